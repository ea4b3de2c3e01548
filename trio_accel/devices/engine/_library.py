"""The base of library actors, and the tasks that wait for what they launch there and then."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from typing import ClassVar, NoReturn

import attrs
import outcome
import trio

from ...actors import (
    NOT_NOW,
    WOKEN,
    Actor,
    ActorContext,
    Backoff,
    DeferredReply,
    DirectReply,
    Intensity,
    handles,
    quick,
)
from ...backends.base import InThread, KernelLibrary
from ...backends.base.fast_paths import current_fast_paths
from ..base._errors import FailureClass, classify
from ..operations._operation import Launch
from ._engine import Engine
from ._in_flight import InFlight
from ._lane import Lane
from ._meeting import PartLaunch
from ._part import Part, check_part

__all__ = ["Asked", "LibraryActor", "OwnSupervision"]


@attrs.frozen(kw_only=True)
class OwnSupervision:
    """How a library actor is supervised that ends alone: its context and the others live on.

    Attributes:
        name: Name in the tree.
        intensity: Its restarts; beyond it, it has ended for good. None for those of the device's options.
        backoff: Waiting before a restart; None for that of the device's options.
    """

    name: str
    intensity: Intensity | None
    backoff: Backoff | None


class LibraryActor(Actor):
    """Owns the handle of one library and a stream; launches one operation after the other.

    Its handler returns as soon as the operation is enqueued; the reply comes at completion.

    An import path may have an argument, ``"package.module:Class?argument"``. Then each argument has an actor
    of its own, and a library of its own of the backend, with the name ``"library?argument"``.

    Attributes:
        library: Name of the backend's library.
    """

    library: ClassVar[str]

    @classmethod
    def supervision(cls, argument: str) -> OwnSupervision | None:
        """How the actor of an argument is supervised, if by a supervisor of its own; None as by default."""
        return None

    @classmethod
    def blocks_of(cls, argument: str) -> tuple[int, ...]:
        """Blocks that the library of an argument uses from its start, and not only in operations."""
        return ()

    @classmethod
    def modules_of(cls, argument: str) -> tuple[str, ...]:
        """Modules that the library of an argument imports: the launcher imports them for the next workers."""
        return ()

    @classmethod
    def library_of(cls, argument: str | None) -> str:
        """Name of the backend's library for an argument of the import path; None where it has none."""
        return cls.library if argument is None else f"{cls.library}?{argument}"

    def __init__(self, engine: Engine, argument: str | None = None) -> None:
        self._library_name = self.library_of(argument)
        self._engine = engine
        self._gate = engine.gate
        self._enqueuer = engine.enqueuer
        self._completer = engine.completer
        self._threaded = engine.threaded
        self._cancel_grace = engine.cancel_grace
        self._kernels: KernelLibrary
        self._lane: Lane
        self._is_plain = False

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the library's handle and a stream.

        A graceful end waits for what is in flight, that of earlier incarnations too. A crash does
        not: that work belongs to the engine, which sees it through, while the next incarnation has
        a new handle and stream.
        """
        engine = self._engine
        kernels = await engine.libraries.take(self._library_name)
        try:
            lane = engine.lanes.open(self.library, context.path, context.report_progress)
        except BaseException:
            kernels.close()
            raise
        self._kernels, self._lane = kernels, lane
        # A subclass may do more with a launch than this class knows.
        cls = type(self)
        is_plain = cls.launch is LibraryActor.launch and cls.launch_now is LibraryActor.launch_now
        self._is_plain = is_plain and current_fast_paths().direct_launch
        try:
            yield
            # One that is cancelled says nothing of the others.
            await trio.lowlevel.checkpoint_if_cancelled()
            engine.expect_end(context.path)
            await engine.synchronize(context.path)
        finally:
            engine.lanes.retire(lane, kernels.close)

    def launch_now(self, message: Launch) -> object:
        """Enqueue an operation, unless it would have to wait."""
        try:
            # Before the library is asked anything, as a thread may be in it.
            if not self._gate.may_launch(message, self._lane):
                return NOT_NOW
            prepare = self._kernels.prepare(message.spec)
            if prepare is None:
                return self._launch(message)
            is_planned = isinstance(prepare, InThread) and prepare.plan is None
            return self._launch_in_thread(message) if is_planned else NOT_NOW
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)

    def launch_here(self, launch: Launch, reply: DirectReply) -> InFlight | bool:
        """Enqueue an operation in place of the actor, which is idle, unless it would have to wait.

        Args:
            launch: Was not handed over before: nothing else may wait to be launched.
            reply: Given at completion, or here if the operation fails at once.

        Returns:
            The operation; True if it has failed, as `reply` knows; False if nothing has happened.
        """
        lane, kernels = self._lane, self._kernels
        if not self._is_plain or not self._gate.order.is_clear or lane.is_full:
            return False
        if launch.arrivals and not launch.has_arrived:
            return False
        try:
            if kernels.prepare(launch.spec) is not None:
                return False
            operation = self._enqueuer.enqueue(launch, kernels, lane)
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            reply.served(self.context, error if classify(error) is FailureClass.SUSPECT else None)
            reply.fail(error)
            return True
        context = self.context
        reply.served(context)
        operation.crash, operation.reply = context.crash, reply
        self._completer.see_to(operation, lane, reply)
        return operation

    def start_grace(self, operation: InFlight, context: Context) -> None:
        """The asker of an operation that `launch_here` returned is cancelled; these are its variables."""
        self._cancel_grace.start(self._lane, operation, context)

    @handles(Launch, ki_protected=True)
    @quick(launch_now)
    async def launch(self, message: Launch) -> DeferredReply[None]:
        """Enqueue an operation, when the window has room and those before it are launched."""
        failure: Exception | None = None
        gate, lane = self._gate, self._lane
        try:
            if lane.load.is_taken:
                await gate.wait(message, lane)
            prepare = self._kernels.prepare(message.spec)
            is_blocking = isinstance(prepare, InThread)
            plan = prepare.plan if isinstance(prepare, InThread) else prepare
            if plan is not None:
                failure = await gate.prepare(message, lane, plan)
            if not gate.may_launch(message, lane):
                await gate.wait(message, lane)
            return self._launch_in_thread(message, failure) if is_blocking else self._launch(message, failure)
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)

    @handles(PartLaunch, ki_protected=True)
    async def launch_part(self, message: PartLaunch) -> DeferredReply[None]:
        """Enqueue a part of an operation that spans devices, together with the other parts."""
        gate, kernels, lane = self._gate, self._kernels, self._lane
        part = Part(message, kernels, lane, self.context, gate, self._enqueuer, self._completer)
        try:
            prepare = check_part(message, kernels)
            if prepare is not None:
                part.failure = await gate.prepare(message, lane, prepare)
            if not gate.may_launch(message, lane):
                await gate.wait(message, lane)
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)
        reply: DeferredReply[None] = self.context.defer()
        part.reply = reply
        try:
            await message.meeting.come(message.part, part)
        except Exception as error:
            if classify(error) is FailureClass.SUSPECT:
                raise
            reply.fail(error)
        return reply

    def _launch(self, launch: Launch, failure: Exception | None = None) -> DeferredReply[None]:
        """Enqueue an operation; its reply is given at completion.

        Args:
            launch: The operation.
            failure: What its preparation failed with.

        Raises:
            Exception: As for `Enqueuer.enqueue`.
        """
        context, lane, cancel_grace = self.context, self._lane, self._cancel_grace
        try:
            operation = self._enqueuer.enqueue(launch, self._kernels, lane, failure)
        finally:
            self._gate.leave(launch)
        operation.crash = context.crash
        reply: DeferredReply[None] = context.defer(
            on_cancel=lambda: cancel_grace.start(lane, operation, reply.context)
        )
        operation.reply = reply
        self._completer.see_to(operation, lane, reply)
        return reply

    def _launch_in_thread(self, launch: Launch, failure: Exception | None = None) -> DeferredReply[None]:
        """Begin with an operation whose kernel blocks; as `_launch`."""
        context, lane, cancel_grace = self.context, self._lane, self._cancel_grace
        operation = self._threaded.begin(launch, lane, failure)
        operation.crash = context.crash
        reply: DeferredReply[None] = context.defer(
            on_cancel=lambda: cancel_grace.start(lane, operation, reply.context)
        )
        operation.reply = reply
        self._threaded.start(operation, self._kernels, lane)
        return reply

    def _refused(self, error: Exception) -> DeferredReply[None]:
        """Reply with what the library said; called while that is handled.

        Raises:
            Exception: The same, if the library is suspect.
        """
        if classify(error) is FailureClass.SUSPECT:
            raise error
        reply: DeferredReply[None] = self.context.defer()
        reply.fail(error)
        return reply


class Asked(DirectReply):
    """The reply of an operation whose asker has had it launched by `launch_here`, and waits for it.

    The code that reschedules the parked task forgets it in the same step, as with an envelope.
    """

    __slots__ = ("_error", "_last_look", "_library", "_operation", "_raise_cancel", "_spin", "_task")

    def __init__(self, launch: Launch) -> None:
        # Without the call of the base's, which takes longer than it does anything.
        self.message = launch
        self.outcomes = None
        self.is_done = False
        self._library: LibraryActor | None = None
        self._operation: InFlight | None = None
        self._task: trio.lowlevel.Task | None = None
        self._error: BaseException | None = None
        self._raise_cancel: Callable[[], NoReturn] | None = None
        self._last_look: Callable[[], None] | None = None
        self._spin: Callable[[], Awaitable[None]] | None = None

    def wait(self, library: LibraryActor, operation: InFlight | bool) -> Awaitable[object]:
        """Wait for the outcome, at once; if cancelled, until the device is done or the grace has passed.

        Args:
            library: Who has launched it.
            operation: What was launched; True if it has failed by now.
        """
        if self.is_done or self._last_look is not None or self._spin is not None:
            return self._look_and_wait(library, operation)
        # Most wait for nothing but being woken, for which a coroutine of its own would take as long again.
        assert not isinstance(operation, bool)  # that has failed, and is done
        self._library, self._operation = library, operation
        self._task = trio.lowlevel.current_task()
        return trio.lowlevel.wait_task_rescheduled(self._abort)  # noqa: ASYNC105  # by the caller

    async def _look_and_wait(self, library: LibraryActor, operation: InFlight | bool) -> None:
        if self.is_done or self._last_look is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            look, self._last_look = self._last_look, None
            if look is not None:
                # Also if it is said to have failed by now: it may be in flight all the same.
                look()
        elif self._spin is not None:
            spin, self._spin = self._spin, None
            await spin()
        if self.is_done:
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    # It holds this frame.
                    del error
            return
        await self.wait(library, operation)

    def _abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        self._raise_cancel = raise_cancel
        assert self._library is not None
        assert self._operation is not None
        assert self._task is not None  # it is parked
        self._library.start_grace(self._operation, self._task.context)
        return trio.lowlevel.Abort.FAILED

    def deliver(self, error: BaseException | None) -> None:
        """Wake the task, or keep the outcome for it."""
        task, self._task = self._task, None
        # It refers to this.
        self._operation = None
        if task is None:
            self._error = error
        elif error is None:
            trio.lowlevel.reschedule(task, WOKEN)
        else:
            trio.lowlevel.reschedule(task, outcome.Error(error))

    def cancelled(self) -> bool:
        """Give the task its cancellation; returns whether that is news."""
        if self.is_done:
            return False
        self.is_done = True
        self._operation = None
        assert self.outcomes is not None  # it is cancelled only while it is parked
        self.outcomes.settle(self)
        assert self._raise_cancel is not None
        assert self._task is not None
        task, self._task = self._task, None
        trio.lowlevel.reschedule(task, outcome.capture(self._raise_cancel))
        return True

    def spin_wait(
        self, wait: Callable[[], Awaitable[None]], complete_early: Callable[[Callable[[], None]], None]
    ) -> bool:
        """Wait by that, before the task is parked if need be."""
        self._spin = wait
        return True

    def look_last(self, look: Callable[[], None]) -> bool:
        """Look once for the end, behind a turn of the loop."""
        self._last_look = look
        return True
