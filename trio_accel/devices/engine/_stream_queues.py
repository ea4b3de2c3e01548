"""The streams of a context with their operations in flight: one for each incarnation of a library actor."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import attrs

from ...actors import TaskEvent
from ...backends.base import AccelStream
from ..base._bridge import BackgroundCalls, CallThread
from ..base._options import StreamSource
from ._in_flight import NOT_YET, InFlight

# A driver's queue is finite, and a launch into a full queue blocks.
MOST_ON_A_STREAM = 256
# The maximum number of calls that a thread has, so that it continues without the loop. They cannot be
# withdrawn, so there are no more than the loop needs to keep up.
_MOST_AHEAD = 8
# Seconds between checks of operations still in flight when the context ends.
_POLL_INTERVAL = 0.0005


@attrs.define(eq=False)
class StreamLoad:
    """The load of a stream, summed over all queues that share it."""

    outstanding: int = 0
    finished: int = 0
    is_taken: bool = False
    """Whether a thread enqueues on the stream, so that there is no room for other work."""


@attrs.define(eq=False)
class StreamQueue:
    """A stream with its operations in flight, in order."""

    stream: AccelStream
    load: StreamLoad
    limit: int
    owner: str
    """The path of the library actor whose incarnations launch here, with one queue each."""
    on_progress: Callable[[], None] | None = None
    """Called once, when the first operation has succeeded."""
    operations: deque[InFlight] = attrs.field(factory=deque[InFlight])
    is_lost: bool = False
    """Whether the context is lost, so that nothing is launched here."""
    is_released: bool = False
    """Whether the stream was returned."""
    thread: CallThread | None = None
    """The thread that calls blocking kernels, once it exists."""
    hands_ahead: bool = False
    """Whether its thread may get the next call before it has returned from the previous one."""
    calls: int = 0
    """The number of calls that its thread has not returned from."""
    is_alone: bool = False
    """Whether the thread must not get another call after the present one."""
    on_idle: Callable[[], None] | None = None
    """Set when the stream takes no more work: called in a thread when the last operation is done."""
    on_end: Callable[[], None] | None = None
    """The same, but called before that, and in the loop if it still runs."""
    changed: TaskEvent | None = None
    _mark: tuple[int, int] | None = None
    _seen_since: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether an operation has to wait for room in the window, or on the stream."""
        if self.calls:
            # The stream belongs to the thread, which takes some calls in advance.
            has_room = self.hands_ahead and not self.is_alone and self.calls < _MOST_AHEAD
        else:
            has_room = self.load.outstanding < MOST_ON_A_STREAM
        # On a lost context nothing waits for room, because the launch has to fail now.
        return not (has_room and len(self.operations) < self.limit) and not self.is_lost

    def take(self) -> None:
        """Count a new call of its thread."""
        self.calls += 1
        if self.calls == 1:
            # One number shows all queues of the stream that it is full, because the hot path reads it anyway.
            self.load.is_taken = True
            self.load.outstanding += MOST_ON_A_STREAM

    def give_back(self) -> None:
        """Count a call from which its thread has returned."""
        self.calls -= 1
        if not self.calls:
            self.load.is_taken = False
            self.load.outstanding -= MOST_ON_A_STREAM

    async def drain(self, *, with_left: bool) -> None:
        """Wait until nothing is in flight, or nothing except operations that their callers have left.

        Operations on a lost context do not count.
        """
        while any(
            not (operation.is_lost or (operation.is_given_up and not with_left))
            for operation in self.operations
        ):
            await self.wait_changed()

    def is_stuck(self, now: float, limit: float) -> bool:
        """Return whether neither its first operation nor the stream has progressed for `limit` seconds.

        The time begins when this method first sees that state, so nothing is timed while operations complete.
        """
        if not self.operations:
            return False
        mark = self.operations[0].number, self.load.finished
        if mark != self._mark:
            self._mark, self._seen_since = mark, now
        return now - self._seen_since > limit

    def forget_seen(self) -> None:
        """Start the time without progress again."""
        self._mark = None

    def end_thread(self) -> None:
        """Let the thread end after its last call."""
        if self.thread is not None:
            self.thread.end()
            self.thread = None

    def finish(self, deadline: float) -> bool:
        """Wait until everything in flight on the stream is done; return whether it is. Any thread."""
        events = [operation.event for operation in self.operations]
        # Neither is awaited: a thread may hang in its call, and a lost context makes no progress.
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
        # The first waiter makes the event, because most completions happen without a waiter, and should only
        # pay for a check.
        if self.changed is None:
            self.changed = TaskEvent()
        await self.changed.wait()

    def notify(self) -> None:
        """Wake all waiters for a change."""
        changed, self.changed = self.changed, None
        if changed is not None:
            changed.set()


