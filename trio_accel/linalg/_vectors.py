"""Operations on vectors, and on a matrix and vectors: the first and the second level of the BLAS.

To the second level a vector is a matrix of one column: its operations are some of the third one, for which
the backends call the routine of the second one where there is one.
"""

from __future__ import annotations

from typing import Final

from ..backends.base.contract.ops import ArraySpec, OperationSpec, Transpose, column
from ..backends.base.kit.checks import INEXACT
from ..devices import AccelRef, Operand, operation, operation_like
from ..expressions import Out
from ._actor import BlasActor
from ._matrices import gemm, symm, syr2k, syrk, trmm, trsm

__all__ = [
    "Asum", "Axpy", "Dot", "Gemv", "Ger", "Iamax", "Nrm2", "Rot", "Scal", "Swap", "Symv", "Syr", "Syr2",
    "Trmv", "Trsv", "asum", "axpy", "dot", "gemv", "ger", "iamax", "nrm2", "rot", "scal", "swap", "symv",
    "syr", "syr2", "trmv", "trsv",
]  # fmt: skip


@operation("x(*), y(*) -> y", actor=BlasActor)
async def axpy(alpha: complex, x: Operand, y: AccelRef) -> AccelRef:
    """Add a multiple of one array to another in place: ``y = alpha * x + y`` (BLAS ``axpy``).

    Args:
        alpha: Factor; real unless the arrays are complex.
        x: Array of any shape and a floating or complex dtype.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The reference `y`.
    """
    ...


@operation("x(*) -> x", actor=BlasActor)
async def scal(alpha: complex, x: AccelRef) -> AccelRef:
    """Multiply an array by a number in place: ``x = alpha * x`` (BLAS ``scal``).

    Args:
        alpha: Factor; real unless the array is complex.
        x: Array of any shape and a floating or complex dtype, which is changed.

    Returns:
        The reference `x`.
    """
    ...


