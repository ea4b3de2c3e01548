"""Triangular and orthogonal factors of matrices, and determinants, which come of them."""

from __future__ import annotations

from typing import Literal, overload

import attrs

from ..backends.base import DType
from ..backends.base.ops import CholeskySpec, DetSpec, LuSpec, QrSpec, real_of
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import SolverOperation
from ._checks import matrices, status_of
from ._results import LUResult, QRResult, SlogdetResult

__all__ = ["Cholesky", "Det", "Lu", "Qr", "Slogdet", "cholesky", "det", "lu", "qr", "slogdet"]


@attrs.define(eq=False, on_setattr=None)
class Cholesky(SolverOperation[AccelRef]):
    """The triangular factor of positive definite matrices; see `cholesky`."""

    a: Operand
    upper: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the factor."""
        a = matrices(planner, "a", self.a, is_square=True)
        out = planner.output(a.shape, a.dtype)
        return Planned(CholeskySpec(bool(self.upper), a, out.spec, status_of(planner, a)), out)


@attrs.define(eq=False, on_setattr=None)
class Lu(SolverOperation[LUResult]):
    """Both triangular factors of matrices, and their row exchanges; see `lu`."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[LUResult]:
        """Check shape and dtype, and name the factors."""
        a = matrices(planner, "a", self.a)
        lu = planner.output(a.shape, a.dtype)
        piv = planner.output((*a.shape[:-2], min(a.shape[-2:])), DType.int32)
        return Planned(LuSpec(a, lu.spec, piv.spec, status_of(planner, a)), LUResult(lu, piv))


@attrs.define(eq=False, on_setattr=None)
class Qr(SolverOperation["QRResult | AccelRef"]):
    """Orthogonal and triangular factors of matrices; see `qr`."""

    a: Operand
    mode: Literal["reduced", "complete", "r"] = "reduced"

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


@attrs.define(eq=False, on_setattr=None)
class Det(SolverOperation[AccelRef]):
    """The determinant of matrices; see `det`."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the determinant."""
        a = matrices(planner, "a", self.a, is_square=True)
        out = planner.output(a.shape[:-2], a.dtype)
        return Planned(DetSpec(a, out.spec, None, None), out)


@attrs.define(eq=False, on_setattr=None)
class Slogdet(SolverOperation[SlogdetResult]):
    """The sign and the logarithm of the determinant of matrices; see `slogdet`."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[SlogdetResult]:
        """Check shape and dtype, and name the results."""
        a = matrices(planner, "a", self.a, is_square=True)
        sign = planner.output(a.shape[:-2], a.dtype)
        logabsdet = planner.output(a.shape[:-2], real_of(a.dtype))
        return Planned(DetSpec(a, None, sign.spec, logabsdet.spec), SlogdetResult(sign, logabsdet))


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
    """
    return await device_of("qr", a).ask(Qr(a, mode))


async def det(a: Operand) -> AccelRef:
    """Determinant of matrices, as `numpy.linalg.det` (LAPACK ``getrf``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The determinants, of shape (...) and the dtype of `a`: 0 of singular matrices, 1 of empty ones.
    """
    return await device_of("det", a).ask(Det(a))


async def slogdet(a: Operand) -> SlogdetResult:
    """Sign and logarithm of the determinant, as `numpy.linalg.slogdet` (LAPACK ``getrf``).

    Of large matrices the determinant itself is often too large or too small for its dtype.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The sign, of shape (...) and the dtype of `a`, and the logarithm of the absolute value, of the real
        dtype: the determinant is ``sign * exp(logabsdet)``. Of a singular matrix 0, and minus infinity.
    """
    return await device_of("slogdet", a).ask(Slogdet(a))
