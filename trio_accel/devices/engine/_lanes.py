"""The streams of one context, one lane for each incarnation of a library actor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..base._bridge import Chores
from ..base._streams import StreamSource
from ._lane import Lane, StreamLoad

__all__ = ["Lanes"]


class Lanes:
    """Opens and retires lanes, and waits for what is in flight on them.

    Args:
        streams: The streams of the context.
        limit: The most operations that a lane has in flight.

    Attributes:
        all: The lanes that have, or may get, operations in flight; not to be changed from outside.
    """

    def __init__(self, streams: StreamSource, limit: int) -> None:
        self.all: list[Lane] = []
        self._streams = streams
        self._limit = limit
        self._chores = Chores()

    @property
    def in_flight(self) -> int:
        """Operations that the backend has."""
        return sum(len(lane.operations) for lane in self.all)

    def open(self, library: str, owner: str, on_progress: Callable[[], None] | None = None) -> Lane:
        """Take a stream for one incarnation of the library actor with the path `owner`.

        Args:
            library: Its library.
            owner: Its path.
            on_progress: Called once, when the first operation has completed without an error.
        """
        stream = self._streams.acquire(library)
        load = next((other.load for other in self.all if other.stream is stream), StreamLoad())
        lane = Lane(stream, load, self._limit, owner, on_progress)
        self.all.append(lane)
        return lane

    def retire(self, lane: Lane, on_idle: Callable[[], None]) -> None:
        """Take no more work on a lane; what is in flight still completes and replies.

        Args:
            lane: The lane.
            on_idle: Called in a thread when nothing is in flight on it.
        """
        lane.on_idle = on_idle
        if not lane.load.is_taken:
            # Else a thread enqueues on it.
            self._release(lane)
        self.sweep(lane)

    def _release(self, lane: Lane) -> None:
        """Nothing more is enqueued on its stream by this lane."""
        if not lane.is_released:
            lane.is_released = True
            self._streams.release(lane.stream)

    def sweep(self, lane: Lane) -> None:
        """Remove a lane that takes no more work and has nothing in flight."""
        if lane.on_idle is not None and not lane.operations:
            self.all.remove(lane)
            lane.end_thread()
            self._release(lane)
            # A vendor's library waits for whatever the device does.
            self._chores.start(f"to close the library behind stream {lane.stream.name}", lane.on_idle)

    def count(self) -> Counter[str]:
        """Count the operations in flight by the import path of their library."""
        return Counter(operation.launch.library for lane in self.all for operation in lane.operations)

    def notify(self, load: StreamLoad) -> None:
        """Wake those that wait for a change on a stream."""
        for lane in tuple(self.all):
            if lane.load is load:
                lane.notify()

    async def drain(self, owner: str | None) -> None:
        """Wait until nothing is in flight, of all or of one library actor.

        An operation that its asker has left does not hold up the end of its library actor.
        """
        for lane in tuple(self.all):
            if owner in (None, lane.owner):
                await lane.drain(with_left=owner is None)

    async def settle(self) -> None:
        """Wait until what is in flight now is over, whatever is launched meanwhile."""
        for lane in tuple(self.all):
            last = lane.operations[-1] if lane.operations else None
            while last is not None and last in lane.operations and not last.is_lost:
                await lane.wait_changed()

    def finish(self, seconds: float) -> None:
        """Wait until the libraries of retired lanes are closed, so many seconds at most. Any thread."""
        self._chores.finish(seconds)
