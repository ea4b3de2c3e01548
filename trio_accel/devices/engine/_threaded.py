"""Launches for which the backend is called in a thread, as that blocks."""

from __future__ import annotations

from functools import partial

from ...backends.base import KernelLibrary
from ..base._bridge import CallThread
from ..operations._operation import Launch
from ._completer import Completer
from ._enqueuer import Enqueuer
from ._in_flight import NOT_YET, InFlight
from ._launch_gate import LaunchGate
from ._stream_queues import StreamQueue

__all__ = ["ThreadedLaunches"]


class ThreadedLaunches:
    """Launches operations in three steps, so that the loop goes on while the backend enqueues one.

    In the loop, an operation gets its memory, its operands and its place on the stream; from then on it is in
    flight. In a thread, the backend is called. In the loop again, its event is recorded.

    Until then it keeps its place in the launch order: what is to follow it is not launched. To hold that back
    on the device instead would hang, as a driver that loads a kernel waits for streams that are held.

    Args:
        gate: Where operations wait to be launched.
        enqueuer: Does the steps in the loop.
        completer: Replies.
    """

    def __init__(self, gate: LaunchGate, enqueuer: Enqueuer, completer: Completer) -> None:
        self._gate = gate
        self._enqueuer = enqueuer
        self._completer = completer

    def begin(self, launch: Launch, queue: StreamQueue, failure: Exception | None) -> InFlight:
        """Take the first step; its caller sees to the reply, and takes the second one.

        Raises:
            Exception: As for `Enqueuer.enqueue`.
        """
        try:
            self._enqueuer.begin(launch, queue, failure)
        except BaseException:
            self._gate.leave(launch)
            raise
        operation = self._enqueuer.add(launch, queue, NOT_YET, InFlight)
        self._gate.keep(launch)
        queue.load.take()
        return operation

    def start(self, operation: InFlight, library: KernelLibrary, queue: StreamQueue) -> None:
        """Call the backend in a thread; the third step follows by itself."""
        if queue.thread is None:
            try:
                queue.thread = CallThread(f"{queue.stream.name} launches")
            except RuntimeError as error:
                # The system has no thread left.
                self._end(operation, queue, error)
                return
        kernels = self._enqueuer.kernels_for(operation.launch, library)
        enqueue = partial(kernels.enqueue, operation.launch.spec, queue.stream)
        queue.thread.call(enqueue, partial(self._end, operation, queue))

    def _end(self, operation: InFlight, queue: StreamQueue, error: Exception | None) -> None:
        """The thread has returned."""
        if operation.is_lost:
            # With its context, of which nobody uses anything any more.
            return
        queue.load.give_back()
        error = self._enqueuer.bind(operation, queue, error)
        self._gate.launched(operation.launch)
        if error is not None:
            self._completer.refuse(operation, error)
        self._completer.watch(operation, queue)
