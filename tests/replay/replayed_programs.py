"""Programs with replayed journals; workers import this module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from trio_accel.programs import Array, method


def native(array: Any) -> Any:
    """Return an array that can be computed with: on a GPU a tensor of PyTorch over the same memory."""
    return array if isinstance(array, np.ndarray) else import_module("torch").from_dlpack(array)


class Scaler:
    """Scales what it is given by an array that it changes."""

    def __init__(self, factors: Array) -> None:
        self.factors = native(factors)

    @method(updates=["self.factors"])
    def grow(self, by: float) -> float:
        """Change the array; returns its sum."""
        self.factors += by
        return float(self.factors.sum())

    def scaled(self, x: Array) -> Array:
        """The product with the array."""
        return native(x) * self.factors  # type: ignore[no-any-return]

    def rows(self, x: Array) -> Iterator[Array]:
        """The rows of a product, one by one."""
        yield from native(x) @ self.factors


class Drawing:
    """Draws numbers of the operating system, which no journal has."""

    def noise(self, count: int) -> Array:
        """Some numbers."""
        return np.frombuffer(os.urandom(8 * count), np.uint64).astype(np.float64)
