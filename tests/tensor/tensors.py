"""Tensors of tests, and comparisons of results with NumPy's in wider types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

import trio_accel as ta

Array = npt.NDArray[Any]

TOLERANCES = {
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float32": 1e-5,
    "float64": 1e-12,
    "complex64": 1e-5,
    "complex128": 1e-12,
}


def values(shape: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> Array:
    """Numbers of a normal distribution, rounded to a dtype."""
    generator = np.random.default_rng(seed)
    drawn: Array = generator.normal(size=shape)
    if dtype.startswith("complex"):
        drawn = drawn + 1j * generator.normal(size=shape)
    return np.asarray(drawn).astype(ta.DType(dtype).dtype)


def wide(array: Array) -> Array:
    """The same numbers in float64 or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def extents_of(subscripts: str, *arrays: Array) -> dict[str, int]:
    """Elements along each letter."""
    terms = subscripts.partition("->")[0].split(",")
    return {
        letter: size
        for term, array in zip(terms, arrays, strict=True)
        for letter, size in zip(term, array.shape, strict=True)
    }


async def check(result: ta.AccelRef, expected: Array, terms: int = 1) -> None:
    """Compare a result with one in wider types; each of its numbers is a sum of this many."""
    host = await result.to_host()
    assert host.shape == expected.shape
    tolerance = TOLERANCES[host.dtype.name] * math.sqrt(max(terms, 1))
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(wide(host), expected, rtol=tolerance, atol=tolerance * scale)
