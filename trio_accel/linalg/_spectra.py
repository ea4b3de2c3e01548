"""Singular values, and eigenvalues of Hermitian matrices."""

from __future__ import annotations

from typing import ClassVar, Literal, overload

import attrs

from ..backends.base.ops import EighSpec, SvdSpec, Triangle, real_of
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import SolverActor
from ._checks import matrices, status_of
from ._results import EighResult, SVDResult

__all__ = ["Eigh", "Eigvalsh", "Svd", "eigh", "eigvalsh", "svd"]

_PATH = "trio_accel.linalg:SolverActor"


@attrs.define(eq=False, on_setattr=None)
class Svd(Operation[SolverActor, "SVDResult | AccelRef"]):
    """Singular values of matrices, with vectors or without; see `svd`."""

    a: Operand
    full_matrices: bool = True
    compute_uv: bool = True
    library: ClassVar[str] = _PATH

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
class Eigh(Operation[SolverActor, EighResult]):
    """Eigenvalues and eigenvectors of Hermitian matrices; see `eigh`."""

    a: Operand
    UPLO: Triangle = "L"
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[EighResult]:
        """Check shape, dtype and letter, and name the results."""
        a = matrices(planner, "a", self.a, is_square=True)
        w = planner.output(a.shape[:-1], real_of(a.dtype))
        v = planner.output(a.shape, a.dtype)
        spec = EighSpec(_triangle(planner, self.UPLO), a, w.spec, v.spec, status_of(planner, a))
        return Planned(spec, EighResult(w, v))


@attrs.define(eq=False, on_setattr=None)
class Eigvalsh(Operation[SolverActor, AccelRef]):
    """Eigenvalues of Hermitian matrices; see `eigvalsh`."""

    a: Operand
    UPLO: Triangle = "L"
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape, dtype and letter, and name the eigenvalues."""
        a = matrices(planner, "a", self.a, is_square=True)
        w = planner.output(a.shape[:-1], real_of(a.dtype))
        spec = EighSpec(_triangle(planner, self.UPLO), a, w.spec, None, status_of(planner, a))
        return Planned(spec, w)


def _triangle(planner: Planner, letter: object) -> Triangle:
    found: dict[object, Triangle] = {"L": "L", "l": "L", "U": "U", "u": "U"}
    if not isinstance(letter, str) or letter not in found:
        raise ValueError(f"{planner.name}: UPLO argument must be 'L' or 'U', got {letter!r}")
    return found[letter]


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
        numpy.linalg.LinAlgError: Fewer than two axes.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("svd", a).ask(Svd(a, full_matrices, compute_uv))


async def eigh(a: Operand, UPLO: Triangle = "L") -> EighResult:  # noqa: N803  # NumPy's name
    """Eigenvalues and eigenvectors of Hermitian matrices, as `numpy.linalg.eigh` (LAPACK ``syevd``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        UPLO: Which triangle is read, the lower or the upper one; the matrices count as Hermitian.

    Returns:
        The eigenvalues, of shape (..., n) and the real dtype, the smallest first; and the eigenvectors, as
        the columns of matrices of the shape of `a`.

    Raises:
        LinAlgError: That triangle of a matrix holds a NaN or an infinity, or its iteration did not
            converge; `LinAlgError.index` says which one.
        numpy.linalg.LinAlgError: Not a stack of square matrices.
        ValueError: Another letter.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("eigh", a).ask(Eigh(a, UPLO))


async def eigvalsh(a: Operand, UPLO: Triangle = "L") -> AccelRef:  # noqa: N803  # NumPy's name
    """Eigenvalues of Hermitian matrices, as `numpy.linalg.eigvalsh` (LAPACK ``syevd``).

    Takes less time than `eigh`, and raises the same.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        UPLO: Which triangle is read, the lower or the upper one; the matrices count as Hermitian.

    Returns:
        The eigenvalues, of shape (..., n) and the real dtype, the smallest first.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("eigvalsh", a).ask(Eigvalsh(a, UPLO))
