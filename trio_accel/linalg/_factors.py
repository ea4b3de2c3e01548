"""Triangular and orthogonal factors of matrices."""

from __future__ import annotations

from typing import ClassVar, Literal, overload

import attrs

from ..backends.base import DType
from ..backends.base.ops import CholeskySpec, LuSpec, QrSpec
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import SolverActor
from ._checks import matrices, status_of
from ._results import LUResult, QRResult

__all__ = ["Cholesky", "Lu", "Qr", "cholesky", "lu", "qr"]

_PATH = "trio_accel.linalg:SolverActor"


@attrs.define(eq=False, on_setattr=None)
class Cholesky(Operation[SolverActor, AccelRef]):
    """The triangular factor of positive definite matrices; see `cholesky`."""

    a: Operand
    upper: bool = False
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the factor."""
        a = matrices(planner, "a", self.a, is_square=True)
        out = planner.output(a.shape, a.dtype)
        return Planned(CholeskySpec(bool(self.upper), a, out.spec, status_of(planner, a)), out)


@attrs.define(eq=False, on_setattr=None)
class Lu(Operation[SolverActor, LUResult]):
    """Both triangular factors of matrices, and their row exchanges; see `lu`."""

    a: Operand
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[LUResult]:
        """Check shape and dtype, and name the factors."""
        a = matrices(planner, "a", self.a)
        lu = planner.output(a.shape, a.dtype)
        piv = planner.output((*a.shape[:-2], min(a.shape[-2:])), DType.int32)
        return Planned(LuSpec(a, lu.spec, piv.spec, status_of(planner, a)), LUResult(lu, piv))


@attrs.define(eq=False, on_setattr=None)
class Qr(Operation[SolverActor, "QRResult | AccelRef"]):
    """Orthogonal and triangular factors of matrices; see `qr`."""

    a: Operand
    mode: Literal["reduced", "complete", "r"] = "reduced"
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[QRResult | AccelRef]:
        """Check shape, dtype and mode, and name the factors."""
        if self.mode not in ("reduced", "complete", "r"):
            raise ValueError(f"{planner.name}: mode must be 'reduced', 'complete' or 'r', got {self.mode!r}")
        a = matrices(planner, "a", self.a)
        *stack, m, n = a.shape
        k = m if self.mode == "complete" else min(m, n)
        q = None if self.mode == "r" else planner.output((*stack, m, k), a.dtype)
        r = planner.output((*stack, k, n), a.dtype)
        spec = QrSpec(a, None if q is None else q.spec, r.spec)
        return Planned(spec, r if q is None else QRResult(q, r))


async def cholesky(a: Operand, *, upper: bool = False) -> AccelRef:
    """Triangular factor of positive definite matrices, as `numpy.linalg.cholesky` (LAPACK ``potrf``).

    Only the lower triangle of `a` is read, or the upper one with `upper`; the matrices count as Hermitian.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        upper: Whether to make ``U`` of ``a = U^H @ U``, instead of ``L`` of ``a = L @ L^H``.

    Returns:
        The factor, of the shape and dtype of `a`, with zeros in its other triangle.

    Raises:
        LinAlgError: A matrix is not positive definite, or holds a NaN or an infinity; `LinAlgError.index`
            says which one. It has `code` for the order of the leading minor that is not positive.
        numpy.linalg.LinAlgError: Not a stack of square matrices.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("cholesky", a).ask(Cholesky(a, upper))


async def lu(a: Operand) -> LUResult:
    """Triangular factors with row exchanges, as `scipy.linalg.lu_factor` (LAPACK ``getrf``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128.

    Returns:
        ``lu`` of the shape and dtype of `a`: ``U`` in the upper triangle and ``L`` below, without its
        diagonal of ones. ``piv`` of shape (..., min(m, n)) and int32, from 0: row i was exchanged with row
        ``piv[i]``. `lu_solve` takes both.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. SciPy only warns.
        numpy.linalg.LinAlgError: Fewer than two axes.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("lu", a).ask(Lu(a))


@overload
async def qr(a: Operand, mode: Literal["reduced", "complete"] = "reduced") -> QRResult: ...
@overload
async def qr(a: Operand, mode: Literal["r"]) -> AccelRef: ...
async def qr(a: Operand, mode: Literal["reduced", "complete", "r"] = "reduced") -> QRResult | AccelRef:
    """Orthogonal and triangular factors, as `numpy.linalg.qr` (LAPACK ``geqrf`` and ``orgqr``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128; k is min(m, n).
        mode: ``"reduced"``: Q of shape (..., m, k) and R of shape (..., k, n). ``"complete"``: (..., m, m)
            and (..., m, n). ``"r"``: R of shape (..., k, n) alone.

    Returns:
        Q with orthonormal columns and R with zeros below its diagonal, such that ``a = Q @ R``; or R.

    Raises:
        numpy.linalg.LinAlgError: Fewer than two axes.
        ValueError: Another mode.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("qr", a).ask(Qr(a, mode))
