"""Specifications of the dense linear algebra operations."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from ._array import ArraySpec
from ._roles import NumberRole, exact, number, reads, updates, writes
from ._shapes import check_one_dtype, common_shape, product_shape, refuse_shapes
from ._spec import OperationSpec, specification

__all__ = [
    "GemmSpec", "MatmulSpec", "Side", "SymmSpec", "SyrkSpec", "Transpose", "TriangularSpec",
]  # fmt: skip

Transpose = Literal["N", "T", "C"]
"""As it is, transposed, or transposed and conjugated: the BLAS's letters."""

Side = Literal["L", "R"]
"""Whether a matrix is the left or the right factor."""

_LETTERS = ("N", "T", "C")
_SIDES = ("L", "R")
_BOOL = (False, True)


@specification
class MatmulSpec(OperationSpec):
    """``out = a @ b`` with the shape rules of `numpy.matmul` for operands of one or more axes.

    All three have one dtype. ``out`` is C-contiguous and overlaps neither operand.
    """

    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, out = self.a, self.b, self.out
        shape = product_shape(name, a.shape, b.shape)
        if out.shape != shape:
            refuse_shapes(name, self, f"out must have the shape {shape} of the product", a=a, b=b, out=out)
        if a.dtype is not b.dtype or a.dtype is not out.dtype:
            check_one_dtype(name, self, a=a, b=b, out=out)


@specification
class GemmSpec(OperationSpec):
    """``c = alpha * op(a) @ op(b) + beta * c`` for matrices of one dtype (BLAS ``gemm``).

    Where beta is 0, c is not read: it may hold anything. It overlaps neither a nor b.
    """

    alpha: complex = number(NumberRole.FACTOR, "c")
    beta: complex = number(NumberRole.FACTOR, "c")
    transpose_a: Transpose = exact()
    transpose_b: Transpose = exact()
    a: ArraySpec = reads()
    b: ArraySpec = reads()
    c: ArraySpec = updates()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, c = self.a, self.b, self.c
        if not _is_product(self.transpose_a, self.transpose_b, a.shape, b.shape, c.shape):
            rule = (
                "a, b and c must be matrices, c of the shape of op(a) @ op(b), with "
                f"transpose_a={self.transpose_a!r} and transpose_b={self.transpose_b!r} of 'N', 'T' and 'C'"
            )
            refuse_shapes(name, self, rule, a=a, b=b, c=c)
        if a.dtype is not b.dtype or a.dtype is not c.dtype:
            check_one_dtype(name, self, a=a, b=b, c=c)


@specification
class SymmSpec(OperationSpec):
    """``c = alpha * a @ b + beta * c``, with b before a where ``side`` is "R" (BLAS ``symm``, ``hemm``).

    Only the lower triangle of the square matrix a is read, or the upper one. It counts as symmetric, or with
    ``hermitian`` as Hermitian. Where beta is 0, c is not read. It overlaps neither a nor b.
    """

    side: Side = exact()
    lower: bool = exact()
    hermitian: bool = exact()
    alpha: complex = number(NumberRole.FACTOR, "c")
    beta: complex = number(NumberRole.FACTOR, "c")
    a: ArraySpec = reads()
    b: ArraySpec = reads()
    c: ArraySpec = updates()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        _check_options(name, self, side=_SIDES, lower=_BOOL, hermitian=_BOOL)
        a, b, c = self.a, self.b, self.c
        n = b.shape[0 if self.side == "L" else -1] if b.ndim == 2 else -1
        if a.shape != (n, n) or b.shape != c.shape:
            rule = f"b and c must be matrices of one shape and a a square one that fits on side {self.side!r}"
            refuse_shapes(name, self, rule, a=a, b=b, c=c)
        check_one_dtype(name, self, a=a, b=b, c=c)


