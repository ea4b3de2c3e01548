"""Functions of sparse matrices' elements, as expressions that run on every backend."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from .._names import later
from ..devices import AccelRef, Operand, bounded_integer, composed, refuse_value
from ..expressions import Elementwise, Reduction, Scatter, on_device
from ._formats import CsrMatrix, check_csr
from ._products import CheckStructure, Spmm, Spmv, row_indices
from ._structures import SumDuplicates

if TYPE_CHECKING:
    from .. import linalg
else:
    linalg = later("trio_accel.linalg")

__all__ = ["diagonal", "max", "min", "multiply", "norm", "rows", "sum"]

_Axis: TypeAlias = Literal[0, 1] | None

_make = Elementwise[AccelRef]
_MINUS = _make("x - y", operation="sparse.rows")
_TIMES = _make("data * x", operation="sparse.multiply")
_ON_DIAGONAL = _make("data if col - row == k else bool(0)", operation="sparse.diagonal")
_WITH_ZEROS = {
    name: _make(f"where(count < n, {name}imum(x, 0.0), x)", operation=f"sparse.{name}")
    for name in ("max", "min")
}
_ROOT = _make("sqrt(x) * unit", operation="sparse.norm")
_PART = _make("where(x > 0, where(x <= most, x, 1.0), 1.0)", operation="sparse.norm")


async def _added_up(matrix: CsrMatrix) -> CsrMatrix:
    """Return a matrix that stores no place twice: the same one, where columns of each row ascend."""
    row, col = await row_indices(matrix), matrix.indices
    if matrix.nnz < 2 or not await (await _DISORDER(row[1:], row[:-1], col[1:], col[:-1])).item():
        return matrix
    return await matrix.device.ask(SumDuplicates(matrix))


def _check_axis(name: str, axis: object) -> None:
    if axis not in (None, 0, 1) or isinstance(axis, bool):
        refuse_value(f"sparse.{name}", "axis", (None, 0, 1), axis)


@composed
async def multiply(matrix: CsrMatrix, x: Operand | complex) -> CsrMatrix:
    """Multiply elements by a number or a dense array's elements, as SciPy's ``matrix.multiply(x)``.

    With an array of shape (m, 1) rows are scaled, with one of shape (n,) or (1, n) columns.

    Args:
        matrix: Matrix of shape (m, n).
        x: A number, or an array that broadcasts to that shape. Elements that are not stored stay zero,
            whatever `x` has there.

    Returns:
        A matrix of the same structure, which shares the arrays of it.

    Raises:
        TypeError: `x` is neither.
        ValueError: It does not broadcast to the shape.
        LibraryError: A wrong structure.
    """
    check_csr("multiply", matrix)
    if isinstance(x, (int, float, complex, np.generic)):
        return CsrMatrix(matrix.shape, matrix.indptr, matrix.indices, await _TIMES(matrix.data, x))
    shape = (1,) * (2 - x.ndim) + tuple(x.shape)
    if x.ndim > 2 or any(size not in (1, extent) for size, extent in zip(shape, matrix.shape, strict=True)):
        raise ValueError(f"sparse.multiply: x must broadcast to {matrix.shape}, got shape {x.shape}")
    row = await row_indices(matrix)
    if not matrix.nnz:
        return matrix
    by = ["0" if shape[0] == 1 else "row", "0" if shape[1] == 1 else "col"]
    expression = _scaled(", ".join(by))
    named = {"row": row, "col": matrix.indices}
    index_arrays = {name: named[name] for name in expression.inputs if name in named}
    factors = await matrix.device.put(x) if isinstance(x, np.ndarray) else on_device(x)
    data = await expression(data=matrix.data, x=factors.reshape(shape), **index_arrays, shape=(matrix.nnz,))
    return CsrMatrix(matrix.shape, matrix.indptr, matrix.indices, data)


@functools.cache
def _scaled(by: str) -> Elementwise[AccelRef]:
    return _make(f"data * x[{by}]", operation="sparse.multiply", is_checked=True)


@composed
async def diagonal(matrix: CsrMatrix, k: int = 0) -> AccelRef:
    """Take a diagonal, as SciPy's ``matrix.diagonal(k)``; values of one place are added up.

    Args:
        matrix: Matrix of shape (m, n).
        k: Which one: 0 is the main one, positive ones are above it.

    Returns:
        A vector of the diagonal's length, with zeros where nothing is stored.

    Raises:
        ValueError: The diagonal does not exist.
        LibraryError: The structure is wrong.
    """
    check_csr("diagonal", matrix)
    k, (m, n) = bounded_integer("sparse.diagonal", "k", k), matrix.shape
    if not -m < k < n and (k or (m and n)):
        raise ValueError(f"sparse.diagonal: k must be above {-m} and below {n}, got {k}")
    first, device = -k if k < 0 else 0, matrix.device
    row = await row_indices(matrix)
    length = np.minimum(m - first, n - first - k)
    out = await device.zeros(int(length), matrix.dtype)
    if length and matrix.nnz:
        values = await _ON_DIAGONAL(col=matrix.indices, row=row, k=k, data=matrix.data)
        scatter = Scatter(
            "out[clip(row - first, 0, last)]",
            "add",
            inputs=("out", "row", "first", "last"),
            operation="sparse.diagonal",
        )
        await scatter(out, row, first, int(length) - 1, values, shape=(matrix.nnz,))
    return out


@composed
async def rows(matrix: CsrMatrix, start: int, stop: int) -> CsrMatrix:
    """Take neighbouring rows: SciPy's ``matrix[start:stop]``. Two row pointers cross to the host.

    Args:
        matrix: Matrix of shape (m, n).
        start: The first row, from the end for a negative one.
        stop: The row after the last one, likewise.

    Returns:
        A matrix of those rows, with views of the columns and values of `matrix`.

    Raises:
        LibraryError: A wrong structure.
    """
    check_csr("rows", matrix)
    first, end, _ = slice(
        bounded_integer("sparse.rows", "start", start), bounded_integer("sparse.rows", "stop", stop)
    ).indices(matrix.shape[0])
    end = int(np.maximum(first, end))
    await matrix.device.ask(CheckStructure(matrix))
    low, high = int(await matrix.indptr[first].item()), int(await matrix.indptr[end].item())
    indptr = await _MINUS(matrix.indptr[first : end + 1], matrix.indptr[first])
    shape = end - first, matrix.shape[1]
    return CsrMatrix(shape, indptr, matrix.indices[low:high], matrix.data[low:high])


@composed
async def sum(matrix: CsrMatrix, axis: _Axis = None) -> AccelRef:
    """Add elements up, as SciPy's ``matrix.sum(axis)``.

    Args:
        matrix: Matrix of shape (m, n).
        axis: 0: of each column. 1: of each row. None: all.

    Returns:
        The sums, of shape (n,), (m,) or ().
    """
    check_csr("sum", matrix)
    _check_axis("sum", axis)
    device = matrix.device
    if axis is None:
        await device.ask(CheckStructure(matrix))
        return await _TOTAL(matrix.data)
    if axis == 1:
        return await device.ask(Spmv(matrix, await device.full(matrix.shape[1], 1, matrix.dtype)))
    ones = await device.full((matrix.shape[0], 1), 1, matrix.dtype)
    return (await device.ask(Spmm(matrix, ones, transpose="T")))[:, 0]


_reduce = Reduction
_DISORDER = _reduce(
    "where(row == above, where(col <= before, 1, 0), 0)", "max", operation="sparse.check_order"
)
_TOTAL = _reduce("x", "sum", operation="sparse.sum")
_EXTREMES = {name: _reduce("x", name, operation=f"sparse.{name}") for name in ("max", "min")}
_SQUARE = _make("(size / unit) * (size / unit)", operation="sparse.norm")
_ABS = _make("abs(x)", operation="sparse.norm")


@composed
async def max(matrix: CsrMatrix, axis: _Axis = None) -> AccelRef:
    """Find the largest elements, as SciPy's ``matrix.max(axis)``; elements that are not stored count as 0.

    Values of one place are added up first, which `sum_duplicates` does.

    Args:
        matrix: Matrix of shape (m, n), of float32 or float64.
        axis: 0: of each column. 1: of each row. None: of all.

    Returns:
        The largest elements, of shape (n,), (m,) or ().

    Raises:
        TypeError: The matrix is complex.
        ValueError: There are no elements.
        LibraryError: The structure is wrong.
        NotSupportedError: Columns of a row do not ascend, and the backend lacks `sum_duplicates`.
    """
    return await _extreme("max", matrix, axis)


@composed
async def min(matrix: CsrMatrix, axis: _Axis = None) -> AccelRef:
    """Find the smallest elements, as SciPy's ``matrix.min(axis)``; see `max`."""
    return await _extreme("min", matrix, axis)


