"""Operations with sparse matrices: messages, and functions that ask for them."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base import DType, ops
from ..backends.base.ops import ArraySpec, Transpose
from ..devices import AccelRef, LibraryActor, Operand, Operation, Planned, Planner, device_of
from ._csr import CsrMatrix

__all__ = [
    "Sddmm", "SparseActor", "Spmm", "Spmv", "ToDense", "sddmm", "spmm", "spmv", "to_dense",
]  # fmt: skip


class SparseActor(LibraryActor):
    """Serves operations with sparse matrices, on a stream of its own.

    CPU backend: SciPy. CUDA: cuSPARSE.
    """

    library = "sparse"


@attrs.define(eq=False, on_setattr=None)
class _Message(Operation[SparseActor, AccelRef]):
    """What all messages share."""

    matrix: CsrMatrix
    library: ClassVar[str] = "trio_accel.sparse:SparseActor"

    def _structure(self, planner: Planner) -> tuple[int, int, ArraySpec, ArraySpec]:
        """Check what can be told without the elements, for matrices that were put together by hand."""
        name, matrix = planner.name, self.matrix
        if not isinstance(matrix, CsrMatrix):
            raise TypeError(
                f"{name}: matrix must be a CsrMatrix, got {type(matrix).__name__}; use sparse.csr"
            )
        rows, columns = matrix.shape
        indptr = planner.read("matrix.indptr", matrix.indptr)
        indices = planner.read("matrix.indices", matrix.indices)
        if indptr.shape != (rows + 1,):
            raise ValueError(f"{name}: matrix.indptr must have shape ({rows + 1},), got {indptr.shape}")
        data = matrix.data
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
        return rows, columns, indptr, indices

    def _operand(
        self, planner: Planner, argument: str, operand: Operand, shape: tuple[int | None, ...]
    ) -> ArraySpec:
        """Take an operand of the matrix's dtype and of this shape; where that has None, of any extent."""
        array, matrix, name = planner.read(argument, operand), self.matrix, planner.name
        if array.shape != shape and (
            len(array.shape) != len(shape)
            or any(extent not in (None, given) for extent, given in zip(shape, array.shape, strict=True))
        ):
            wanted = str(shape).replace("None", "any")
            raise ValueError(
                f"{name}: {argument} must have shape {wanted} for a matrix of {matrix.shape}, "
                f"got {array.shape}"
            )
        if array.dtype is not matrix.data.dtype:
            raise TypeError(
                f"{name}: matrix and {argument} must have one dtype, got {matrix.dtype} and {array.dtype}; "
                "use cast()"
            )
        return array


@attrs.define(eq=False, on_setattr=None)
class Spmv(_Message):
    """The product of a sparse matrix and a vector; see `spmv`."""

    x: Operand
    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the product."""
        rows, columns, indptr, indices = self._structure(planner)
        data = planner.read("matrix.data", self.matrix.data)
        x = self._operand(planner, "x", self.x, (columns,))
        out = planner.output((rows,), data.dtype, self.out)
        if self.out is not None:
            planner.distinct("out", out.spec, x=x, data=data, indices=indices, indptr=indptr)
        return Planned(ops.SpmvCsrSpec(rows, columns, indptr, indices, data, x, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Spmm(_Message):
    """The product of a sparse matrix and a dense one; see `spmm`."""

    b: Operand
    alpha: complex = 1.0
    beta: complex = 0.0
    out: AccelRef | None = None
    transpose: Transpose = "N"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes, dtypes, factors and the letter, and name the product."""
        name, transpose = planner.name, self.transpose
        if transpose not in ("N", "T", "C"):
            raise ValueError(f"{name}: transpose must be 'N', 'T' or 'C', got {transpose!r}")
        rows, columns, indptr, indices = self._structure(planner)
        data = planner.read("matrix.data", self.matrix.data)
        height, inner = (rows, columns) if transpose == "N" else (columns, rows)
        b = self._operand(planner, "b", self.b, (inner, None))
        alpha = planner.factor("alpha", self.alpha, data.dtype)
        beta = planner.factor("beta", self.beta, data.dtype)
        if self.out is None and beta != 0:
            raise ValueError(f"{name}: beta must be 0 without out, got {self.beta!r}")
        out = planner.output((height, b.shape[1]), data.dtype, self.out)
        planner.distinct("out", out.spec, b=b, data=data, indices=indices, indptr=indptr)
        spec = ops.SpmmCsrSpec(rows, columns, indptr, indices, data, b, out.spec, transpose, alpha, beta)
        return Planned(spec, out)