@specification
class SyrkSpec(OperationSpec):
    """``c = alpha * op(a) @ op(a).T + beta * c`` in one triangle of c (BLAS ``syrk``, ``herk``).

    With b, ``c = alpha * op(a) @ op(b).T + alpha * op(b) @ op(a).T + beta * c`` (``syr2k``, ``her2k``). With
    ``hermitian``, transposes are conjugated, and so is the second alpha; factors of Hermitian matrices are
    real, but for alpha of two. Where beta is 0, the triangle is not read. The other one stays as it is.
    """

    trans: Transpose = exact()
    lower: bool = exact()
    hermitian: bool = exact()
    alpha: complex = number(NumberRole.FACTOR, "c")
    beta: complex = number(NumberRole.FACTOR, "c")
    a: ArraySpec = reads()
    b: ArraySpec | None = reads(optional=True)
    c: ArraySpec = updates()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, c = self.a, self.b or self.a, self.c
        is_complex = c.dtype.kind == "complex"
        letters = ("N", "C" if self.hermitian else "T") if is_complex else _LETTERS
        _check_options(name, self, lower=_BOOL, hermitian=_BOOL, trans=letters)
        n = a.shape[0 if self.trans == "N" else -1] if a.ndim == 2 else -1
        if c.shape != (n, n) or a.shape != b.shape:
            refuse_shapes(name, self, "c must be square, with the shape of op(a) @ op(b).T", a=a, b=b, c=c)
        check_one_dtype(name, self, a=a, b=b, c=c)
        if self.hermitian and (self.beta.imag or (self.b is None and self.alpha.imag)):
            raise ValueError(
                f"{name}: with hermitian, factors must be real, got alpha {self.alpha} and beta {self.beta}"
            )


@specification
class TriangularSpec(OperationSpec):
    """``out = alpha * op(a) @ b``, or with ``solve`` the solution of ``op(a) @ out = alpha * b``.

    Where ``side`` is "R", a is on the right: ``b @ op(a)`` and ``out @ op(a) = alpha * b`` (BLAS ``trmm``,
    ``trsm``). Only the lower triangle of the square matrix a is read, or the upper one; with
    ``unit_diagonal``, not its diagonal either, which counts as ones. A zero on the diagonal makes infinities
    and NaN. ``b`` may be ``out`` itself; ``a`` and ``b`` may be stacks that broadcast to that of ``out``.
    """

    solve: bool = exact()
    side: Side = exact()
    lower: bool = exact()
    trans: Transpose = exact()
    unit_diagonal: bool = exact()
    alpha: complex = number(NumberRole.FACTOR, "out")
    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        _check_options(name, self, solve=_BOOL, side=_SIDES, lower=_BOOL, trans=_LETTERS, unit_diagonal=_BOOL)
        a, b, out = self.a, self.b, self.out
        n = out.shape[-2 if self.side == "L" else -1] if out.ndim > 1 else -1
        stack = common_shape(a.shape[:-2], b.shape[:-2])
        if a.shape[-2:] != (n, n) or b.shape[-2:] != out.shape[-2:] or stack != out.shape[:-2]:
            rule = f"out must be shaped as b, and a be square and fit on side {self.side!r}"
            refuse_shapes(name, self, rule, a=a, b=b, out=out)
        check_one_dtype(name, self, a=a, b=b, out=out)


def _check_options(name: str, spec: OperationSpec, **allowed: tuple[object, ...]) -> None:
    """Require values of fields that are letters or flags."""
    for field, values in allowed.items():
        given = getattr(spec, field)
        if given not in values:
            raise ValueError(f"{name}: {field} must be one of {values}, got {given!r}")


@lru_cache
def _is_product(
    transpose_a: str, transpose_b: str, a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]
) -> bool:
    """Whether these are letters of the BLAS, and c has the shape of the product of the two matrices."""
    if not len(a) == len(b) == len(c) == 2 or transpose_a not in _LETTERS or transpose_b not in _LETTERS:
        return False
    rows, inner = a if transpose_a == "N" else a[::-1]
    also_inner, columns = b if transpose_b == "N" else b[::-1]
    return inner == also_inner and c == (rows, columns)
