"""The context actor: one incarnation is one generation of a device."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from ..actors import Actor, ActorContext, Policy, Ref, handles
from ..backends.base import AccelDevice, KernelLibrary
from ._engine import Engine
from ._library import LibraryActor
from ._submissions import OpenLibrary, Submissions

if TYPE_CHECKING:
    from ._device import Device

__all__ = ["ContextActor", "Session"]


@attrs.define(eq=False)
class Session:
    """What the device's front needs of one generation.

    Attributes:
        generation: Its number.
        engine: Where operations are launched.
        context: The context actor.
        libraries: Library actors that were started, by import path.
        submissions: Operations that nobody waits for.
    """

    generation: int
    engine: Engine
    context: ActorContext
    libraries: dict[str, Ref[LibraryActor]] = attrs.field(factory=dict[str, Ref[LibraryActor]])
    submissions: Submissions = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.submissions = Submissions(self.engine, self.libraries)


class ContextActor(Actor):
    """Opens the device, owns the engine, and supervises the library actors."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._session: Session

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the open device and its engine; the library actors end before it is given back."""
        front = self._device
        opened, memory = await self._open()
        engine = Engine(
            opened,
            memory,
            options=front.options,
            generation=front.generation + 1,
            hooks=front.hooks,
            lose=self._lose,
            drain=front.blocks.drain,
        )
        self._session = Session(engine.generation, engine, context)
        cause: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                nursery.start_soon(engine.watch)
                nursery.start_soon(engine.completion.run)
                front.attach(self._session)
                yield
                nursery.cancel_scope.cancel(reason="the context ends")
        except BaseException as error:
            cause = error
            raise
        finally:
            front.detach()
            engine.fail_all(cause)
            # The device bounds this by its cancel_grace.
            with trio.CancelScope(shield=True):
                await engine.close()

    async def _open(self) -> tuple[AccelDevice, KernelLibrary]:
        front = self._device
        opened = await trio.to_thread.run_sync(
            partial(front.backend.open_device, front.info.index, memory_limit=front.options.memory_limit)
        )
        try:
            return opened, await trio.to_thread.run_sync(opened.open_library, "memory")
        except BaseException:
            # Cancelled, too: it may have been while the device was being opened.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(opened.close, front.options.cancel_grace)
            raise

    def _lose(self, error: Exception) -> None:
        """The context is dead: send no more work to it, and have it replaced."""
        self._device.detach()
        self.context.crash(error)

    @handles(OpenLibrary)
    async def open_library(self, message: OpenLibrary) -> Ref[LibraryActor]:
        """Start a library actor on first use."""
        libraries = self._session.libraries
        known = libraries.get(message.library)
        if known is not None and not known.is_terminated:
            return known
        actor_class = await trio.to_thread.run_sync(_load, message.library)
        options = self._device.options
        library = await self.context.spawn(
            actor_class,
            self._session.engine,
            name=_free_name(actor_class.library, libraries.values()),
            policy=Policy(backoff=options.backoff, grace=options.cancel_grace),
        )
        libraries[message.library] = library
        return library


def _free_name(library: str, taken: Iterable[Ref[LibraryActor]]) -> str:
    """The library's name, numbered where several actors serve the same one, each with its own stream."""
    names = {ref.path.rpartition("/")[2] for ref in taken if not ref.is_terminated}
    numbered = (f"{library}#{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([library], numbered) if name not in names)


def _load(path: str) -> type[LibraryActor]:
    module, separator, name = path.partition(":")
    if not separator or module == "__main__":
        raise ValueError(
            f"library: {path!r} must be an import path 'package.module:Class' that any process can import, "
            "so no class of __main__"
        )
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, LibraryActor)):
        raise TypeError(f"library: {path!r} names no subclass of LibraryActor")
    return found
