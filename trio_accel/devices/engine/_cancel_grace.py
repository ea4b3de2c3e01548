"""Cancelled askers of operations in flight."""

from __future__ import annotations

from contextvars import Context

import trio

from ..base._alarms import Alarms
from ..base._cancel_grace import grace_in
from ._host_use import leave_hosts
from ._in_flight import InFlight
from ._stream_queues import StreamQueue

__all__ = ["CancelGrace"]

# A host array is being copied: seconds between two looks at it.
_COPYING = 0.001


class CancelGrace:
    """Has a cancelled asker wait for its operation no longer than the grace.

    Args:
        alarms: Calls back when the grace is over. An operation's alarm is dropped when it is done: the alarm
            holds on to its arrays.
        seconds: The grace, where the asker has chosen none.
    """

    def __init__(self, alarms: Alarms, seconds: float) -> None:
        self._alarms = alarms
        self._seconds = seconds

    def start(self, queue: StreamQueue, operation: InFlight, context: Context) -> None:
        """The asker of an operation in flight is cancelled: its grace begins.

        Args:
            queue: Where the operation is.
            operation: The operation.
            context: Context variables of the asker.
        """
        operation.has_grace = True
        self._let_wait(operation, queue, grace_in(context, self._seconds))

    def _let_wait(self, operation: InFlight, queue: StreamQueue, seconds: float) -> None:
        deadline = trio.current_time() + seconds
        self._alarms.set(operation, deadline, lambda: self._leave(operation, queue))

    def _leave(self, operation: InFlight, queue: StreamQueue) -> None:
        """Let a cancelled asker go; the operation stays in flight, and its buffers with it."""
        is_free = leave_hosts(operation.launch)
        if not is_free:
            if is_free is not None:
                self._let_wait(operation, queue, _COPYING)
            return
        operation.is_given_up = True
        if operation.reply is not None:
            operation.reply.cancelled()
        queue.notify()
