"""Operations with symmetric, Hermitian and triangular matrices: the third level of the BLAS."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import Side, SymmSpec, SyrkSpec, Transpose, TriangularSpec, common_shape
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import BlasOperation
from ._checks import accumulated, factors, matrix, overwritten, same_dtype, updated

__all__ = ["Symm", "Syr2k", "Syrk", "Trmm", "Trsm", "symm", "syr2k", "syrk", "trmm", "trsm"]


@attrs.define(eq=False, on_setattr=None)
class Symm(BlasOperation[AccelRef]):
    """The product of a symmetric or Hermitian matrix and another one; see `symm`."""

    alpha: complex
    a: Operand
    b: Operand
    beta: complex = 0.0
    c: AccelRef | None = None
    side: Side = "L"
    lower: bool = False
    hermitian: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands, and name the result."""
        a, b = matrix(planner, self.a, is_square=True), matrix(planner, self.b, "b")
        ref, c = accumulated(planner, "c", self.c, self.beta, b.shape, a=a, b=b)
        numbers = factors(planner, self.alpha, self.beta, c.dtype)
        return Planned(SymmSpec(self.side, self.lower, self.hermitian, *numbers, a, b, c), ref)


@attrs.define(eq=False, on_setattr=None)
class Syrk(BlasOperation[AccelRef]):
    """The product of a matrix and its transpose; see `syrk`."""

    alpha: complex
    a: Operand
    beta: complex
    c: AccelRef
    trans: Transpose = "N"
    lower: bool = False
    hermitian: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands."""
        a = matrix(planner, self.a)
        n = a.shape[0 if self.trans == "N" else 1]
        c = updated(planner, "c", self.c, ((n, n), a.dtype), a=a)
        numbers = factors(planner, self.alpha, self.beta, c.dtype)
        return Planned(SyrkSpec(self.trans, self.lower, self.hermitian, *numbers, a, None, c), self.c)


@attrs.define(eq=False, on_setattr=None)
class Syr2k(BlasOperation[AccelRef]):
    """The products of two matrices and each other's transpose; see `syr2k`."""

    alpha: complex
    a: Operand
    b: Operand
    beta: complex
    c: AccelRef
    trans: Transpose = "N"
    lower: bool = False
    hermitian: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands."""
        a, b = matrix(planner, self.a), matrix(planner, self.b, "b")
        n = a.shape[0 if self.trans == "N" else 1]
        dtype = same_dtype(planner.name, a=a, b=b)
        c = updated(planner, "c", self.c, ((n, n), dtype), a=a, b=b)
        numbers = factors(planner, self.alpha, self.beta, c.dtype)
        return Planned(SyrkSpec(self.trans, self.lower, self.hermitian, *numbers, a, b, c), self.c)


@attrs.define(eq=False, on_setattr=None)
class Trmm(BlasOperation[AccelRef]):
    """The product of triangular matrices and others; see `trmm`."""

    alpha: complex
    a: Operand
    b: Operand
    side: Side = "L"
    trans: Transpose = "N"
    lower: bool = False
    unit_diagonal: bool = False
    out: AccelRef | None = None
    solve: ClassVar[bool] = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check operands, and name the result."""
        a, b = planner.read("a", self.a), planner.read("b", self.b)
        shape = (common_shape(a.shape[:-2], b.shape[:-2]) or ()) + b.shape[-2:]
        ref, out = overwritten(planner, self.out, b, shape, a=a, b=b)
        alpha = planner.factor("alpha", self.alpha, out.dtype)
        options = self.solve, self.side, self.lower, self.trans, self.unit_diagonal
        return Planned(TriangularSpec(*options, alpha, a, b, out), ref)


@attrs.define(eq=False, on_setattr=None)
class Trsm(Trmm):
    """Equations with triangular matrices; see `trsm`."""

    solve: ClassVar[bool] = True


