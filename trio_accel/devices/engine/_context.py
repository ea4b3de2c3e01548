"""One generation of a device: the context actor, its session, and its submitted operations."""

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

# The caller gets the error of a library that cannot be opened, unless it means a lost context.
_DIRECTIVES = {
    Exception: Directive.RESUME,
    ContextLostError: Directive.RESTART,
    # No other context is possible.
    DeviceLostError: Directive.ESCALATE,
}


def context_policy(options: DeviceOptions) -> Policy:
    """Return the policy by which a context is supervised, and supervises its libraries."""
    return recovery_policy(options, directives=_DIRECTIVES, grace=options.close_grace + 5.0)


@attrs.define(eq=False)
class Session:
    """The interface of one generation for the device's front.

    Attributes:
        generation: Its number.
        engine: Its engine.
        context: The context actor.
        libraries: The started library actors, by import path.
        submissions: Submitted operations without a waiting task.
        discard: Drops the library of an import path that was opened in advance.
        variables: The context variables for these operations; None for the submitter's.
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
        """Forget the actor of a library after its end. The next request for it starts another."""
        if self.libraries.get(path) is library:
            del self.libraries[path]


class ContextOwner(EngineObserver, Protocol):
    """The owner of a context: a device, or a worker process (D57).

    Attributes:
        options: The options of the device.
        blocks: Receives dropped blocks.
        variables: The context variables for submitted operations; None for the submitter's.
    """

    options: DeviceOptions
    blocks: BlockTable
    variables: Context | None

    @property
    def next_generation(self) -> int:
        """The number of the opening context; 0 for a spare, which does not have a number yet."""
        ...

    @property
    def in_use(self) -> Iterable[str]:
        """The import paths of the libraries in use before, which this context opens in advance."""
        ...

    @property
    def opened(self) -> AccelDevice | None:
        """The device, if it is already open."""
        ...

    def open_device(self) -> AccelDevice:
        """Open the device; blocks."""
        ...

    def attach(self, session: Session) -> None:
        """Record that the context is ready."""

    def prepared(self) -> None:
        """Record that the opening of previously used libraries has ended, successfully or not."""

    def detach(self, error: BaseException | None) -> None:
        """End with the context; called twice for a lost context, first with the error of the loss."""


class ContextActor(LibraryOpener):
    """Opens the device, owns the engine, and supervises the library actors."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextLostError,)

    def __init__(self, owner: ContextOwner) -> None:
        super().__init__(owner.options)
        self._owner = owner

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the open device and its engine. The library actors end before the device is closed."""
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
        self._take_library = session.submissions.take_library
        cause: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.alarms.run)
                nursery.start_soon(engine.watchdog.run)
                nursery.start_soon(engine.completion.run)
                engine.libraries.start(nursery)
                for path in owner.options.libraries:
                    await self.open_library(OpenLibrary(path, "DeviceOptions.libraries"))
                # The requested libraries are open by now, because requests arrive from here on.
                owner.attach(session)
                # D99: this runs concurrently with the first requests, which do not wait for it.
                nursery.start_soon(self._open_ahead)
                yield
                engine.expect_end(context.path)
                nursery.cancel_scope.cancel(reason="the context ends")
        except BaseException as error:
            # If another task was opening a library, that task has the error, and this task is only cancelled.
            cause = self._found_lost or error
            raise
        finally:
            # Do this first, so that later requests wait for the next context.
            owner.detach(cause)
            # If the context was not lost, this fails the remaining operations. Replies precede the closing of
            # the device, which may take its whole grace.
            engine.fail_all(cause)
            # The device limits this by its close_grace.
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
            # A cancellation may have arrived while the device was being opened. It must be closed
            # nevertheless.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(opened.close, self._owner.options.close_grace)
            raise

    def _lose(self, error: Exception) -> None:
        """Send no more work to a lost context, and start its replacement."""
        self._owner.detach(error)
        self.context.crash(error)


OnDone: TypeAlias = "Callable[[BaseException | None], None]"


@attrs.define(eq=False)
class _Submitted:
    """One submitted operation.

    Attributes:
        launch: The launch.
        on_done: Called with its error, or None.
        invalidates: Whether its outputs become invalid even if it was never launched, because others use
            them.
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
    """The unfinished submitted operations of one generation.

    A library is opened on first use. Operations submitted meanwhile wait here, in order.
    """

    _engine: Engine
    _libraries: dict[str, Ref[LibraryActor]]
    # The only context of all operations in a worker, because requests do not carry context variables. There
    # they are also launched at once, because an error keeps no frames of the user's program.
    _context: Context | None = None
    _opening: dict[str, list[_Submitted]] = attrs.field(factory=dict[str, list[_Submitted]], init=False)
    _submitted: dict[Launch, _Submitted] = attrs.field(factory=dict[Launch, _Submitted], init=False)

    def submit(
        self, context: Ref[LibraryOpener], launch: Launch, on_done: OnDone, *, invalidates: bool = True
    ) -> None:
        """Submit an operation: to its library's actor, or to the operations that wait for the library."""
        submitted = self._submitted[launch] = _Submitted(launch, on_done, invalidates, context)
        path = launch.library
        self._engine.enter(launch)
        library = self._libraries.get(path)
        if library is not None and not library.is_terminated and path not in self._opening:
            self._post(library, submitted)
        else:
            self._open(submitted)

    def _open(self, submitted: _Submitted) -> None:
        """Let an operation wait until its library is open."""
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
        """Withdraw an operation before its launch; then `on_done` is not called.

        Returns:
            Whether it was withdrawn. Otherwise it is in flight or has ended, or its library has begun with
            it. In the last case its outcome is `WithdrawnError`, unless it is launched after all.
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

    def take_library(self, path: str, library: Ref[LibraryActor]) -> None:
        """Take an open library: operations that wait for it precede all later operations.

        Other operations rely on that order, and would otherwise wait for each other for ever: see
        `LaunchOrder`.
        """
        for submitted in self._opening.pop(path, ()):
            self._post(library, submitted)

    def _opened(self, path: str, result: outcome.Outcome[Ref[LibraryActor]]) -> None:
        waiting = self._opening.pop(path, [])
        if self._engine.is_lost and isinstance(result, outcome.Value):
            # The next context has opened the library, but these operations belong to this one.
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
                # Only the library's actor has ended, and not its context. `_open` starts another actor, or
                # raises the reason.
                self._open(submitted)
            else:
                self._done(submitted, error)

        submitted.library = library
        try:
            submitted.posted = library.post(
                submitted.launch, done, context=self._context, at_once=self._context is not None
            )
        # The library's actor has ended just before this post, which is treated as an end just after it.
        except ActorError as error:
            done(outcome.Error(error))

    def _done(self, submitted: _Submitted, error: BaseException | None) -> None:
        launch = submitted.launch
        del self._submitted[launch]
        if error is not None:
            error = self._what_happened(submitted.library, launch, error)
            if submitted.invalidates:
                # The operation damages even arrays that it was to change and did not, because the program
                # continues as if they were changed.
                launch.mark_damaged(error)
        try:
            submitted.on_done(error)
        finally:
            # The turn is given up even if the callback raises, because later operations wait for it.
            self._engine.over(launch)

    def _what_happened(
        self, library: Ref[LibraryActor] | None, launch: Launch, error: BaseException
    ) -> BaseException:
        """Return the error in a device's terms: an actor that ended did so with its context."""
        if isinstance(error, ActorFailedError):
            if library is None:
                # Without a library, the context's actor has failed, because it opens libraries.
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
