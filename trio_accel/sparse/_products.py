"""Products of dense arrays with sparse matrices in any format, and the actor of sparse matrices."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from ..backends.base import NATIVE, DType, Strs
from ..backends.base.contract.ops import SearchSpec, Transpose
from ..devices import (
    AccelRef,
    LibraryActor,
    Operand,
    Planned,
    Planner,
    composed,
    operation,
    refuse_value,
)
from ..expressions import ARRAYS, Elementwise, Out, Scatter, on_device
from ._formats import BsrMatrix, CooMatrix, CscMatrix, CsrMatrix, SparseMatrix

__all__ = [
    "CheckStructure",
    "FindRows",
    "SparseActor",
    "Spmm",
    "Spmv",
    "ToDense",
    "sddmm",
    "spmm",
    "spmv",
    "to_dense",
]


class SparseActor(LibraryActor):
    """Serves operations with sparse matrices, on a stream of its own.

    CPU backend: SciPy. CUDA: cuSPARSE.
    """

    library = "sparse"


# Row pointers begin at 0, do not decrease, and end at the number of stored elements; for spmv and to_dense
# they may end before. If they do not, or a column is out of range, the operation fails before memory is read.
# A backend may check a structure once and rely on it from then on: a program that changes the arrays keeps
# them right.
STRUCTURE = "matrix(m, n), matrix.indptr: index(m+1), matrix.indices: index(e)"
_MATRIX = f"{STRUCTURE}, matrix.data(e)"
_TRANSPOSED = f"{_MATRIX}, b(m, c) -> out(n, c)"


@operation(f"{_MATRIX}, x(n) -> out(m)", actor=SparseActor)
async def _spmv(matrix: CsrMatrix, x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Product of a sparse matrix and a vector (cuSPARSE ``SpMV``).

    Args:
        matrix: Matrix of shape (m, n).
        x: Vector of shape (n,) and the matrix's dtype.
        out: Vector of shape (m,) to write to; by default a new one.

    Returns:
        The product, of shape (m,).
    """
    ...


