"""Arrays that the tests of graphs work on."""

from __future__ import annotations

from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel import linalg

__all__ = ["N", "affine", "close", "matrix", "put"]

N = 6


def matrix(seed: int, *shape: int) -> Any:
    """Random numbers, by default a matrix of N × N, in float64."""
    return np.random.default_rng(seed).standard_normal(shape or (N, N))


async def put(device: ta.Device, *seeds: int, n: int = N) -> list[ta.AccelRef]:
    """A matrix on the device for each seed."""
    return [await device.put(matrix(seed, n, n)) for seed in seeds]


async def close(ref: ta.AccelRef, expected: Any) -> None:
    """Fail unless an array equals the expected one."""
    np.testing.assert_allclose(await ref.to_host(), expected, rtol=1e-12, atol=1e-12)


async def affine(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    """``(x @ y) @ y + 2 x``; y is scaled by a half afterwards."""
    product = await linalg.matmul(await linalg.matmul(x, y), y)
    await linalg.axpy(2.0, x, product)
    await linalg.scal(0.5, y)
    return product
