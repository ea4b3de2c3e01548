"""How often a supervisor restarts its children, and how long each waits."""

from __future__ import annotations

import random
from collections import deque

import attrs

from ._options import Backoff, Intensity, Policy

__all__ = ["Restarts"]


@attrs.define(eq=False)
class _Series:
    """Where the back-off of one child has got to."""

    attempt: int = 0
    attempt_after_progress: int = 0
    quiet_since: float = float("-inf")


class Restarts:
    """The restarts that one supervisor has made, held against its intensity."""

    __slots__ = ("_counted", "_intensity", "_random", "_series")

    def __init__(self, intensity: Intensity, source: random.Random) -> None:
        self._intensity = intensity
        self._random = source
        # When, and whose.
        self._counted: deque[tuple[float, str]] = deque()
        self._series: dict[str, _Series] = {}

    def is_one_more_allowed(self, path: str, now: float, *, has_progressed: bool) -> bool:
        """Count a restart of a child; returns whether that is within the intensity."""
        intensity, counted = self._intensity, self._counted
        if has_progressed and not intensity.counts_progress:
            self._counted = deque(restart for restart in counted if restart[1] != path)
            return True
        counted.append((now, path))
        while counted[0][0] < now - intensity.within:
            counted.popleft()
        return len(counted) <= intensity.restarts

    def delay(self, path: str, policy: Policy, now: float, progressed_at: float | None) -> float:
        """Seconds that a child waits for its next incarnation.

        Args:
            path: Path of the child.
            policy: Its policy.
            now: When its incarnation ended.
            progressed_at: When that had made progress; None if it had not.
        """
        series = self._series.setdefault(path, _Series())
        gentle = policy.backoff_after_progress
        if gentle is None or progressed_at is None:
            return self._delay(series, policy.backoff, now)
        # Waiting and starting are no quiet period either: what counts is for how long it worked.
        if now - progressed_at > gentle.reset_after:
            series.attempt_after_progress = 0
        delay = gentle.delay(series.attempt_after_progress, self._random)
        series.attempt_after_progress += 1
        series.attempt = 0
        return delay

    def _delay(self, series: _Series, backoff: Backoff, now: float) -> float:
        if now - series.quiet_since > backoff.reset_after:
            series.attempt = 0
        delay = backoff.delay(series.attempt, self._random)
        # The waiting itself is no quiet period.
        series.quiet_since = now + delay
        series.attempt += 1
        return delay

    def forget(self, path: str) -> None:
        """A child has ended for good: one of the same name begins anew."""
        self._series.pop(path, None)
