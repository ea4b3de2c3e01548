"""Programs that refuse requests; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel.programs import Array, Refused, method


class BadRowError(Exception):
    """An error of the program's own."""


class TwoTextsError(Exception):
    """No error of one text: it cannot be made again from that."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


class Careful:
    """Refuses rows with infinite or NaN elements."""

    def __init__(self, counts: Array) -> None:
        self.counts = counts
        self.calls = 0

    @method(out=lambda x: ((x.shape[0],), "float64"), refuses=(ValueError, BadRowError, TwoTextsError))
    def rows(self, x: Array) -> Array:
        self.calls += 1
        if not np.isfinite(x).all():
            raise ValueError("a row is not finite")
        return np.asarray(x).sum(axis=1)

    @method(refuses=(ValueError, BadRowError, TwoTextsError))
    def fails_with(self, kind: str) -> Any:
        self.calls += 1
        errors: dict[str, Exception] = {
            "BadRowError": BadRowError("row 3"),
            "UnicodeError": UnicodeError("a subclass"),
            "TwoTextsError": TwoTextsError("one", "two"),
            "Refused": Refused("not today"),
            "KeyError": KeyError("undeclared"),
        }
        raise errors[kind]

    @method(updates=["self.counts"], out=lambda numbers: None)
    def add(self, numbers: Array) -> None:
        if (numbers < 0).any():
            raise Refused("a negative number", unchanged=True)
        self.counts += numbers
        if (numbers > 100).any():
            raise Refused("too large, and added already")

    @method(out=lambda x: (x.shape, "float64"))
    def half(self, x: Array, *, out: Array = None) -> None:
        out[0] = x[0]
        raise Refused("half of it", unchanged=bool(x[1] > 0))

    def served(self) -> int:
        return self.calls


class RefusesConstruction:
    def __init__(self) -> None:
        raise Refused("never")


@ta.programs.method(refuses=(ZeroDivisionError,))
def invert(x: float) -> float:
    """A function may also refuse."""
    return 1 / x
