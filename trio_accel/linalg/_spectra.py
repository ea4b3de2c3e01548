"""Singular values and eigenvalues."""

from __future__ import annotations

from typing import Literal, overload

import attrs

from ..backends.base.ops import ArraySpec, EighSpec, EigSpec, SvdSpec, Triangle, complex_of, real_of
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import SolverOperation
from ._checks import matrices, same_dtype, status_of
from ._results import EighResult, EigResult, SVDResult

__all__ = [
    "Eig", "Eigh", "Eigvals", "Eigvalsh", "Svd", "eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals",
]  # fmt: skip


@attrs.define(eq=False, on_setattr=None)
class Svd(SolverOperation["SVDResult | AccelRef"]):
    """Singular values of matrices, with vectors or without; see `svd`."""

    a: Operand
    full_matrices: bool = True
    compute_uv: bool = True

    def plan(self, planner: Planner) -> Planned[SVDResult | AccelRef]:
        """Check shape and dtype, and name the results."""
        a = matrices(planner, "a", self.a)
        *stack, m, n = a.shape
        k, info = min(m, n), status_of(planner, a)
        s = planner.output((*stack, k), real_of(a.dtype))
        if not self.compute_uv:
            return Planned(SvdSpec(a, None, s.spec, None, info), s)
        columns, rows = (m, n) if self.full_matrices else (k, k)
        u = planner.output((*stack, m, columns), a.dtype)
        vh = planner.output((*stack, rows, n), a.dtype)
        return Planned(SvdSpec(a, u.spec, s.spec, vh.spec, info), SVDResult(u, s, vh))


@attrs.define(eq=False, on_setattr=None)
class Eigh(SolverOperation[EighResult]):
    """Eigenvalues and eigenvectors of Hermitian matrices, or of pairs of them; see `eigh`."""

    a: Operand
    UPLO: Triangle = "L"
    b: Operand | None = None

    def plan(self, planner: Planner) -> Planned[EighResult]:
        """Check shapes, dtypes and letter, and name the results."""
        spec, w, v = _plan_eigh(planner, self, has_vectors=True)
        assert v is not None
        return Planned(spec, EighResult(w, v))


@attrs.define(eq=False, on_setattr=None)
class Eigvalsh(SolverOperation[AccelRef]):
    """Eigenvalues of Hermitian matrices, or of pairs of them; see `eigvalsh`."""

    a: Operand
    UPLO: Triangle = "L"
    b: Operand | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes, dtypes and letter, and name the eigenvalues."""
        spec, w, _ = _plan_eigh(planner, self, has_vectors=False)
        return Planned(spec, w)


@attrs.define(eq=False, on_setattr=None)
class Eig(SolverOperation[EigResult]):
    """Eigenvalues and eigenvectors of square matrices; see `eig`."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[EigResult]:
        """Check shape and dtype, and name the results."""
        a = matrices(planner, "a", self.a, is_square=True)
        w = planner.output(a.shape[:-1], complex_of(a.dtype))
        v = planner.output(a.shape, complex_of(a.dtype))
        return Planned(EigSpec(a, w.spec, v.spec, status_of(planner, a)), EigResult(w, v))


@attrs.define(eq=False, on_setattr=None)
class Eigvals(SolverOperation[AccelRef]):
    """Eigenvalues of square matrices; see `eigvals`."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the eigenvalues."""
        a = matrices(planner, "a", self.a, is_square=True)
        w = planner.output(a.shape[:-1], complex_of(a.dtype))
        return Planned(EigSpec(a, w.spec, None, status_of(planner, a)), w)


def _plan_eigh(
    planner: Planner, asked: Eigh | Eigvalsh, *, has_vectors: bool
) -> tuple[EighSpec, AccelRef, AccelRef | None]:
    """The specification of both, with the values, and the vectors if wanted."""
    if asked.UPLO not in ("L", "l", "U", "u"):
        raise ValueError(f"{planner.name}: UPLO argument must be 'L' or 'U', got {asked.UPLO!r}")
    a = matrices(planner, "a", asked.a, is_square=True)
    b: ArraySpec | None = None
    if asked.b is not None:
        b = matrices(planner, "b", asked.b, is_square=True)
        same_dtype(planner.name, a=a, b=b)
        if a.shape != b.shape:
            raise ValueError(f"{planner.name}: a and b must have one shape, got {a.shape} and {b.shape}")
    w = planner.output(a.shape[:-1], real_of(a.dtype))
    v = planner.output(a.shape, a.dtype) if has_vectors else None
    triangle: Triangle = "L" if asked.UPLO in "Ll" else "U"
    spec = EighSpec(triangle, a, w.spec, None if v is None else v.spec, status_of(planner, a), b)
    return spec, w, v


