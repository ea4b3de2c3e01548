"""Dense linear algebra: matrix products here, vectors in their own module."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...base import DType, ops
from ...base.blas import plan_routine
from ...base.checks import INEXACT, LOW_PRECISION, NATIVE, scalar_of
from ...base.kernels import kernel
from ...base.ops import Transpose
from ..kit._checks import check_dtype, check_same_dtype
from ..kit._pieces import convert, to_float32
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work
from ._fortran import LONGEST, Blas
from ._routines import find
from ._vectors import asum, axpy, dot, iamax, nrm2, rot, scal, swap

__all__ = ["asum", "axpy", "by_blas", "dot", "gemm", "iamax", "matmul", "nrm2", "rot", "scal", "swap"]

_INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))


@kernel(ops.MatmulSpec, backend="cpu")
def matmul(spec: ops.MatmulSpec, memory: CpuMemory) -> Work:
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


@kernel(ops.GemmSpec, backend="cpu")
def gemm(spec: ops.GemmSpec, memory: CpuMemory) -> Work:
    """Prepare a product with factors, by BLAS where the type has one."""
    dtype = check_same_dtype("gemm", spec.a, spec.b, spec.c)
    check_dtype("gemm", dtype, INEXACT)
    if find(dtype, "gemm") is not None and max(*spec.a.shape, *spec.b.shape, *spec.c.shape) < LONGEST:
        return _planned(spec, dtype).prepare(spec, memory.view)
    # Low precision is computed, and its factors applied, in float32.
    number = np.dtype(np.float32) if dtype in LOW_PRECISION else dtype.dtype
    alpha = np.array(scalar_of("blas", "alpha", spec.alpha, dtype), number)
    beta = np.array(scalar_of("blas", "beta", spec.beta, dtype), number)
    a, b, c = memory.view(spec.a), memory.view(spec.b), memory.view(spec.c)
    return partial(_gemm_plain, alpha, a, b, beta, c, spec.transpose_a, spec.transpose_b)


@kernel(ops.SymmSpec, backend="cpu")
@kernel(ops.SyrkSpec, backend="cpu")
@kernel(ops.TriangularSpec, backend="cpu")
def by_blas(spec: ops.SymmSpec | ops.SyrkSpec | ops.TriangularSpec, memory: CpuMemory) -> Work:
    """Prepare an operation on matrices that only BLAS has."""
    name = type(spec).__name__.removesuffix("Spec").lower()
    dtype = check_same_dtype(name, *spec.inputs(), *spec.outputs())
    check_dtype(name, dtype, NATIVE)
    return _planned(spec, dtype).prepare(spec, memory.view)


_PLANS: dict[tuple[object, ...], Blas] = {}
_MOST_PLANS = 1024


def _planned(spec: ops.GemmSpec | ops.SymmSpec | ops.SyrkSpec | ops.TriangularSpec, dtype: DType) -> Blas:
    """What operations of one plan key have in common."""
    key = spec.descriptor().plan_key(spec)
    found = _PLANS.get(key)
    if found is None:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        found = _PLANS[key] = Blas(dtype, plan_routine(spec))
    return found


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
