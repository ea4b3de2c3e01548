"""The streams of one context with their operations in flight: one for each incarnation of a library actor."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import attrs
import trio

from ...backends.base import AccelStream
from ..base._bridge import BackgroundCalls, CallThread
from ..base._options import StreamSource
from ._in_flight import NOT_YET, InFlight

# A driver's queue is finite, and a launch into a full one blocks.
MOST_ON_A_STREAM = 256
# Calls that a thread has at once: it goes on to the next one without the loop. They cannot be
# withdrawn any more, so there are no more than the loop needs to keep up.
_MOST_AHEAD = 8
# Seconds between looks at operations that are still in flight when the context ends.
_POLL_INTERVAL = 0.0005


@attrs.define(eq=False)
class StreamLoad:
    """Load of a stream, of all queues that share it."""

    outstanding: int = 0
    finished: int = 0
    is_taken: bool = False
    """Whether a thread enqueues on the stream: then there is no room for anything else."""


@attrs.define(eq=False)
class StreamQueue:
    """A stream with its operations in flight, in order."""

    stream: AccelStream
    load: StreamLoad
    limit: int
    owner: str
    """Path of the library actor whose incarnations launch here, one queue each."""
    on_progress: Callable[[], None] | None = None
    """Called once, when the first operation has completed without an error."""
    operations: deque[InFlight] = attrs.field(factory=deque[InFlight])
    is_lost: bool = False
    """Whether the context is gone: nothing is launched here any more."""
    is_released: bool = False
    """Whether the stream was given back."""
    thread: CallThread | None = None
    """The thread that calls kernels that block, once there was one."""
    hands_ahead: bool = False
    """Whether its thread may be given the next call before it has returned from the last one."""
    calls: int = 0
    """Calls that its thread has been given and has not returned from."""
    is_alone: bool = False
    """Whether the thread is to be given nothing behind the call that it has."""
    on_idle: Callable[[], None] | None = None
    """Set when the stream takes no more work: called in a thread when the last operation is done."""
    on_end: Callable[[], None] | None = None
    """The same, called before, and in the loop while that runs."""
    changed: trio.Event | None = None
    _seen: tuple[int, int] | None = None
    _seen_since: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether an operation has to wait for room in the window, or on the stream."""
        if self.calls:
            # The stream is the thread's, which takes some ahead.
            has_room = self.hands_ahead and not self.is_alone and self.calls < _MOST_AHEAD
        else:
            has_room = self.load.outstanding < MOST_ON_A_STREAM
        # On a lost context nothing waits for room: the launch is to fail now.
        return not (has_room and len(self.operations) < self.limit) and not self.is_lost

    def take(self) -> None:
        """Count a call that its thread is given."""
        self.calls += 1
        if self.calls == 1:
            # One number says for all queues of the stream that it is full: the hot path looks at it anyway.
            self.load.is_taken = True
            self.load.outstanding += MOST_ON_A_STREAM

    def give_back(self) -> None:
        """Count a call that its thread has returned from."""
        self.calls -= 1
        if not self.calls:
            self.load.is_taken = False
            self.load.outstanding -= MOST_ON_A_STREAM

    async def drain(self, *, with_left: bool) -> None:
        """Wait until nothing is in flight, or nothing but operations that their askers have left.

        Those on a lost context do not count.
        """
        while any(
            not (operation.is_lost or (operation.is_given_up and not with_left))
            for operation in self.operations
        ):
            await self.wait_changed()

    def is_stuck(self, now: float, limit: float) -> bool:
        """Tell whether neither its first operation nor others on the stream have got anywhere for so long.

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
        """Let the thread end when it has returned from its last call."""
        if self.thread is not None:
            self.thread.end()
            self.thread = None

    def finish(self, deadline: float) -> bool:
        """Wait until the stream is through all that is in flight; tells whether it is. Any thread."""
        events = [operation.event for operation in self.operations]
        # A thread may hang in its call, and a lost context gets nowhere: neither is waited for.
        if NOT_YET in events:
            return False
        while events:
            if self.stream.failure is not None or time.monotonic() > deadline:
                return False
            events = [event for event in events if not event.is_done]
            if events:
                time.sleep(_POLL_INTERVAL)
        self.operations.clear()
        return True

    async def wait_changed(self) -> None:
        """Wait for a change."""
        # Made by the first that waits: most completions have no waiter, and pay for a look alone.
        if self.changed is None:
            self.changed = trio.Event()
        await self.changed.wait()

    def notify(self) -> None:
        """Wake those that wait for a change."""
        changed, self.changed = self.changed, None
        if changed is not None:
            changed.set()


class StreamQueues:
    """The queues of a context: opened, retired, and waited for.

    Args:
        streams: The streams of the context.
        limit: The most operations that a queue has in flight.

    Attributes:
        all: The queues that have, or may get, operations in flight; not to be changed from outside.
    """

    def __init__(self, streams: StreamSource, limit: int) -> None:
        self.all: list[StreamQueue] = []
        self._streams = streams
        self._limit = limit
        self._closing = BackgroundCalls()

    @property
    def in_flight(self) -> int:
        """Operations that the backend has."""
        return sum(len(queue.operations) for queue in self.all)

    def open(self, library: str, owner: str, on_progress: Callable[[], None] | None = None) -> StreamQueue:
        """Take a stream for one incarnation of the library actor with the path `owner`.

        Args:
            library: Its library.
            owner: Its path.
            on_progress: Called once, when the first operation has completed without an error.
        """
        stream = self._streams.acquire(library)
        load = next((other.load for other in self.all if other.stream is stream), StreamLoad())
        queue = StreamQueue(stream, load, self._limit, owner, on_progress)
        self.all.append(queue)
        return queue

    def retire(
        self, queue: StreamQueue, on_idle: Callable[[], None], on_end: Callable[[], None] | None = None
    ) -> None:
        """Take no more work on a queue; operations in flight still complete and reply.

        Args:
            queue: The queue.
            on_idle: Called in a thread when no operation is in flight on it.
            on_end: The same, called before, and in the loop while that runs.
        """
        queue.on_idle, queue.on_end = on_idle, on_end
        if not queue.load.is_taken:
            # The stream of a queue on which a thread enqueues is released later, by `sweep` (D111).
            self._release(queue)
        self.sweep(queue)

    def _release(self, queue: StreamQueue) -> None:
        """Release the stream: this queue enqueues nothing more."""
        if not queue.is_released:
            queue.is_released = True
            self._streams.release(queue.stream)

    def sweep(self, queue: StreamQueue) -> None:
        """Remove a queue that takes no more work and has nothing in flight."""
        if queue.on_idle is not None and not queue.operations:
            self.all.remove(queue)
            queue.end_thread()
            self._release(queue)
            if queue.on_end is not None:
                queue.on_end()
            # The library closes in a thread: a vendor's waits for all work of the device when it closes.
            self._closing.start(f"to close the library behind stream {queue.stream.name}", queue.on_idle)

    def count(self) -> Counter[str]:
        """Count the operations in flight by the import path of their library."""
        return Counter(operation.launch.library for queue in self.all for operation in queue.operations)

    def notify(self, load: StreamLoad) -> None:
        """Wake those that wait for a change on a stream."""
        for queue in tuple(self.all):
            if queue.load is load:
                queue.notify()

    async def drain(self, owner: str | None) -> None:
        """Wait until nothing is in flight, of all or of one library actor.

        An operation that its asker has left does not hold up the end of its library actor.
        """
        for queue in tuple(self.all):
            if owner in (None, queue.owner):
                await queue.drain(with_left=owner is None)

    async def settle(self) -> None:
        """Wait until what is in flight now is over, whatever is launched meanwhile."""
        for queue in tuple(self.all):
            # Operations of a stream end in order: behind the last one of now, all of now are over.
            last = queue.operations[-1] if queue.operations else None
            while last is not None and last in queue.operations and not last.is_lost:
                await queue.wait_changed()

    def finish(self, seconds: float) -> bool:
        """Wait for what is in flight, and until the libraries of retired queues are closed. Any thread.

        To be called when the loop launches and completes nothing any more.

        Args:
            seconds: The most to wait.

        Returns:
            Whether nothing is in flight any more. What still runs may use its library, which stays open.
        """
        deadline = time.monotonic() + seconds
        for queue in tuple(self.all):
            if queue.finish(deadline):
                self.sweep(queue)
        self._closing.finish(max(0.0, deadline - time.monotonic()))
        return not self.in_flight
