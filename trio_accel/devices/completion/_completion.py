"""How the engine learns that work on a stream is done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter
from typing import Protocol

import attrs
import trio

from ...backends.base import AccelEvent, AccelStream, DeviceInfo
from ..base._bridge import LoopWaker
from ..base._nudge import Nudge
from ._latency import Forecast

__all__ = [
    "LONGEST_LOOK",
    "AdaptiveCompletion",
    "CompletionPort",
    "CompletionStrategy",
    "HostCallbackCompletion",
    "PolledCompletion",
    "SyncCompletion",
    "best_completion",
    "window_of",
]


class CompletionPort(Protocol):
    """The completions of one engine; a base of classes that are one.

    Attributes:
        is_quick: Whether the next operation, if it is alone, is to be stared at before it is watched.
        flushes: Whether it flushes the streams that it watches, in every turn of the loop.
    """

    is_quick: bool = False
    flushes: bool = False

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

    def herald(self, event: AccelEvent, tell: Callable[[], None]) -> None:
        """Call this as soon as an event is seen to be done that is watched alone, unless that has failed.

        Only one is told of, the one that was named last, and perhaps not even that.
        """
        return

    def stare(self, event: AccelEvent) -> bool:
        """Wait for the end of a very short operation, here and now; returns whether it is done."""
        return event.is_done

    def is_awaited(self, stream: AccelStream) -> bool:
        """Whether the next operation of a stream, if it is alone, is to be attended by its asker."""
        return False

    async def attend(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Wait for an operation in its asker's own task, while `goes_on` says so and it is worth it.

        Returns:
            Whether it is done; if not, it is to be watched.
        """
        await trio.lowlevel.checkpoint()
        return event.is_done

    async def run(self) -> None:
        """What the strategy does beside the engine, until it is cancelled; may return at once."""

    def close(self) -> None:
        """Watch nothing any more."""


def best_completion(info: DeviceInfo) -> CompletionStrategy:
    """The strategy that suits a device."""
    return AdaptiveCompletion() if info.completion == "adaptive" else HostCallbackCompletion()


def window_of(completion: CompletionStrategy | None, info: DeviceInfo) -> float:
    """How many seconds a program and its worker may stay awake for one operation that is due."""
    chosen = completion or best_completion(info)
    if not isinstance(chosen, AdaptiveCompletion):
        return 0.0
    # Both, and what they wait for, must have a processor to run on.
    return chosen.window if _processors() >= _ROOMY else 0.0


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class CompletionStrategy(Protocol):
    """A way to learn of completions, given to `DeviceOptions`."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Args:
            reap: Looks at the engine's events; to be called on the Trio thread.
        """
        ...


LONGEST_LOOK = 0.05
"""Seconds for which a task may look for what it waits for: Trio tells of Ctrl-C only where one is parked."""

_MOST_FORECASTS = 64
_ROOMY = 4
# A small product takes half of it, on a machine that is slow for a while nearly all.
_STARE = 40e-6
# As long as a few turns of a loop that has nothing else to do.
_GLANCE = 25e-6
# What is due so near to the end of a glance is waited for: it would fall into the turn behind it.
_MISS = 12e-6


