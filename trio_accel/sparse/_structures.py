"""Operations that make sparse matrices of others: conversions, sums, products, and parts of them.

The number of stored values is only known afterwards. If there is a bound that is not much larger, the arrays
get that size, and the matrix has views of the filled part. Otherwise a first operation counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

import numpy as np

from ..backends.base import NATIVE, DType, Ints, LibraryError, ops
from ..devices import Operand, Planned, Planner, bounded_integer, composed, operation, operation_like
from ._formats import BsrMatrix, CooMatrix, CscMatrix, CsrMatrix, SparseMatrix, refuse_format
from ._products import SparseActor

__all__ = [
    "BsrToCsr",
    "CooToCsr",
    "CsrToBsr",
    "CsrToCsc",
    "Spgemm",
    "SumDuplicates",
    "SumOfTwo",
    "TakeRows",
    "eliminate_zeros",
    "spgemm",
    "sum_duplicates",
    "take_rows",
    "tril",
    "triu",
]

_Compressed: TypeAlias = type[BsrMatrix] | type[CscMatrix] | type[CsrMatrix]


@ops.specification
class MadeSpec(ops.OperationSpec):
    """A sparse matrix to make from others, or the count of its values.

    Attributes:
        function: The name of the function.
        numbers: Rows and columns of the source, followed by other numbers of the function.
        arrays: The source arrays: those of each matrix, in the order of its fields, followed by others.
        indptr: Row pointers of the result; None if values are only counted, as for the next two.
        indices: Its columns, with a place for each possible value or block.
        data: Its values.
        count: The number of stored values, an int64 in two words.
    """

    operation = "sparse.make"

    function: str = ops.exact()
    numbers: Ints = ops.exact()
    arrays: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    indptr: ops.ArraySpec | None = ops.writes(optional=True)
    indices: ops.ArraySpec | None = ops.writes(optional=True)
    data: ops.ArraySpec | None = ops.writes(optional=True)
    count: ops.StatusArray = ops.status()


def _read(planner: Planner, argument: str, matrix: Any, matrix_class: type[Any]) -> tuple[ops.ArraySpec, ...]:
    """Take the arrays of a matrix in one format.

    Raises:
        TypeError: It has another format, or wrong dtypes.
        ValueError: Shapes that do not fit.
    """
    name = planner.name
    if not isinstance(matrix, matrix_class):
        refuse_format(name, argument, matrix, matrix_class)
    fields = matrix_class.operand_fields
    arrays = tuple([planner.read(f"{argument}.{field}", getattr(matrix, field)) for field in fields])
    first, second, data = arrays
    ops.check_index(
        name, [(f"{argument}.{field}", array) for field, array in zip(fields, arrays[:2], strict=False)]
    )
    if data.dtype not in NATIVE:
        allowed = ", ".join(map(str, NATIVE))
        raise TypeError(f"{name}: {argument}.data has dtype {data.dtype}; allowed: {allowed} (use cast())")
    rows, columns = matrix.shape[::-1] if matrix_class is CscMatrix else matrix.shape
    if matrix_class is BsrMatrix:
        if data.ndim != 3 or rows % data.shape[1] or columns % data.shape[2]:
            raise ValueError(f"{name}: blocks of shape {data.shape[1:]} do not fit into {argument}")
        rows //= data.shape[1]
    shapes = (
        (first.shape, second.shape),
        ((data.shape[0] if matrix_class is CooMatrix else rows + 1,), data.shape[:1]),
    )
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{name}: {argument} of shape {matrix.shape} must have {fields[0]} and {fields[1]} of shapes "
            f"{shapes[1][0]} and {shapes[1][1]}, got {shapes[0][0]} and {shapes[0][1]}"
        )
    return arrays


def _plan(
    planner: Planner,
    function: str,
    numbers: Sequence[int],
    arrays: Sequence[ops.ArraySpec],
    *,
    result_class: _Compressed = CsrMatrix,
    shape: tuple[int, int],
    size: int | None,
    block: tuple[int, int] | None = None,
) -> Planned[Any]:
    """Plan the matrix of at most `size` values; or without a size the count of them."""
    (index, dtype), count = (arrays[0].dtype, arrays[2].dtype), planner.status(2)
    numbers = tuple([int(number) for number in numbers])
    if size is None:
        spec = MadeSpec(function, numbers, tuple(arrays), None, None, None, count)
        return Planned(spec, finish=lambda: ops.number_of(count))
    limit = int(np.iinfo(index.dtype).max)
    size = bounded_integer(planner.name, "size", size)
    if size < 0:
        raise ValueError(f"{planner.name}: size must not be negative, got {size}")
    if size > limit:
        raise ValueError(
            f"{planner.name}: up to {size} values need indices of int64, got {index}; cast indptr and indices"
        )
    lines = shape[1] if result_class is CscMatrix else shape[0] // (block or (1, 1))[0]
    indptr, indices = planner.output((lines + 1,), index), planner.output((size,), index)
    data = planner.output((size, *(block or ())), dtype)
    spec = MadeSpec(function, numbers, tuple(arrays), indptr.spec, indices.spec, data.spec, count)

    def finish() -> SparseMatrix:
        stored = ops.number_of(count)
        if stored > size:
            # It was not made: `size` is wrong, or the operands were changed after they were counted.
            raise LibraryError(
                f"{planner.name}: size is {size}, but the result has {stored} values; count them again",
                library="sparse",
                code="invalid_value",
            )
        return result_class(
            shape, indptr, *([indices, data] if stored == size else [indices[:stored], data[:stored]])
        )

    return Planned(spec, finish=finish)


def _of_one(
    function: str, *numbers: str, of: type[Any] = CsrMatrix, result_class: _Compressed = CsrMatrix
) -> Callable[[Any, Planner], Planned[Any]]:
    """Return the plan of a matrix with at most the values of another one: a conversion, or a part."""

    def plan(message: Any, planner: Planner) -> Planned[Any]:
        matrix, arrays = message.matrix, _read(planner, "matrix", message.matrix, of)
        values = (
            *matrix.shape,
            *[bounded_integer(planner.name, parameter, getattr(message, parameter)) for parameter in numbers],
        )
        return _plan(
            planner,
            function,
            values,
            arrays,
            result_class=result_class,
            shape=matrix.shape,
            size=arrays[2].size,
        )

    return plan


def _plan_to_bsr(message: Any, planner: Planner) -> Planned[Any]:
    matrix, arrays = message.matrix, _read(planner, "matrix", message.matrix, CsrMatrix)
    block = cast("tuple[object, ...]", message.blocksize)
    if type(block) is not tuple or len(block) != 2:
        raise TypeError(f"{planner.name}: blocksize must be a pair of integers, got {block!r}")
    rows, columns = (bounded_integer(planner.name, "blocksize", extent) for extent in block)
    if rows < 1 or columns < 1 or matrix.shape[0] % rows or matrix.shape[1] % columns:
        raise ValueError(f"{planner.name}: blocks of shape {block} do not fit into shape {matrix.shape}")
    numbers = (*matrix.shape, rows, columns)
    return _plan(
        planner,
        "csr_to_bsr",
        numbers,
        arrays,
        result_class=BsrMatrix,
        shape=matrix.shape,
        size=message.size,
        block=(rows, columns),
    )


def _plan_two(message: Any, planner: Planner) -> Planned[Any]:
    """Plan the sum of two matrices with one dtype, and one dtype of indices; or their product."""
    a, b, is_sum = message.a, message.b, not hasattr(message, "size")
    arrays = (*_read(planner, "a", a, CsrMatrix), *_read(planner, "b", b, CsrMatrix))
    if arrays[2].dtype is not arrays[5].dtype:
        planner.refuse_dtypes(a=arrays[2], b=arrays[5])
    ops.check_index(planner.name, [("a.indptr", arrays[0]), ("b.indptr", arrays[3])])
    if (a.shape != b.shape) if is_sum else (a.shape[1] != b.shape[0]):
        rule = "one shape" if is_sum else "shapes (m, k) and (k, n)"
        raise ValueError(f"{planner.name}: a and b must have {rule}, got {a.shape} and {b.shape}")
    if is_sum:
        size = arrays[2].size + arrays[5].size
        return _plan(planner, "add", a.shape, arrays, shape=a.shape, size=size)
    shape = a.shape[0], b.shape[1]
    return _plan(planner, "spgemm", (*a.shape, b.shape[1]), arrays, shape=shape, size=message.size)


def _plan_rows(message: Any, planner: Planner) -> Planned[Any]:
    matrix, arrays = message.matrix, _read(planner, "matrix", message.matrix, CsrMatrix)
    row_numbers = planner.read("indices", message.indices)
    if row_numbers.ndim != 1 or row_numbers.dtype not in (DType.int32, DType.int64):
        raise TypeError(
            f"{planner.name}: indices must be a vector of int32 or int64, got shape {row_numbers.shape} of "
            f"{row_numbers.dtype}"
        )
    shape = row_numbers.size, matrix.shape[1]
    return _plan(planner, "take_rows", matrix.shape, (*arrays, row_numbers), shape=shape, size=message.size)


@operation(actor=SparseActor, plan=_of_one("coo_to_csr", of=CooMatrix))
async def _coo_to_csr(matrix: CooMatrix) -> CsrMatrix:
    """Bring coordinates into rows, in order of the columns; values of one place are added up."""
    ...


@operation(actor=SparseActor, plan=_of_one("csr_to_csc", result_class=CscMatrix))
async def _csr_to_csc(matrix: CsrMatrix) -> CscMatrix:
    """Bring the values of rows into columns."""
    ...


@operation(actor=SparseActor, plan=_of_one("bsr_to_csr", of=BsrMatrix))
async def _bsr_to_csr(matrix: BsrMatrix) -> CsrMatrix:
    """Bring the values of blocks into rows; zeros of a block are stored."""
    ...


@operation(actor=SparseActor, plan=_plan_to_bsr)
async def _csr_to_bsr(matrix: CsrMatrix, blocksize: tuple[int, int], size: int | None = None) -> Any:
    """Bring values into blocks; without a size, count the blocks."""
    ...


@operation(actor=SparseActor, plan=_plan_two)
async def _sum_of_two(a: CsrMatrix, b: CsrMatrix) -> CsrMatrix:
    """Add two matrices."""
    ...


@operation(actor=SparseActor, plan=_plan_two)
async def _spgemm(a: CsrMatrix, b: CsrMatrix, size: int | None = None) -> Any:
    """Multiply two matrices; without a size, count the values of the product."""
    ...


@operation(actor=SparseActor, plan=_plan_rows)
async def _take_rows(matrix: CsrMatrix, indices: Operand, size: int | None = None) -> Any:
    """Take rows; without a size, count their values."""
    ...


@composed
async def spgemm(a: CsrMatrix, b: CsrMatrix) -> CsrMatrix:
    """Multiply two sparse matrices: SciPy's ``a @ b`` (Gustavson's algorithm; on CUDA cuSPARSE's SpGEMM).

    A first operation counts the values, which the host reads.

    Args:
        a: Matrix of shape (m, k).
        b: Matrix of shape (k, n), and of the same dtypes.

    Returns:
        The product, of shape (m, n): columns of a row in ascending order. Elements that cancel out are
        not stored.

    Raises:
        LibraryError: A wrong structure.
        NotSupportedError: The product may have more than 2^31 - 1 values on CUDA.
    """
    size: int = await _spgemm(a, b)
    product: CsrMatrix = await _spgemm(a, b, size)
    return product


@composed
async def take_rows(matrix: CsrMatrix, indices: Operand) -> CsrMatrix:
    """Take rows by their indices: SciPy's ``matrix[indices]``. A first operation counts, as of `spgemm`.

    Args:
        matrix: Matrix of shape (m, n).
        indices: Vector of int32 or int64; a row may be taken several times. None is negative.

    Returns:
        The rows, of shape (len(indices), n).

    Raises:
        LibraryError: A row does not exist.
        NotSupportedError: The backend lacks this operation; `rows` takes neighbours.
    """
    size: int = await _take_rows(matrix, indices)
    taken: CsrMatrix = await _take_rows(matrix, indices, size)
    return taken


@operation(actor=SparseActor, plan=_of_one("sum_duplicates"))
async def sum_duplicates(matrix: CsrMatrix) -> CsrMatrix:
    """Bring columns of each row into ascending order, and add values of one place up, as SciPy does.

    Args:
        matrix: The matrix, which is not changed.

    Returns:
        A new matrix. Its arrays are as large as the arrays of `matrix`, or views of such arrays.

    Raises:
        LibraryError: The structure is wrong.
        NotSupportedError: On CUDA, sorting needs the package cuda-cccl.
    """
    ...


@operation_like(sum_duplicates, plan=_of_one("eliminate_zeros"))
def eliminate_zeros() -> None:
    """Leave stored zeros out, as SciPy's ``eliminate_zeros``; see `sum_duplicates`."""


@operation(actor=SparseActor, plan=_of_one("tril", "k"))
async def tril(matrix: CsrMatrix, k: int = 0) -> CsrMatrix:
    """Take the lower triangle, as `scipy.sparse.tril`.

    Args:
        matrix: The matrix, which is not changed.
        k: The last diagonal to keep: 0 is the main one, positive ones are above it.

    Returns:
        A new matrix of the same shape. Its arrays are as large as the arrays of `matrix`, or views of such
        arrays.

    Raises:
        NotSupportedError: CUDA lacks this operation.
    """
    ...


@operation_like(tril, plan=_of_one("triu", "k"))
def triu() -> None:
    """Take the upper triangle, as `scipy.sparse.triu`: from diagonal `k` up. See `tril`."""


BsrToCsr: Final = _bsr_to_csr.message
CooToCsr: Final = _coo_to_csr.message
CsrToBsr: Final = _csr_to_bsr.message
CsrToCsc: Final = _csr_to_csc.message
Spgemm: Final = _spgemm.message
SumDuplicates: Final = sum_duplicates.message
SumOfTwo: Final = _sum_of_two.message
TakeRows: Final = _take_rows.message
