"""Fourier transforms by pocketfft, in the precision of their input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import scipy.fft
from scipy.fft._backend import _ScipyBackend  # pyright: ignore[reportPrivateUsage]

from ...base import DType, LibraryError, NotSupportedError
from ...base.ops import FftNorm, FftSpec
from .._memory import CpuMemory, HostArray
from .._processor import usable_cores
from .._stream import Work
from ._checks import check_dtype

__all__ = ["KERNELS"]

_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}
_COMPLEX = {real: complex_ for complex_, real in _REAL.items()}

# Type of the result for each type of input.
_DTYPES = {"c2c": {dtype: dtype for dtype in _REAL}, "r2c": _COMPLEX, "c2r": _REAL}

_TRANSFORMS: dict[tuple[str, str], object] = {
    ("c2c", "forward"): scipy.fft.fft,
    ("c2c", "inverse"): scipy.fft.ifft,
    ("r2c", "forward"): scipy.fft.rfft,
    ("c2r", "inverse"): scipy.fft.irfft,
}

# SciPy's own implementation. `scipy.fft.fft` itself goes to whatever backend the program has set for
# all threads, which may well be this library; and `set_backend` in a thread crashes SciPy 1.14.
_scipy_transform = cast("Callable[..., HostArray]", _ScipyBackend.__ua_function__)


def fft(spec: FftSpec, memory: CpuMemory) -> Work:
    """Prepare a transform."""
    operation = f"{spec.direction} {spec.kind} transform"
    transform = _TRANSFORMS.get((spec.kind, spec.direction))
    if transform is None:
        raise NotSupportedError(
            f"the CPU backend has no {operation}; it has {', '.join(f'{d} {k}' for k, d in _TRANSFORMS)}",
            backend="cpu",
        )
    results = _DTYPES[spec.kind]
    check_dtype(operation, spec.source.dtype, results)
    check_dtype(f"{operation} of {spec.source.dtype} to", spec.out.dtype, (results[spec.source.dtype],))
    if spec.n < 1:
        raise LibraryError(f"n: a transform has at least one point, not {spec.n}", library="fft", code="size")
    source, out = memory.view(spec.source), memory.view(spec.out)
    return partial(_transform, transform, source, out, spec.n, spec.axis, spec.norm)


def _transform(
    transform: object, source: HostArray, out: HostArray, n: int, axis: int, norm: FftNorm
) -> None:
    if not out.size:
        return
    # A transform that is too small to be shared out runs in this thread: pocketfft decides.
    options = {"n": n, "axis": axis, "norm": norm, "workers": usable_cores()}
    np.copyto(out, _scipy_transform(transform, (source,), options))


KERNELS = {FftSpec: fft}
