"""When the next of several things that come one after the other is due."""

from __future__ import annotations

from math import inf

__all__ = ["Forecast"]

# Two that differ by so little count as the same: a share of the time, and what a wake-up may be late by.
_SHARE = 0.1
_LATE = 5e-4


class Forecast:
    """Tells when what is at work now will be done, going by how long the two before it took.

    Times are of `time.perf_counter`.

    Args:
        now: When the first began.

    Attributes:
        seconds: How long the last one took.
        is_steady: Whether the last two took about as long.
    """

    __slots__ = ("_began", "is_steady", "seconds")

    def __init__(self, now: float) -> None:
        self._began = now
        self.seconds: float = inf
        self.is_steady: bool = False

    @property
    def due(self) -> float:
        """When it will be done, if it takes as long as the last one."""
        return self._began + self.seconds

    def begin(self, now: float) -> None:
        """One begins, with nothing before it that is still at work."""
        self._began = now

    def end(self, now: float, count: int = 1) -> None:
        """One is done, and the next begins. Of several seen at once nobody knows how long each took."""
        seconds, before = now - self._began, self.seconds
        self.is_steady = count == 1 and abs(seconds - before) <= _SHARE * seconds + _LATE
        self.seconds = seconds
        self._began = now