class StreamQueues:
    """The queues of a context: opens, retires, and awaits them.

    Args:
        streams: The streams of the context.
        limit: The maximum number of operations that a queue has in flight.

    Attributes:
        all: The queues that have, or may get, operations in flight; do not change it from outside.
    """

    def __init__(self, streams: StreamSource, limit: int) -> None:
        self.all: list[StreamQueue] = []
        self._streams = streams
        self._limit = limit
        self._closing = BackgroundCalls()

    @property
    def in_flight(self) -> int:
        """The number of operations that the backend has."""
        return sum(len(queue.operations) for queue in self.all)

    def open(self, library: str, owner: str, on_progress: Callable[[], None] | None = None) -> StreamQueue:
        """Take a stream for one incarnation of the library actor with the path `owner`.

        Args:
            library: Its library.
            owner: Its path.
            on_progress: Called once, when the first operation has succeeded.
        """
        stream = self._streams.acquire(library)
        load = next((queue.load for queue in self.all if queue.stream is stream), StreamLoad())
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
            on_end: Called before `on_idle`, and in the loop if it still runs.
        """
        queue.on_idle, queue.on_end = on_idle, on_end
        if not queue.load.is_taken:
            # If a thread enqueues on the queue, `sweep` releases its stream later (D111).
            self._release(queue)
        self.sweep(queue)

    def _release(self, queue: StreamQueue) -> None:
        """Release the stream, because this queue enqueues nothing more."""
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
            # The library closes in a thread, because a vendor's library waits for all work of the device.
            self._closing.start(f"to close the library behind stream {queue.stream.name}", queue.on_idle)

    def count(self) -> Counter[str]:
        """Count the operations in flight, by the import path of their library."""
        return Counter(operation.launch.library for queue in self.all for operation in queue.operations)

    def notify(self, load: StreamLoad) -> None:
        """Wake all waiters for a change on a stream."""
        for queue in tuple(self.all):
            if queue.load is load:
                queue.notify()

    async def drain(self, owner: str | None) -> None:
        """Wait until nothing is in flight, of all library actors or of one.

        An operation that its caller has left does not delay the end of its library actor.
        """
        for queue in tuple(self.all):
            if owner in (None, queue.owner):
                await queue.drain(with_left=owner is None)

    async def settle(self) -> None:
        """Wait until all operations now in flight have ended, whatever is launched meanwhile."""
        for queue in tuple(self.all):
            # Operations of a stream end in order: after the present last operation, all have ended.
            last_operation = queue.operations[-1] if queue.operations else None
            while (
                last_operation is not None
                and last_operation in queue.operations
                and not last_operation.is_lost
            ):
                await queue.wait_changed()

    def finish(self, seconds: float) -> bool:
        """Wait for operations in flight, and until the libraries of retired queues are closed. Any thread.

        Call this only when the loop no longer launches or completes anything.

        Args:
            seconds: The maximum time to wait.

        Returns:
            Whether nothing is in flight. Running operations may use their library, which stays open then.
        """
        deadline = time.monotonic() + seconds
        for queue in tuple(self.all):
            if queue.finish(deadline):
                self.sweep(queue)
        self._closing.finish(max(0.0, deadline - time.monotonic()))
        return not self.in_flight
