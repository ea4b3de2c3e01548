"""Launches for which the backend is called in a thread, as that blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import attrs

from ...backends.base import AccelEvent, KernelLibrary
from ..base._bridge import CallThread, failure_of
from ..operations._operation import Launch
from ._completer import Completer
from ._enqueuer import Enqueuer, Kernels
from ._in_flight import NOT_YET, InFlight, Reply
from ._launch_gate import LaunchGate
from ._stream_queues import StreamQueue

__all__ = ["ThreadedCall", "ThreadedLaunches"]


@attrs.define(eq=False)
class ThreadedCall:
    """The call of the backend for one operation, which is in flight already.

    Attributes:
        operation: The operation.
        queue: Where it is.
        later: What is to be put on the stream before the call; None if it is there already, as the call is
            made in the loop.
        event: Behind what was enqueued, once that is done. An injected fault comes in between, in the loop.
    """

    operation: InFlight
    queue: StreamQueue
    later: list[Callable[[], object]] | None
    event: AccelEvent | None = None

    def make(self, kernels: Kernels) -> None:
        """Put everything on the stream, in order; raises as the backend does."""
        operation, stream = self.operation, self.queue.stream
        if operation.is_lost:
            # It was handed over ahead, and its context is gone.
            return
        try:
            for put in self.later or ():
                put()
            kernels.enqueue(operation.launch.spec, stream)
        finally:
            if operation.launch.fault is None:
                # Here, as the thread may be at the next call before the loop looks. A closed stream refuses.
                with suppress(RuntimeError):
                    self.event = stream.record()


class ThreadedLaunches:
    """Launches operations in three steps, so that the loop goes on while the backend enqueues one.

    In the loop, an operation gets its memory, its operands and its place among what is in flight. In a
    thread, what it must follow is put on the stream, the backend is called, and the event is recorded. In the
    loop again, others learn of the event.

    Until then it keeps its place in the launch order: what is to follow it is not launched. To hold that back
    on the device instead would hang, as a driver that loads a kernel waits for streams that are held.

    A queue may hand calls over ahead (`StreamQueue.hands_ahead`). What touches the memory of one before is
    not among them, by the launch order. So nothing that is put on a stream waits for what the same thread
    has still to put there.

    A call that is short is made in the loop, in the same steps.

    Args:
        gate: Where operations wait to be launched.
        enqueuer: Does the steps in the loop.
        completer: Replies.
    """

    def __init__(self, gate: LaunchGate, enqueuer: Enqueuer, completer: Completer) -> None:
        self._gate = gate
        self._enqueuer = enqueuer
        self._completer = completer

    def begin(
        self, launch: Launch, queue: StreamQueue, failure: Exception | None, *, is_here: bool = False
    ) -> ThreadedCall:
        """Take the first step; its caller sees to the reply, and takes the second one.

        Args:
            launch: The operation.
            queue: Where it goes.
            failure: What its preparation failed with.
            is_here: Whether the call is made in the loop.

        Raises:
            Exception: As for `Enqueuer.enqueue`.
        """
        later: list[Callable[[], object]] | None = None if is_here else []
        try:
            self._enqueuer.begin(launch, queue, failure, later)
        except BaseException:
            self._gate.leave(launch)
            raise
        operation = self._enqueuer.add(launch, queue, NOT_YET, InFlight)
        if not is_here:
            self._gate.keep(launch)
            queue.is_alone = launch.fault is not None
            queue.take()
        return ThreadedCall(operation, queue, later)

    def start(self, call: ThreadedCall, library: KernelLibrary, reply: Reply) -> None:
        """Call the backend; the third step follows by itself."""
        operation, queue = call.operation, call.queue
        kernels = self._enqueuer.kernels_for(operation.launch, library)
        if call.later is None:
            self._call_here(call, kernels, reply)
            return
        if queue.thread is None:
            try:
                queue.thread = CallThread(f"{queue.stream.name} launches")
            except RuntimeError as error:
                # The system has no thread left.
                self._end(call, error)
                return
        queue.thread.call(partial(call.make, kernels), partial(self._end, call))

    def _call_here(self, call: ThreadedCall, kernels: Kernels, reply: Reply) -> None:
        operation, queue = call.operation, call.queue
        error: Exception | None = None
        try:
            call.make(kernels)
        except Exception as raised:  # noqa: BLE001  # it is the operation's
            error = failure_of(raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next))
        error = self._enqueuer.bind(operation, queue, error, call.event)
        self._gate.leave(operation.launch)
        if error is None:
            self._completer.see_to(operation, queue, reply)
        else:
            self._completer.refuse(operation, error)
            self._completer.watch(operation, queue)

    def _end(self, call: ThreadedCall, error: Exception | None) -> None:
        """The thread has returned."""
        operation, queue = call.operation, call.queue
        if operation.is_lost:
            # With its context, of which nobody uses anything any more.
            return
        queue.give_back()
        error = self._enqueuer.bind(operation, queue, error, call.event)
        self._gate.launched(operation.launch)
        if error is not None:
            self._completer.refuse(operation, error)
        self._completer.watch(operation, queue)
