"""Programs that some requests are bad for; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np

from trio_accel.programs import Array, method


class Picky:
    """Doubles numbers, and does not like those below zero."""

    def double(self, x: Array) -> Array:
        if (x < 0).any():
            raise ValueError("a number below zero")
        return x * 2

    @method(out=lambda x: (x.shape, x.dtype), refuses=(ValueError,))
    def refusing(self, x: Array) -> Any:
        return self.double(x)

    @method(out=lambda rows: ((len(rows),), "float64"), refuses=(ValueError,))
    def apart(self, rows: list[Array]) -> Any:
        """Sums of rows, of which 2 and 5 cannot be in one batch."""
        firsts = {float(row[0]) for row in rows}
        if {2.0, 5.0} <= firsts:
            raise ValueError("2 beside 5")
        return np.array([row.sum() for row in rows])