@attrs.define(eq=False, on_setattr=None)
class Sddmm(_Message):
    """Elements of a product of dense matrices where a sparse one has some; see `sddmm`."""

    a: Operand
    b: Operand
    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the values."""
        rows, columns, indptr, indices = self._structure(planner)
        a = self._operand(planner, "a", self.a, (rows, None))
        b = self._operand(planner, "b", self.b, (a.shape[1], columns))
        out = planner.output(indices.shape, a.dtype, self.out)
        planner.distinct("out", out.spec, a=a, b=b, indices=indices, indptr=indptr)
        return Planned(ops.SddmmCsrSpec(rows, columns, indptr, indices, a, b, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class ToDense(_Message):
    """The dense matrix of a sparse one; see `to_dense`."""

    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the structure, and name the matrix."""
        rows, columns, indptr, indices = self._structure(planner)
        data = planner.read("matrix.data", self.matrix.data)
        out = planner.output((rows, columns), data.dtype, self.out)
        planner.distinct("out", out.spec, data=data, indices=indices, indptr=indptr)
        return Planned(ops.CsrToDenseSpec(rows, columns, indptr, indices, data, out.spec), out)


async def spmv(matrix: CsrMatrix, x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Product of a sparse matrix and a vector (cuSPARSE ``SpMV``).

    Args:
        matrix: Matrix of shape (m, n).
        x: Vector of shape (n,) and the matrix's dtype.
        out: Vector of shape (m,) to write to; by default a new one.

    Returns:
        The product, of shape (m,).
    """
    return await device_of("spmv", matrix, x, out).ask(Spmv(matrix, x, out))


async def spmm(
    matrix: CsrMatrix,
    b: Operand,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    out: AccelRef | None = None,
    transpose: Transpose = "N",
) -> AccelRef:
    """Product with a dense matrix: ``alpha * op(matrix) @ b + beta * out`` (cuSPARSE ``SpMM``).

    Args:
        matrix: Matrix with op(matrix) of shape (m, k).
        b: Dense matrix of shape (k, n) and the sparse matrix's dtype.
        alpha: Factor of the product; real unless the matrices are complex.
        beta: Factor of `out`; where it is 0, `out` is only written, whatever it holds.
        out: Dense matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        transpose: ``"N"``: op(matrix) is `matrix`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.

    Returns:
        The reference `out`, or a new one.
    """
    return await device_of("spmm", matrix, b, out).ask(Spmm(matrix, b, alpha, beta, out, transpose))


async def sddmm(matrix: CsrMatrix, a: Operand, b: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Elements of a product of dense matrices where a sparse one has stored elements (cuSPARSE ``SDDMM``).

    The product itself is not made. With the result, ``CsrMatrix(matrix.shape, matrix.indptr, matrix.indices,
    result)`` is a sparse matrix of the same structure.

    Args:
        matrix: Matrix of shape (m, n). Its structure counts, its values do not.
        a: Dense matrix of shape (m, k) and the sparse matrix's dtype.
        b: Dense matrix of shape (k, n) and the same dtype.
        out: Vector of shape (nnz,) to write to; by default a new one.

    Returns:
        The elements of ``a @ b``, in the order of `CsrMatrix.data`.
    """
    return await device_of("sddmm", matrix, a, b, out).ask(Sddmm(matrix, a, b, out))


async def to_dense(matrix: CsrMatrix, *, out: AccelRef | None = None) -> AccelRef:
    """The dense matrix of a sparse one, as SciPy's ``toarray``.

    Args:
        matrix: Matrix of shape (m, n).
        out: Matrix of this shape and dtype to write to; by default a new one.

    Returns:
        The dense matrix.
    """
    return await device_of("to_dense", matrix, out).ask(ToDense(matrix, out))
