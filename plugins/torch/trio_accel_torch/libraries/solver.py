"""Dense solvers. Banded and other structured systems, and forms of general matrices, are not PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from trio_accel.backends.base import NATIVE, ArraySpec, kernel

from .._views import carrier, read, write
from ..manifest import BACKEND

T = torch.Tensor
_OF = {"a": NATIVE}


def _note(spec: Any, info: T) -> None:
    spec.info[:] = info.reshape(-1).cpu().numpy()


def _are_finite(spec: Any, *matrices: T) -> bool:
    """Return whether there is no NaN or infinity, and else note where."""
    held = torch.ones(matrices[0].shape[:-2], dtype=torch.bool, device=matrices[0].device)
    for one in matrices:
        held = held & torch.isfinite(one).all(-1).all(-1)
    _note(spec, -(~held).int())
    return not spec.info.any()


def _is_empty(array: ArraySpec) -> bool:
    return 0 in array.shape


@kernel("linalg.cholesky", backend=BACKEND, dtypes=_OF)
def cholesky(spec: Any, call: Any) -> None:
    """Make triangular factors."""
    call.status(spec.info)
    if _is_empty(spec.a):
        return
    a = read(call, spec.a)
    factor, info = torch.linalg.cholesky_ex(a, upper=spec.upper)
    # A NaN comes to the diagonal, which LAPACK does not tell.
    lost = ~torch.isfinite(torch.diagonal(factor, dim1=-2, dim2=-1))
    info = torch.where((info == 0) & lost.any(-1), lost.to(torch.uint8).argmax(-1).int() + 1, info)
    _note(spec, info)
    write(call, spec.out, factor.triu() if spec.upper else factor.tril())


@kernel("linalg.lu", backend=BACKEND, dtypes=_OF)
def lu(spec: Any, call: Any) -> None:
    """Make triangular factors with exchanges of rows."""
    call.status(spec.info)
    if _is_empty(spec.a):
        return
    factors, pivots, info = torch.linalg.lu_factor_ex(read(call, spec.a))
    _note(spec, info)
    write(call, spec.lu, factors)
    write(call, spec.piv, pivots - 1)


@kernel("linalg.det", "linalg.slogdet", backend=BACKEND, dtypes=_OF)
def det(spec: Any, call: Any) -> None:
    """Make determinants of the diagonals of factors, multiplied in double precision."""
    a = read(call, spec.a)
    n, wide = a.shape[-1], torch.complex128 if a.is_complex() else torch.float64
    if n and a.numel():
        factors, pivots, _ = torch.linalg.lu_factor_ex(a)
        diagonal = torch.diagonal(factors, dim1=-2, dim2=-1).to(wide)
        rows = torch.arange(1, n + 1, device=a.device)
        odd = (pivots != rows).sum(-1) % 2
    else:
        diagonal = torch.ones(a.shape[:-1], dtype=wide, device=a.device)
        odd = torch.zeros(a.shape[:-2], dtype=torch.int64, device=a.device)
    size, is_zero = diagonal.abs(), (diagonal == 0).any(-1)
    sign = (diagonal / size).prod(-1) * (1 - 2 * odd)
    sign = torch.where(is_zero, torch.zeros_like(sign), sign)
    logs = torch.where(is_zero, -torch.inf, size.log().sum(-1))
    for name, value in (("det", sign * logs.exp()), ("sign", sign), ("logabsdet", logs)):
        out = getattr(spec, name, None)
        if out is not None:
            write(call, out, value.to(carrier(out.dtype)))


@kernel("linalg.solve", "linalg.inv", backend=BACKEND, dtypes=_OF)
def solve(spec: Any, call: Any) -> None:
    """Solve systems; a matrix that serves several right-hand sides is factored once."""
    call.status(spec.info)
    if _is_empty(spec.a):
        return
    a, right = read(call, spec.a), getattr(spec, "b", None)
    factors, pivots, info = torch.linalg.lu_factor_ex(a)
    _note(spec, info)
    if spec.info.any() or _is_empty(spec.out):
        return
    b = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) if right is None else read(call, right)
    write(call, spec.out, torch.linalg.lu_solve(factors, pivots, b.expand(spec.out.shape)))


@kernel("linalg.lu_solve", backend=BACKEND, dtypes={"lu": NATIVE})
def lu_solve(spec: Any, call: Any) -> None:
    """Solve systems by factors that are there."""
    call.status(spec.info)
    factors, pivots = read(call, spec.lu), read(call, spec.piv)
    is_no_row = (pivots < 0) | (pivots >= factors.shape[-1])
    if bool(is_no_row.any()):
        place = is_no_row.to(torch.uint8).argmax(-1).int() + 1
        _note(spec, torch.where(is_no_row.any(-1), place, 0))
        return
    if not factors.numel() or _is_empty(spec.out):
        return
    b, trans = read(call, spec.b).expand(spec.out.shape), spec.trans
    if trans == 1:
        b = b.conj()
    made = torch.linalg.lu_solve(factors, (pivots + 1).int(), b, adjoint=trans > 0)
    write(call, spec.out, made.conj() if trans == 1 else made)


@kernel("linalg.check_diagonal", backend=BACKEND, dtypes=_OF)
def check_diagonal(spec: Any, call: Any) -> None:
    """Note where the diagonals have a zero."""
    call.status(spec.info)
    if not _is_empty(spec.a):
        is_zero = torch.diagonal(read(call, spec.a), dim1=-2, dim2=-1) == 0
        place = is_zero.to(torch.uint8).argmax(-1).int() + 1
        _note(spec, torch.where(is_zero.any(-1), place, 0))


@kernel("linalg.qr", backend=BACKEND, dtypes=_OF)
def qr(spec: Any, call: Any) -> None:
    """Make orthogonal and triangular factors."""
    q = getattr(spec, "q", None)
    m, n = spec.a.shape[-2:]
    mode = "r" if q is None else "complete" if q.shape[-1] == m and m > min(m, n) else "reduced"
    found = torch.linalg.qr(read(call, spec.a), mode=mode)
    write(call, spec.r, found.R)
    if q is not None:
        write(call, q, found.Q)


@kernel("linalg.svd", backend=BACKEND, dtypes=_OF)
def svd(spec: Any, call: Any) -> None:
    """Make singular values and vectors."""
    call.status(spec.info)
    a, u, vh = read(call, spec.a), getattr(spec, "u", None), getattr(spec, "vh", None)
    if not _are_finite(spec, a):
        return
    if u is None or vh is None:
        if a.numel():
            write(call, spec.s, torch.linalg.svdvals(a))
        return
    m, n = a.shape[-2:]
    found = torch.linalg.svd(a, full_matrices=u.shape[-1] == m and vh.shape[-2] == n)
    for out, value in ((u, found.U), (spec.s, found.S), (vh, found.Vh)):
        write(call, out, value)


@kernel("linalg.eigh", "linalg.eigvalsh", backend=BACKEND, dtypes=_OF)
def eigh(spec: Any, call: Any) -> None:
    """Make eigenvalues of Hermitian matrices, and vectors if wanted; of pairs by Cholesky factors."""
    call.status(spec.info)
    is_lower = spec.UPLO in "Ll"
    a, right = read(call, spec.a), getattr(spec, "b", None)
    given = [a] if right is None else [a, read(call, right)]
    if not _are_finite(spec, *[one.tril() if is_lower else one.triu() for one in given]) or not a.numel():
        return
    factor: T | None = None
    if right is not None:
        b = given[1]
        factor, info = torch.linalg.cholesky_ex(b if is_lower else b.mH)
        _note(spec, torch.where(info > 0, info + a.shape[-1], 0))
        if spec.info.any():
            return
        triangle = a.tril(-1) if is_lower else a.triu(1).mH
        whole = triangle + triangle.mH + torch.diag_embed(torch.diagonal(a, dim1=-2, dim2=-1))
        left = torch.linalg.solve_triangular(factor, whole, upper=False)
        a = torch.linalg.solve_triangular(factor, left.mH, upper=False).mH
    out = getattr(spec, "v", None)
    if out is None:
        write(call, spec.w, torch.linalg.eigvalsh(a, UPLO=spec.UPLO.upper()))
        return
    values, vectors = torch.linalg.eigh(a, UPLO=spec.UPLO.upper())
    if factor is not None:
        vectors = torch.linalg.solve_triangular(factor.mH, vectors, upper=True)
    write(call, spec.w, values)
    write(call, out, vectors)


@kernel("linalg.eig", "linalg.eigvals", backend=BACKEND, dtypes=_OF)
def eig(spec: Any, call: Any) -> None:
    """Make eigenvalues of general matrices, and vectors if wanted."""
    call.status(spec.info)
    a, out = read(call, spec.a), getattr(spec, "v", None)
    if not _are_finite(spec, a) or not a.numel():
        return
    if out is None:
        write(call, spec.w, torch.linalg.eigvals(a))
        return
    values, vectors = torch.linalg.eig(a)
    write(call, spec.w, values)
    write(call, out, vectors)
