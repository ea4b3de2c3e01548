"""The ways by which the engine learns that work on a stream is done: a notice, or a look when it is due."""

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
"""Seconds for which a task may poll in a row: Trio delivers Ctrl-C only to a parked task."""


class CompletionPort(Protocol):
    """The completions of one engine; a base of classes that are one.

    Attributes:
        polls: Whether the end of an operation may be polled for: else `poll` and `spin` are not called.
        is_quick: Whether the next operation, if it is alone, is to be polled before it is watched.
        calls: How many calls threads make now, or are to make, for operations of this engine.
    """

    polls: bool = False
    is_quick: bool = False
    calls: int = 0

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

    def poll(self, event: AccelEvent) -> bool:
        """Poll for the end of a very short operation, here and now; returns whether it is done."""
        return event.is_done

    def may_spin(self, stream: AccelStream) -> bool:
        """Tell whether the asker of the next operation of a stream, if it is alone, may `spin`."""
        return False

    async def spin(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Spin-wait for an operation in its asker's own task, while `goes_on` says so and it is worth it.

        Returns:
            Whether it is done; if not, it is to be watched.
        """
        await trio.lowlevel.checkpoint()
        return event.is_done

    async def run(self) -> None:
        """Run the strategy's task beside the engine, until it is cancelled; may return at once."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Watch nothing any more."""


class CompletionStrategy(Protocol):
    """A way to learn of completions, given to `DeviceOptions`."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Args:
            reap: Looks at the engine's events; to be called on the Trio thread.
        """
        ...


@attrs.define(eq=False)
class HostCallbackPort(CompletionPort):
    """Has the stream notify of each event."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # D9: after a fault of the device this may never be called: the watchdog looks, too.
        stream.notify(event, self._notifier)

    def close(self) -> None:
        self._notifier.close()


class SyncPort(HostCallbackPort):
    """Waits for each event at once, and the loop with it."""

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # The loop stands still on purpose: nothing else of the program disturbs what is measured.
        stream.synchronize()
        # The launch is not finished yet: the reply follows when the loop goes on.
        self._notifier.notify()


class WatchedPort(CompletionPort):
    """Events that a task of the port looks at, in the order of each stream."""

    def __init__(self, reap: Callable[[], None]) -> None:
        self._reap = reap
        self._events: dict[AccelStream, list[AccelEvent]] = {}
        self._changed = TaskNotifier()

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """Look at an event from now on."""
        events, changed = self._events, self._changed
        if stream in events:
            of_stream = events[stream]
            if of_stream[-1] is not event:
                of_stream.append(event)
        else:
            self._begin(stream)
            events[stream] = [event]
        # No call is made where the port's task is awake: it looks at all events before it waits again.
        if changed.task is not None:
            changed.notify()

    def close(self) -> None:
        """Look at nothing any more."""
        # The engine has failed all operations by now, so these events end nothing.
        self._events.clear()

    async def wait(self) -> None:
        """Wait until there is something to look at."""
        while not self._events:
            await self._changed.wait()

    def look(self) -> bool:
        """Let the engine reap if anything is done; returns whether it is."""
        found = False
        # A copy, as streams without events are taken out meanwhile.
        for stream, events in tuple(self._events.items()):
            # A stream runs in order: while its first event is not done, no other one is.
            if events[0].is_done:
                count = _count_done(events)
                del events[:count]
                if not events:
                    del self._events[stream]
                self._seen(stream, count)
                found = True
        # One call serves all streams: the engine looks at each of its own anyway.
        if found:
            self._reap()
        return found

    def _begin(self, stream: AccelStream) -> None:
        """Note that there is something to look at of a stream of which there was nothing."""

    def _seen(self, stream: AccelStream, count: int) -> None:
        """Note that so many of a stream are seen to be done."""


def _count_done(events: list[AccelEvent]) -> int:
    """Tell how many of a stream's events are done, of which the first is.

    A stream runs in order: what is behind one that is not done is not done either. The engine looks at each
    of them; to look at all of them here, too, would take as long again.
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
    """Looks in intervals, of so many seconds, while there is anything to look at."""

    def __init__(self, reap: Callable[[], None], interval: float) -> None:
        super().__init__(reap)
        self._interval = interval

    async def run(self) -> None:
        while True:
            await self.wait()
            # The pause comes first: what has just been launched is not done yet.
            await trio.sleep(self._interval)
            self.look()


_MOST_ESTIMATORS = 64
# A small product takes half of it, on a machine that is slow for a while nearly all.
_SHORT_WAIT_SECONDS = 40e-6
# Seconds of a few turns of a loop that has nothing else to do.
_POLL = 25e-6
# An event that is due so near to the end of a poll is waited for: it would fall into the turn behind it.
_MISS = 12e-6
# A task that polls looks once in so many turns of the loop whether it is cancelled.
_TURNS = 8


class AdaptivePort(WatchedPort):
    """Polls for a short while, and when something is due; otherwise the stream notifies.

    Args:
        reap: Looks at the engine's events.
        most: The most seconds to poll before the stream is asked to notify.
        window: The most seconds to poll around the time when an operation is due.
    """

    polls = True
    # Below this there is no time for a second look.
    _MIN_SLEEP_SECONDS = 5e-6

    def __init__(self, reap: Callable[[], None], most: float, window: float) -> None:
        super().__init__(reap)
        self._most = most
        self._budget = most
        self._half = window / 2
        self._may_be_quick = current_fast_paths().spin_wait
        self._began = 0.0
        self._notifier = LoopNotifier(self._notified)
        # The event that each stream was asked to notify of last.
        self._armed: dict[AccelStream, AccelEvent] = {}
        self._estimators: dict[AccelStream, LatencyEstimator] = {}

    def _begin(self, stream: AccelStream) -> None:
        now = time.perf_counter()
        estimator = self._estimators.get(stream)
        if estimator is not None:
            estimator.begin(now)
            return
        # Streams that have gone are forgotten, and nothing is lost with the others' times.
        if len(self._estimators) >= _MOST_ESTIMATORS:
            self._estimators.clear()
        self._estimators[stream] = LatencyEstimator(now)

    def may_spin(self, stream: AccelStream) -> bool:
        estimator = self._estimators.get(stream)
        # A task does not spin where it would have to sleep first.
        return (
            estimator is not None
            and estimator.is_steady
            and estimator.seconds <= self._half
            and stream not in self._events
        )

    async def spin(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Poll as `run` does; but then the asker need not be woken, which takes a turn of the loop."""
        estimator = self._estimators[stream]
        now = time.perf_counter()
        estimator.begin(now)
        end, late = now + LONGEST_LOOK, estimator.due + self._half
        for turn in itertools.count(1):
            # Shielded: a cancelled asker has a grace, which begins when it is parked (D72).
            await trio.lowlevel.cancel_shielded_checkpoint()
            now = time.perf_counter()
            if event.is_done or (
                estimator.is_near(now) and _poll((event,), _end_of_poll(now, estimator.due))
            ):
                estimator.end(time.perf_counter())
                return True
            # The look for a cancellation is half of a turn's calls.
            is_over = now >= late or now >= end or (turn % _TURNS == 0 and _is_cancelled())
            if is_over or not goes_on():
                estimator.is_steady = now < late
                return event.is_done
        raise AssertionError  # it counts without end

    def poll(self, event: AccelEvent) -> bool:
        """Look without a turn of the loop, which takes longer than a small operation has left."""
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
                # A thread runs Python: a loop that polls keeps taking the interpreter's lock from it.
                if not self.look():
                    self._arm()
                    await self._changed.wait()
                continue
            self._began = time.perf_counter()
            if await self._search(self._began + self._budget):
                self._budget = min(2 * self._budget, self._most)
                # Such an operation is as short as one that `poll` waits for.
                self.is_quick = self._may_be_quick and time.perf_counter() - self._began < _SHORT_WAIT_SECONDS
            elif self._events:
                self._budget = max(self._budget / 2, self._MIN_SLEEP_SECONDS)
                await self._expect()

    async def _search(self, end: float, estimator: LatencyEstimator | None = None) -> bool:
        """Look until then; returns whether anything was done.

        Args:
            end: The time by `time.perf_counter`.
            estimator: Tells when something is due.
        """
        while not self.look():
            # The rest of the program goes on between two looks.
            await trio.lowlevel.checkpoint()
            now = time.perf_counter()
            if now >= end or not self._events or self.calls:
                return self.look()
            if estimator is not None and estimator.is_near(now):
                _poll([events[0] for events in self._events.values()], now + _POLL)
        return True  # noqa: ASYNC910  # there are only so many events that it can see to be done

    async def _expect(self) -> None:
        """Wait for a notification; if something may be due before or soon, look then."""
        now, half = time.perf_counter(), self._half
        estimators = [self._estimators[stream] for stream in self._events if stream in self._estimators]
        # An overdue event has no estimate.
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
        # The end is waited for without a notification, as it is due so soon: the thread that notifies would
        # take the interpreter's lock.
        if not await self._search(first.due + half, first):
            first.is_steady = False

    def _seen(self, stream: AccelStream, count: int) -> None:
        estimator = self._estimators.get(stream)
        if estimator is not None:
            estimator.end(time.perf_counter(), count)

    def _arm(self) -> None:
        """Have each stream notify of what comes first; the others are looked at then."""
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
        if self.look() and time.perf_counter() - self._began <= self._most:
            # It would have been seen in time.
            self._budget = self._most
        self._changed.notify()


def _is_cancelled() -> bool:
    return trio.current_effective_deadline() == -inf


def _end_of_poll(now: float, due: float) -> float:
    """Tell until when to look for what is due then."""
    end = now + _POLL
    return due + _MISS if abs(due - end) < _MISS else end


def _poll(events: Sequence[AccelEvent], end: float) -> bool:
    """Wait until then for any of these to be done: a turn of the loop takes longer than to see it."""
    while time.perf_counter() < end:
        for event in events:
            if event.is_done:
                return True
    return False


# Two that differ by so little count as the same: a share of the time, and what a wake-up may be late by.
_SHARE = 0.1
_WAKE_UP_SECONDS = 5e-4
# Nearly all of what is steady ends so near to when it is due.
_STEADY_SHARE = 0.02
_STEADY_SECONDS = 1e-4
# A time that is so many times as long is no sample of the rule: a pause of the program.
_PAUSE = 2


class LatencyEstimator:
    """Estimates when the current one will be done, from how long those before it took.

    An estimate takes two in a row that took about as long. A single one that then takes much longer, such as
    a pause of the program, does not change the estimate. Times are of `time.perf_counter`.

    Args:
        now: When the first began.

    Attributes:
        seconds: How long the next will take, as far as is known.
        is_steady: Whether the estimate is reliable.
    """

    __slots__ = ("_began", "_is_regular", "is_steady", "seconds")

    def __init__(self, now: float) -> None:
        self._began = now
        self.seconds: float = inf
        self.is_steady: bool = False
        # Whether the last two were alike.
        self._is_regular = False

    @property
    def due(self) -> float:
        """The time when the current one will be done, by the estimate."""
        return self._began + self.seconds

    def is_near(self, now: float) -> bool:
        """Tell whether the current one is likely to be done in these moments."""
        return self.is_steady and abs(now - self.due) <= max(_STEADY_SECONDS, _STEADY_SHARE * self.seconds)

    def begin(self, now: float) -> None:
        """Note that an operation begins, with no work before it."""
        self._began = now

    def end(self, now: float, count: int = 1) -> None:
        """Note that one is done, and the next begins. The single times of several at once are unknown."""
        seconds = now - self._began
        self._began = now
        is_alike = count == 1 and abs(seconds - self.seconds) <= _SHARE * seconds + _WAKE_UP_SECONDS
        if self._is_regular and not is_alike and count == 1 and seconds > _PAUSE * self.seconds:
            # One pause is forgiven: if the next is not alike either, there is another rule, or none.
            self._is_regular, self.is_steady = False, True
            return
        self._is_regular = self.is_steady = is_alike
        self.seconds = seconds
