"""Back-offs that are the same in every run."""

from __future__ import annotations

import random

__all__ = ["FixedRandom"]


class FixedRandom(random.Random):
    """A source of jitter that always draws the same: for ``SystemOptions(random=FixedRandom())``.

    Args:
        fraction: What `random` returns, from 0 to 1; 0.5 draws the middle of every range, so that
            delays have no jitter.
    """

    def __init__(self, fraction: float = 0.5) -> None:
        super().__init__(0)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"FixedRandom: fraction must be from 0 to 1, got {fraction!r}")
        self._fraction = fraction

    def random(self) -> float:
        """The fixed fraction."""
        return self._fraction
