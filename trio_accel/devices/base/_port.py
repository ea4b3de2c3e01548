"""The ways to learn that work on a stream is done: by a notification, or by a check at the expected time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter
from typing import Protocol

import attrs
import trio

from ...backends.base import AccelEvent, AccelStream
from ...backends.base.kit.fast_paths import current_fast_paths
from ._bridge import LoopNotifier
from ._waits import TaskNotifier

__all__ = ["CompletionPort", "CompletionStrategy"]

LONGEST_LOOK = 0.05
"""The maximum seconds of uninterrupted polling, because Trio delivers Ctrl-C only to a parked task."""


class CompletionPort(Protocol):
    """The completions of one engine; the base class of all ports.

    Attributes:
        polls: Whether the end of an operation may be polled for. If not, `poll` and `spin` are not called.
        is_quick: Whether the next operation, if it is the only one, is polled before it is watched.
        calls: The number of present and queued calls of threads for operations of this engine.
    """

    polls: bool = False
    is_quick: bool = False
    calls: int = 0

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """Make the engine check its events soon after this event is done."""

    def poll(self, event: AccelEvent) -> bool:
        """Poll now for the end of a very short operation; return whether it is done."""
        return event.is_done

    def may_spin(self, stream: AccelStream) -> bool:
        """Return whether the caller of a stream's next operation may `spin`, if that is the only one."""
        return False

    async def spin(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Spin-wait for an operation in its caller's task, while `goes_on` returns true and it pays.

        Returns:
            Whether the operation is done. If not, it must be watched.
        """
        await trio.lowlevel.checkpoint()
        return event.is_done

    async def run(self) -> None:
        """Run the strategy's task concurrently with the engine, until cancelled; may return at once."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Stop watching."""


class CompletionStrategy(Protocol):
    """A way to learn of completions, for `DeviceOptions`."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Args:
            reap: Checks the engine's events; call it on the Trio thread.
        """
        ...


@attrs.define(eq=False)
class HostCallbackPort(CompletionPort):
    """Lets the stream notify of each event."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # D9: after a device fault this may never be called, so the watchdog checks as well.
        stream.notify(event, self._notifier)

    def close(self) -> None:
        self._notifier.close()


class SyncPort(HostCallbackPort):
    """Waits for each event at once, and blocks the loop."""

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # Blocking the loop is intended: nothing else in the program disturbs the measurement.
        stream.synchronize()
        # The launch has not returned yet, so the reply follows when the loop continues.
        self._notifier.notify()


class WatchedPort(CompletionPort):
    """Checks events in a task of the port, in the order of each stream."""

    def __init__(self, reap: Callable[[], None]) -> None:
        self._reap = reap
        self._events: dict[AccelStream, list[AccelEvent]] = {}
        self._changed = TaskNotifier()

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """Check an event from now on."""
        events, changed = self._events, self._changed
        if stream in events:
            of_stream = events[stream]
            if of_stream[-1] is not event:
                of_stream.append(event)
        else:
            self._begin(stream)
            events[stream] = [event]
        # No call is needed while the port's task is awake, because it checks all events before it waits.
        if changed.task is not None:
            changed.notify()

    def close(self) -> None:
        """Stop checking."""
        # The engine has failed all operations by now, so these events end nothing.
        self._events.clear()

    async def wait(self) -> None:
        """Wait until there is an event to check."""
        while not self._events:
            await self._changed.wait()

    def poll_events(self) -> bool:
        """Let the engine reap if any event is done; return whether one is."""
        has_done = False
        # A copy, because streams without events are removed meanwhile.
        for stream, events in tuple(self._events.items()):
            # A stream runs in order: while its first event is not done, no later one is.
            if events[0].is_done:
                count = _count_done(events)
                del events[:count]
                if not events:
                    del self._events[stream]
                self._record_done(stream, count)
                has_done = True
        # One call serves all streams, because the engine checks each of them anyway.
        if has_done:
            self._reap()
        return has_done

    def _begin(self, stream: AccelStream) -> None:
        """Record that a stream without events gets its first event."""

    def _record_done(self, stream: AccelStream, count: int) -> None:
        """Record that `count` events of a stream are done."""


def _count_done(events: list[AccelEvent]) -> int:
    """Return how many of a stream's events are done. The first one is.

    A stream runs in order, so no event after an unfinished one is done. The engine checks each of them, and
    checking all of them here would take that time twice.
    """
    done, end = 1, len(events)
    while done < end:
        middle = (done + end) // 2
        if events[middle].is_done:
            done = middle + 1
        else:
            end = middle
    return done


class PolledPort(WatchedPort):
    """Checks at intervals of `interval` seconds, while there are events."""

    def __init__(self, reap: Callable[[], None], interval: float) -> None:
        super().__init__(reap)
        self._interval = interval

    async def run(self) -> None:
        while True:
            await self.wait()
            # Pause first, because a newly launched operation is not done yet.
            await trio.sleep(self._interval)
            self.poll_events()


_MOST_ESTIMATORS = 64
# A small matrix product takes half of this time, or nearly all of it on a machine in a slow phase.
_SHORT_WAIT_SECONDS = 40e-6
# Seconds that a few turns of an otherwise idle loop take.
_POLL = 25e-6
# A poll is extended for an event due this close to its end, because it would miss the next turn.
_MISS = 12e-6
# A polling task checks for cancellation once in this number of loop turns.
_TURNS = 8


class AdaptivePort(WatchedPort):
    """Polls for a short while, and when an operation is due. Otherwise the stream notifies.

    Args:
        reap: Checks the engine's events.
        poll_limit: The maximum seconds to poll before the stream is asked to notify.
        window: The maximum seconds to poll around the time when an operation is due.
    """

    polls = True
    # In less time than this, a second check is impossible.
    _MIN_SLEEP_SECONDS = 5e-6

    def __init__(self, reap: Callable[[], None], poll_limit: float, window: float) -> None:
        super().__init__(reap)
        self._poll_limit = poll_limit
        self._budget = poll_limit
        self._half = window / 2
        self._may_be_quick = current_fast_paths().spin_wait
        self._began = 0.0
        self._notifier = LoopNotifier(self._notified)
        # The event that each stream was last asked to notify of.
        self._armed: dict[AccelStream, AccelEvent] = {}
        self._estimators: dict[AccelStream, LatencyEstimator] = {}

    def _begin(self, stream: AccelStream) -> None:
        now = time.perf_counter()
        estimator = self._estimators.get(stream)
        if estimator is not None:
            estimator.begin(now)
            return
        # This forgets streams that no longer exist. Forgetting the other estimates does no harm.
        if len(self._estimators) >= _MOST_ESTIMATORS:
            self._estimators.clear()
        self._estimators[stream] = LatencyEstimator(now)

    def may_spin(self, stream: AccelStream) -> bool:
        estimator = self._estimators.get(stream)
        # A task does not spin if it would have to sleep first.
        return (
            estimator is not None
            and estimator.is_steady
            and estimator.seconds <= self._half
            and stream not in self._events
        )

    async def spin(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Poll as `run` does. The caller need not be woken then, which takes a turn of the loop."""
        estimator = self._estimators[stream]
        now = time.perf_counter()
        estimator.begin(now)
        end, deadline = now + LONGEST_LOOK, estimator.due + self._half
        for turn in itertools.count(1):
            # Shielded, because a cancelled caller has a grace that begins when it is parked (D72).
            await trio.lowlevel.cancel_shielded_checkpoint()
            now = time.perf_counter()
            if event.is_done or (
                estimator.is_near(now) and _poll((event,), _end_of_poll(now, estimator.due))
            ):
                estimator.end(time.perf_counter())
                return True
            # The check for cancellation costs half of a turn's calls.
            is_over = now >= deadline or now >= end or (turn % _TURNS == 0 and _is_cancelled())
            if is_over or not goes_on():
                estimator.is_steady = now < deadline
                return event.is_done
        raise AssertionError  # the count never ends

    def poll(self, event: AccelEvent) -> bool:
        """Check without a turn of the loop, which takes longer than the rest of a small operation."""
        end = time.perf_counter() + _SHORT_WAIT_SECONDS
        while not event.is_done:
            if time.perf_counter() > end:
                self.is_quick = False
                return False
        return True

    def close(self) -> None:
        super().close()
        self._notifier.close()
        self._armed.clear()
        self._estimators.clear()

    async def run(self) -> None:
        while True:
            await self.wait()
            if self.calls:
                # A thread runs Python, and polling would keep taking the interpreter's lock from it.
                if not self.poll_events():
                    self._arm()
                    await self._changed.wait()
                continue
            self._began = time.perf_counter()
            if await self._search(self._began + self._budget):
                self._budget = min(2 * self._budget, self._poll_limit)
                # Such an operation is as short as the operations that `poll` waits for.
                self.is_quick = self._may_be_quick and time.perf_counter() - self._began < _SHORT_WAIT_SECONDS
            elif self._events:
                self._budget = max(self._budget / 2, self._MIN_SLEEP_SECONDS)
                await self._expect()

    async def _search(self, end: float, estimator: LatencyEstimator | None = None) -> bool:
        """Check until `end`; return whether anything was done.

        Args:
            end: The time by `time.perf_counter`.
            estimator: Estimates when an operation is due.
        """
        while not self.poll_events():
            # The rest of the program runs between two checks.
            await trio.lowlevel.checkpoint()
            now = time.perf_counter()
            if now >= end or not self._events or self.calls:
                return self.poll_events()
            if estimator is not None and estimator.is_near(now):
                _poll([events[0] for events in self._events.values()], now + _POLL)
        return True  # noqa: ASYNC910  # the number of events that can end is finite

    async def _expect(self) -> None:
        """Wait for a notification; check earlier if an operation may be due before it."""
        now, half = time.perf_counter(), self._half
        estimators = [self._estimators[stream] for stream in self._events if stream in self._estimators]
        # An overdue event lacks an estimate.
        steady = [estimator for estimator in estimators if estimator.is_steady and estimator.due + half > now]
        if not steady or not half or self.calls:
            self._arm()
            await self._changed.wait()
            return
        first = min(steady, key=attrgetter("due"))
        seconds = first.due - half - now
        if seconds > 0:
            self._arm()
            with trio.move_on_after(seconds):
                await self._changed.wait()
                return
        # The end is due so soon that no notification is requested: the notifying thread would take the
        # interpreter's lock.
        if not await self._search(first.due + half, first):
            first.is_steady = False

    def _record_done(self, stream: AccelStream, count: int) -> None:
        estimator = self._estimators.get(stream)
        if estimator is not None:
            estimator.end(time.perf_counter(), count)

    def _arm(self) -> None:
        """Let each stream notify of its first event. The others are checked then."""
        for stream, events in self._events.items():
            if self._armed.get(stream) is not events[0]:
                self._armed[stream] = events[0]
                stream.notify(events[0], self._notifier)

    def _notified(self) -> None:
        self._armed = {
            stream: event
            for stream, event in self._armed.items()
            if self._events.get(stream, (None,))[0] is event
        }
        if self.poll_events() and time.perf_counter() - self._began <= self._poll_limit:
            # Polling would have seen it in time.
            self._budget = self._poll_limit
        self._changed.notify()


def _is_cancelled() -> bool:
    return trio.current_effective_deadline() == -inf


def _end_of_poll(now: float, due: float) -> float:
    """Return the end of a poll for an operation due at `due`."""
    end = now + _POLL
    return due + _MISS if abs(due - end) < _MISS else end


def _poll(events: Sequence[AccelEvent], end: float) -> bool:
    """Wait until `end` for any of these events, because a turn of the loop would take longer."""
    while time.perf_counter() < end:
        for event in events:
            if event.is_done:
                return True
    return False


# Two durations with at most this difference count as equal: a part of the time, plus the delay of a wake-up.
_SHARE = 0.1
_WAKE_UP_SECONDS = 5e-4
# Nearly all steady operations end this close to the estimate.
_STEADY_SHARE = 0.02
_STEADY_SECONDS = 1e-4
# A duration longer by this factor is not a sample, but a pause of the program.
_PAUSE = 2


class LatencyEstimator:
    """Estimates when the current operation will be done, from the durations of the previous ones.

    An estimate needs two similar durations in a row. A single much longer duration after that, such as a
    pause of the program, does not change the estimate. Times are of `time.perf_counter`.

    Args:
        now: The time when the first operation began.

    Attributes:
        seconds: The expected duration of the next operation.
        is_steady: Whether the estimate is reliable.
    """

    __slots__ = ("_began", "_is_regular", "is_steady", "seconds")

    def __init__(self, now: float) -> None:
        self._began = now
        self.seconds: float = inf
        self.is_steady: bool = False
        # Whether the last two durations were similar.
        self._is_regular = False

    @property
    def due(self) -> float:
        """The estimated time when the current operation will be done."""
        return self._began + self.seconds

    def is_near(self, now: float) -> bool:
        """Return whether the current operation is likely to end at about this time."""
        return self.is_steady and abs(now - self.due) <= max(_STEADY_SECONDS, _STEADY_SHARE * self.seconds)

    def begin(self, now: float) -> None:
        """Record that an operation begins, with no work before it."""
        self._began = now

    def end(self, now: float, count: int = 1) -> None:
        """Record that an operation is done, and the next begins. Durations of several at once are unknown."""
        seconds = now - self._began
        self._began = now
        is_alike = count == 1 and abs(seconds - self.seconds) <= _SHARE * seconds + _WAKE_UP_SECONDS
        if self._is_regular and not is_alike and count == 1 and seconds > _PAUSE * self.seconds:
            # One pause is ignored. If the next duration is not similar either, the estimate starts again.
            self._is_regular, self.is_steady = False, True
            return
        self._is_regular = self.is_steady = is_alike
        self.seconds = seconds
