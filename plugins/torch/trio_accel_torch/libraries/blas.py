"""Products of matrices and operations on vectors."""

from __future__ import annotations

from typing import Any

import torch

from trio_accel.backends.base import (
    INEXACT,
    INTEGERS,
    NATIVE,
    ArraySpec,
    DType,
    check_dtype,
    kernel,
    ops,
    scalar_of,
)

from .._views import carrier, read, wrapped, write
from ..manifest import BACKEND

T = torch.Tensor


@kernel(ops.MatmulSpec, backend=BACKEND, dtypes=(*INEXACT, *INTEGERS))
def matmul(spec: ops.MatmulSpec, call: Any) -> None:
    """Multiply; integers wrap around, and halves are rounded once."""
    if 0 in spec.out.shape:
        return
    a, b = _wide(call, spec.a), _wide(call, spec.b)
    out = call.device.view(spec.out)
    # Of vectors PyTorch makes a result of another shape first.
    is_apart = spec.out.block not in (spec.a.block, spec.b.block) and min(a.dim(), b.dim()) > 1
    # cuBLAS takes no stride of 0, which axes of one element have.
    is_apart = is_apart and 0 not in out.at.stride()
    if is_apart and spec.out.dtype.is_inexact and out.is_direct and out.at.dtype is a.dtype is b.dtype:
        torch.matmul(a, b, out=out.at)
    else:
        write(call, spec.out, wrapped(torch.matmul(a, b), spec.out.dtype))


def _wide(call: Any, array: ArraySpec) -> T:
    """Read an array in the type that it is computed in: cards add the products of halves in float32."""
    value = read(call, array)
    return value.float() if array.dtype.is_half and value.device.type == "cpu" else value


def _factor(spec: Any, name: str, dtype: DType) -> complex:
    return scalar_of("blas", name, getattr(spec, name), dtype)


def _turned(matrix: T, op: str) -> T:
    return matrix if op == "N" else matrix.mT if op == "T" else matrix.mH


def _combined(call: Any, spec: Any, product: T, c: ArraySpec) -> T:
    """Return ``alpha * product + beta * c``, where beta of 0 reads nothing."""
    made = product * _factor(spec, "alpha", c.dtype)
    beta = _factor(spec, "beta", c.dtype)
    return made + beta * _wide(call, c) if beta else made


@kernel("linalg.gemm", backend=BACKEND, dtypes=INEXACT)
def gemm(spec: Any, call: Any) -> None:
    """Compute ``c = alpha * op(a) @ op(b) + beta * c``."""
    a, b = _turned(_wide(call, spec.a), spec.trans_a), _turned(_wide(call, spec.b), spec.trans_b)
    write(call, spec.c, _combined(call, spec, torch.matmul(a, b), spec.c))


def _whole(a: T, *, lower: bool, hermitian: bool) -> T:
    """Make a symmetric or Hermitian matrix of one triangle."""
    triangle = a.tril(-1) if lower else a.triu(1)
    diagonal = torch.diagonal(a, dim1=-2, dim2=-1)
    if hermitian and a.is_complex():
        return triangle + triangle.mH + torch.diag_embed(diagonal.real.to(a.dtype))
    return triangle + triangle.mT + torch.diag_embed(diagonal)


@kernel("linalg.symm", backend=BACKEND, dtypes=NATIVE)
def symm(spec: Any, call: Any) -> None:
    """Multiply by a symmetric matrix."""
    a = _whole(read(call, spec.a), lower=spec.lower, hermitian=spec.hermitian)
    b = read(call, spec.b)
    product = torch.matmul(a, b) if spec.side == "L" else torch.matmul(b, a)
    write(call, spec.c, _combined(call, spec, product, spec.c))


@kernel("linalg.syrk", "linalg.syr2k", backend=BACKEND, dtypes=NATIVE)
def syrk(spec: Any, call: Any) -> None:
    """Add a product with its own transpose to one triangle."""
    c, is_hermitian = read(call, spec.c), spec.hermitian and spec.c.dtype.kind == "complex"
    a, b = [_turned(read(call, one), spec.trans) for one in (spec.a, getattr(spec, "b", spec.a))]
    if is_hermitian and spec.trans == "T":
        a, b = a.conj(), b.conj()
    other = b.mH if is_hermitian else b.mT
    if not is_hermitian and spec.trans == "C":
        a, other = a.conj(), other.conj()
    alpha, beta = (_factor(spec, name, spec.c.dtype) for name in ("alpha", "beta"))
    made = alpha * torch.matmul(a, other)
    if spec.operation == "linalg.syr2k":
        made = made + (made.mH if is_hermitian else made.mT)
    if beta:
        made = made + beta * c
    if is_hermitian:
        made = made.clone()
        torch.diagonal(made, dim1=-2, dim2=-1).imag.zero_()
    kept, changed = (c.triu(1), made.tril()) if spec.lower else (c.tril(-1), made.triu())
    write(call, spec.c, kept + changed)


