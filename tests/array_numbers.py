"""Arrays of every dtype, for tests of array functions."""

from __future__ import annotations

from typing import Any

import numpy as np

import trio_accel as ta

__all__ = ["DTYPES", "INEXACT", "REALS", "numbers", "wide"]

REALS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
DTYPES = (*REALS, "complex64", "complex128")
# By the dtype of an array, the dtype of a result with fractions.
INEXACT = {name: name if "float" in name or "complex" in name else "float64" for name in DTYPES}


def numbers(shape: tuple[int, ...], name: str, seed: int = 3) -> Any:
    rng, dtype = np.random.default_rng(seed), ta.DType(name)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if not dtype.is_inexact:
        return rng.integers(0, 9, shape).astype(dtype.dtype)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if dtype.kind == "complex" else x).astype(dtype.dtype)


def wide(x: Any) -> Any:
    return x.astype(complex if ta.DType.of(x.dtype).kind == "complex" else float)
