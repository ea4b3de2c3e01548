"""Operations with a matrix and vectors: the second level of the BLAS.

A vector is a matrix of one column: these are operations of the third level, for which the backends call the
routine of the second one where there is one.
"""

from __future__ import annotations

from typing import Final

from ..backends.base.ops import ArraySpec, OperationSpec, Transpose, column
from ..devices import AccelRef, Operand, operation
from ._actor import BlasActor
from ._matrices import symm, syr2k, syrk, trmm, trsm
from ._products import gemm

__all__ = [
    "Gemv", "Ger", "Symv", "Syr", "Syr2", "Trmv", "Trsv", "gemv", "ger", "symv", "syr", "syr2", "trmv",
    "trsv",
]  # fmt: skip


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
    alpha: complex,
    a: Operand,
    x: Operand,
    beta: complex = 0.0,
    y: AccelRef | None = None,
    trans: Transpose = "N",
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


@operation("a(n, n), x(n) -> out(n)", actor=BlasActor, spec=_trsv, alias={"out": "x"})
async def trsv(
    a: Operand,
    x: Operand,
    trans: Transpose = "N",
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """The solution of ``op(a) @ result = x`` for a triangular ``a`` (BLAS ``trsv``).

    Arguments are those of `trmv`. A zero on the diagonal makes infinities and NaN; it is no error.
    """
    ...


Gemv: Final = gemv.message
Symv: Final = symv.message
Ger: Final = ger.message
Syr: Final = syr.message
Syr2: Final = syr2.message
Trmv: Final = trmv.message
Trsv: Final = trsv.message