def _triangle(spec: Any, a: T) -> tuple[T, bool]:
    """Return ``op(a)``, and whether it is an upper triangle."""
    a = a.tril() if spec.lower else a.triu()
    if spec.unit_diagonal:
        a = a.clone()
        torch.diagonal(a, dim1=-2, dim2=-1).fill_(1)
    return _turned(a, spec.trans), spec.lower == (spec.trans != "N")


@kernel("linalg.trmm", "linalg.trsm", backend=BACKEND, dtypes=NATIVE)
def triangular(spec: Any, call: Any) -> None:
    """Multiply by a triangular matrix, or solve with it."""
    x = spec.out
    a, is_upper = _triangle(spec, read(call, spec.a))
    b, is_left = _factor(spec, "alpha", x.dtype) * read(call, spec.b), spec.side == "L"
    if spec.operation == "linalg.trsm":
        made = torch.linalg.solve_triangular(a, b, upper=is_upper, left=is_left)
    else:
        made = torch.matmul(a, b) if is_left else torch.matmul(b, a)
    write(call, x, made)


@kernel("linalg.axpy", backend=BACKEND, dtypes=INEXACT)
def axpy(spec: Any, call: Any) -> None:
    """Compute ``y = alpha * x + y``."""
    alpha = _factor(spec, "alpha", spec.y.dtype)
    write(call, spec.y, _wide(call, spec.x) * alpha + _wide(call, spec.y))


@kernel("linalg.scal", backend=BACKEND, dtypes=INEXACT)
def scal(spec: Any, call: Any) -> None:
    """Compute ``x = alpha * x``."""
    write(call, spec.x, _wide(call, spec.x) * _factor(spec, "alpha", spec.x.dtype))


@kernel("linalg.swap", backend=BACKEND, dtypes=tuple(DType))
def swap(spec: Any, call: Any) -> None:
    """Compute ``x, y = y, x``."""
    x, y = read(call, spec.x).clone(), read(call, spec.y)
    write(call, spec.x, y)
    write(call, spec.y, x)


@kernel("linalg.rot", backend=BACKEND, dtypes=NATIVE)
def rot(spec: Any, call: Any) -> None:
    """Compute ``x, y = c * x + s * y, c * y - conj(s) * x``."""
    x, y, c, s = read(call, spec.x), read(call, spec.y), spec.c.real, _factor(spec, "s", spec.x.dtype)
    turned, other = c * x + s * y, c * y - s.conjugate() * x
    write(call, spec.x, turned)
    write(call, spec.y, other)


@kernel("linalg.dot", backend=BACKEND, dtypes=INEXACT)
def dot(spec: Any, call: Any) -> None:
    """Compute ``out = sum(x * y)``."""
    write(call, spec.out, torch.dot(_wide(call, spec.x), _wide(call, spec.y)))


def _plan_norm(spec: Any, device: object) -> DType:
    """Refuse a result that is not of the type of absolute values."""
    real = ops.real_of(spec.x.dtype)
    check_dtype(BACKEND, f"norm of {spec.x.dtype} to", spec.out.dtype, (real,))
    return real


def _reals(call: Any, array: ArraySpec) -> T:
    """Read elements as a vector of real numbers of float64, complex ones as pairs."""
    value = read(call, array).reshape(-1)
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).reshape(-1).double()


@kernel("linalg.nrm2", backend=BACKEND, dtypes=INEXACT, plan=_plan_norm, is_quick=True)
def nrm2(spec: Any, call: Any) -> None:
    """Compute ``out = sqrt(sum(abs(x)**2))``, scaled so that no square overflows."""
    x = _reals(call, spec.x)
    scale = x.abs().max() if x.numel() else x.sum()
    if not 0 < float(scale) < float("inf"):
        write(call, spec.out, scale.to(carrier(spec.out.dtype)))
        return
    write(call, spec.out, (torch.linalg.vector_norm(x / scale) * scale).to(carrier(spec.out.dtype)))


@kernel("linalg.asum", backend=BACKEND, dtypes=NATIVE, plan=_plan_norm, is_quick=True)
def asum(spec: Any, call: Any) -> None:
    """Compute ``out = sum(abs(x.real) + abs(x.imag))``."""
    write(call, spec.out, _reals(call, spec.x).abs().sum().to(carrier(spec.out.dtype)))


@kernel("linalg.iamax", backend=BACKEND, dtypes=NATIVE)
def iamax(spec: Any, call: Any) -> None:
    """Compute ``out = argmax(abs(x.real) + abs(x.imag))``."""
    sizes = _reals(call, spec.x).abs().reshape(spec.x.shape[0], -1).sum(1)
    write(call, spec.out, torch.argmax(sizes).to(carrier(spec.out.dtype)))
