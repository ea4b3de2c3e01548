"""The base of library actors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import ClassVar, cast

import attrs
import trio

from ...actors import (
    UNAVAILABLE,
    Actor,
    ActorContext,
    Backoff,
    DeferredReply,
    DirectReply,
    Intensity,
    fast_path,
    handles,
)
from ...backends.base import DType, InThread, Ints, KernelLibrary, Strs
from ...backends.base.kit.fast_paths import current_fast_paths
from ..base._errors import FailureClass, classify
from ..operations._operation import Launch
from ._engine import Engine
from ._enqueuer import ThreadedCall
from ._in_flight import Reply
from ._stream_queues import MOST_ON_A_STREAM, StreamQueue

__all__ = ["LibraryActor", "OwnSupervision"]

APART = "?apart"
"""Behind an import path: an actor of its own with the same library, for operations that read what is lent.

An operation that waits until an array is not lent any more keeps back its library. The operations that read
the array must not be behind it."""


@attrs.frozen(kw_only=True)
class OwnSupervision:
    """The supervision of a library actor that ends alone: its context and the others live on.

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
        hands_ahead: Whether a thread that calls its kernels is given the next call before it has returned
            from the last one. Then the backend's library may be asked to `prepare` meanwhile.
        dtypes: Those of its operations, unless a declaration names others; empty where the kernels say which.
    """

    library: ClassVar[str]
    hands_ahead: ClassVar[bool] = False
    dtypes: ClassVar[tuple[DType, ...]] = ()

    @classmethod
    def supervision(cls, argument: str) -> OwnSupervision | None:
        """Tell how the actor of an argument is supervised, if alone; None as by default."""
        return None

    @classmethod
    def blocks_of(cls, argument: str) -> Ints:
        """List the blocks that the library of an argument uses from its start, and not only in operations."""
        return ()

    @classmethod
    def modules_of(cls, argument: str) -> Strs:
        """List modules that the library of an argument imports, and the launcher for the next workers."""
        return ()

    @classmethod
    def library_of(cls, argument: str | None) -> str:
        """Name the backend's library for an argument of the import path; None where it has none."""
        return cls.library if argument in (None, APART[1:]) else f"{cls.library}?{argument}"

    def __init__(self, engine: Engine, argument: str | None = None) -> None:
        self._library_name = self.library_of(argument)
        self._blocks = () if argument is None else self.blocks_of(argument)
        self._engine = engine
        self._gate = engine.gate
        self._enqueuer = engine.enqueuer
        self._completer = engine.completer
        self._threaded = engine.threaded
        self._cancel_grace = engine.cancel_grace
        self._kernels: KernelLibrary
        self._queue: StreamQueue
        self._is_plain = False

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the library's handle and a stream.

        A graceful end waits for what is in flight, that of earlier incarnations too. A crash does
        not: that work belongs to the engine, which sees it through, while the next incarnation has
        a new handle and stream.
        """
        engine = self._engine
        kernels = await engine.libraries.take(self._library_name)
        try:
            queue = engine.streams.open(self.library, context.path, lambda: self._report_progress(context))
        except BaseException:
            kernels.close()
            raise
        queue.hands_ahead = self.hands_ahead
        # They stay where they are until the last operation is over, also one that its asker has left.
        uses = [engine.pin(block) for block in self._blocks]
        self._kernels, self._queue = kernels, queue
        # A subclass that overrides these must see every launch, so it has no direct way.
        cls = type(self)
        is_plain = cls.launch is LibraryActor.launch and cls.launch_now is LibraryActor.launch_now
        self._is_plain = is_plain and current_fast_paths().direct_launch
        try:
            yield
            # Only a graceful end is told and waited for, not a cancelled one.
            await trio.lowlevel.checkpoint_if_cancelled()
            engine.expect_end(context.path)
            await engine.synchronize(context.path)
        finally:
            # The handle outlives the actor: operations in flight still use it.
            engine.streams.retire(queue, kernels.close, partial(engine.unpin, uses))

    def _report_progress(self, context: ActorContext) -> None:
        """Tell that an operation of this incarnation has completed without an error."""
        context.report_progress()
        self._engine.observer.progressed()

    def place(self) -> tuple[KernelLibrary, StreamQueue]:
        """Return the library of this incarnation, and its stream."""
        return self._kernels, self._queue

    @property
    def is_plain(self) -> bool:
        """Whether operations may be launched past its mailbox."""
        return self._is_plain

    def launch_now(self, message: Launch) -> object:
        """Launch an operation that was handed over, unless it would have to wait."""
        try:
            # The gate comes before any question to the library: a thread may be in it, unless it hands calls
            # ahead.
            if not self._gate.may_launch(message, self._queue):
                return UNAVAILABLE
            prepare = self._kernels.prepare(message.spec)
            # A plan is made in a thread and waited for, which `launch` does. A call in a thread is not waited
            # for.
            if prepare is not None and not (isinstance(prepare, InThread) and prepare.plan is None):
                return UNAVAILABLE
            return self._launch(message, None, in_thread=prepare)
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)

    def launch_here(self, launch: Launch, reply: DirectReply) -> bool:
        """Launch an operation in place of the actor, which is idle, unless it would have to wait.

        Args:
            launch: Was not handed over before: nothing else may wait to be launched.
            reply: Given at completion, or here if the operation fails at once.

        Returns:
            Whether it was launched, or has failed; otherwise nothing has happened.
        """
        queue, load = self._queue, self._queue.load
        # D20: past the mailbox only while nothing waits to be launched, so that the order of launches stays.
        if not self._is_plain or not (self._gate.order.is_clear or self._gate.order.admits(launch)):
            return False
        # `StreamQueue.is_full` says the same, with a call.
        if len(queue.operations) >= queue.limit or load.outstanding >= MOST_ON_A_STREAM:
            return False
        # D50: a host array is still being copied, and no stream may be held for it.
        if launch.arrivals and not launch.has_arrived:
            return False
        try:
            prepare = self._kernels.prepare(launch.spec)
            if prepare is None:
                self._launch(launch, reply)
            # A longer call keeps a place in the order until it returns (D111), and this operation was given
            # none.
            elif isinstance(prepare, InThread) and prepare.is_short:
                self._launch(launch, reply, in_thread=prepare)
            else:
                return False
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            reply.served(self.context, error if classify(error) is FailureClass.SUSPECT else None)
            reply.fail(error)
        return True

    @handles(Launch, ki_protected=True)
    @fast_path(launch_now)
    async def launch(self, message: Launch) -> DeferredReply[None]:
        """Enqueue an operation, when the window has room and those before it are launched."""
        failure: Exception | None = None
        gate, queue = self._gate, self._queue
        try:
            # D111: the library is not asked anything while a thread is in it.
            if queue.load.is_taken and not self.hands_ahead:
                await gate.wait(message, queue)
            prepare = self._kernels.prepare(message.spec)
            in_thread = prepare if isinstance(prepare, InThread) else None
            plan = prepare if in_thread is None else in_thread.plan
            if plan is not None:
                failure = await gate.prepare(message, queue, plan)
            # Room and turn are looked at behind the preparation, which takes time. No checkpoint lies between
            # this look and the launch.
            if not gate.may_launch(message, queue):
                await gate.wait(message, queue)
            reply = self._launch(message, None, failure, in_thread=in_thread)
            return cast("DeferredReply[None]", reply)  # as none was given
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)

    def _launch(
        self,
        launch: Launch,
        reply: DirectReply | None,
        failure: Exception | None = None,
        *,
        in_thread: InThread | None = None,
    ) -> Reply:
        """Launch an operation: all launches of one device come by here. Its reply is given at completion.

        Args:
            launch: The operation.
            reply: Its reply; None if it was handed over, so that its reply is a deferred one.
            failure: Error of its preparation.
            in_thread: The library's answer, if its kernel is called in a thread, or as it is there.

        Raises:
            Exception: See `Enqueuer.enqueue`.
        """
        context, queue = self.context, self._queue
        call: ThreadedCall | None = None
        if in_thread is not None or queue.calls:
            # D111: behind the calls that the thread has, also if this one is short or does not block.
            is_here = in_thread is not None and in_thread.is_short and not queue.calls
            call = self._threaded.begin(launch, queue, failure, is_here=is_here)
            operation = call.operation
        elif reply is not None:
            operation = self._enqueuer.enqueue(launch, self._kernels, queue, failure)
        else:
            try:
                operation = self._enqueuer.enqueue(launch, self._kernels, queue, failure)
            finally:
                # The launch leaves the gate even after a failure: operations that follow this one must go on.
                self._gate.leave(launch)
        start_grace = partial(self._cancel_grace.start, queue, operation)
        given: Reply
        if reply is not None:
            reply.served(context)
            reply.on_cancel, given = start_grace, reply
        else:
            deferred: DeferredReply[None] = context.defer(on_cancel=lambda: start_grace(deferred.context))
            given = deferred
        # The operation gets its reply before the port is told: its poll may see the end and reply at once.
        operation.crash, operation.reply = context.crash, given
        if call is not None:
            self._threaded.start(call, self._kernels, given)
        else:
            self._completer.see_to(operation, queue, given)
        return given

    def _refused(self, error: Exception) -> DeferredReply[None]:
        """Reply with the library's error; called while that is handled.

        Raises:
            Exception: The same, if the library is suspect.
        """
        if classify(error) is FailureClass.SUSPECT:
            raise error
        reply: DeferredReply[None] = self.context.defer()
        reply.fail(error)
        return reply
