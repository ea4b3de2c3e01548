"""Operations with a matrix and vectors: the second level of the BLAS.

A vector is a matrix of one column: these are operations of the third level, for which the backends call the
routine of the second one where there is one.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import GemmSpec, SymmSpec, SyrkSpec, Transpose, TriangularSpec
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import BlasOperation
from ._checks import accumulated, column, factors, matrix, overwritten, same_dtype, updated, vector

__all__ = [
    "Gemv", "Ger", "Symv", "Syr", "Syr2", "Trmv", "Trsv", "gemv", "ger", "symv", "syr", "syr2", "trmv",
    "trsv",
]  # fmt: skip


@attrs.define(eq=False, on_setattr=None)
class Gemv(BlasOperation[AccelRef]):
    """The product of a matrix and a vector; see `gemv`."""

    alpha: complex
    a: Operand
    x: Operand
    beta: complex = 0.0
    y: AccelRef | None = None
    trans: Transpose = "N"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands, and name the result."""
        a, x = matrix(planner, self.a), planner.read("x", self.x)
        rows, columns = a.shape if self.trans == "N" else a.shape[::-1]
        vector(planner.name, "x", x, columns)
        ref, y = accumulated(planner, "y", self.y, self.beta, (rows,), a=a, x=x)
        numbers = factors(planner, self.alpha, self.beta, y.dtype)
        return Planned(GemmSpec(*numbers, self.trans, "N", a, column(x), column(y)), ref)


@attrs.define(eq=False, on_setattr=None)
class Symv(BlasOperation[AccelRef]):
    """The product of a symmetric or Hermitian matrix and a vector; see `symv`."""

    alpha: complex
    a: Operand
    x: Operand
    beta: complex = 0.0
    y: AccelRef | None = None
    lower: bool = False
    hermitian: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands, and name the result."""
        a, x = matrix(planner, self.a, is_square=True), planner.read("x", self.x)
        vector(planner.name, "x", x, a.shape[0])
        ref, y = accumulated(planner, "y", self.y, self.beta, x.shape, a=a, x=x)
        numbers = factors(planner, self.alpha, self.beta, y.dtype)
        options = self.lower, self.hermitian
        return Planned(SymmSpec("L", *options, *numbers, a, column(x), column(y)), ref)


@attrs.define(eq=False, on_setattr=None)
class Ger(BlasOperation[AccelRef]):
    """A matrix with the product of a column and a row added to it; see `ger`."""

    alpha: complex
    x: Operand
    y: Operand
    a: AccelRef
    conjugate: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands."""
        x, y = planner.read("x", self.x), planner.read("y", self.y)
        vector(planner.name, "x", x)
        vector(planner.name, "y", y)
        dtype = same_dtype(planner.name, x=x, y=y)
        a = updated(planner, "a", self.a, (x.shape + y.shape, dtype), x=x, y=y)
        alpha = planner.factor("alpha", self.alpha, a.dtype)
        trans: Transpose = "C" if self.conjugate else "T"
        return Planned(GemmSpec(alpha, 1.0, "N", trans, column(x), column(y), a), self.a)


@attrs.define(eq=False, on_setattr=None)
class Syr(BlasOperation[AccelRef]):
    """A triangle with the product of a vector and itself added to it; see `syr`."""

    alpha: complex
    x: Operand
    a: AccelRef
    lower: bool = False
    hermitian: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands."""
        x = planner.read("x", self.x)
        vector(planner.name, "x", x)
        a = updated(planner, "a", self.a, (x.shape * 2, x.dtype), x=x)
        alpha = planner.factor("alpha", self.alpha, a.dtype)
        options = self.lower, self.hermitian
        return Planned(SyrkSpec("N", *options, alpha, 1.0, column(x), None, a), self.a)


@attrs.define(eq=False, on_setattr=None)
class Syr2(BlasOperation[AccelRef]):
    """A triangle with the products of two vectors added to it; see `syr2`."""

    alpha: complex
    x: Operand
    y: Operand
    a: AccelRef
    lower: bool = False
    hermitian: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands."""
        x, y = planner.read("x", self.x), planner.read("y", self.y)
        vector(planner.name, "x", x)
        vector(planner.name, "y", y, x.shape[0])
        dtype = same_dtype(planner.name, x=x, y=y)
        a = updated(planner, "a", self.a, (x.shape * 2, dtype), x=x, y=y)
        alpha = planner.factor("alpha", self.alpha, a.dtype)
        options = self.lower, self.hermitian
        return Planned(SyrkSpec("N", *options, alpha, 1.0, column(x), column(y), a), self.a)


@attrs.define(eq=False, on_setattr=None)
class Trmv(BlasOperation[AccelRef]):
    """The product of a triangular matrix and a vector; see `trmv`."""

    a: Operand
    x: Operand
    trans: Transpose = "N"
    lower: bool = False
    unit_diagonal: bool = False
    out: AccelRef | None = None
    solve: ClassVar[bool] = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands, and name the result."""
        a, x = matrix(planner, self.a, is_square=True), planner.read("x", self.x)
        vector(planner.name, "x", x, a.shape[0])
        ref, out = overwritten(planner, self.out, x, x.shape, a=a, x=x)
        options = self.lower, self.trans, self.unit_diagonal
        return Planned(TriangularSpec(self.solve, "L", *options, 1.0, a, column(x), column(out)), ref)


@attrs.define(eq=False, on_setattr=None)
class Trsv(Trmv):
    """Equations with a triangular matrix and a vector; see `trsv`."""

    solve: ClassVar[bool] = True


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
    return await device_of("gemv", a, x, y).ask(Gemv(alpha, a, x, beta, y, trans))


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
    return await device_of("symv", a, x, y).ask(Symv(alpha, a, x, beta, y, lower, hermitian))


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
    return await device_of("ger", a, x, y).ask(Ger(alpha, x, y, a, conjugate))


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
    return await device_of("syr", a, x).ask(Syr(alpha, x, a, lower, hermitian))


async def syr2(
    alpha: complex, x: Operand, y: Operand, a: AccelRef, lower: bool = False, hermitian: bool = False
) -> AccelRef:
    """``a = alpha * outer(x, y) + alpha * outer(y, x) + a`` in one triangle (BLAS ``syr2``, ``her2``).

    Arguments and result are those of `syr`, but `y` has the shape and dtype of `x`. With `hermitian`, the
    second product has the conjugate of `alpha`, which may be complex.
    """
    return await device_of("syr2", a, x, y).ask(Syr2(alpha, x, y, a, lower, hermitian))


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
    return await device_of("trmv", a, x, out).ask(Trmv(a, x, trans, lower, unit_diagonal, out))


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
    return await device_of("trsv", a, x, out).ask(Trsv(a, x, trans, lower, unit_diagonal, out))
