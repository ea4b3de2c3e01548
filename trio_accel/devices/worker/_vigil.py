"""Staying awake while a message is due."""

from __future__ import annotations

import time

import trio

from .._forecast import Forecast
from .._nudge import Nudge

__all__ = ["Vigil"]


class Vigil:
    """Lets the loop go round around the time when the peer's next message is due.

    A processor that has slept takes long to wake. So where the peer has taken about as long for its last
    two answers, the loop does not sleep from a while before the next is due until a while after: what comes
    then is read at once.

    Args:
        window: The most seconds to stay awake for one message: half of them before it is due.
        asks: First items of the messages that something answers, or follows.
        answers: Of those that do. Others may come and go in between, and mean nothing.
    """

    def __init__(self, window: float, asks: frozenset[object], answers: frozenset[object]) -> None:
        self.asks: frozenset[object] = asks
        self.answers: frozenset[object] = answers
        self._half = window / 2
        self._forecast = Forecast(time.perf_counter())
        self._is_expected = False
        self._nudge = Nudge()

    def sent(self) -> None:
        """Something was sent that is answered."""
        if not self._is_expected:
            self._is_expected = True
            self._forecast.begin(time.perf_counter())
            if self._forecast.is_steady:
                self._nudge.wake()

    def received(self) -> None:
        """An answer has come."""
        if self._is_expected:
            self._is_expected = False
            self._forecast.end(time.perf_counter())
            # It may sleep until later.
            self._nudge.wake()

    async def run(self) -> None:
        """Stay awake when it is time to, until it is cancelled."""
        forecast = self._forecast
        while True:
            left = forecast.due - time.perf_counter() if self._is_expected and forecast.is_steady else None
            if left is None:
                await self._nudge.wait()
            elif left > self._half:
                with trio.move_on_after(left - self._half):
                    await self._nudge.wait()
            elif left > -self._half:
                await trio.lowlevel.checkpoint()
            else:
                # It was in vain.
                forecast.is_steady = False
