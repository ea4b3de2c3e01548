"""What is asked for in the benchmarks of mixed shapes."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping

import numpy as np
import numpy.typing as npt

import trio_accel as ta

from .rivals import MIXED, REPEATED

__all__ = ["mixed_matrices", "mixed_works", "repeated_matrix"]

Host = npt.NDArray[np.float32]


def mixed_matrices() -> tuple[Host, ...]:
    """One matrix of each shape."""
    numbers = np.random.default_rng(len(MIXED))
    return tuple(numbers.standard_normal(shape, dtype=np.float32) for shape in MIXED)


def repeated_matrix() -> Host:
    """What is multiplied with itself again and again."""
    return np.random.default_rng(REPEATED).standard_normal((REPEATED, REPEATED), dtype=np.float32)


async def mixed_works(device: ta.Device) -> Mapping[str, Callable[[], Awaitable[ta.AccelRef]]]:
    """Put the matrices on a device.

    Returns:
        By the name of the work, what asks for it once: of the next matrix each time, with a fresh result.
    """
    arrays = [await device.put(matrix) for matrix in mixed_matrices()]
    repeated = await device.put(repeated_matrix())
    # Each has a turn of its own, so that a measurement is of all shapes alike.
    products, transforms = itertools.cycle(arrays), itertools.cycle(arrays)

    async def multiply() -> ta.AccelRef:
        array = next(products)
        return await ta.linalg.matmul(array, array.T)

    return {
        "matmul": multiply,
        "rfft": lambda: ta.fft.rfft(next(transforms)),
        "repeat": lambda: ta.linalg.matmul(repeated, repeated),
    }
