"""Memory of arrays that code outside of the package has, and for how long."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Hold", "held", "nothing"]


def nothing() -> None:
    """Tell that nothing holds a block."""


class Hold:
    """Keeps memory that code outside of the package has, as the memory of one of its own arrays.

    Its finaliser runs where the last reference goes, on any thread. What releases the block has a reference
    while it sets the flag, so the memory is given back exactly once.

    Args:
        give_back: Gives the memory back; it keeps the block alive, too.

    Attributes:
        is_last: Whether the block was released, so that its memory goes with this.
    """

    __slots__ = ("__weakref__", "_give_back", "is_last")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self.is_last: bool = False

    def __del__(self) -> None:
        if self.is_last:
            self._give_back()


def held(given: npt.NDArray[Any], hold: Hold) -> npt.NDArray[Any]:
    """Return an array that has a hold, as what is made of it has: views, buffers, arrays by DLPack."""
    if not given.size:
        return given
    steps = [(extent - 1) * stride for extent, stride in zip(given.shape, given.strides, strict=True)]
    start = -sum(step for step in steps if step < 0)
    end = start + sum(step for step in steps if step > 0) + given.itemsize
    memory: Any = (ctypes.c_char * end).from_address(given.__array_interface__["data"][0] - start)
    # NumPy looks for the base of a view through arrays, but not through this.
    memory.held = given, hold
    data = memory if given.flags.writeable else np.frombuffer(memoryview(memory).toreadonly(), np.uint8)
    return np.ndarray(given.shape, given.dtype, data, start, given.strides)
