"""Triangular and orthogonal factors of matrices, and determinants, which come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, overload

from ..backends.base.checks import NATIVE
from ..devices import AccelRef, Operand, Operation, message_of, operation
from ._actor import SolverActor
from ._results import LUResult, QRResult, SlogdetResult

__all__ = [
    "Cholesky", "Det", "Lu", "Qr", "Slogdet", "cholesky", "det", "lu", "qr", "slogdet",
]  # fmt: skip

SINGULAR = "is singular: its pivot {} is zero"


@operation(
    "a(..., n, n) -> out(..., n, n)",
    actor=SolverActor,
    dtypes=NATIVE,
    # The word is the order, from 1, of the first leading minor that is not positive, or holds a NaN.
    status="is not positive definite: its leading minor of order {} is not positive",
)
async def cholesky(a: Operand, *, upper: bool = False) -> AccelRef:
    """Triangular factor of positive definite matrices, as `numpy.linalg.cholesky` (LAPACK ``potrf``).

    Only the lower triangle of `a` is read, or the upper one with `upper`; the matrices count as Hermitian.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        upper: Whether to make ``U`` of ``a = U^H @ U``, instead of ``L`` of ``a = L @ L^H``.

    Returns:
        The factor, of the shape and dtype of `a`, with a positive diagonal and zeros in its other triangle.

    Raises:
        LinAlgError: A matrix is not positive definite, or holds a NaN or an infinity; `LinAlgError.index`
            says which one. It has `code` for the order of the leading minor that is not positive.
    """
    ...


@operation(
    "a(..., m, n) -> lu(..., m, n), piv: int32(..., min(m, n))",
    actor=SolverActor,
    dtypes=NATIVE,
    status=SINGULAR,
    reply=LUResult,
)
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
    ...


@overload
async def qr(a: Operand, mode: Literal["reduced", "complete"] = "reduced") -> QRResult: ...
@overload
async def qr(a: Operand, mode: Literal["r"]) -> AccelRef: ...
@operation(
    {
        "reduced": "a(..., m, n) -> q(..., m, min(m, n)), r(..., min(m, n), n)",
        "complete": "a(..., m, n) -> q(..., m, m), r(..., m, n)",
        "r": "a(..., m, n) -> r(..., min(m, n), n)",
    },
    by="mode",
    actor=SolverActor,
    dtypes=NATIVE,
    reply=QRResult,
)
async def qr(a: Operand, mode: Literal["reduced", "complete", "r"] = "reduced") -> QRResult | AccelRef:
    """Orthogonal and triangular factors, as `numpy.linalg.qr` (LAPACK ``geqrf`` and ``orgqr``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128; k is min(m, n).
        mode: ``"reduced"``: Q of shape (..., m, k) and R of shape (..., k, n). ``"complete"``: (..., m, m)
            and (..., m, n). ``"r"``: R of shape (..., k, n) alone.

    Returns:
        Q with orthonormal columns and R with zeros below its diagonal, such that ``a = Q @ R``; or R.
    """
    ...


@operation("a(..., n, n) -> det(...)", actor=SolverActor, dtypes=NATIVE)
async def det(a: Operand) -> AccelRef:
    """Determinant of matrices, as `numpy.linalg.det` (LAPACK ``getrf``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The determinants, of shape (...) and the dtype of `a`: 0 of singular matrices, 1 of empty ones.
    """
    ...


@operation(
    "a(..., n, n) -> sign(...), logabsdet: real(...)",
    actor=SolverActor,
    dtypes=NATIVE,
    reply=SlogdetResult,
)
async def slogdet(a: Operand) -> SlogdetResult:
    """Sign and logarithm of the determinant, as `numpy.linalg.slogdet` (LAPACK ``getrf``).

    Of large matrices the determinant itself is often too large or too small for its dtype.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The sign, of shape (...) and the dtype of `a`, and the logarithm of the absolute value, of the real
        dtype: the determinant is ``sign * exp(logabsdet)``. Of a singular matrix 0, and minus infinity.
    """
    ...


Cholesky: Final = cholesky.message
Det: Final = det.message
Lu: Final = lu.message
Slogdet: Final = slogdet.message
Qr: Callable[..., Operation[SolverActor, QRResult | AccelRef]] = message_of(qr)
