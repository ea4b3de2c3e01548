"""The BLAS: products of matrices, operations on matrices by its routines, and operations on vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ...base import (
    INEXACT,
    INTEGERS,
    NATIVE,
    DType,
    HostArray,
    HostCall,
    check_dtype,
    kernel,
    ops,
    scalar_of,
)
from ...base.contract.ops import ArraySpec, Transpose
from ...base.kit.blas import plan_routine
from ..runtime._memory import convert, pieces, to_float32, widened
from ..runtime.blas_threads import LOAD_COST, SCIPY, matrix_product
from ._fortran import LONGEST, Blas, FortranRoutine, find


def _bind_matmul(spec: ops.MatmulSpec, call: HostCall) -> Callable[[], object] | None:
    if spec.out.dtype.is_half:
        return None
    return partial(matrix_product, call.array(spec.a), call.array(spec.b), call.array(spec.out))


@kernel(ops.MatmulSpec, backend="cpu", dtypes=(*INEXACT, *INTEGERS), bind=_bind_matmul)
def matmul(spec: ops.MatmulSpec, call: HostCall) -> None:
    """Multiply by `numpy.matmul`; integers wrap around as they do there."""
    a, b, out = call.array(spec.a), call.array(spec.b), call.array(spec.out)
    if spec.out.dtype.is_half:
        # NumPy would multiply float16 itself, but without BLAS: 180 times slower at 512.
        convert(matrix_product(to_float32(a), to_float32(b)), out)
    else:
        matrix_product(a, b, out)


_Run: TypeAlias = "Callable[[Any, Callable[[ArraySpec], HostArray]], None]"


def _plan_blas(spec: Any, device: object) -> _Run:
    """Find the routine and how it sees the arrays."""
    return Blas(spec.outputs()[0].dtype, plan_routine(spec)).run


def _plan_gemm(spec: Any, device: object) -> _Run:
    """Have BLAS make the product, if it has a routine for the type."""
    dtype = spec.c.dtype
    if find(dtype, "gemm") is not None and max(*spec.a.shape, *spec.b.shape, *spec.c.shape) < LONGEST:
        return _plan_blas(spec, device)
    return _multiply


@kernel("linalg.gemm", backend="cpu", dtypes=INEXACT, plan=_plan_gemm, is_quick=True)
@kernel(
    *("linalg.symm", "linalg.syrk", "linalg.syr2k", "linalg.trmm", "linalg.trsm"),
    backend="cpu",
    dtypes=NATIVE,
    plan=_plan_blas,
    is_quick=True,
)
def by_blas(spec: Any, call: HostCall[_Run]) -> None:
    """Run an operation on matrices according to its plan."""
    # Each extent is in two of the three matrices, of all these routines: the root is their product.
    matrices = spec.a, getattr(spec, "b", spec.a), *spec.outputs()
    with SCIPY.for_work(math.isqrt(math.prod(math.prod(matrix.shape) for matrix in matrices))):
        call.plan(spec, call.array)


def _multiply(spec: Any, view: Callable[[ArraySpec], HostArray]) -> None:
    """Multiply without BLAS: in low precision by way of float32, and for sizes that BLAS cannot count."""
    dtype = spec.c.dtype
    factors = (("alpha", spec.alpha), ("beta", spec.beta))
    alpha, beta = (np.array(scalar_of("blas", *factor, dtype), _compute_dtype(dtype)) for factor in factors)
    a, b, c = view(spec.a), view(spec.b), view(spec.c)
    result = matrix_product(_transposed(widened(a), spec.trans_a), _transposed(widened(b), spec.trans_b))
    result = result * alpha
    if beta != 0:
        result += widened(c) * beta
    convert(result, c)


def _transposed(matrix: HostArray, op: Transpose) -> HostArray:
    if op == "N":
        return matrix
    return matrix.T if op == "T" else matrix.conj().T


# A sum of squares at least so large has lost nothing that matters to squares that underflowed.
_SAFE = {DType.float32: 1e-20, DType.float64: 1e-280}


@kernel("linalg.axpy", backend="cpu", dtypes=INEXACT)
def axpy(spec: Any, call: HostCall) -> None:
    """Compute ``y = alpha * x + y``."""
    dtype = spec.y.dtype
    alpha = np.array(scalar_of("blas", "alpha", spec.alpha, dtype), _compute_dtype(dtype))
    x, y = call.array(spec.x), call.array(spec.y)
    routine = find(dtype, "axpy")
    if spec.x.is_contiguous and spec.y.is_contiguous:
        x, y = x.reshape(-1), y.reshape(-1)
    # BLAS is three times as fast as two passes of NumPy, and needs no room for the product.
    if routine is not None and _has_blas_stride(x) and _has_blas_stride(y):
        _axpy(routine, alpha, x, y)
    else:
        for xs, ys in pieces(x, y):
            product = np.multiply(xs, alpha, dtype=alpha.dtype)
            np.copyto(ys, np.add(product, ys, out=product, dtype=alpha.dtype), casting="unsafe")


@kernel("linalg.scal", backend="cpu", dtypes=INEXACT)
def scal(spec: Any, call: HostCall) -> None:
    """Compute ``x = alpha * x``."""
    dtype, x = spec.x.dtype, call.array(spec.x)
    alpha = np.array(scalar_of("blas", "alpha", spec.alpha, dtype), _compute_dtype(dtype))
    if dtype.is_half:
        for (xs,) in pieces(x):
            np.copyto(xs, np.multiply(xs, alpha, dtype=alpha.dtype), casting="unsafe")
    else:
        np.multiply(x, alpha, out=x)


@kernel("linalg.swap", backend="cpu", dtypes=tuple(DType))
def swap(spec: Any, call: HostCall) -> None:
    """Compute ``x, y = y, x``."""
    for xs, ys in pieces(call.array(spec.x), call.array(spec.y)):
        copy = xs.copy()
        np.copyto(xs, ys)
        np.copyto(ys, copy)


@kernel("linalg.rot", backend="cpu", dtypes=NATIVE)
def rot(spec: Any, call: HostCall) -> None:
    """Compute ``x, y = c * x + s * y, c * y - conj(s) * x``."""
    dtype = spec.x.dtype
    c = np.array(spec.c.real, ops.real_of(dtype).dtype)
    s = np.array(scalar_of("blas", "s", spec.s, dtype), dtype.dtype)
    for xs, ys in pieces(call.array(spec.x), call.array(spec.y)):
        turned = c * xs + s * ys
        np.subtract(c * ys, s.conj() * xs, out=ys)
        np.copyto(xs, turned)


@kernel("linalg.dot", backend="cpu", dtypes=INEXACT)
def dot(spec: Any, call: HostCall) -> None:
    """Compute ``out = sum(x * y)``."""
    x, y, out = call.array(spec.x), call.array(spec.y), call.array(spec.out)
    if spec.out.dtype.is_half:
        wide = (matrix_product(xs.astype(np.float32), ys.astype(np.float32)) for xs, ys in pieces(x, y))
        out[...] = sum(map(float, wide))
    else:
        matrix_product(x, y, out=out)


def _plan_norm(spec: Any, device: object) -> DType:
    """Refuse a result of another type than that of absolute values."""
    real = ops.real_of(spec.x.dtype)
    check_dtype("cpu", f"norm of {spec.x.dtype} to", spec.out.dtype, (real,))
    return real


@kernel("linalg.nrm2", backend="cpu", dtypes=INEXACT, plan=_plan_norm, is_quick=True)
def nrm2(spec: Any, call: HostCall[DType]) -> None:
    """Compute ``out = sqrt(sum(abs(x)**2))``."""
    x = call.array(spec.x)
    call.array(spec.out)[...] = norm_of(x.reshape(-1) if spec.x.is_contiguous else x, call.plan)


def norm_of(x: HostArray, real: DType) -> float:
    """Return the root of the sum of squares; `real` is the dtype of absolute values."""
    safe = _SAFE.get(real)
    # The plain sum of squares, by BLAS dot, is 4 to 13 times as fast as OpenBLAS's nrm2 of doubles.
    # The careful way is for squares that may have overflowed or underflowed, and for types without BLAS.
    squares = 0.0 if safe is None else _sum_of_squares(x)
    if safe is not None and (safe <= squares < math.inf or math.isnan(squares)):
        return math.sqrt(squares)
    return _careful_norm(x)


@kernel("linalg.asum", backend="cpu", dtypes=NATIVE, plan=_plan_norm, is_quick=True)
def asum(spec: Any, call: HostCall) -> None:
    """Compute ``out = sum(abs(x.real) + abs(x.imag))``."""
    x, out = call.array(spec.x), call.array(spec.out)
    out[...] = sum(float(np.abs(_reals(part)).sum(dtype=np.float64)) for (part,) in pieces(x))


@kernel("linalg.iamax", backend="cpu", dtypes=NATIVE)
def iamax(spec: Any, call: HostCall) -> None:
    """Compute ``out = argmax(abs(x.real) + abs(x.imag))``."""
    x, out = call.array(spec.x), call.array(spec.out)
    best, start = -1.0, 0
    for (part,) in pieces(x):
        sizes = np.abs(_reals(part)).reshape(len(part), -1).sum(1)
        index = int(sizes.argmax())
        # A NaN is not below anything either.
        if not sizes[index] <= best:
            best, out[...] = float(sizes[index]), start + index
        start += len(part)


def _compute_dtype(dtype: DType) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if dtype.is_half else dtype.dtype


def _has_blas_stride(x: HostArray) -> bool:
    # A vector with a negative or zero stride would need another base address.
    return x.ndim == 1 and x.strides[0] > 0 and x.strides[0] % x.itemsize == 0


def _axpy(routine: FortranRoutine, alpha: HostArray, x: HostArray, y: HostArray) -> None:
    steps = [array.strides[0] // array.itemsize for array in (x, y)]
    for start in range(0, len(x), LONGEST):
        xs, ys = x[start : start + LONGEST], y[start : start + LONGEST]
        counts = np.array([len(xs), *steps], np.int32)
        size, x_step, y_step = (counts[index:].ctypes.data for index in range(3))
        with SCIPY.for_work(LOAD_COST * len(xs)):
            routine(size, alpha.ctypes.data, xs.ctypes.data, x_step, ys.ctypes.data, y_step)


def _sum_of_squares(x: HostArray) -> float:
    parts = [(x,)] if x.flags.c_contiguous else pieces(x)
    return sum(float(matrix_product(reals, reals)) for (part,) in parts for reals in (_reals(part),))


def _careful_norm(x: HostArray) -> float:
    """Norm in float64, which holds the squares of every smaller type; doubles are scaled to 1 for it."""
    scale = 1.0
    if x.dtype.char in "dD":
        scale = max((float(np.abs(_reals(part)).max()) for (part,) in pieces(x) if part.size), default=0.0)
    if scale == 0.0 or not math.isfinite(scale):
        return scale
    total = 0.0
    for (part,) in pieces(x):
        reals = _reals(part).astype(np.float64)
        reals /= scale
        total += float(matrix_product(reals, reals))
    return scale * math.sqrt(total)


def _reals(x: HostArray) -> HostArray:
    """Take elements as a vector of real numbers, complex ones as pairs; a copy only if they have gaps."""
    vector: HostArray = np.ascontiguousarray(x).reshape(-1)
    return vector.view(np.real(vector).dtype) if vector.dtype.kind == "c" else vector
