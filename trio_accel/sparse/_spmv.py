"""Products of sparse matrices and vectors."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base import DType
from ..backends.base.ops import ArraySpec, SpmvCsrSpec
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import SparseActor
from ._csr import CsrMatrix

__all__ = ["Spmv", "spmv"]


@attrs.define(eq=False, on_setattr=None)
class Spmv(Operation[SparseActor, AccelRef]):
    """The product of a sparse matrix and a vector; see `spmv`."""

    matrix: CsrMatrix
    x: Operand
    out: AccelRef | None = None
    library: ClassVar[str] = "trio_accel.sparse:SparseActor"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the product."""
        name, matrix = planner.name, self.matrix
        if not isinstance(matrix, CsrMatrix):
            raise TypeError(
                f"{name}: matrix must be a CsrMatrix, got {type(matrix).__name__}; use sparse.csr"
            )
        rows, columns = matrix.shape
        indptr = planner.read("matrix.indptr", matrix.indptr)
        indices = planner.read("matrix.indices", matrix.indices)
        data = planner.read("matrix.data", matrix.data)
        x = planner.read("x", self.x)
        _check_structure(name, rows, indptr, indices, data)
        if x.shape != (columns,):
            raise ValueError(
                f"{name}: x must have shape ({columns},) for a matrix of {matrix.shape}, got {x.shape}"
            )
        if x.dtype is not data.dtype:
            raise TypeError(
                f"{name}: matrix and x must have one dtype, got {data.dtype} and {x.dtype}; use cast()"
            )
        out = planner.output((rows,), data.dtype, self.out)
        if self.out is not None:
            planner.distinct("out", out.spec, x=x, data=data, indices=indices, indptr=indptr)
        return Planned(SpmvCsrSpec(rows, columns, indptr, indices, data, x, out.spec), out)


def _check_structure(name: str, rows: int, indptr: ArraySpec, indices: ArraySpec, data: ArraySpec) -> None:
    """Check what can be told without the elements, for matrices that were put together by hand."""
    if indptr.shape != (rows + 1,):
        raise ValueError(f"{name}: matrix.indptr must have shape ({rows + 1},), got {indptr.shape}")
    if len(data.shape) != 1 or indices.shape != data.shape:
        raise ValueError(
            f"{name}: matrix.indices and matrix.data must have one axis and one length, "
            f"got {indices.shape} and {data.shape}"
        )
    if indptr.dtype is not indices.dtype or indptr.dtype not in (DType.int32, DType.int64):
        raise TypeError(
            f"{name}: matrix.indptr and matrix.indices must both be int32 or int64, "
            f"got {indptr.dtype} and {indices.dtype}"
        )


async def spmv(matrix: CsrMatrix, x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Product of a sparse matrix and a vector (cuSPARSE ``SpMV``).

    Args:
        matrix: Matrix of shape (m, n).
        x: Vector of shape (n,) and the matrix's dtype.
        out: Vector of shape (m,) to write to; by default a new one.

    Returns:
        The product, of shape (m,).

    Raises:
        ValueError: Shapes that do not fit, or an `out` that shares memory.
        TypeError: Dtypes that differ.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("spmv", matrix, x, out).ask(Spmv(matrix, x, out))
