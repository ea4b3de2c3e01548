"""The shapes of the mixed operations: no two of them alike, and the same for all that compute with them."""

from __future__ import annotations

import random

__all__ = ["MIXED", "REPEATED"]

_SEED = 26
_COUNT = 40
_LEAST, _MOST = 100, 600

REPEATED = 512
"""Rows and columns of the product that is repeated beside them."""


def _shapes() -> tuple[tuple[int, int], ...]:
    numbers = random.Random(_SEED)  # noqa: S311  # no secret
    return tuple((numbers.randint(_LEAST, _MOST), numbers.randint(_LEAST, _MOST)) for _ in range(_COUNT))


MIXED = _shapes()
"""Rows and columns of each."""
