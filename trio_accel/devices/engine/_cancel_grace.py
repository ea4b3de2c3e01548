"""Cancelled askers of operations in flight: how long they wait, and the host arrays of theirs in use."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar

import trio

from ...backends.base.ops import CopyFromHostSpec, CopyToHostSpec, HostUse
from ..arrays._blocks import Block
from ..base._waits import Alarms
from ..host._host_pool import SMALL
from ..operations._operation import Launch
from ._in_flight import InFlight
from ._stream_queues import StreamQueue

__all__ = ["CancelGrace", "cancel_grace", "grace_in", "leave_hosts"]

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
        """Begin the grace of an operation in flight, whose asker is cancelled.

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


def leave_hosts(launch: Launch) -> bool | None:
    """Have an operation in flight use no host array of the program any more, as far as that is possible.

    A copy that has not begun is withdrawn if its target was made for it, and is seen by no other operation.
    Arrays that an operation changes in place are seen: for these a small host array is replaced by a private
    copy.

    Returns:
        Whether none is used any more. False if that is so soon, None if it may take as long as the operation.
    """
    made = {block for block, _ in launch.allocations}
    is_seen = not launch.writes <= made
    copies = [
        spec for spec in (launch.spec, *launch.staged) if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))
    ]
    is_free = True
    for kept in launch.keep:
        if isinstance(kept, Block):
            continue
        by = [spec for spec in copies if spec.host is kept]
        if not by:
            # The operation itself uses it, as long as it runs.
            return None
        for spec in by:
            if spec.host.size:
                if spec.use is None:
                    return None
                is_free = _leave(spec.use, is_seen=is_seen) and is_free
    return is_free


def _leave(use: HostUse, *, is_seen: bool) -> bool:
    if not is_seen:
        return use.withdraw()
    return use.make_private(SMALL)


_GRACE: ContextVar[float] = ContextVar("trio_accel.cancel_grace")


@contextmanager
def cancel_grace(seconds: float) -> Generator[None, None, None]:
    """Choose how long a cancelled asker waits, for the operations that are asked for in the body.

    It goes before ``DeviceOptions(cancel_grace=...)``, for every device. Tasks that are started in the
    body inherit it. It is looked up when an asker is cancelled, and at no other time.

    >>> import trio_accel
    >>> with trio_accel.cancel_grace(5.0):
    ...     pass  # await trio_accel.linalg.matmul(a, b)

    Args:
        seconds: At least 0. ``math.inf`` waits until the operation has ended, as
            `trio.to_thread.run_sync` does.

    Raises:
        ValueError: No number of seconds.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"cancel_grace: seconds must be a number of at least 0, got {seconds!r}")
    token = _GRACE.set(seconds)
    try:
        yield
    finally:
        _GRACE.reset(token)


def grace_in(context: Context, default: float) -> float:
    """Return the seconds that were chosen in the context of an asker, or the default."""
    return context.get(_GRACE, default)