async def _extreme(name: Literal["max", "min"], matrix: CsrMatrix, axis: _Axis) -> AccelRef:
    check_csr(name, matrix)
    _check_axis(name, axis)
    if matrix.dtype.kind != "float":
        raise TypeError(f"sparse.{name}: values of {matrix.dtype} cannot be compared")
    matrix = await _added_up(matrix)
    (m, n), device, nnz = matrix.shape, matrix.device, matrix.nnz
    extent = m * n if axis is None else matrix.shape[axis]
    if not extent:
        raise ValueError(f"sparse.{name}: shape {matrix.shape} is empty along axis={axis}")
    row, lowest = await row_indices(matrix), -math.inf if name == "max" else math.inf
    if axis is None:
        if not nnz:
            return await device.zeros((), matrix.dtype)
        return await _WITH_ZEROS[name](count=nnz, n=extent, x=await _EXTREMES[name](matrix.data))
    index, length = (row, m) if axis == 1 else (matrix.indices, n)
    extremes, count = await device.full(length, lowest, matrix.dtype), await device.zeros(length, "int64")
    if nnz:
        ones = np.ones(1, np.int64)
        await _scatter(name)(extremes, index, matrix.data, shape=(nnz,))
        await _scatter("add")(count, index, ones, shape=(nnz,))
    return await _WITH_ZEROS[name](count=count, n=extent, x=extremes)


