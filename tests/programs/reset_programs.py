"""Programs made again with other arrays; workers import this module."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from trio_accel.programs import Array, method

# The state found by a constructor, and its action then.
FAILS, DIES = -1.0, -2.0


class Tally:
    """Counts in an array; its constructor looks at that."""

    def __init__(self, counts: Array, *, factors: dict[str, Array], step: float = 1.0, **more: Any) -> None:
        if counts[0] == FAILS:
            raise LookupError("it does not count from there")
        if counts[0] == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        self.counts, self.factors, self.step, self.more = counts, factors, step, more
        self.calls = 0

    @method(updates=["self.counts"], out=lambda: ((), "float64"))
    def add(self) -> Array:
        """One step; returns the count before it."""
        before = np.array(self.counts[0])
        self.counts += self.step
        return before

    @method(updates=["self.counts"], out=lambda: None)
    def half(self) -> None:
        self.counts[0] += 1000
        raise ZeroDivisionError("in the middle")

    @method(updates=["self.counts"], out=lambda path: None)
    def wait(self, path: str) -> None:
        """Wait until somebody writes to a pipe, then count."""
        with open(path) as file:
            file.read()
        self.counts += self.step

    @method(refuses=(ValueError,))
    def about(self) -> dict[str, Any]:
        self.calls += 1
        return {
            "counts": float(self.counts[0]),
            "factor": float(self.factors["a"][0]),
            "step": self.step,
            "more": sorted(self.more),
            "calls": self.calls,
        }

    def breaks(self) -> None:
        raise KeyError("broken")
