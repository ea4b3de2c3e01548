"""Programs as users write them; workers import this module."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel.programs import Array


class Layer:
    """A dense layer: all its methods compute ``tanh(x @ weights + bias) * scale``."""

    def __init__(self, parameters: dict[str, Array], *, scale: float = 1.0) -> None:
        self.weights = parameters["weights"]
        self.bias = parameters["bias"]
        self.scale = scale
        self.calls = 0
        self.is_warm = False

    def warm_up(self) -> None:
        self.is_warm = True

    def forward(self, x: Array) -> Array:
        self.calls += 1
        return np.tanh(x @ self.weights + self.bias) * self.scale

    @ta.programs.method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def written(self, x: Array, *, out: Array = None) -> None:
        np.multiply(np.tanh(x @ self.weights + self.bias), self.scale, out=out)

    @ta.programs.method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def copied(self, x: Array) -> Array:
        return self.forward(x)

    @ta.programs.method(
        out=lambda x: {"sum": ((), "float64"), "both": [(x.shape, "float64"), ((x.size,), "float32")]}
    )
    def several(self, x: Array, *, out: Any = None) -> None:
        out["sum"][...] = x.sum()
        out["both"][0][...] = 2 * x
        out["both"][1][...] = x.ravel()

    def about(self) -> dict[str, Any]:
        return {"calls": self.calls, "is_warm": self.is_warm, "scale": self.scale, "pid": os.getpid()}

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return {"args": args, "kwargs": kwargs}

    def defaults(self, a: Any = 1, b: Any = 2, *, c: Any = 3) -> Any:
        return [a, b, c]

    def types(self, values: Any) -> Any:
        return repr(values)

    def size(self, values: Any) -> int:
        return len(values)

    def emptied(self, values: Any) -> int:
        count = len(values)
        values.clear()
        return count

    def fails(self, x: Array) -> Array:
        raise ZeroDivisionError(f"of {x.shape}")


class Counter:
    """Counts in an array, which survives it."""

    def __init__(self, counts: Array) -> None:
        self.counts = counts

    @ta.programs.method(updates=["self.counts"], out=lambda numbers: None)
    def add(self, numbers: Array) -> None:
        self.counts += numbers

    @ta.programs.method(updates=["target"])
    def add_to(self, target: Array, number: float) -> float:
        target += number
        return float(target.sum())

    def total(self) -> float:
        return float(self.counts.sum())

    def spoil(self) -> None:
        self.counts[0] = 7.0


def scaled(x: Array, factor: float = 2.0) -> Array:
    """A program without state."""
    return x * factor


@ta.programs.method(out=lambda x: ((x.size,), "float64"))
def flat(x: Array) -> Array:
    """The same, with a declared output."""
    return np.ravel(x).astype(np.float64)


class Noted:
    """Writes down the process of its construction, and its calls."""

    def __init__(self, path: str, state: Array) -> None:
        self.path = path
        self.state = state
        self.note("made")

    def note(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def called(self, x: Array) -> Array:
        self.note("called")
        return x + self.state

    @ta.programs.method(updates=["self.state"])
    def changes(self, x: Array) -> Array:
        self.note("changed")
        self.state += x
        return self.state