@operation(
    {"N": f"{_MATRIX}, b(n, c) -> out(m, c)", "T": _TRANSPOSED, "C": _TRANSPOSED},
    by="transpose",
    actor=SparseActor,
)
async def _spmm(
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
    ...


@operation(f"{STRUCTURE}, a(m, k), b(k, n) -> out(e)", actor=SparseActor)
async def sddmm(matrix: CsrMatrix, a: Operand, b: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Compute a dense matrices' product at the stored elements of a sparse matrix (cuSPARSE ``SDDMM``).

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
    ...


@operation(f"{_MATRIX} -> out(m, n)", actor=SparseActor)
async def _to_dense(matrix: CsrMatrix, *, out: AccelRef | None = None) -> AccelRef:
    """Make the dense matrix of a sparse one, as SciPy's ``toarray``; elements stored twice are added up.

    Args:
        matrix: Matrix of shape (m, n).
        out: Matrix of this shape and dtype to write to; by default a new one.

    Returns:
        The dense matrix.
    """
    ...


@operation(f"{STRUCTURE}, matrix.data(e) -> ", actor=SparseActor, dtypes=NATIVE)
async def _check_structure(matrix: CsrMatrix) -> None:
    """Fail with `LibraryError` if a structure is wrong; functions made of expressions ask it first."""
    ...


_make = Elementwise[AccelRef]
_CONJ = _make("conj(x)", operation="sparse.spmm")
_SCALE = _make("x * y", operation="sparse.spmm")
_ROW_INDEX = _make("i(0)", operation="sparse.find_rows")
_MINUS = _make("x - y", operation="sparse.rows")


def _plan_find_rows(message: Any, planner: Planner) -> Planned[AccelRef]:
    indptr, positions = planner.read("indptr", message.indptr), planner.read("positions", message.positions)
    out = planner.output(positions.shape, DType.int64)
    return Planned(SearchSpec("right", indptr, positions, None, out.spec, planner.status(1)), out)


@operation(actor=ARRAYS, plan=_plan_find_rows)
async def _find_rows(indptr: AccelRef, positions: AccelRef) -> AccelRef:
    """Find the row of each position, from 1."""
    ...


async def row_indices(matrix: CsrMatrix) -> AccelRef:
    """Find the row of each value, with the dtype of `indices`, once the structure is found right."""
    device, index = matrix.device, matrix.indices.dtype
    await device.ask(CheckStructure(matrix))
    positions = await device.ask(_ROW_INDEX.compute(shape=(matrix.nnz,)))
    rows = await _MINUS(await device.ask(FindRows(matrix.indptr, positions)), 1)
    return rows if index is DType.int64 else await rows.cast(index)


@composed
async def spmv(matrix: SparseMatrix, x: Operand, *, out: Out = None) -> AccelRef:
    """Product of a sparse matrix and a vector (cuSPARSE ``SpMV``).

    A matrix of columns is a transposed matrix of rows: one product (``SpMM``). Coordinates and blocks are not
    converted: an expression multiplies them, and a sum adds at computed places. CUDA adds there in any order.

    Args:
        matrix: Matrix of shape (m, n), of any format.
        x: Vector of shape (n,) and the matrix's dtype.
        out: Vector of shape (m,) to write to; by default a new one.

    Returns:
        The product, of shape (m,).
    """
    if isinstance(matrix, (BsrMatrix, CooMatrix, CscMatrix)):
        _check_vector(matrix, x, out)
        column = None if out is None else out.reshape(-1, 1)
        product = (await spmm(matrix, x.reshape(-1, 1), out=column))[:, 0]
        return product if out is None else out
    return await _spmv(matrix, x, out=out)


def _check_vector(matrix: SparseMatrix, x: Operand, out: Out) -> None:
    vectors: dict[str, Any] = {"x": (x, matrix.shape[1]), "out": (out, matrix.shape[0])}
    for name, (vector, length) in vectors.items():
        if vector is not None and getattr(vector, "shape", None) != (length,):
            description = getattr(vector, "shape", type(vector).__name__)
            raise ValueError(f"sparse.Spmv: {name} must have shape {(length,)}, got {description}")


@composed
async def spmm(
    matrix: SparseMatrix,
    b: Operand,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    out: Out = None,
    transpose: Transpose = "N",
) -> AccelRef:
    """Product with a dense matrix: ``alpha * op(matrix) @ b + beta * out`` (cuSPARSE ``SpMM``).

    See `spmv` for the formats.

    Args:
        matrix: Matrix with op(matrix) of shape (m, k), of any format.
        b: Dense matrix of shape (k, n) and the sparse matrix's dtype.
        alpha: Factor of the product; real unless the matrices are complex.
        beta: Factor of `out`; where it is 0, `out` is only written, whatever it holds.
        out: Dense matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        transpose: ``"N"``: op(matrix) is `matrix`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.

    Returns:
        The reference `out`, or a new one.
    """
    if isinstance(matrix, CscMatrix):
        if transpose not in _TURNED:
            refuse_value("sparse.Spmm", "transpose", tuple(_TURNED), transpose)
        turned = matrix.T
        if transpose == "C" and matrix.dtype.kind == "complex":
            turned = CsrMatrix(turned.shape, turned.indptr, turned.indices, await _CONJ(turned.data))
        return await _spmm(turned, b, alpha=alpha, beta=beta, out=out, transpose=_TURNED[transpose])
    if isinstance(matrix, (BsrMatrix, CooMatrix)):
        return await _by_places(matrix, b, alpha, beta, out, transpose)
    return await _spmm(matrix, b, alpha=alpha, beta=beta, out=out, transpose=transpose)


_TURNED: dict[str, Transpose] = {"N": "T", "T": "N", "C": "N"}


@composed
async def to_dense(matrix: SparseMatrix, *, out: Out = None) -> AccelRef:
    """Make the dense matrix of a sparse one, as SciPy's ``toarray``; elements stored twice are added up.

    Args:
        matrix: Matrix of shape (m, n), of any format.
        out: Matrix of this shape and dtype to write to; by default a new one.

    Returns:
        The dense matrix; for a matrix of columns, a view of the transpose.
    """
    if isinstance(matrix, CscMatrix):
        return (await _to_dense(matrix.T, out=None if out is None else out.T)).T
    if isinstance(matrix, (BsrMatrix, CooMatrix)):
        target = await _target("sparse.ToDense", matrix, matrix.shape, out, 0)
        positions = await _placed(matrix)
        if matrix.nnz:
            scatter = _scatter(("row", "col"), positions.row, positions.col)
            await scatter(target, *positions.indices, matrix.data, shape=matrix.data.shape)
        return target
    return await _to_dense(matrix, out=out)


class _Placed:
    """The places of a matrix's values: the row and the column as expressions, and the arrays in these."""

    def __init__(self, row: str, col: str, indices: tuple[AccelRef, ...]) -> None:
        self.row, self.col, self.indices = row, col, indices


async def _placed(matrix: BsrMatrix | CooMatrix) -> _Placed:
    """Find where values are; negative indices are taken outside, where they are refused."""
    if isinstance(matrix, CooMatrix):
        return _Placed(
            "where(row < 0, 2147483647, row)", "where(col < 0, 2147483647, col)", (matrix.row, matrix.col)
        )
    rows, columns = matrix.blocksize
    blocks = CsrMatrix(
        (matrix.shape[0] // rows, matrix.shape[1] // columns),
        matrix.indptr,
        matrix.indices,
        matrix.data[:, 0, 0],
    )
    row = await row_indices(blocks)
    shape = -1, 1, 1
    return _Placed(
        f"row * {rows} + i(1)", f"col * {columns} + i(2)", (row.reshape(shape), matrix.indices.reshape(shape))
    )


async def _by_places(
    matrix: BsrMatrix | CooMatrix, b: Operand, alpha: complex, beta: complex, out: Out, transpose: Transpose
) -> AccelRef:
    """Multiply each value by a row of `b`, and add the products at the places of the result."""
    name = "sparse.Spmm"
    if transpose not in _TURNED:
        refuse_value(name, "transpose", tuple(_TURNED), transpose)
    (m, k), n = matrix.shape if transpose == "N" else matrix.shape[::-1], b.shape[-1] if b.ndim == 2 else 0
    if b.ndim != 2 or b.shape[0] != k:
        raise ValueError(f"{name}: b must have shape ({k}, n), got {b.shape}")
    if b.dtype != matrix.dtype:
        raise TypeError(f"{name}: b must have dtype {matrix.dtype}, got {b.dtype}")
    if out is None and beta != 0:
        raise ValueError(f"{name}: beta must be 0 without out, got {beta!r}")
    positions = await _placed(matrix)
    target = await _target(name, matrix, (m, n), out, beta)
    if not (matrix.nnz and n):
        return target
    extra = matrix.data.ndim
    shape = (*matrix.data.shape, n)
    indices = [array.reshape(*array.shape, 1) for array in positions.indices]
    dense = await matrix.device.put(b) if isinstance(b, np.ndarray) else on_device(b)
    row, col = (positions.row, positions.col) if transpose == "N" else (positions.col, positions.row)
    named = {"row": indices[0], "col": indices[1]}
    to, of = ("row", "col") if transpose == "N" else ("col", "row")
    product = _product(of, col, extra, transpose == "C")
    values = await product(matrix.data.reshape(*matrix.data.shape, 1), dense, named[of], alpha, shape=shape)
    await _scatter((to,), row, f"i({extra})")(target, named[to], values, shape=shape)
    return target


async def _target(
    name: str, matrix: SparseMatrix, shape: tuple[int, int], out: Out, beta: complex
) -> AccelRef:
    """Make the array that products are added to."""
    if out is None:
        return await matrix.device.zeros(shape, matrix.dtype)
    if out.shape != shape or out.dtype is not matrix.dtype:
        description = f"shape {out.shape} and dtype {out.dtype}"
        raise ValueError(f"{name}: out must have shape {shape} and dtype {matrix.dtype}, got {description}")
    return await out.fill(0) if beta == 0 else out if beta == 1 else await _SCALE(out, beta, out=out)


@functools.cache
def _product(of: str, row: str, axis: int, is_conjugated: bool) -> Elementwise[AccelRef]:
    """Multiply values by elements of a dense matrix, in rows computed by an expression of `of`."""
    text = f"{'conj(x)' if is_conjugated else 'x'} * b[{row}, i({axis})] * alpha"
    return _make(text, inputs=("x", "b", of, "alpha"), operation="sparse.spmm", is_checked=True)


@functools.cache
def _scatter(indices: Strs, row: str, col: str) -> Scatter:
    """Add values at places that expressions of indices compute."""
    return Scatter(f"out[{row}, {col}]", "add", inputs=("out", *indices), operation="sparse.spmm")


# The messages and specifications belong to the operations on rows, under the functions' names.
for _public, _declared in ((spmv, _spmv), (spmm, _spmm), (to_dense, _to_dense)):
    vars(_public).update({name: vars(_declared)[name] for name in ("declaration", "message", "spec")})


CheckStructure: Final = _check_structure.message
FindRows: Final = _find_rows.message
Spmm: Final = _spmm.message
Spmv: Final = _spmv.message
ToDense: Final = _to_dense.message