@overload
async def svd(a: Operand, full_matrices: bool = True, compute_uv: Literal[True] = True) -> SVDResult: ...
@overload
async def svd(a: Operand, full_matrices: bool = True, *, compute_uv: Literal[False]) -> AccelRef: ...
@overload
async def svd(a: Operand, full_matrices: bool, compute_uv: Literal[False]) -> AccelRef: ...
async def svd(a: Operand, full_matrices: bool = True, compute_uv: bool = True) -> SVDResult | AccelRef:
    """Singular value decomposition, as `numpy.linalg.svd` (LAPACK ``gesdd``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128; k is min(m, n).
        full_matrices: Whether U has shape (..., m, m) and Vh (..., n, n), instead of (..., m, k) and
            (..., k, n).
        compute_uv: Whether to compute U and Vh.

    Returns:
        U, S and Vh such that ``a = (U * S[..., None, :]) @ Vh``, where they are not full; or S alone. S has
        shape (..., k) and the real dtype.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity, or its iteration did not converge;
            `LinAlgError.index` says which one.
    """
    return await device_of("svd", a).ask(Svd(a, full_matrices, compute_uv))


async def svdvals(x: Operand, /) -> AccelRef:
    """Singular values of matrices, as `numpy.linalg.svdvals`: `svd` without vectors, which raises the same.

    Args:
        x: Array of shape (..., m, n), of float32, float64, complex64 or complex128.

    Returns:
        The singular values, of shape (..., min(m, n)) and the real dtype, the largest first.
    """
    return await svd(x, compute_uv=False)


async def eigh(
    a: Operand,
    UPLO: Triangle = "L",  # noqa: N803  # NumPy's name
    *,
    b: Operand | None = None,
) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices, as `numpy.linalg.eigh` (LAPACK ``syevd``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        UPLO: Which triangle is read, the lower or the upper one; the matrices count as Hermitian.
        b: Positive definite matrices, of the shape and dtype of `a`: then the results are those of
            ``a @ v = b @ v * w``, as `scipy.linalg.eigh` finds them (LAPACK ``sygvd``).

    Returns:
        The eigenvalues, of shape (..., n) and the real dtype, the smallest first; and the eigenvectors, as
        the columns of matrices of the shape of `a`. Their length is 1; with `b`, ``v^H @ b @ v`` is.

    Raises:
        LinAlgError: That triangle of a matrix holds a NaN or an infinity, a matrix of `b` is not positive
            definite, or an iteration did not converge; `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend does not take `b`.
    """
    return await device_of("eigh", a, b).ask(Eigh(a, UPLO, b))


async def eigvalsh(
    a: Operand,
    UPLO: Triangle = "L",  # noqa: N803  # NumPy's name
    *,
    b: Operand | None = None,
) -> AccelRef:
    """Eigenvalues of Hermitian matrices, as `numpy.linalg.eigvalsh` (LAPACK ``syevd``, ``sygvd``).

    Those of `eigh`, with its arguments and errors, in less time.
    """
    return await device_of("eigvalsh", a, b).ask(Eigvalsh(a, UPLO, b))


async def eig(a: Operand) -> EigResult:
    """Eigenvalues and right eigenvectors of square matrices, as `numpy.linalg.eig` (LAPACK ``geev``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The eigenvalues, of shape (..., n), in no order; and the eigenvectors, as columns of length 1 of
        matrices of the shape of `a`. Both are complex, also where all imaginary parts are zero: a dtype is
        known before the values are.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity, or its iteration did not converge;
            `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    return await device_of("eig", a).ask(Eig(a))


async def eigvals(a: Operand) -> AccelRef:
    """Eigenvalues of square matrices, as `numpy.linalg.eigvals` (LAPACK ``geev``).

    Those of `eig`, with its argument and errors, in less time.
    """
    return await device_of("eigvals", a).ask(Eigvals(a))
