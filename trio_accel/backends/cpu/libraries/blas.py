"""Dense linear algebra: matrix products here, vectors in their own module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from ...base import DType, ops
from ...base.blas import plan_routine
from ...base.checks import INEXACT, LOW_PRECISION, NATIVE, scalar_of
from ...base.kernels import Call, kernel
from ...base.ops import ArraySpec, Transpose
from ..runtime._memory import HostArray, convert, to_float32
from ._fortran import LONGEST, Blas
from ._routines import find
from ._vectors import asum, axpy, dot, iamax, nrm2, rot, scal, swap

__all__ = ["asum", "axpy", "by_blas", "dot", "iamax", "matmul", "nrm2", "rot", "scal", "swap"]

_INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))


@kernel(ops.MatmulSpec, backend="cpu", dtypes=(*INEXACT, *_INTEGERS))
def matmul(spec: ops.MatmulSpec, call: Call) -> None:
    """Multiply by `numpy.matmul`; integers wrap around as they do there."""
    a, b, out = call.array(spec.a), call.array(spec.b), call.array(spec.out)
    if spec.out.dtype in LOW_PRECISION:
        # Also float16, which NumPy multiplies itself, but without BLAS: 180 times slower at 512.
        convert(np.matmul(to_float32(a), to_float32(b)), out)
    else:
        np.matmul(a, b, out=out)


def _plan_blas(spec: Any, device: object) -> Blas:
    """Find the routine and how it sees the arrays."""
    return Blas(spec.outputs()[0].dtype, plan_routine(spec))


def _plan_gemm(spec: Any, device: object) -> Blas | _Plain:
    """Have the product made by BLAS where the type has one."""
    dtype = spec.c.dtype
    if find(dtype, "gemm") is not None and max(*spec.a.shape, *spec.b.shape, *spec.c.shape) < LONGEST:
        return _plan_blas(spec, device)
    # Low precision is computed, and its factors applied, in float32.
    return _Plain(dtype, np.dtype(np.float32) if dtype in LOW_PRECISION else dtype.dtype)


@kernel("linalg.gemm", backend="cpu", dtypes=INEXACT, plan=_plan_gemm, is_quick=True)
@kernel("linalg.symm", backend="cpu", dtypes=NATIVE, plan=_plan_blas, is_quick=True)
@kernel("linalg.syrk", backend="cpu", dtypes=NATIVE, plan=_plan_blas, is_quick=True)
@kernel("linalg.syr2k", backend="cpu", dtypes=NATIVE, plan=_plan_blas, is_quick=True)
@kernel("linalg.trmm", backend="cpu", dtypes=NATIVE, plan=_plan_blas, is_quick=True)
@kernel("linalg.trsm", backend="cpu", dtypes=NATIVE, plan=_plan_blas, is_quick=True)
def by_blas(spec: Any, call: Call) -> None:
    """Run an operation on matrices as its plan says."""
    call.plan.run(spec, call.array)


@attrs.frozen
class _Plain:
    """A product without BLAS's routine: for low precision, and where sizes are beyond it.

    Attributes:
        dtype: Type of the elements.
        number: Type of the factors.
    """

    dtype: DType
    number: np.dtype[Any]

    def run(self, spec: Any, view: Callable[[ArraySpec], HostArray]) -> None:
        """Multiply."""
        alpha = np.array(scalar_of("blas", "alpha", spec.alpha, self.dtype), self.number)
        beta = np.array(scalar_of("blas", "beta", spec.beta, self.dtype), self.number)
        a, b, c = view(spec.a), view(spec.b), view(spec.c)
        result = np.matmul(_transposed(_wide(a), spec.trans_a), _transposed(_wide(b), spec.trans_b))
        result = result * alpha
        if beta != 0:
            result += _wide(c) * beta
        convert(result, c)


def _wide(matrix: HostArray) -> HostArray:
    return to_float32(matrix) if DType.of(matrix.dtype) in LOW_PRECISION else matrix


def _transposed(matrix: HostArray, op: Transpose) -> HostArray:
    if op == "N":
        return matrix
    return matrix.T if op == "T" else matrix.conj().T
