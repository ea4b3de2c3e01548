"""Counterparts of PyTorch's functions of matrices, and of its transforms."""

# ruff: noqa: A002, PLR0917  # the names and the order of PyTorch's arguments

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from opinfo_base import Function, a, axes, f, host, m, need

# Matrices.


def logdet(x: Any) -> Any:
    sign, logarithm = m.slogdet(x)
    if "complex" in str(x.dtype):
        return a.log(sign) + logarithm
    return a.where(sign > 0, logarithm, a.where(sign == 0, -np.inf, np.nan))


def _is_vector(x: Any, b: Any) -> bool:
    return b.ndim == 1 or (x.ndim - 1 == b.ndim and b.shape == x.shape[:-1])


def solve(x: Any, b: Any, left: bool = True) -> Any:
    if _is_vector(x, b):
        made = m.solve(x if left else x.mT, b[..., None])
        return made[..., 0]
    return m.solve(x, b) if left else m.solve(x.mT, b.mT).mT


def solve_triangular(x: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    if left:
        return m.solve_triangular(x, b, lower=not upper, unit_diagonal=unitriangular)
    return m.solve_triangular(x.mT, b.mT, lower=upper, unit_diagonal=unitriangular).mT


def triangular_solve(
    b: Any, x: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    made = m.solve_triangular(x, b, trans=int(transpose), lower=not upper, unit_diagonal=unitriangular)
    return made, None


def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    return m.cho_solve((factor, not upper), b)


def cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    eye = np.eye(factor.shape[-1], dtype=str(factor.dtype))
    return m.cho_solve((factor, not upper), eye)


def lu_factor(x: Any, pivot: bool = True, *rest: Any) -> Any:
    need(pivot, "factors without row exchanges")
    return m.lu(x)[0], None


def lu_factor_ex(x: Any, pivot: bool = True) -> Any:
    return *lu_factor(x, pivot), None


def lu_parts(x: Any, pivot: bool = True) -> Any:
    need(pivot, "factors without row exchanges")
    lu, rows, columns = m.lu(x)[0], *x.shape[-2:]
    k = min(rows, columns)
    lower = a.tril(lu[..., :, :k], k=-1) + np.eye(rows, k)
    return None, lower, a.triu(lu[..., :k, :])


def lu_solve(lu: Any, pivots: Any, b: Any, left: bool = True, adjoint: bool = False) -> Any:
    pivots = (np.asarray(host(pivots)) - 1).astype("int32")
    is_complex = "complex" in str(lu.dtype)
    if left:
        return m.lu_solve((lu, pivots), b, trans=(2 if is_complex else 1) if adjoint else 0)
    need(not (is_complex and adjoint), "the conjugate from the right")
    return m.lu_solve((lu, pivots), b.mT, trans=0 if adjoint else 1).mT


def eigh(x: Any, UPLO: str = "L") -> Any:  # noqa: N803
    w, v = m.eigh(x, UPLO)
    return w, a.abs(v)


def eigvalsh(x: Any, UPLO: str = "L") -> Any:  # noqa: N803
    return m.eigvalsh(x, UPLO)


def eig(x: Any) -> Any:
    w, v = m.eig(x)
    return w, a.abs(v)


def svd(x: Any, full_matrices: bool = True) -> Any:
    k = min(x.shape[-2:])
    u, s, vh = m.svd(x, full_matrices=full_matrices)
    if full_matrices:
        u, vh = u[..., :k], vh[..., :k, :]
    return a.abs(u), s, a.abs(vh)


def svd_some(x: Any, some: bool = True, compute_uv: bool = True) -> Any:
    need(compute_uv, "factors of zeros")
    u, s, vh = svd(x, not some)
    return u, s, vh.mT


def qr(x: Any, mode: str = "reduced") -> Any:
    made = m.qr(x, mode)
    if mode == "r":
        return None, a.abs(made)
    return a.abs(made[0]), a.abs(made[1])


def lstsq(x: Any, b: Any, driver: Any = None) -> Any:
    need(x.ndim == 2, "a stack of matrices")
    return m.lstsq(x, b)[0], None, None, None


def lstsq_oriented(x: Any, b: Any, driver: Any = None) -> Any:
    return lstsq(x, b, driver)[:2]


def pinv(x: Any, rcond: Any = None, hermitian: bool = False, rtol: Any = None, atol: Any = None) -> Any:
    need(atol is None, "an absolute tolerance")
    need(not hermitian, "a pseudo-inverse that reads one triangle")
    rtol = rtol if rcond is None else rcond
    return m.pinv(x, rtol=rtol if rtol is None else host(rtol))


def matrix_sqrth(x: Any) -> Any:
    made = m.sqrtm((x + a.conj(x.mT)) / 2)
    return made if "complex" in str(x.dtype) else a.real(made)


def matrix_rank(x: Any, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    need(atol is None and rtol is None and not hermitian, "other tolerances")
    return m.matrix_rank(x)


def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    over = axes(x, dim)
    return m.vector_norm(x, axis=over, ord=ord, keepdims=keepdim)


def matrix_norm(
    x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, dtype: Any = None
) -> Any:
    made = m.matrix_norm(a.moveaxis(x, tuple(dim), (-2, -1)), ord=ord)
    if not keepdim:
        return made
    sizes = list(x.shape)
    for k in dim:
        sizes[k] = 1
    return made.reshape(tuple(sizes))


def norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if ord is None:
        return vector_norm(x, 2, dim, keepdim)
    is_pair = (x.ndim == 2) if dim is None else isinstance(dim, Sequence) and len(dim) == 2
    if isinstance(ord, str) or is_pair:
        return matrix_norm(x, ord, (-2, -1) if dim is None else dim, keepdim)
    return vector_norm(x, ord, dim, keepdim)


def old_norm(x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if p == "nuc":
        return matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim)
    return vector_norm(x, 2 if p == "fro" else p, dim, keepdim)


def cdist(x: Any, y: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    return m.vector_norm(x[..., :, None, :] - y[..., None, :, :], axis=-1, ord=p)


def pdist(x: Any, p: float = 2.0) -> Any:
    i, j = np.triu_indices(x.shape[0], 1)
    return m.vector_norm(a.take(x, i, axis=0) - a.take(x, j, axis=0), axis=-1, ord=p)


def dist(x: Any, y: Any, p: float = 2.0) -> Any:
    return m.vector_norm(x - y, ord=p)


def vander(x: Any, N: int | None = None) -> Any:  # noqa: N803
    need(x.ndim == 1, "a stack of vectors")
    return a.vander(x, N, increasing=True)


def tensorinv(x: Any, ind: int = 2) -> Any:
    rows = math.prod(x.shape[:ind])
    return m.inv(a.reshape(x, (rows, -1))).reshape(x.shape[ind:] + x.shape[:ind])


def tensorsolve(x: Any, b: Any, dims: Any = None) -> Any:
    if dims is not None:
        x = a.moveaxis(x, tuple(dims), tuple(range(x.ndim - len(dims), x.ndim)))
    shape = x.shape[b.ndim :]
    return m.solve(a.reshape(x, (-1, math.prod(shape))), a.reshape(b, (-1,))).reshape(shape)


def multi_dot(xs: Any) -> Any:
    return m.multi_dot(list(xs))


# Transforms.


def transform(function: Function) -> Function:
    return lambda x, n=None, dim=-1, norm=None: function(x, n, dim, norm)


def transforms(function: Function, is_plane: bool) -> Function:
    def run(x: Any, s: Any = None, dim: Any = (-2, -1) if is_plane else None, norm: Any = None) -> Any:
        if isinstance(dim, int):
            dim = (dim,)
        if s is not None and dim is None:
            dim = tuple(range(-len(s), 0))
        return function(x, s, dim, norm)

    return run


def stft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: Any = None,
    return_complex: Any = None,
) -> Any:
    """Compose windows and transforms, because `ta.signal.stft` has SciPy's scale."""
    need(win_length in (None, n_fft) and not normalized, "windows of another length")
    hop = hop_length or n_fft // 4
    if center:
        x = a.pad(x, (*((0, 0),) * (x.ndim - 1), (n_fft // 2, n_fft // 2)), mode=pad_mode)
    frames = a.sliding_window_view(x, n_fft, axis=-1)[..., ::hop, :]
    frames = frames if window is None else frames * window
    is_half = onesided if onesided is not None else "complex" not in str(x.dtype)
    made = a.swapaxes(f.rfft(frames) if is_half else f.fft(frames), -1, -2)
    is_complex = return_complex if return_complex is not None else "complex" in str(x.dtype)
    return made if is_complex else a.stack([a.real(made), a.imag(made)], axis=-1)
