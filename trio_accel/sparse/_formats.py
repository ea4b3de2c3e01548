"""Sparse matrices on a device: the formats, as arrays and a shape."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeAlias, cast

import attrs

from ..backends.base import DType, Strs
from ..devices import AccelRef, Device, bounded_integer

__all__ = ["BsrMatrix", "CooMatrix", "CscMatrix", "CsrMatrix", "SparseMatrix"]


class _SparseArrays:
    """The base of all formats. A matrix is as good as its arrays: operations look at these, see D26."""

    __slots__ = ()
    operand_fields: ClassVar[Strs] = ("indptr", "indices", "data")

    shape: tuple[int, int]
    data: AccelRef

    def __attrs_post_init__(self) -> None:
        """Refuse a shape that no matrix has: vendors' routines trust it."""
        name, shape = type(self).__name__, cast("object", self.shape)
        if not isinstance(shape, tuple) or len(cast("tuple[object, ...]", shape)) != 2:
            raise ValueError(f"{name}: shape must be a pair of rows and columns, got {shape!r}")
        index = getattr(getattr(self, self.operand_fields[1]), "dtype", None)
        limit = (1 << (31 if index is DType.int32 else 63)) - 1
        for extent in self.shape:
            if not 0 <= bounded_integer(name, "shape", extent) <= limit:
                raise ValueError(f"{name}: shape must have numbers from 0 to {limit}, got {shape}")

    def __repr__(self) -> str:
        summary = f"{type(self).__name__} {self.dtype} {self.shape}, {self.nnz} stored"
        return f"<{summary}, on {self.device.name}>"

    @property
    def device(self) -> Device:
        """The device of its memory."""
        return self.data.device

    @property
    def dtype(self) -> DType:
        """Element type of the values."""
        return self.data.dtype

    @property
    def nnz(self) -> int:
        """Stored values, explicit zeros included."""
        return self.data.size

    def release(self) -> None:
        """Free the memory of all three arrays, even if others refer to them."""
        for name in self.operand_fields:
            ref: AccelRef = getattr(self, name)
            ref.release()


@attrs.frozen(eq=False, repr=False)
class _Compressed(_SparseArrays):
    """Fields of a format with pointers to where each row or column begins."""

    shape: tuple[int, int]
    indptr: AccelRef
    indices: AccelRef
    data: AccelRef


@attrs.frozen(eq=False, repr=False)
class CsrMatrix(_Compressed):
    """A sparse matrix on a device, as compressed sparse rows. Made by `csr` and `tocsr`.

    Row i has its values at ``data[indptr[i]:indptr[i + 1]]``, in the columns at the same places of `indices`.
    The structure was checked when it was made, and operations check it again after a write to its arrays. All
    four classes raise `ValueError` for a shape with negative numbers, or too large for the indices' type.

    Attributes:
        shape: Rows and columns.
        indptr: int32 or int64 of shape (rows + 1,).
        indices: Same dtype, shape (nnz,): columns.
        data: Shape (nnz,): values.
    """

    made_by: ClassVar[str] = "sparse.csr"

    @property
    def T(self) -> CscMatrix:  # noqa: N802  # SciPy's name
        """The transpose, of the same arrays: no copy."""
        return CscMatrix((self.shape[1], self.shape[0]), self.indptr, self.indices, self.data)


@attrs.frozen(eq=False, repr=False)
class CscMatrix(_Compressed):
    """A sparse matrix on a device, as compressed sparse columns. Made by `csc` and `tocsc`.

    Column j has its values at ``data[indptr[j]:indptr[j + 1]]``, in the rows that `indices` names.

    Attributes:
        shape: Rows and columns.
        indptr: int32 or int64 of shape (columns + 1,).
        indices: Same dtype, shape (nnz,): rows.
        data: Shape (nnz,): values.
    """

    made_by: ClassVar[str] = "sparse.csc"

    @property
    def T(self) -> CsrMatrix:  # noqa: N802  # SciPy's name
        """The transpose, of the same arrays: no copy."""
        return CsrMatrix((self.shape[1], self.shape[0]), self.indptr, self.indices, self.data)


@attrs.frozen(eq=False, repr=False)
class CooMatrix(_SparseArrays):
    """A sparse matrix on a device, as coordinates in any order. Made by `coo` and `tocoo`.

    Values of one place are added up.

    Attributes:
        shape: Rows and columns.
        row: int32 or int64 of shape (nnz,): row of each value.
        col: Same dtype and shape: its column.
        data: Shape (nnz,): values.
    """

    operand_fields: ClassVar[tuple[str, ...]] = ("row", "col", "data")
    made_by: ClassVar[str] = "sparse.coo"

    shape: tuple[int, int]
    row: AccelRef
    col: AccelRef
    data: AccelRef

    @property
    def T(self) -> CooMatrix:  # noqa: N802  # SciPy's name
        """The transpose, of the same arrays: no copy."""
        return CooMatrix((self.shape[1], self.shape[0]), self.col, self.row, self.data)


@attrs.frozen(eq=False, repr=False)
class BsrMatrix(_Compressed):
    """A sparse matrix on a device, as compressed rows of dense blocks. Made by `bsr` and `tobsr`.

    Attributes:
        shape: Rows and columns, multiples of a block's.
        indptr: int32 or int64 of shape (rows of blocks + 1,).
        indices: Same dtype, shape (blocks,): columns of blocks.
        data: Shape (blocks, rows of a block, columns of a block): values.
    """

    made_by: ClassVar[str] = "sparse.bsr"

    @property
    def blocksize(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        _, rows, columns = self.data.shape
        return rows, columns


SparseMatrix: TypeAlias = BsrMatrix | CooMatrix | CscMatrix | CsrMatrix
"""A matrix of any format."""


def check_csr(name: str, matrix: object, argument: str = "matrix") -> None:
    """Refuse a matrix of another format.

    Raises:
        TypeError: It is not a CSR matrix.
    """
    if not isinstance(matrix, CsrMatrix):
        refuse_format(f"sparse.{name}", argument, matrix, CsrMatrix)


def refuse_format(name: str, argument: str, matrix: object, expected: type[Any]) -> NoReturn:
    """Refuse a matrix of another format, and name the function that makes the wanted one.

    Raises:
        TypeError: Always.
    """
    made_by = str(expected.made_by).rpartition(".")[2]
    advice = f"await sparse.to{made_by}(...)" if isinstance(matrix, SparseMatrix) else f"sparse.{made_by}"
    raise TypeError(
        f"{name}: {argument} must be a {expected.__name__}, got {type(matrix).__name__}; use {advice}"
    )
