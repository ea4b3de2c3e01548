"""Dense linear algebra: matrix products here, vectors in their own module."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...base import DType
from ...base.checks import INEXACT, LOW_PRECISION, scalar_of
from ...base.kernels import kernel
from ...base.ops import GemmSpec, MatmulSpec, Transpose
from ..kit._checks import check_dtype, check_same_dtype
from ..kit._pieces import convert, to_float32
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work
from ._fortran import GEMM, LONGEST, Gemm
from ._vectors import axpy, dot, nrm2, scal

__all__ = ["axpy", "dot", "gemm", "matmul", "nrm2", "scal"]

_INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))


@kernel(MatmulSpec, backend="cpu")
def matmul(spec: MatmulSpec, memory: CpuMemory) -> Work:
    """Prepare a product by `numpy.matmul`; integers wrap around as they do there."""
    dtype = check_same_dtype("matmul", spec.a, spec.b, spec.out)
    check_dtype("matmul", dtype, (*INEXACT, *_INTEGERS))
    a, b, out = memory.view(spec.a), memory.view(spec.b), memory.view(spec.out)
    if dtype in LOW_PRECISION:
        return partial(_matmul_float32, a, b, out)
    return partial(np.matmul, a, b, out=out)


def _matmul_float32(a: HostArray, b: HostArray, out: HostArray) -> None:
    # Also for float16, which NumPy multiplies itself, but without BLAS: 180 times slower at 512.
    convert(np.matmul(to_float32(a), to_float32(b)), out)


@kernel(GemmSpec, backend="cpu")
def gemm(spec: GemmSpec, memory: CpuMemory) -> Work:
    """Prepare a product with factors, by BLAS where the type has one."""
    dtype = check_same_dtype("gemm", spec.a, spec.b, spec.c)
    check_dtype("gemm", dtype, INEXACT)
    # Low precision is computed, and its factors applied, in float32.
    number = np.dtype(np.float32) if dtype in LOW_PRECISION else dtype.dtype
    alpha = np.array(scalar_of("blas", "alpha", spec.alpha, dtype), number)
    beta = np.array(scalar_of("blas", "beta", spec.beta, dtype), number)
    a, b, c = memory.view(spec.a), memory.view(spec.b), memory.view(spec.c)
    routine = GEMM.get(dtype)
    if routine is not None and c.size and a.size and max(*a.shape, *b.shape, *c.shape) < LONGEST:
        return partial(_gemm, routine, alpha, a, b, beta, c, spec.transpose_a, spec.transpose_b)
    return partial(_gemm_plain, alpha, a, b, beta, c, spec.transpose_a, spec.transpose_b)


def _gemm(
    routine: Gemm,
    alpha: HostArray,
    a: HostArray,
    b: HostArray,
    beta: HostArray,
    c: HostArray,
    op_a: Transpose,
    op_b: Transpose,
) -> None:
    a, op_a = _rows_together(a, op_a)
    b, op_b = _rows_together(b, op_b)
    if _has_rows_together(c):
        routine(alpha, a, b, beta, c, op_a, op_b)
        return
    packed: HostArray = np.array(c, order="C")
    routine(alpha, a, b, beta, packed, op_a, op_b)
    np.copyto(c, packed)


def _rows_together(matrix: HostArray, op: Transpose) -> tuple[HostArray, Transpose]:
    """The matrix as BLAS takes it: seen from the other side, or copied, where its rows have gaps."""
    if _has_rows_together(matrix):
        return matrix, op
    if op != "C" and _has_rows_together(matrix.T):
        return matrix.T, "N" if op == "T" else "T"
    return np.array(matrix, order="C"), op


def _has_rows_together(matrix: HostArray) -> bool:
    rows, columns = matrix.shape
    step, within = matrix.strides
    is_dense = columns <= 1 or within == matrix.itemsize
    return is_dense and (rows <= 1 or (step >= columns * matrix.itemsize and step % matrix.itemsize == 0))


def _gemm_plain(
    alpha: HostArray,
    a: HostArray,
    b: HostArray,
    beta: HostArray,
    c: HostArray,
    op_a: Transpose,
    op_b: Transpose,
) -> None:
    """The product without BLAS's routine: for low precision, and where there is nothing to multiply."""
    result = np.matmul(_transposed(_wide(a), op_a), _transposed(_wide(b), op_b)) * alpha
    if beta != 0:
        result += _wide(c) * beta
    convert(result, c)


def _wide(matrix: HostArray) -> HostArray:
    return to_float32(matrix) if DType.of(matrix.dtype) in LOW_PRECISION else matrix


def _transposed(matrix: HostArray, op: Transpose) -> HostArray:
    if op == "N":
        return matrix
    return matrix.T if op == "T" else matrix.conj().T
