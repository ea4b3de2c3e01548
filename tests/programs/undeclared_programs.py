"""Programs that write to arrays, declared or not; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np

from trio_accel.programs import Array, method


class Counters:
    """Counts in several ways in one array of two rows, and in another one."""

    def __init__(self, state: Array, other: Array, limits: Array) -> None:
        self.state, self.other, self.limits = state, other, limits
        self.row = state[0]
        self.nested: dict[str, Any] = {"rows": [state[0], (state[1],)]}
        self.lazy: Any = None

    def warm_up(self) -> None:
        self.other += 0.0  # not changed, but written

    @method(updates=["self.state"], out=lambda where: None)
    def add(self, where: str) -> None:
        self._add(where)

    def add_undeclared(self, where: str) -> None:
        self._add(where)

    @method(updates=["self.other"], out=lambda where: None)
    def add_while_another_is_declared(self, where: str) -> None:
        self._add(where)

    def looks(self) -> list[float]:
        self.lazy = self.state[0]
        return [float(self.row[0]), float(self.state.sum())]

    @method(updates=["self.state"], out=lambda: None)
    def keeps(self) -> None:
        self.lazy = self.state[0]

    @method(updates=["self.other"], out=lambda: None)
    def other_one(self) -> None:
        self.other += 1

    def takes(self, x: Array) -> None:
        x += 1

    def to_frozen(self) -> None:
        self.limits += 1

    def _add(self, where: str) -> None:
        places = {
            "itself": self.state,
            "view": self.row,
            "in a list": self.nested["rows"][0],
            "in a tuple": self.nested["rows"][1][0],
            "kept": self.lazy,
        }
        np.add(places[where], 1, out=places[where])


class Aliases:
    """Two arguments are parts of one array."""

    def __init__(self, first: Array, second: Array) -> None:
        self.first, self.second = first, second

    @method(updates=["self.first", "self.second"], out=lambda: None)
    def both(self) -> None:
        self.first += 1
        self.second += 2

    @method(updates=["self.first"], out=lambda: None)
    def only_first_declared(self) -> None:
        self.first += 1
        self.second += 2


def adds(x: Array) -> None:
    x += 1


class Cache:
    """Rows that each call writes again, and a sum that it does not."""

    def __init__(self, rows: Array, other: Array) -> None:
        self.rows, self.other = rows, other

    @method(updates=["self.rows"], out=lambda row, value: None, idempotent=True)
    def put(self, row: int, value: float) -> None:
        self.rows[row] = value

    @method(updates=["self.rows"], idempotent=True)
    def put_and_tell(self, row: int, value: float) -> float:
        self.rows[row] = value
        return value

    @method(updates=["row"], out=lambda row: None)
    def put_in(self, row: Array) -> None:
        row += 1