@functools.cache
def _scatter(reduce: Literal["add", "max", "min"]) -> Scatter:
    return Scatter("out[at]", reduce, inputs=("out", "at"), operation=f"sparse.{reduce}")


_ORDERS = (None, "fro", 1, -1, math.inf, -math.inf)


@composed
async def norm(
    matrix: CsrMatrix,
    ord: float | Literal["fro"] | None = None,  # SciPy's name
    axis: _Axis = None,
) -> AccelRef:
    """Compute a norm, as `scipy.sparse.linalg.norm`.

    Values of one place are added up first, which `sum_duplicates` does.

    Args:
        matrix: Matrix of shape (m, n).
        ord: For a matrix: None or ``"fro"``, 1, -1, ``inf`` or ``-inf``. For rows or columns: None, 1, 2 or
            ``inf``.
        axis: 0: norms of columns. 1: norms of rows. None: the norm of the matrix.

    Returns:
        A real array of shape (n,), (m,) or ().

    Raises:
        ValueError: Another `ord`, or an empty matrix where a largest or smallest sum is wanted.
        LibraryError: A wrong structure.
        NotSupportedError: See `max`.
    """
    check_csr("norm", matrix)
    _check_axis("norm", axis)
    allowed = _ORDERS if axis is None else (None, 1, 2, math.inf)
    if ord not in allowed or isinstance(ord, bool):
        refuse_value("sparse.norm", "ord", allowed, ord)
    matrix = await _added_up(matrix)
    if axis is None and ord in (None, "fro"):
        return await linalg.nrm2(matrix.data)
    squared = axis is not None and ord in (None, 2)
    sizes, unit = await _ABS(matrix.data), None
    if squared and matrix.nnz:
        # The dtype holds squares of parts of the largest size.
        unit = await _PART(x=await _EXTREMES["max"](sizes), most=float(np.finfo(sizes.dtype.dtype).max))
        sizes = await _SQUARE(size=sizes, unit=unit)
    terms = CsrMatrix(matrix.shape, matrix.indptr, matrix.indices, sizes)
    if axis is not None:
        if ord == math.inf:
            return await max(terms, axis)
        total = await sum(terms, axis)
        return await _ROOT(x=total, unit=unit) if unit is not None else total
    if 0 in matrix.shape:
        raise ValueError(f"sparse.norm: a matrix of shape {matrix.shape} is empty")
    sums = await sum(terms, 0 if ord in (1, -1) else 1)
    return await _EXTREMES["max" if ord in (1, math.inf) else "min"](sums)
