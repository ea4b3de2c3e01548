"""Launches for which the backend is called in a thread, as that blocks."""

from __future__ import annotations

from functools import partial

from ...backends.base import KernelLibrary
from ..base._bridge import CallThread
from ..operations._operation import Launch
from ._completer import Completer
from ._enqueuer import Enqueuer
from ._in_flight import InFlight
from ._lane import Lane
from ._launch_gate import LaunchGate

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

    def begin(self, launch: Launch, lane: Lane, failure: Exception | None) -> InFlight:
        """Take the first step; its caller sees to the reply, and takes the second one.

        Raises:
            Exception: As for `Enqueuer.enqueue`.
        """
        try:
            operation = self._enqueuer.begin(launch, lane, failure)
        except BaseException:
            self._gate.leave(launch)
            raise
        self._gate.keep(launch)
        lane.load.take()
        return operation

    def start(self, operation: InFlight, library: KernelLibrary, lane: Lane) -> None:
        """Call the backend in a thread; the third step follows by itself."""
        if lane.thread is None:
            try:
                lane.thread = CallThread(f"{lane.stream.name} launches")
            except RuntimeError as error:
                # The system has no thread left.
                self._end(operation, lane, error)
                return
        kernels = self._enqueuer.kernels_for(operation.launch, library)
        enqueue = partial(kernels.enqueue, operation.launch.spec, lane.stream)
        lane.thread.call(enqueue, partial(self._end, operation, lane))

    def _end(self, operation: InFlight, lane: Lane, error: Exception | None) -> None:
        """The thread has returned."""
        if operation.is_lost:
            # With its context, of which nobody uses anything any more.
            return
        lane.load.give_back()
        error = self._enqueuer.end(operation, lane, error)
        self._gate.launched(operation.launch)
        if error is not None:
            self._completer.refuse(operation, error)
        self._completer.watch(operation, lane)
