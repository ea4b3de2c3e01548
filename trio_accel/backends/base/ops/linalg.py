"""Specifications of the dense linear algebra operations."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from ._array import ArraySpec
from ._roles import NumberRole, exact, number, reads, updates, writes
from ._shapes import check_one_dtype, product_shape, refuse_shapes
from ._spec import OperationSpec, specification

__all__ = ["AxpySpec", "DotSpec", "GemmSpec", "MatmulSpec", "Nrm2Spec", "ScalSpec", "Transpose"]

Transpose = Literal["N", "T", "C"]
"""As it is, transposed, or transposed and conjugated: the BLAS's letters."""

_LETTERS = ("N", "T", "C")


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
class AxpySpec(OperationSpec):
    """``y = alpha * x + y`` for arrays of one shape and dtype (BLAS ``axpy``)."""

    alpha: complex = number(NumberRole.FACTOR, "y")
    x: ArraySpec = reads()
    y: ArraySpec = updates()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        x, y = self.x, self.y
        if x.shape != y.shape:
            refuse_shapes(name, self, "x and y must have one shape", x=x, y=y)
        if x.dtype is not y.dtype:
            check_one_dtype(name, self, x=x, y=y)


@specification
class ScalSpec(OperationSpec):
    """``x = alpha * x`` (BLAS ``scal``)."""

    alpha: complex = number(NumberRole.FACTOR, "x")
    x: ArraySpec = updates()


@specification
class DotSpec(OperationSpec):
    """``out = sum(x * y)`` of two vectors, unconjugated (BLAS ``dot``, ``dotu``); ``out`` has no axes."""

    x: ArraySpec = reads()
    y: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        x, y, out = self.x, self.y, self.out
        if len(x.shape) != 1 or x.shape != y.shape or out.shape:
            refuse_shapes(
                name, self, "x and y must be vectors of one length, out without axes", x=x, y=y, out=out
            )
        if x.dtype is not y.dtype or x.dtype is not out.dtype:
            check_one_dtype(name, self, x=x, y=y, out=out)


@specification
class Nrm2Spec(OperationSpec):
    """``out = sqrt(sum(abs(x)**2))`` without needless overflow (BLAS ``nrm2``); ``out`` is real, no axes."""

    x: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        if len(self.x.shape) != 1 or self.out.shape:
            refuse_shapes(name, self, "x must be a vector, out without axes", x=self.x, out=self.out)


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
