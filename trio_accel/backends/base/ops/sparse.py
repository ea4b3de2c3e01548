"""Specifications of the sparse operations."""

from __future__ import annotations

from ._array import ArraySpec
from ._roles import NumberRole, exact, number, reads, updates, writes
from ._shapes import check_one_dtype, refuse_shapes
from ._spec import OperationSpec, specification
from .linalg import Transpose

__all__ = ["CsrToDenseSpec", "SddmmCsrSpec", "SpmmCsrSpec", "SpmvCsrSpec"]


@specification
class _CsrSpec(OperationSpec):
    """A matrix of compressed sparse rows.

    Attributes:
        rows: Rows of the matrix; ``indptr`` has ``rows + 1`` elements.
        columns: Its columns.
    """

    rows: int = exact()
    columns: int = exact()
    indptr: ArraySpec = reads()
    indices: ArraySpec = reads()

    def _check(self, name: str, *operands: tuple[str, ArraySpec, tuple[int, ...]]) -> None:
        """Require the structure of a matrix, and operands of one dtype, each with its name and shape."""
        indptr, indices, dtype = self.indptr, self.indices, operands[0][1].dtype
        fits = indptr.shape == (self.rows + 1,) and len(indices.shape) == 1
        same = indptr.dtype is indices.dtype
        for _, array, shape in operands:
            fits = fits and array.shape == shape
            same = same and array.dtype is dtype
        if fits and same:
            return
        arrays = {field: array for field, array, _ in operands}
        if not fits:
            needs = ", ".join(f"{field} of shape {shape}" for field, _, shape in operands)
            rule = (
                f"a matrix of rows={self.rows} and columns={self.columns} takes indptr of rows + 1 elements, "
                f"indices of one axis, and here {needs}"
            )
            refuse_shapes(name, self, rule, indptr=indptr, indices=indices, **arrays)
        check_one_dtype(name, self, indptr=indptr, indices=indices)
        check_one_dtype(name, self, **arrays)


@specification
class SpmvCsrSpec(_CsrSpec):
    """``out = A @ x`` for a matrix of compressed sparse rows.

    Row pointers begin at 0, do not decrease, and end at the number of stored elements or before. Ends that
    lie are the operation's error, before memory is read. A backend may look at a structure once and believe
    it from then on: a program that changes the arrays in place keeps them right.
    """

    data: ArraySpec = reads()
    x: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stored, data, x, out = self.indices.shape, self.data, self.x, self.out
        self._check(name, ("data", data, stored), ("x", x, (self.columns,)), ("out", out, (self.rows,)))


@specification
class SpmmCsrSpec(_CsrSpec):
    """``out = alpha * op(A) @ b + beta * out`` for a matrix of compressed sparse rows.

    As `SpmvCsrSpec`, but the row pointers end at the number of stored elements, and columns outside are the
    operation's error.

    Attributes:
        transpose: op: ``"N"``, ``"T"`` (transposed) or ``"C"`` (conjugated and transposed).
        alpha: Factor of the product.
        beta: Factor of ``out``, which is not read where it is 0.
    """

    data: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = updates()
    transpose: Transpose = exact()
    alpha: complex = number(NumberRole.FACTOR, "out")
    beta: complex = number(NumberRole.FACTOR, "out")

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stored, data, b, out = self.indices.shape, self.data, self.b, self.out
        rows, inner = self.rows, self.columns
        if self.transpose != "N":
            rows, inner = inner, rows
        columns = b.shape[1:]
        if len(columns) != 1:
            refuse_shapes(name, self, "b must have two axes", b=b, out=out)
        self._check(name, ("data", data, stored), ("b", b, (inner, *columns)), ("out", out, (rows, *columns)))


@specification
class SddmmCsrSpec(_CsrSpec):
    """Elements of ``a @ b`` where a matrix of compressed sparse rows has stored ones.

    As `SpmvCsrSpec`, but the row pointers end at the number of stored elements, and columns outside are the
    operation's error.
    """

    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, out, inner = self.a, self.b, self.out, self.a.shape[-1:]
        self._check(
            name,
            ("a", a, (self.rows, *inner)),
            ("b", b, (*inner, self.columns)),
            ("out", out, self.indices.shape),
        )


@specification
class CsrToDenseSpec(_CsrSpec):
    """The dense matrix of one of compressed sparse rows; elements that are stored twice are added up.

    As `SpmvCsrSpec`, but columns outside are the operation's error.
    """

    data: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stored, data, out = self.indices.shape, self.data, self.out
        self._check(name, ("data", data, stored), ("out", out, (self.rows, self.columns)))
