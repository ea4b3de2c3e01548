"""The latency of the next of several things that come one after the other."""

from __future__ import annotations

from math import inf

__all__ = ["LatencyEstimator"]

# Two that differ by so little count as the same: a share of the time, and what a wake-up may be late by.
_SHARE = 0.1
_LATE = 5e-4
# Nearly all of what is steady ends so near to when it is due.
_NEAR_SHARE = 0.02
_NEAR = 1e-4
# What takes so many times as long is another matter.
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
        """When the current one will be done, by the estimate."""
        return self._began + self.seconds

    def is_near(self, now: float) -> bool:
        """Whether the current one is likely to be done in these moments."""
        return self.is_steady and abs(now - self.due) <= max(_NEAR, _NEAR_SHARE * self.seconds)

    def begin(self, now: float) -> None:
        """One begins, with nothing before it that is still at work."""
        self._began = now

    def end(self, now: float, count: int = 1) -> None:
        """One is done, and the next begins. Of several seen at once nobody knows how long each took."""
        seconds = now - self._began
        self._began = now
        is_alike = count == 1 and abs(seconds - self.seconds) <= _SHARE * seconds + _LATE
        if self._is_regular and not is_alike and count == 1 and seconds > _PAUSE * self.seconds:
            # Once: if the next is not alike either, there is another rule, or none.
            self._is_regular, self.is_steady = False, True
            return
        self._is_regular = self.is_steady = is_alike
        self.seconds = seconds