async def symm(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex = 0.0,
    c: AccelRef | None = None,
    side: Side = "L",
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``alpha * a @ b + beta * c`` for a symmetric or Hermitian ``a`` (BLAS ``symm``, ``hemm``).

    Args:
        alpha: Factor of the product; real unless the matrices are complex.
        a: Square matrix of float32, float64, complex64 or complex128, of which one triangle is read.
        b: Matrix of shape (m, n), of the same dtype.
        beta: Factor of `c`; where it is 0, `c` is only written.
        c: Matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        side: ``"L"``: `a` is on the left; ``"R"``: on the right, ``alpha * b @ a + beta * c``.
        lower: Whether the lower triangle is read, instead of the upper one.
        hermitian: Whether `a` is Hermitian; then its diagonal counts as real.

    Returns:
        The reference `c`, or a new one.
    """
    return await device_of("symm", a, b, c).ask(Symm(alpha, a, b, beta, c, side, lower, hermitian))


async def syrk(
    alpha: complex,
    a: Operand,
    beta: complex,
    c: AccelRef,
    trans: Transpose = "N",
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``c = alpha * a @ a.T + beta * c`` in one triangle of c (BLAS ``syrk``, ``herk``).

    Args:
        alpha: Factor of the product; real unless the matrices are complex and not Hermitian.
        a: Matrix of shape (n, k), of float32, float64, complex64 or complex128.
        beta: Factor of `c`, like `alpha`; where it is 0, the triangle is only written.
        c: Matrix of shape (n, n), of which one triangle is changed.
        trans: ``"T"``: ``a.T @ a`` for `a` of shape (k, n). Of complex matrices ``"T"`` is for symmetric
            ones, ``"C"`` for Hermitian ones.
        lower: Whether it is the lower triangle, instead of the upper one.
        hermitian: Whether the transpose is conjugated; then the diagonal of `c` becomes real.

    Returns:
        The reference `c`.
    """
    return await device_of("syrk", c, a).ask(Syrk(alpha, a, beta, c, trans, lower, hermitian))


async def syr2k(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex,
    c: AccelRef,
    trans: Transpose = "N",
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``c = alpha * a @ b.T + alpha * b @ a.T + beta * c`` in one triangle (BLAS ``syr2k``, ``her2k``).

    Arguments and result are those of `syrk`, but `b` has the shape and dtype of `a`. With `hermitian`, the
    second product has the conjugate of `alpha`, which may be complex.
    """
    message = Syr2k(alpha, a, b, beta, c, trans, lower, hermitian)
    return await device_of("syr2k", c, a, b).ask(message)


async def trmm(
    alpha: complex,
    a: Operand,
    b: Operand,
    side: Side = "L",
    trans: Transpose = "N",
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """``alpha * op(a) @ b`` for a triangular ``a`` (BLAS ``trmm``).

    Args:
        alpha: Factor; real unless the matrices are complex.
        a: Square matrix of float32, float64, complex64 or complex128, of which one triangle is read. It may
            be a stack of shape (..., n, n).
        b: Matrix of the same dtype; or a stack, which broadcasts against that of `a`.
        side: ``"L"``: op(a) is on the left; ``"R"``: on the right.
        trans: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.
        lower: Whether the lower triangle is read, instead of the upper one.
        unit_diagonal: Whether the diagonal of `a` counts as ones, and is not read.
        out: Array to write to, which may be `b` itself; by default a new one.

    Returns:
        The reference `out`, or a new one.
    """
    message = Trmm(alpha, a, b, side, trans, lower, unit_diagonal, out)
    return await device_of("trmm", a, b, out).ask(message)


async def trsm(
    alpha: complex,
    a: Operand,
    b: Operand,
    side: Side = "L",
    trans: Transpose = "N",
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """The solution x of ``op(a) @ x = alpha * b`` for a triangular ``a`` (BLAS ``trsm``).

    Arguments and result are those of `trmm`; with `side` ``"R"``, it is ``x @ op(a) = alpha * b``. A zero on
    the diagonal makes infinities and NaN; it is no error.
    """
    message = Trsm(alpha, a, b, side, trans, lower, unit_diagonal, out)
    return await device_of("trsm", a, b, out).ask(message)
