"""The same program for each library; PyTorch, CuPy, Triton and JAX have modules of their own.

Workers import these modules.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel.programs import Array


class ReadingProgram:
    """A dense layer, in a library with immutable arrays.

    Attributes:
        xp: The library.
    """

    xp: Any

    def __init__(self, parameters: dict[str, Array], total: Array) -> None:
        self.weights = self.taken(parameters["weights"])
        self.bias = self.taken(parameters["bias"])
        self.total = self.taken(total)
        self.calls = 0

    def taken(self, array: Array) -> Any:
        """An array of the device as one of the library, over the same memory where it can."""
        raise NotImplementedError

    def dense(self, x: Any) -> Any:
        """A layer of the library's arrays."""
        return self.xp.tanh(x @ self.weights + self.bias)

    def forward(self, x: Array) -> Array:
        self.calls += 1
        return self.dense(self.taken(x))

    @ta.programs.method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def declared(self, x: Array) -> Array:
        return self.dense(self.taken(x))

    def positive(self, x: Array) -> Array:
        """A result with a shape that depends on the numbers."""
        taken = self.taken(x)
        return taken[taken > 0]

    def several(self, x: Array) -> Any:
        taken = self.taken(x)
        return {"sums": taken.sum(0), "both": [taken.T, taken[::2]], "rows": len(taken)}

    def twice(self, x: Array) -> Array:
        taken = self.taken(x)
        return taken + taken

    def about(self) -> dict[str, int]:
        return {"calls": self.calls, "pid": os.getpid()}


class LibraryProgram(ReadingProgram):
    """The same with a running sum, in a library that writes to arrays."""

    @ta.programs.method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def written(self, x: Array, *, out: Array = None) -> None:
        self.taken(out)[...] = self.dense(self.taken(x))

    @ta.programs.method(updates=["self.total"])
    def add(self, x: Array) -> None:
        self.total += self.taken(x).sum(0)

    @ta.programs.method(updates=["x"])
    def double(self, x: Array) -> None:
        taken = self.taken(x)
        taken *= 2

    def total_now(self) -> Array:
        return self.total


class NumpyProgram(LibraryProgram):
    """In NumPy, because the CPU backend has its arrays."""

    xp = np

    def taken(self, array: Array) -> Any:
        return array
