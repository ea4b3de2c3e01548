"""When the next of several things that come one after the other is due."""

from __future__ import annotations

from math import inf

__all__ = ["Forecast"]

# Two that differ by so little count as the same: a share of the time, and what a wake-up may be late by.
_SHARE = 0.1
_LATE = 5e-4


class Forecast:
    """Tells when what is at work now will be done, going by how long those before it took.

    It takes two that took as long as one another; after these, one that did not, such as a pause of the
    program, makes only the next one uncertain. Times are of `time.perf_counter`.

    Args:
        now: When the first began.

    Attributes:
        seconds: How long the last one took.
        is_steady: Whether the next is taken to be as long.
    """

    __slots__ = ("_began", "_is_regular", "_usual", "is_steady", "seconds")

    def __init__(self, now: float) -> None:
        self._began = now
        self.seconds: float = inf
        self.is_steady: bool = False
        # Whether the last two were alike, and how long such took before one that was not.
        self._is_regular = False
        self._usual = inf

    @property
    def due(self) -> float:
        """When it will be done, if it takes as long as the last one."""
        return self._began + self.seconds

    def begin(self, now: float) -> None:
        """One begins, with nothing before it that is still at work."""
        self._began = now

    def end(self, now: float, count: int = 1) -> None:
        """One is done, and the next begins. Of several seen at once nobody knows how long each took."""
        seconds, usual = now - self._began, self._usual
        self._began = now
        is_like_last = count == 1 and _is_near(seconds, self.seconds)
        self._usual = self.seconds if self._is_regular and not is_like_last else inf
        self.is_steady = is_like_last or (count == 1 and _is_near(seconds, usual))
        self._is_regular, self.seconds = is_like_last, seconds


def _is_near(seconds: float, other: float) -> bool:
    return abs(seconds - other) <= _SHARE * seconds + _LATE
