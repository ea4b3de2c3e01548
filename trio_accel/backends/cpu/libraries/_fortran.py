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
from ..runtime._memory import HostArray
from ._routines import LETTERS, routine

__all__ = ["AXPY", "GEMM", "LONGEST", "Axpy", "Gemm"]

Axpy: TypeAlias = Callable[[HostArray, HostArray, HostArray], None]
"""``y = alpha * x + y`` for vectors with positive strides and an alpha without axes."""

Gemm: TypeAlias = Callable[[HostArray, HostArray, HostArray, HostArray, HostArray, str, str], None]
"""``c = alpha * op(a) @ op(b) + beta * c`` for row-major matrices; alpha and beta without axes.

Elements of a row lie side by side, and rows do not overlap.
"""

_EXPORTED = cast("dict[str, object]", scipy.linalg.cython_blas.__pyx_capi__)

LONGEST = 1 << 30
"""Sizes that the routines can count: they do in 32 bits."""


def _axpy(dtype: DType) -> Axpy | None:
    call = routine(_EXPORTED, LETTERS[dtype] + "axpy")
    if call is None:
        return None

    def axpy(alpha: HostArray, x: HostArray, y: HostArray) -> None:
        increments = [ctypes.c_int(array.strides[0] // array.itemsize) for array in (x, y)]
        for start in range(0, len(x), LONGEST):
            xs, ys = x[start : start + LONGEST], y[start : start + LONGEST]
            call(
                ctypes.byref(ctypes.c_int(len(xs))),
                alpha.ctypes.data,
                xs.ctypes.data,
                ctypes.byref(increments[0]),
                ys.ctypes.data,
                ctypes.byref(increments[1]),
            )

    return axpy


def _gemm(dtype: DType) -> Gemm | None:
    call = routine(_EXPORTED, LETTERS[dtype] + "gemm")
    if call is None:
        return None

    def gemm(
        alpha: HostArray, a: HostArray, b: HostArray, beta: HostArray, c: HostArray, op_a: str, op_b: str
    ) -> None:
        # Row-major c is the column-major transpose of c: that is op(b)' @ op(a)'.
        rows, columns = c.shape
        inner = a.shape[1] if op_a == "N" else a.shape[0]
        sizes = [ctypes.c_int(size) for size in (columns, rows, inner)]
        leading = [ctypes.c_int(_leading_dimension(matrix)) for matrix in (b, a, c)]
        call(
            ctypes.c_char_p(op_b.encode()),
            ctypes.c_char_p(op_a.encode()),
            *(ctypes.byref(size) for size in sizes),
            alpha.ctypes.data,
            b.ctypes.data,
            ctypes.byref(leading[0]),
            a.ctypes.data,
            ctypes.byref(leading[1]),
            beta.ctypes.data,
            c.ctypes.data,
            ctypes.byref(leading[2]),
        )

    return gemm


def _leading_dimension(matrix: HostArray) -> int:
    """Elements from one row to the next; at least one row's length, also where there is a single row."""
    rows, columns = matrix.shape
    step: int = matrix.strides[0] // matrix.itemsize if rows > 1 else 0
    leading: int = max(step, columns, 1)
    return leading


GEMM = {dtype: _gemm(dtype) for dtype in LETTERS}
"""BLAS gemm of each type that has one; None where it cannot be called."""

AXPY = {dtype: _axpy(dtype) for dtype in LETTERS}
"""BLAS axpy of each type that has one; None where it cannot be called."""
