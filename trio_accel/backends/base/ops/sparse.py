"""Specifications of the sparse operations."""

from __future__ import annotations

from ._array import ArraySpec
from ._roles import exact, reads, writes
from ._shapes import check_one_dtype, refuse_shapes
from ._spec import OperationSpec, specification

__all__ = ["SpmvCsrSpec"]


@specification
class SpmvCsrSpec(OperationSpec):
    """``out = A @ x`` for a matrix of compressed sparse rows.

    Row pointers begin at 0, do not decrease, and end at the number of stored elements or before. Ends that
    lie are the operation's error, before memory is read. A backend may look at a structure once and believe
    it from then on: a program that changes the arrays in place keeps them right.

    Attributes:
        rows: Rows of A; ``indptr`` has ``rows + 1`` elements.
        columns: Columns of A, the length of ``x``.
    """

    rows: int = exact()
    columns: int = exact()
    indptr: ArraySpec = reads()
    indices: ArraySpec = reads()
    data: ArraySpec = reads()
    x: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        indptr, indices, data, x, out = self.indptr, self.indices, self.data, self.x, self.out
        if (
            indptr.shape != (self.rows + 1,)
            or len(data.shape) != 1
            or indices.shape != data.shape
            or x.shape != (self.columns,)
            or out.shape != (self.rows,)
        ):
            rule = (
                f"a matrix of rows={self.rows} and columns={self.columns} takes indptr of rows + 1, indices "
                "and data of one length, x of columns and out of rows elements"
            )
            refuse_shapes(name, self, rule, indptr=indptr, indices=indices, data=data, x=x, out=out)
        if indptr.dtype is not indices.dtype:
            check_one_dtype(name, self, indptr=indptr, indices=indices)
        if x.dtype is not data.dtype or x.dtype is not out.dtype:
            check_one_dtype(name, self, data=data, x=x, out=out)
