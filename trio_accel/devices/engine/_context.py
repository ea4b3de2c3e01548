"""One generation of a device: the context actor, its session, and operations that are handed over to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import Context
from typing import ClassVar, Protocol, TypeAlias

import attrs
import outcome
import trio

from ...actors import (
    ActorContext,
    ActorError,
    ActorFailedError,
    ActorStoppedError,
    Directive,
    Policy,
    Posted,
    Ref,
)
from ...backends.base import (
    AccelDevice,
    ContextLostError,
    DeviceLostError,
    KernelLibrary,
    NotSupportedError,
)
from ...backends.base.kit.modules import import_extra
from ..base._errors import OPENING, locate, lost
from ..base._options import DeviceOptions
from ..operations._blocks import BlockTable
from ..operations._faults import copy_error
from ..operations._operation import Launch
from ._context_state import EngineObserver
from ._engine import Engine
from ._library import LibraryActor
from ._library_opener import LibraryOpener, OpenLibrary
from ._recovery import recovery_policy

# A library that cannot be opened is the asker's problem, unless the context is lost over it.
_DIRECTIVES = {
    Exception: Directive.RESUME,
    ContextLostError: Directive.RESTART,
    # No context will be had any more.
    DeviceLostError: Directive.ESCALATE,
}


def context_policy(options: DeviceOptions) -> Policy:
    """Tell how a context is supervised, and supervises its libraries."""
    return recovery_policy(options, directives=_DIRECTIVES, grace=options.close_grace + 5.0)


@attrs.define(eq=False)
class Session:
    """Interface of one generation to the device's front.

    Attributes:
        generation: Its number.
        engine: Its engine.
        context: The context actor.
        libraries: Library actors that were started, by import path.
        submissions: Operations that were handed over, without a task that waits.
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
        """Forget the actor of a library that has ended: the next request for it starts another."""
        if self.libraries.get(path) is library:
            del self.libraries[path]


class ContextOwner(EngineObserver, Protocol):
    """The owner of a context: a device, or a worker process (D57).

    Attributes:
        options: Options of the device.
        blocks: Takes dropped blocks.
        variables: Context variables of submitted operations; None for those of the submitter.
    """

    options: DeviceOptions
    blocks: BlockTable
    variables: Context | None

    @property
    def next_generation(self) -> int:
        """Number of the context that is being opened; 0 where it stands ready and has none yet."""
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
        """Note that the context is ready."""

    def prepared(self) -> None:
        """Note that the libraries that were in use are open, or cannot be opened."""

    def detach(self, error: BaseException | None) -> None:
        """End with the context; called twice when it was lost, first with the error of the loss."""


