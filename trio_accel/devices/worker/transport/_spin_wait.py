"""When to stay awake for a message that is due."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

from ...completion._adaptive import LatencyEstimator

__all__ = ["SpinWait"]


class SpinWait:
    """Tells when a message is due, so that the task that waits for it does not sleep then.

    A processor that has slept takes long to wake. So where the peer has taken about as long for its last
    two answers, its messages are looked for from a while before the next is due until a while after.

    Args:
        window: The most seconds to stay awake for one message: half of them before it is due.
        asks: First items of the messages that something answers, or follows.
        answers: Of those that do. Others may come and go in between, and mean nothing.
    """

    def __init__(self, window: float, asks: frozenset[object], answers: frozenset[object]) -> None:
        self.asks: frozenset[object] = asks
        self.answers: frozenset[object] = answers
        self._half = window / 2
        self._forecast = LatencyEstimator(time.perf_counter())
        self._is_expected = False

    @property
    def is_steady(self) -> bool:
        """Whether the next answer can be told."""
        return self._forecast.is_steady

    @property
    def is_near(self) -> bool:
        """Whether the answer is likely to come in these moments."""
        return self._is_expected and self._forecast.is_near(time.perf_counter())

    def sent(self) -> bool:
        """Something was sent that is answered; returns whether `pause` has changed."""
        if self._is_expected:
            return False
        self._is_expected = True
        self._forecast.begin(time.perf_counter())
        return self._forecast.is_steady

    def received(self, messages: Sequence[tuple[tuple[object, ...], object]]) -> None:
        """Messages have come, and among them perhaps an answer."""
        if self._is_expected:
            answers = self.answers
            for message, _ in messages:
                if message[0] in answers:
                    self._end()
                    break

    def _end(self) -> None:
        self._is_expected = False
        self._forecast.end(time.perf_counter())

    def pause(self) -> float:
        """Seconds for which one may sleep; 0 while an answer is due, infinity if none is."""
        forecast = self._forecast
        if not self._is_expected or not forecast.is_steady:
            return inf
        left = forecast.due - time.perf_counter()
        if left > self._half:
            return left - self._half
        if left > -self._half:
            return 0.0
        # It was in vain.
        forecast.is_steady = False
        return inf
