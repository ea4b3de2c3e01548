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
"""The end of the import path of a second actor for a library, for operations that read leased arrays.

An operation that waits for the end of a lease blocks its library. Operations that read the array must not
wait after it."""


@attrs.frozen(kw_only=True)
class OwnSupervision:
    """The supervision of a library actor that ends separately: its context and other actors survive.

    Attributes:
        name: Its name in the tree.
        intensity: The limit of its restarts, after which it has ended for good. None for the device's option.
        backoff: The delays of its restarts; None for the device's option.
    """

    name: str
    intensity: Intensity | None
    backoff: Backoff | None


class LibraryActor(Actor):
    """Owns the handle of one library and a stream; launches one operation after the other.

    Its handler returns as soon as the operation is enqueued. The reply follows at completion.

    An import path may have an argument, ``"package.module:Class?argument"``. Then each argument has its own
    actor, and its own library of the backend with the name ``"library?argument"``.

    Attributes:
        library: The name of the backend's library.
        hands_ahead: Whether a thread that calls its kernels may get the next call before it has returned from
            the previous one. Then the backend's library may be asked to `prepare` meanwhile.
        dtypes: The dtypes of its operations, unless a declaration names others; empty if the kernels
            determine them.
    """

    library: ClassVar[str]
    hands_ahead: ClassVar[bool] = False
    dtypes: ClassVar[tuple[DType, ...]] = ()
    inherits_context: ClassVar[bool] = False

    @classmethod
    def supervision(cls, argument: str) -> OwnSupervision | None:
        """Return the separate supervision of the actor for an argument; None for the default."""
        return None

    @classmethod
    def blocks_of(cls, argument: str) -> Ints:
        """List the blocks that the library for an argument uses from its start, apart from its operations."""
        return ()

    @classmethod
    def modules_of(cls, argument: str) -> Strs:
        """List the modules that an argument's library imports, in the launcher as well for later workers."""
        return ()

    @classmethod
    def library_of(cls, argument: str | None) -> str:
        """Return the name of the backend's library for the import path's argument, or None without one."""
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

        A graceful end waits for operations in flight, even in earlier incarnations. A crash does not, because
        the engine completes that work, while the next incarnation has a new handle and stream. a new handle
        and stream.
        """
        engine = self._engine
        kernels = await engine.libraries.take(self._library_name)
        try:
            queue = engine.streams.open(self.library, context.path, lambda: self._report_progress(context))
        except BaseException:
            kernels.close()
            raise
        queue.hands_ahead = self.hands_ahead
        # The blocks must not move until the last operation has ended, even if its caller has left.
        uses = [engine.pin(block) for block in self._blocks]
        self._kernels, self._queue = kernels, queue
        # A subclass that overrides these must see every launch, so it is never bypassed.
        cls = type(self)
        is_plain = cls.launch is LibraryActor.launch and cls.launch_now is LibraryActor.launch_now
        self._is_plain = is_plain and current_fast_paths().direct_launch
        try:
            yield
            # Only a graceful end is announced and awaited, not a cancelled one.
            await trio.lowlevel.checkpoint_if_cancelled()
            engine.expect_end(context.path)
            await engine.synchronize(context.path)
        finally:
            # The handle outlives the actor, because operations in flight still use it.
            engine.streams.retire(queue, kernels.close, partial(engine.unpin, uses))

    def _report_progress(self, context: ActorContext) -> None:
        """Report that an operation of this incarnation has succeeded."""
        context.report_progress()
        self._engine.observer.progressed()

    def kernels_and_queue(self) -> tuple[KernelLibrary, StreamQueue]:
        """Return the library and the stream of this incarnation."""
        return self._kernels, self._queue

    @property
    def is_plain(self) -> bool:
        """Whether operations may bypass its mailbox."""
        return self._is_plain

    def launch_now(self, message: Launch) -> object:
        """Launch a submitted operation, unless it would have to wait."""
        try:
            # Wait for the gate before any question to the library, because a thread may be using it, unless
            # it takes calls in advance.
            if not self._gate.may_launch(message, self._queue):
                return UNAVAILABLE
            prepare = self._kernels.prepare(message.spec)
            # `launch` makes a plan in a thread, and waits for it. A call in a thread is not awaited.
            if prepare is not None and not (isinstance(prepare, InThread) and prepare.plan is None):
                return UNAVAILABLE
            return self._launch(message, None, in_thread=prepare)
        except Exception as error:  # noqa: BLE001  # `_refused` decides who gets it
            return self._refused(error)

    def launch_here(self, launch: Launch, reply: DirectReply) -> bool:
        """Launch an operation instead of the idle actor, unless it would have to wait.

        Args:
            launch: It was not submitted before. Nothing else may wait to be launched.
            reply: Given at completion, or here if the operation fails at once.

        Returns:
            Whether it was launched or has failed. If not, nothing has happened.
        """
        queue, load = self._queue, self._queue.load
        # D20: the mailbox is bypassed only while nothing waits to be launched, to keep the order of launches.
        if not self._is_plain or not (self._gate.order.is_clear or self._gate.order.admits(launch)):
            return False
        # `StreamQueue.is_full` returns the same, with one more call.
        if len(queue.operations) >= queue.limit or load.outstanding >= MOST_ON_A_STREAM:
            return False
        # D50: a host array is still being copied, and no stream may be held for it.
        if launch.arrivals and not launch.has_arrived:
            return False
        try:
            prepare = self._kernels.prepare(launch.spec)
            if prepare is None:
                self._launch(launch, reply)
            # A longer call keeps its turn until it returns (D111), and this operation does not have a turn.
            elif isinstance(prepare, InThread) and prepare.is_short:
                self._launch(launch, reply, in_thread=prepare)
            else:
                return False
        except Exception as error:  # noqa: BLE001  # the reply decides who gets it
            reply.served(self.context, error if classify(error) is FailureClass.SUSPECT else None)
            reply.fail(error)
        return True

    @handles(Launch, ki_protected=True)
    @fast_path(launch_now)
    async def launch(self, message: Launch) -> DeferredReply[None]:
        """Enqueue an operation when the window has room and the earlier operations are launched."""
        failure: Exception | None = None
        gate, queue = self._gate, self._queue
        try:
            # D111: nobody calls the library while a thread uses it.
            if queue.load.is_taken and not self.hands_ahead:
                await gate.wait(message, queue)
            prepare = self._kernels.prepare(message.spec)
            in_thread = prepare if isinstance(prepare, InThread) else None
            plan = prepare if in_thread is None else in_thread.plan
            if plan is not None:
                failure = await gate.prepare(message, queue, plan)
            # Room and turn are checked after the preparation, which takes time. No checkpoint separates this
            # check from the launch.
            if not gate.may_launch(message, queue):
                await gate.wait(message, queue)
            reply = self._launch(message, None, failure, in_thread=in_thread)
            return cast("DeferredReply[None]", reply)  # no direct reply was passed
        except Exception as error:  # noqa: BLE001  # `_refused` decides who gets it
            return self._refused(error)

    def _launch(
        self,
        launch: Launch,
        reply: DirectReply | None,
        failure: Exception | None = None,
        *,
        in_thread: InThread | None = None,
    ) -> Reply:
        """Launch an operation. All launches of a device pass through here; replies follow at completion.

        Args:
            launch: The operation.
            reply: Its reply; None if it was submitted, so that its reply is deferred.
            failure: The error of its preparation.
            in_thread: The library's answer if its kernel is called in a thread, or in the loop as if in one.

        Raises:
            Exception: See `Enqueuer.enqueue`.
        """
        context, queue = self.context, self._queue
        call: ThreadedCall | None = None
        if in_thread is not None or queue.calls:
            # D111: a short or non-blocking call also has to follow the calls that the thread has.
            is_here = in_thread is not None and in_thread.is_short and not queue.calls
            call = self._threaded.begin(launch, queue, failure, is_here=is_here)
            operation = call.operation
        elif reply is not None:
            operation = self._enqueuer.enqueue(launch, self._kernels, queue, failure)
        else:
            try:
                operation = self._enqueuer.enqueue(launch, self._kernels, queue, failure)
            finally:
                # The launch leaves the gate even after a failure, because later operations must continue.
                self._gate.leave(launch)
        start_grace = partial(self._cancel_grace.start, queue, operation)
        answer: Reply
        if reply is not None:
            reply.served(context)
            reply.on_cancel, answer = start_grace, reply
        else:
            deferred: DeferredReply[None] = context.defer(on_cancel=lambda: start_grace(deferred.context))
            answer = deferred
        # The operation gets its reply before the port, because a poll may see the end and reply at once.
        operation.crash, operation.reply = context.crash, answer
        if call is not None:
            self._threaded.start(call, self._kernels, answer)
        else:
            self._completer.see_to(operation, queue, answer)
        return answer

    def _refused(self, error: Exception) -> DeferredReply[None]:
        """Reply with the library's error; called while it is handled.

        Raises:
            Exception: The same error, if the library is suspect.
        """
        if classify(error) is FailureClass.SUSPECT:
            raise error
        reply: DeferredReply[None] = self.context.defer()
        reply.fail(error)
        return reply
