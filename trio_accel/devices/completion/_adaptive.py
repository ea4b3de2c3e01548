"""Completions that are looked for when they are due, and told of by the stream otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter

import trio

from ...backends.base import AccelEvent, AccelStream
from ..base._bridge import LoopWaker
from ._latency import Forecast
from ._port import LONGEST_LOOK
from ._watched import WatchedPort

__all__ = ["AdaptivePort"]

_MOST_FORECASTS = 64
# A small product takes half of it, on a machine that is slow for a while nearly all.
_STARE = 40e-6
# As long as a few turns of a loop that has nothing else to do.
_GLANCE = 25e-6
# What is due so near to the end of a glance is waited for: it would fall into the turn behind it.
_MISS = 12e-6


class AdaptivePort(WatchedPort):
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