def _positive(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(
            f"{type(instance).__name__}: {attribute.name} must be seconds above 0, got {value!r}"
        )


def _not_negative(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{type(instance).__name__}: {attribute.name} must be seconds from 0, got {value!r}")


@attrs.frozen(kw_only=True)
class HostCallbackCompletion:
    """The stream itself notifies, from its own thread or the driver's; Trio is woken by token.

    Nothing runs while an operation does. The default of the CPU backend. On CUDA the driver calls a C
    function that posts a semaphore, on a stream beside the work's own; no Python runs in its threads.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _HostCallbackPort(LoopWaker(reap))


@attrs.frozen(kw_only=True)
class PolledCompletion:
    """The events are looked at in intervals while anything is in flight.

    Attributes:
        interval: Seconds between two looks; Trio itself adds about a millisecond.
    """

    interval: float = attrs.field(default=0.001, validator=_positive)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _PolledPort(reap, self.interval)


@attrs.frozen(kw_only=True)
class AdaptiveCompletion:
    """Polls the events for a short while, then asks the stream to notify.

    Short operations are seen without the cost of a callback and a wake-up, at the price of up to
    `budget` of processor time each; where that keeps failing, less and less is spent. A processor that has
    slept takes long to wake, and has forgotten the code that is to run next. So where operations of a stream
    take about as long as those before, they are looked at again around the time when they are due: with what
    takes up to 25 ms, one after the other, that is all the time, as in the driver's own waiting by default;
    other tasks run in between. The default of the CUDA backend, where a look reads a word that the stream
    writes to the host's memory.

    Attributes:
        budget: The most seconds to poll before the stream is asked to notify.
        window: The most seconds to look around the time when an operation is due: half of them before.
            Less saves processor time; with 0 the stream notifies each time.
    """

    budget: float = attrs.field(default=50e-6, validator=_positive)
    window: float = attrs.field(default=50e-3, validator=_not_negative)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _AdaptivePort(reap, self.budget, self.window)


@attrs.frozen(kw_only=True)
class SyncCompletion:
    """The launch itself blocks until the operation is done, **and the whole Trio loop with it**.

    For measurements and for finding errors: one operation at a time, in order.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _SyncPort(LoopWaker(reap))


@attrs.frozen
class _HostCallbackPort(CompletionPort):
    _waker: LoopWaker

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.notify(event, self._waker)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._waker.close()


@attrs.frozen
class _SyncPort(CompletionPort):
    _waker: LoopWaker

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.synchronize()
        # The launch is not finished yet: the reply follows when the loop goes on.
        self._waker.ring()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._waker.close()


class _Watched(CompletionPort):
    """Events that a task of the port looks at, in the order of each stream."""

    def __init__(self, reap: Callable[[], None]) -> None:
        self._reap = reap
        self._events: dict[AccelStream, list[AccelEvent]] = {}
        self._changed = Nudge()
        self._heralded: tuple[AccelEvent, Callable[[], None]] | None = None

    def herald(self, event: AccelEvent, tell: Callable[[], None]) -> None:
        self._heralded = event, tell

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
        if changed.task is not None:
            changed.wake()

    def close(self) -> None:
        """Look at nothing any more."""
        self._events.clear()
        self._heralded = None

    async def wait_changed(self) -> None:
        """Wait until there is something new to look at."""
        await self._changed.wait()

    async def wait(self) -> None:
        """Wait until there is something to look at."""
        while not self._events:
            await self.wait_changed()

    def look(self) -> bool:
        """Let the engine reap if anything is done; returns whether it is."""
        found = False
        for stream, events in tuple(self._events.items()):
            stream.flush()
            first = events[0]
            if first.is_done:
                if self._heralded is not None:
                    (event, tell), self._heralded = self._heralded, None
                    if event is first and event.error is None:
                        tell()
                count = _count_done(events)
                del events[:count]
                if not events:
                    del self._events[stream]
                self._seen(stream, count)
                found = True
        if found:
            self._reap()
        return found

    def _begin(self, stream: AccelStream) -> None:
        """There is something to look at of a stream of which there was nothing."""

    def _seen(self, stream: AccelStream, count: int) -> None:
        """So many of a stream are seen to be done."""


def _count_done(events: list[AccelEvent]) -> int:
    """How many of a stream's events are done, of which the first is.

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


def _end_of_glance(now: float, due: float) -> float:
    """Until when to look for what is due then."""
    end = now + _GLANCE
    return due + _MISS if abs(due - end) < _MISS else end


def _glance(events: Sequence[AccelEvent], end: float) -> bool:
    """Wait until then for any of these to be done: a turn of the loop takes longer than to see it."""
    while time.perf_counter() < end:
        for event in events:
            if event.is_done:
                return True
    return False


class _PolledPort(_Watched):
    def __init__(self, reap: Callable[[], None], interval: float) -> None:
        super().__init__(reap)
        self._interval = interval

    async def run(self) -> None:
        while True:
            await self.wait()
            await trio.sleep(self._interval)
            self.look()


class _AdaptivePort(_Watched):
    flushes = True
    # Below this there is no time for a second look.
    _LEAST = 5e-6

    def __init__(self, reap: Callable[[], None], most: float, window: float) -> None:
        super().__init__(reap)
        self._most = most
        self._budget = most
        self._half = window / 2
        self._began = 0.0
        self._waker = LoopWaker(self._rung)
        # What each stream was asked to ring for last.
        self._armed: dict[AccelStream, AccelEvent] = {}
        self._forecasts: dict[AccelStream, Forecast] = {}

    def _begin(self, stream: AccelStream) -> None:
        now = time.perf_counter()
        forecast = self._forecasts.get(stream)
        if forecast is not None:
            forecast.begin(now)
            return
        # Streams that have gone are forgotten, and nothing is lost with the others' times.
        if len(self._forecasts) >= _MOST_FORECASTS:
            self._forecasts.clear()
        self._forecasts[stream] = Forecast(now)

    def is_awaited(self, stream: AccelStream) -> bool:
        forecast = self._forecasts.get(stream)
        # Not where one would have to sleep first.
        return (
            forecast is not None
            and forecast.is_steady
            and forecast.seconds <= self._half
            and stream not in self._events
        )

    async def attend(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """As `run` does it; but then the asker need not be woken, which takes a turn of the loop."""
        forecast = self._forecasts[stream]
        now = time.perf_counter()
        forecast.begin(now)
        end, late = now + LONGEST_LOOK, forecast.due + self._half
        while True:
            # One that is cancelled has a grace, which begins when it is parked.
            await trio.lowlevel.cancel_shielded_checkpoint()
            now = time.perf_counter()
            if event.is_done or (
                forecast.is_near(now) and _glance((event,), _end_of_glance(now, forecast.due))
            ):
                forecast.end(time.perf_counter())
                return True
            if now >= late or now >= end or trio.current_effective_deadline() == -inf or not goes_on():
                forecast.is_steady = now < late
                return event.is_done

    def stare(self, event: AccelEvent) -> bool:
        """Look without a turn of the loop, which takes longer than a small operation has left."""
        end = time.perf_counter() + _STARE
        while not event.is_done:
            if time.perf_counter() > end:
                self.is_quick = False
                return False
        return True

    def close(self) -> None:
        super().close()
        self._waker.close()
        self._armed.clear()
        self._forecasts.clear()

    async def run(self) -> None:
        while True:
            await self.wait()
            self._began = time.perf_counter()
            if await self._search(self._began + self._budget):
                self._budget = min(2 * self._budget, self._most)
                # As short as one that is stared at.
                self.is_quick = time.perf_counter() - self._began < _STARE
            elif self._events:
                self._budget = max(self._budget / 2, self._LEAST)
                await self._expect()

    async def _search(self, end: float, forecast: Forecast | None = None) -> bool:
        """Look until then; returns whether anything was done.

        Args:
            end: By `time.perf_counter`.
            forecast: When something is due.
        """
        while not self.look():
            # The rest of the program goes on between two looks.
            await trio.lowlevel.checkpoint()
            now = time.perf_counter()
            if now >= end or not self._events:
                return self.look()
            if forecast is not None and forecast.is_near(now):
                _glance([events[0] for events in self._events.values()], now + _GLANCE)
        return True  # noqa: ASYNC910  # there are only so many events that it can see to be done

    async def _expect(self) -> None:
        """Wait for a ring; if something may be due before or soon, look then."""
        now, half = time.perf_counter(), self._half
        forecasts = [self._forecasts[stream] for stream in self._events if stream in self._forecasts]
        # Nobody can tell about what is overdue.
        steady = [forecast for forecast in forecasts if forecast.is_steady and forecast.due + half > now]
        if not steady or not half:
            self._arm()
            await self.wait_changed()
            return
        first = min(steady, key=attrgetter("due"))
        seconds = first.due - half - now
        if seconds > 0:
            self._arm()
            with trio.move_on_after(seconds):
                await self.wait_changed()
                return
        # No ring for what is so soon: who rings takes the interpreter's lock from whoever has seen it.
        if not await self._search(first.due + half, first):
            first.is_steady = False

    def _seen(self, stream: AccelStream, count: int) -> None:
        forecast = self._forecasts.get(stream)
        if forecast is not None:
            forecast.end(time.perf_counter(), count)

    def _arm(self) -> None:
        """Have each stream ring for what comes first; the others are looked at then."""
        for stream, events in self._events.items():
            if self._armed.get(stream) is not events[0]:
                self._armed[stream] = events[0]
                stream.notify(events[0], self._waker)

    def _rung(self) -> None:
        self._armed = {
            stream: event
            for stream, event in self._armed.items()
            if self._events.get(stream, (None,))[0] is event
        }
        if self.look() and time.perf_counter() - self._began <= self._most:
            # It would have been seen in time.
            self._budget = self._most
        self._changed.wake()
