"""The context actor: one incarnation is one generation of a device."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from ..actors import Actor, ActorContext, Policy, Ref, Request, handles
from ._engine import Engine
from ._library import LibraryActor

if TYPE_CHECKING:
    from ._device import Device

__all__ = ["ContextActor", "OpenLibrary", "Session"]


@attrs.frozen
class OpenLibrary(Request["ContextActor", Ref[LibraryActor]]):
    """Start a library's actor, unless it runs already.

    Attributes:
        library: Import path, ``"package.module:Class"``.
    """

    library: str


@attrs.define(eq=False)
class Session:
    """What the device's front needs of one generation.

    Attributes:
        generation: Its number.
        engine: Where operations are launched.
        libraries: Library actors that were started, by import path.
        context: The context actor.
    """

    generation: int
    engine: Engine
    context: ActorContext
    libraries: dict[str, Ref[LibraryActor]] = attrs.field(factory=dict[str, Ref[LibraryActor]])


class ContextActor(Actor):
    """Opens the device, owns the engine, and supervises the library actors."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._session: Session

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the open device and its engine; the library actors end before it is given back."""
        front = self._device
        opened = await trio.to_thread.run_sync(
            partial(front.backend.open_device, front.info.index, memory_limit=front.options.memory_limit)
        )
        memory = await trio.to_thread.run_sync(opened.open_library, "memory")
        engine = Engine(
            opened,
            memory,
            options=front.options,
            generation=front.generation + 1,
            hooks=front.hooks,
        )
        self._session = Session(engine.generation, engine, context)
        cause: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
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

    @handles(OpenLibrary)
    async def open_library(self, message: OpenLibrary) -> Ref[LibraryActor]:
        """Start a library actor on first use."""
        known = self._session.libraries.get(message.library)
        if known is not None:
            return known
        actor_class = await trio.to_thread.run_sync(_load, message.library)
        options = self._device.options
        library = await self.context.spawn(
            actor_class,
            self._session.engine,
            name=actor_class.library,
            policy=Policy(backoff=options.backoff, grace=options.cancel_grace),
        )
        self._session.libraries[message.library] = library
        return library


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
