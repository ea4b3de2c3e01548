"""The context actor: one incarnation is one generation of a device."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import Context
from typing import ClassVar, Protocol

import attrs
import trio

from ...actors import ActorContext, Directive, Policy, Ref
from ...backends.base import AccelDevice, ContextPoisonedError, DeviceLostError, KernelLibrary
from .._options import DeviceOptions
from ..arrays._blocks import BlockTable
from ._context_state import EngineObserver
from ._engine import Engine
from ._library import LibraryActor
from ._library_opener import LibraryOpener, OpenLibrary
from ._ranges import import_ranges
from ._recovery import recovery_policy
from ._submissions import Submissions

__all__ = ["ContextActor", "ContextOwner", "Session", "context_policy"]

# A library that cannot be opened is the asker's problem, unless the context is lost over it.
_DIRECTIVES = {
    Exception: Directive.RESUME,
    ContextPoisonedError: Directive.RESTART,
    # No context will be had any more.
    DeviceLostError: Directive.ESCALATE,
}


def context_policy(options: DeviceOptions) -> Policy:
    """How a context is supervised, and supervises its libraries."""
    return recovery_policy(options, directives=_DIRECTIVES, grace=options.close_grace + 5.0)


@attrs.define(eq=False)
class Session:
    """What the device's front needs of one generation.

    Attributes:
        generation: Its number.
        engine: Where operations are launched.
        context: The context actor.
        libraries: Library actors that were started, by import path.
        submissions: Operations that nobody waits for.
        discard: Drops what was opened ahead of the library of an import path.
        variables: Context variables that they are served with; None for those of the submitter.
    """

    generation: int
    engine: Engine
    context: ActorContext
    discard: Callable[[str], None]
    variables: Context | None = None
    libraries: dict[str, Ref[LibraryActor]] = attrs.field(factory=dict[str, Ref[LibraryActor]])
    submissions: Submissions = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.submissions = Submissions(self.engine, self.libraries, self.variables)

    def forget(self, path: str, library: Ref[LibraryActor]) -> None:
        """The actor of a library has ended: the next request for it starts another."""
        if self.libraries.get(path) is library:
            del self.libraries[path]


class ContextOwner(EngineObserver, Protocol):
    """Whom a context belongs to: a device, or a worker process."""

    @property
    def options(self) -> DeviceOptions:
        """Options of the device."""
        ...

    @property
    def blocks(self) -> BlockTable:
        """Where dropped blocks go."""
        ...

    @property
    def next_generation(self) -> int:
        """Number of the context that is being opened; 0 where it stands ready and has none yet."""
        ...

    @property
    def variables(self) -> Context | None:
        """Context variables of submitted operations; None for those of the submitter."""
        ...

    @property
    def in_use(self) -> Iterable[str]:
        """Import paths of the libraries that were in use, and are opened ahead in this context."""
        ...

    @property
    def opened(self) -> AccelDevice | None:
        """The device, where it is open already."""
        ...

    def open_device(self) -> AccelDevice:
        """Open the device; blocks."""
        ...

    def attach(self, session: Session) -> None:
        """The context is ready."""

    def detach(self, error: BaseException | None) -> None:
        """It is gone, or ends by itself; called twice when it was lost, first with what it was lost to."""


class ContextActor(LibraryOpener):
    """Opens the device, owns the engine, and supervises the library actors."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextPoisonedError,)

    def __init__(self, owner: ContextOwner) -> None:
        super().__init__(owner.options)
        self._owner = owner

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the open device and its engine; the library actors end before it is given back."""
        owner = self._owner
        if owner.options.nvtx:
            await trio.to_thread.run_sync(import_ranges)
        opened, memory = await self._open()
        engine = Engine(
            opened,
            memory,
            options=owner.options,
            generation=owner.next_generation,
            observer=owner,
            lose=self._lose,
            blocks=owner.blocks,
            on_progress=context.report_progress,
        )
        session = Session(engine.generation, engine, context, self.discard, owner.variables)
        self._engine, self._libraries = engine, session.libraries
        self._found = session.submissions.found
        cause: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.alarms.run)
                nursery.start_soon(engine.watchdog.run)
                nursery.start_soon(engine.completion.run)
                engine.libraries.start(nursery)
                for path in owner.options.libraries:
                    await self.open_library(OpenLibrary(path, "DeviceOptions.libraries"))
                owner.attach(session)
                nursery.start_soon(self.prepare, owner.in_use)
                yield
                nursery.cancel_scope.cancel(reason="the context ends")
        except BaseException as error:
            # Where a library was being opened, in another task, this one is only cancelled.
            cause = self._found_lost or error
            raise
        finally:
            owner.detach(cause)
            engine.fail_all(cause)
            # The device bounds this by its close_grace.
            with trio.CancelScope(shield=True):
                await engine.close()

    async def _open(self) -> tuple[AccelDevice, KernelLibrary]:
        opened = self._owner.opened
        if opened is None:
            opened = await trio.to_thread.run_sync(self._owner.open_device)
        try:
            return opened, await trio.to_thread.run_sync(opened.open_library, "memory")
        except BaseException:
            # Cancelled, too: it may have been while the device was being opened.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(opened.close, self._owner.options.close_grace)
            raise

    def _lose(self, error: Exception) -> None:
        """The context is dead: send no more work to it, and have it replaced."""
        self._owner.detach(error)
        self.context.crash(error)