@operation("x(n), y(n) -> out()", actor=BlasActor)
async def dot(x: Operand, y: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum of the products of two vectors, without conjugation (BLAS ``dot``, ``dotu``).

    Args:
        x: Vector of shape (n,).
        y: Vector of the same shape and dtype.
        out: Array without axes to write to; by default a new one.

    Returns:
        An array of shape () on the device; ``await result.item()`` is the number.
    """
    ...


@operation("x(n) -> out: real()", actor=BlasActor, dtypes=INEXACT)
async def nrm2(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Euclidean norm of a vector, without needless overflow or underflow (BLAS ``nrm2``).

    Args:
        x: Vector of shape (n,) and a floating or complex dtype.
        out: Array without axes, of the real dtype, to write to; by default a new one.

    Returns:
        A real array of shape () on the device; ``await result.item()`` is the number.
    """
    ...


@operation_like(nrm2, "x(n) -> out: real()", dtypes=INEXACT)
def asum() -> None:
    """Sum of ``abs(x.real) + abs(x.imag)`` over a vector (BLAS ``asum``).

    Arguments and result are those of `nrm2`; `x` is of float32, float64, complex64 or complex128.
    """


@operation_like(nrm2, "x(n>0) -> out: int64()", dtypes=INEXACT)
def iamax() -> None:
    """Index of the first element with the largest ``abs(x.real) + abs(x.imag)``, from 0 (BLAS ``iamax``).

    Arguments and result are those of `asum`, but `x` must not be empty, and the result is of int64. Where `x`
    holds a NaN, it is any index.
    """


@operation("x(*), y(*) -> x, y", actor=BlasActor)
async def swap(x: AccelRef, y: AccelRef) -> tuple[AccelRef, AccelRef]:
    """Exchange the elements of two arrays (BLAS ``swap``).

    Args:
        x: Array of any shape and dtype, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The references `x` and `y`.
    """
    ...


@operation("x(*), y(*) -> x, y", actor=BlasActor)
async def rot(x: AccelRef, y: AccelRef, c: float, s: complex) -> tuple[AccelRef, AccelRef]:
    """Rotate points in a plane: ``x, y = c * x + s * y, c * y - conj(s) * x`` in place (BLAS ``rot``).

    Args:
        x: Array of any shape, of float32, float64, complex64 or complex128, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.
        c: Cosine of the angle, or any real number.
        s: Sine of the angle, or any number; real unless the arrays are complex.

    Returns:
        The references `x` and `y`.
    """
    ...


def _gemv(
    alpha: complex, beta: complex, trans: Transpose, a: ArraySpec, x: ArraySpec, y: ArraySpec
) -> OperationSpec:
    return gemm.spec(alpha, a, column(x), beta, trans, "N", column(y))


def _symv(
    lower: bool, hermitian: bool, alpha: complex, beta: complex, a: ArraySpec, x: ArraySpec, y: ArraySpec
) -> OperationSpec:
    return symm.spec(alpha, a, column(x), beta, "L", lower, hermitian, column(y))


def _ger(alpha: complex, x: ArraySpec, y: ArraySpec, a: ArraySpec, conjugate: bool) -> OperationSpec:
    return gemm.spec(alpha, column(x), column(y), 1.0, "N", "C" if conjugate else "T", a)


def _syr(alpha: complex, x: ArraySpec, a: ArraySpec, lower: bool, hermitian: bool) -> OperationSpec:
    return syrk.spec(alpha, column(x), 1.0, a, "N", lower, hermitian)


def _syr2(
    alpha: complex, x: ArraySpec, y: ArraySpec, a: ArraySpec, lower: bool, hermitian: bool
) -> OperationSpec:
    return syr2k.spec(alpha, column(x), column(y), 1.0, a, "N", lower, hermitian)


def _trmv(
    lower: bool, trans: Transpose, unit_diagonal: bool, a: ArraySpec, x: ArraySpec, out: ArraySpec
) -> OperationSpec:
    return trmm.spec(1.0, a, column(x), "L", trans, lower, unit_diagonal, column(out))


def _trsv(
    lower: bool, trans: Transpose, unit_diagonal: bool, a: ArraySpec, x: ArraySpec, out: ArraySpec
) -> OperationSpec:
    return trsm.spec(1.0, a, column(x), "L", trans, lower, unit_diagonal, column(out))


@operation("a^trans(m, n), x(n) -> y(m)", actor=BlasActor, spec=_gemv)
async def gemv(
    alpha: complex, a: Operand, x: Operand, beta: complex = 0.0, y: Out = None, trans: Transpose = "N"
) -> AccelRef:
    """``alpha * op(a) @ x + beta * y`` (BLAS ``gemv``).

    Args:
        alpha: Factor of the product; real unless the arrays are complex.
        a: Matrix with op(a) of shape (m, n), of a floating or complex dtype.
        x: Vector of shape (n,), of the same dtype.
        beta: Factor of `y`; where it is 0, `y` is only written.
        y: Vector of shape (m,), which is changed; by default a new one, with a `beta` of 0.
        trans: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.

    Returns:
        The reference `y`, or a new one.
    """
    ...


@operation("a(n, n), x(n) -> y(n)", actor=BlasActor, spec=_symv)
async def symv(
    alpha: complex,
    a: Operand,
    x: Operand,
    beta: complex = 0.0,
    y: AccelRef | None = None,
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``alpha * a @ x + beta * y`` for a symmetric or Hermitian ``a`` (BLAS ``symv``, ``hemv``).

    Arguments and result are those of `symm`, but `x` and `y` are vectors of shape (n,).
    """
    ...


@operation("x(m), y(n), a(m, n) -> a", actor=BlasActor, spec=_ger)
async def ger(alpha: complex, x: Operand, y: Operand, a: AccelRef, conjugate: bool = False) -> AccelRef:
    """``a = alpha * outer(x, y) + a`` in place (BLAS ``ger``, ``geru``, ``gerc``).

    Args:
        alpha: Factor; real unless the arrays are complex.
        x: Vector of shape (m,), of a floating or complex dtype.
        y: Vector of shape (n,), of the same dtype.
        a: Matrix of shape (m, n), which is changed.
        conjugate: Whether `y` is conjugated.

    Returns:
        The reference `a`.
    """
    ...


@operation("x(n), a(n, n) -> a", actor=BlasActor, spec=_syr)
async def syr(
    alpha: complex, x: Operand, a: AccelRef, lower: bool = False, hermitian: bool = False
) -> AccelRef:
    """``a = alpha * outer(x, x) + a`` in one triangle of ``a`` (BLAS ``syr``, ``her``).

    Args:
        alpha: Factor; real unless the arrays are complex and `a` is symmetric.
        x: Vector of shape (n,), of float32, float64, complex64 or complex128.
        a: Matrix of shape (n, n), of which one triangle is changed.
        lower: Whether it is the lower triangle, instead of the upper one.
        hermitian: Whether the second `x` is conjugated; then the diagonal of `a` becomes real.

    Returns:
        The reference `a`.
    """
    ...


@operation("x(n), y(n), a(n, n) -> a", actor=BlasActor, spec=_syr2)
async def syr2(
    alpha: complex, x: Operand, y: Operand, a: AccelRef, lower: bool = False, hermitian: bool = False
) -> AccelRef:
    """``a = alpha * outer(x, y) + alpha * outer(y, x) + a`` in one triangle (BLAS ``syr2``, ``her2``).

    Arguments and result are those of `syr`, but `y` has the shape and dtype of `x`. With `hermitian`, the
    second product has the conjugate of `alpha`, which may be complex.
    """
    ...


@operation("a(n, n), x(n) -> out(n)", actor=BlasActor, spec=_trmv, alias={"out": "x"})
async def trmv(
    a: Operand,
    x: Operand,
    trans: Transpose = "N",
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """``op(a) @ x`` for a triangular ``a`` (BLAS ``trmv``).

    Arguments and result are those of `trmm`, but `a` is one matrix, and `x` a vector of shape (n,).
    """
    ...


@operation_like(trmv, "a(n, n), x(n) -> out(n)", spec=_trsv, alias={"out": "x"})
def trsv() -> None:
    """The solution of ``op(a) @ result = x`` for a triangular ``a`` (BLAS ``trsv``).

    Arguments are those of `trmv`. A zero on the diagonal makes infinities and NaN; it is no error.
    """


Axpy: Final = axpy.message
Scal: Final = scal.message
Dot: Final = dot.message
Nrm2: Final = nrm2.message
Asum: Final = asum.message
Iamax: Final = iamax.message
Swap: Final = swap.message
Rot: Final = rot.message
Gemv: Final = gemv.message
Symv: Final = symv.message
Ger: Final = ger.message
Syr: Final = syr.message
Syr2: Final = syr2.message
Trmv: Final = trmv.message
Trsv: Final = trsv.message