class ContextActor(LibraryOpener):
    """Opens the device, owns the engine, and supervises the library actors."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextLostError,)

    def __init__(self, owner: ContextOwner) -> None:
        super().__init__(owner.options)
        self._owner = owner

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the open device and its engine; the library actors end before it is given back."""
        owner = self._owner
        if owner.options.nvtx:
            await trio.to_thread.run_sync(import_extra, "nvtx", "nvtx")
        opened, memory = await self._open()
        engine = Engine(
            opened,
            memory,
            options=owner.options,
            generation=owner.next_generation,
            observer=owner,
            lose=self._lose,
            blocks=owner.blocks,
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
                # Requests come from here on, so the libraries that were asked for are open by now.
                owner.attach(session)
                # D99: beside the first requests. One of another library does not wait for these.
                nursery.start_soon(self._open_ahead)
                yield
                engine.expect_end(context.path)
                nursery.cancel_scope.cancel(reason="the context ends")
        except BaseException as error:
            # If a library was being opened in another task, that one has the error, and this one is only
            # cancelled.
            cause = self._found_lost or error
            raise
        finally:
            # First, so that what is asked for from now on waits for the next context.
            owner.detach(cause)
            # An end without a loss fails the rest here. Replies come before the device is closed, which may
            # take its grace.
            engine.fail_all(cause)
            # The device bounds this by its close_grace.
            with trio.CancelScope(shield=True):
                await engine.close()

    async def _open_ahead(self) -> None:
        await self.prepare(self._owner.in_use)
        self._owner.prepared()

    async def _open(self) -> tuple[AccelDevice, KernelLibrary]:
        opened = self._owner.opened
        if opened is None:
            opened = await trio.to_thread.run_sync(self._owner.open_device)
        try:
            return opened, await trio.to_thread.run_sync(opened.open_library, "memory")
        except BaseException:
            # A cancellation may have come while the device was being opened: it is closed all the same.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(opened.close, self._owner.options.close_grace)
            raise

    def _lose(self, error: Exception) -> None:
        """Send no more work to a context that is dead, and have it replaced."""
        self._owner.detach(error)
        self.context.crash(error)


OnDone: TypeAlias = "Callable[[BaseException | None], None]"


@attrs.define(eq=False)
class _Submitted:
    """One operation on its way.

    Attributes:
        launch: The launch.
        on_done: Called with its error, or None.
        invalidates: Whether its outputs are invalidated also if it was never launched: others count on it.
        opener: Opens its library.
        library: Launches it.
        posted: Its place in the mailbox.
    """

    launch: Launch
    on_done: OnDone
    invalidates: bool
    opener: Ref[LibraryOpener]
    library: Ref[LibraryActor] | None = None
    posted: Posted | None = None


@attrs.define(eq=False)
class Submissions:
    """The operations of one generation that were submitted and are not done.

    A library that is not open yet is opened; what is submitted meanwhile waits here, in order.
    """

    _engine: Engine
    _libraries: dict[str, Ref[LibraryActor]]
    # The one context of all operations in a worker, as requests bring no context variables. There they are
    # also launched at once: an error keeps frames, but none of the user's program.
    _context: Context | None = None
    _opening: dict[str, list[_Submitted]] = attrs.field(factory=dict[str, list[_Submitted]], init=False)
    _submitted: dict[Launch, _Submitted] = attrs.field(factory=dict[Launch, _Submitted], init=False)

    def submit(
        self, context: Ref[LibraryOpener], launch: Launch, on_done: OnDone, *, invalidates: bool = True
    ) -> None:
        """Hand an operation over, to the library's actor or to those that wait for it."""
        submitted = self._submitted[launch] = _Submitted(launch, on_done, invalidates, context)
        path = launch.library
        self._engine.enter(launch)
        library = self._libraries.get(path)
        if library is not None and not library.is_terminated and path not in self._opening:
            self._post(library, submitted)
        else:
            self._open(submitted)

    def _open(self, submitted: _Submitted) -> None:
        """Have an operation wait until its library is open."""
        path = submitted.launch.library
        if path in self._opening:
            self._opening[path].append(submitted)
            return
        self._opening[path] = [submitted]
        request = OpenLibrary(path, submitted.launch.name)
        try:
            submitted.opener.post(request, lambda result: self._opened(path, result))
        except ActorError as error:
            self._opened(path, outcome.Error(error))

    def withdraw(self, launch: Launch) -> bool:
        """Take an operation back that is not launched; `on_done` is not called then.

        Returns:
            Whether it was; otherwise it is in flight or over, or its library has begun with it: then its
            outcome is `WithdrawnError`, unless it is launched after all.
        """
        submitted = self._submitted.get(launch)
        if submitted is None:
            return False
        waiting = self._opening.get(launch.library, [])
        if submitted in waiting:
            waiting.remove(submitted)
        elif submitted.posted is None or not submitted.posted.withdraw():
            self._engine.gate.withdraw(launch)
            return False
        del self._submitted[launch]
        self._engine.over(launch)
        return True

    def found(self, path: str, library: Ref[LibraryActor]) -> None:
        """Take an open library: operations that wait for it go before all later ones.

        Others count on that order, and would wait for each other for ever: see `LaunchOrder`.
        """
        for submitted in self._opening.pop(path, ()):
            self._post(library, submitted)

    def _opened(self, path: str, result: outcome.Outcome[Ref[LibraryActor]]) -> None:
        waiting = self._opening.pop(path, [])
        if self._engine.is_lost and isinstance(result, outcome.Value):
            # The next context has opened it, and these operations are of the last one.
            result = outcome.Error(ActorStoppedError(f"{path} was not opened in time", path=path))
        if isinstance(result, outcome.Error):
            for submitted in waiting:
                error = result.error
                if isinstance(error, NotSupportedError):
                    error = copy_error(error)
                    self._engine.locate(error, submitted.launch)
                self._done(submitted, error)
            return
        library = result.unwrap()
        for submitted in waiting:
            self._post(library, submitted)

    def _post(self, library: Ref[LibraryActor], submitted: _Submitted) -> None:
        def done(result: outcome.Outcome[None]) -> None:
            error = result.error if isinstance(result, outcome.Error) else None
            engine = self._engine
            if isinstance(error, ActorStoppedError) and not (engine.is_lost or engine.is_closing):
                # The library's actor has ended alone, and its context has not: `_open` starts another, or
                # tells why not.
                self._open(submitted)
            else:
                self._done(submitted, error)

        submitted.library = library
        try:
            submitted.posted = library.post(
                submitted.launch, done, context=self._context, at_once=self._context is not None
            )
        # The library's actor has ended since it was looked at: as if it ended a moment later.
        except ActorError as error:
            done(outcome.Error(error))

    def _done(self, submitted: _Submitted, error: BaseException | None) -> None:
        launch = submitted.launch
        del self._submitted[launch]
        if error is not None:
            error = self._what_happened(submitted.library, launch, error)
            if submitted.invalidates:
                # The operation spoils even arrays that it was to change and did not: the program goes on as
                # if they were changed.
                launch.mark_damaged(error)
        try:
            submitted.on_done(error)
        finally:
            # The place is given up even if the callback raises: operations behind this one wait for it.
            self._engine.over(launch)

    def _what_happened(
        self, library: Ref[LibraryActor] | None, launch: Launch, error: BaseException
    ) -> BaseException:
        """Return the error in a device's terms: an actor that ended did so with its context."""
        if isinstance(error, ActorFailedError):
            if library is None:
                # Without a library it was the context's actor that failed, as it opens libraries.
                cause = error.__cause__
                if isinstance(cause, (ContextLostError, DeviceLostError)):
                    return self._engine.lost_while(launch.name, OPENING, "ask again", cause)
                if isinstance(cause, ActorStoppedError):
                    error = cause
            elif library.is_terminated:
                return self._engine.lost(launch, error) if launch.is_in_flight else error
        if not isinstance(error, ActorStoppedError):
            return error
        engine = self._engine
        unbegun = lost(error, "waited to be started", "submit it again")
        locate(unbegun, device=engine.device.info.name, operation=launch.name, generation=engine.generation)
        return unbegun
