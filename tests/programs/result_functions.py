"""Functions with undeclared results; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np

from trio_accel.programs import Array

KEPT = np.zeros(3)


def rows(x: Array, count: int = 2) -> Array:
    """As many rows as are asked for."""
    return x[:count] * 2


def several(x: Array, tag: float = 0.5) -> dict[str, Any]:
    return {"tag": tag, "both": [x.T, x[::2]], "none": None}


def same(x: Array) -> Array:
    """A view of the argument."""
    return x


def kept(x: Array) -> Array:
    """An array that the module uses again."""
    KEPT[...] = x
    return KEPT


def wordy(x: Array, count: int) -> tuple[str, Array]:
    """A long text, and an array."""
    return "w" * count, x + 1


def positive(x: Array) -> Array:
    """A shape that depends on the numbers."""
    return x[x > 0]


def stubborn(x: Array) -> Array:
    if x[0] < 0:
        raise ValueError("a negative number")
    return x + 1


def zeros(x: Array, nbytes: int) -> Array:
    return np.zeros(nbytes, np.uint8)


def later(x: Array, what: str) -> Any:
    """A function in place of a result: it is called when the work is done."""
    total = float(np.asarray(x).sum()) if isinstance(x, np.ndarray) else 0.0

    def read() -> Any:
        if what == "bad":
            raise LookupError("nothing to read")
        return {"total": total, "bytes": b"abc"} if what == "plain" else np.ones(2)

    return read
