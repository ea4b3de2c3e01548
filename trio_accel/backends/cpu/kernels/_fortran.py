"""BLAS routines by their addresses.

`scipy.linalg.blas` holds the interpreter's lock while it computes. The same routines called by
`ctypes`, at the addresses that SciPy exports for Cython, do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias, cast

import scipy.linalg.cython_blas

from ...base import DType
from .._memory import HostArray

__all__ = ["AXPY", "Axpy"]

Axpy: TypeAlias = Callable[[HostArray, HostArray, HostArray], None]
"""``y = alpha * x + y`` for vectors with positive strides and an alpha without axes."""

_LETTERS = {DType.float32: "s", DType.float64: "d", DType.complex64: "c", DType.complex128: "z"}

# The routines count in 32 bits.
_LONGEST = 1 << 30


def _axpy(dtype: DType) -> Axpy | None:
    routine = _routine(_LETTERS[dtype] + "axpy", 6)
    if routine is None:
        return None

    def axpy(alpha: HostArray, x: HostArray, y: HostArray) -> None:
        increments = [ctypes.c_int(array.strides[0] // array.itemsize) for array in (x, y)]
        for start in range(0, len(x), _LONGEST):
            xs, ys = x[start : start + _LONGEST], y[start : start + _LONGEST]
            routine(
                ctypes.byref(ctypes.c_int(len(xs))),
                alpha.ctypes.data,
                xs.ctypes.data,
                ctypes.byref(increments[0]),
                ys.ctypes.data,
                ctypes.byref(increments[1]),
            )

    return axpy


def _routine(name: str, arguments: int) -> Callable[..., None] | None:
    """Make a routine callable; None where this SciPy's integers are not those that we pass."""
    capsule = cast("dict[str, object]", scipy.linalg.cython_blas.__pyx_capi__)[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address_of = ctypes.pythonapi.PyCapsule_GetPointer
    address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature: bytes = name_of(capsule)
    if not signature.startswith(b"void (int *"):
        return None
    # CFUNCTYPE gives the interpreter's lock back during the call (PYFUNCTYPE would not).
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(address_of(capsule, signature))


AXPY = {dtype: _axpy(dtype) for dtype in _LETTERS}
"""BLAS axpy of each type that has one; None where it cannot be called."""
