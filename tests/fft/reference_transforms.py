"""The transforms of NumPy and SciPy in double precision, and how near the device's must come to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.fft

Array = npt.NDArray[Any]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "complex128": 1e-12, "complex64": 1e-5}
COMPLEX = {
    "float32": "complex64",
    "float64": "complex128",
    "complex64": "complex64",
    "complex128": "complex128",
}
REAL = {"complex64": "float32", "complex128": "float64", "float32": "float32", "float64": "float64"}


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    if dtype.startswith("complex"):
        values = values + 1j * generator.normal(size=shape)
    return values.astype(dtype)


def dtypes(kind: str) -> list[str]:
    return ["float32", "float64"] if kind.startswith(("rfft", "ihfft")) else list(COMPLEX)


def result_dtype(kind: str, dtype: str) -> str:
    return REAL[dtype] if kind.startswith(("irfft", "hfft")) else COMPLEX[dtype]


def reference(kind: str, a: Array, **options: Any) -> Array:
    """NumPy if it has the transform, else SciPy: the Hermitian transforms of several axes."""
    wide = a.astype(complex if a.dtype.kind == "c" else float)
    if options.get("s") is not None and options.get("axes", ()) is None:
        options["axes"] = tuple(range(a.ndim - len(options["s"]), a.ndim))  # NumPy will require it
    function = getattr(np.fft, kind, None) or getattr(scipy.fft, kind)
    result: Array = function(wide, **options)
    return result


def check(result: Array, expected: Array, dtype: str) -> None:
    assert result.shape == expected.shape
    size = float(np.linalg.norm(expected))
    assert float(np.linalg.norm(result - expected)) <= TOLERANCE[dtype] * max(size, 1e-30) * 4
