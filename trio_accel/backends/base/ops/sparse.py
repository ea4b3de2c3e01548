"""Specifications of the sparse operations."""

from __future__ import annotations

import attrs

from ._spec import ArraySpec, OperationSpec, exact, reads, writes

__all__ = ["SpmvCsrSpec"]


@attrs.define(on_setattr=None, unsafe_hash=True)
class SpmvCsrSpec(OperationSpec):
    """``out = A @ x`` for a matrix of compressed sparse rows.

    Row pointers begin at 0, do not decrease, and end at the number of stored elements or before. Ends that
    lie are the operation's error, before memory is read. A backend may look at a structure once and believe
    it from then on: whoever changes the arrays in place keeps them right.

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
