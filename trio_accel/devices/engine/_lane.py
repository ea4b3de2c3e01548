"""Streams with their operations in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import trio

from ...backends.base import AccelStream
from ..base._bridge import CallThread
from ._in_flight import InFlight

__all__ = ["Lane", "StreamLoad"]

# A driver's queue is finite, and a launch into a full one blocks.
_MOST_ON_A_STREAM = 256


@attrs.define(eq=False)
class StreamLoad:
    """What several lanes that share a stream have on it together."""

    outstanding: int = 0
    finished: int = 0
    is_taken: bool = False
    """Whether a thread enqueues on the stream: then there is no room for anything else."""

    @property
    def is_full(self) -> bool:
        """Whether the stream takes no more for now."""
        return self.outstanding >= _MOST_ON_A_STREAM

    def take(self) -> None:
        """A thread enqueues from now on."""
        self.is_taken = True
        self.outstanding += _MOST_ON_A_STREAM

    def give_back(self) -> None:
        """It does not any more."""
        self.is_taken = False
        self.outstanding -= _MOST_ON_A_STREAM


@attrs.define(eq=False)
class Lane:
    """A stream with its operations in flight, in order."""

    stream: AccelStream
    load: StreamLoad
    limit: int
    owner: str
    """Path of the library actor whose incarnations launch here, one lane each."""
    on_progress: Callable[[], None] | None = None
    """Called once, when the first operation has completed without an error."""
    operations: deque[InFlight] = attrs.field(factory=deque[InFlight])
    is_lost: bool = False
    """The context is gone: nothing is launched here any more."""
    is_released: bool = False
    """Whether the stream was given back."""
    thread: CallThread | None = None
    """Where kernels that block are called, once there was one."""
    on_idle: Callable[[], None] | None = None
    """Set when the stream takes no more work: called when the last operation is done."""
    _changed: trio.Event | None = attrs.field(default=None, init=False)
    _seen: tuple[int, int] | None = attrs.field(default=None, init=False)
    _seen_since: float = attrs.field(default=0.0, init=False)

    @property
    def is_full(self) -> bool:
        """Whether an operation has to wait for room in the window, or on the stream."""
        is_full = len(self.operations) >= self.limit or self.load.outstanding >= _MOST_ON_A_STREAM
        return is_full and not self.is_lost

    async def drain(self, *, with_left: bool) -> None:
        """Wait until nothing is in flight, or nothing but what its askers have left.

        What is in flight on a lost context does not count.
        """
        while any(
            not (operation.is_lost or (operation.is_given_up and not with_left))
            for operation in self.operations
        ):
            await self.wait_changed()

    def is_stuck(self, now: float, limit: float) -> bool:
        """Whether neither its first operation nor others on the stream have got anywhere for so long.

        The time begins when this first sees them so: nothing is timed while operations come and go.
        """
        if not self.operations:
            return False
        seen = self.operations[0].number, self.load.finished
        if seen != self._seen:
            self._seen, self._seen_since = seen, now
        return now - self._seen_since > limit

    def forget_seen(self) -> None:
        """Begin anew to time how long it has got nowhere."""
        self._seen = None

    def end_thread(self) -> None:
        """No kernel is called any more: let the thread end when it has returned from the last one."""
        if self.thread is not None:
            self.thread.end()
            self.thread = None

    async def wait_changed(self) -> None:
        """Wait for a change."""
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def notify(self) -> None:
        """Wake those that wait for a change."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()
