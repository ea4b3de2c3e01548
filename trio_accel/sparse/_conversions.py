"""Constructors of sparse matrices, and conversions between their formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ..actors import run_in_thread
from ..backends.base import NATIVE, HostArray, check_plain
from ..devices import AccelRef, Device, check_device, composed
from ..expressions import Elementwise
from ._formats import BsrMatrix, CooMatrix, CscMatrix, CsrMatrix, SparseMatrix, check_csr
from ._products import row_indices
from ._structures import BsrToCsr, CooToCsr, CsrToBsr, CsrToCsc, SumOfTwo

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["add", "bsr", "coo", "csc", "csr", "tobsr", "tocoo", "tocsc", "tocsr", "transpose"]

MatrixT = TypeVar("MatrixT", bound=SparseMatrix)


@composed
async def csr(device: Device, matrix: scipy.sparse.spmatrix | scipy.sparse.sparray) -> CsrMatrix:
    """Copy a SciPy sparse matrix of any format to a device, as compressed sparse rows.

    Duplicate entries are added up, and columns sorted, as SciPy's ``tocsr`` does; the matrix itself is not
    changed.

    Args:
        device: The device of the result.
        matrix: Matrix of float32, float64, complex64 or complex128.

    Raises:
        TypeError: Not a SciPy sparse matrix, or of another dtype.
        ValueError: Not two axes, or an inconsistent structure.
        OutOfMemoryError: There is not enough device memory.
    """
    return await _put(CsrMatrix, "csr", device, matrix, _in_rows)


@composed
async def csc(device: Device, matrix: scipy.sparse.spmatrix | scipy.sparse.sparray) -> CscMatrix:
    """Copy a SciPy sparse matrix of any format to a device, as compressed sparse columns; see `csr`."""
    return await _put(CscMatrix, "csc", device, matrix, lambda rows: _in_rows(rows.tocsc()))


@composed
async def coo(device: Device, matrix: scipy.sparse.spmatrix | scipy.sparse.sparray) -> CooMatrix:
    """Copy a SciPy sparse matrix of any format to a device, as coordinates; see `csr`.

    They are in order of rows and columns. ``CooMatrix(shape, row, col, data)`` takes arrays in any order.
    """
    return await _put(CooMatrix, "coo", device, matrix, _as_coordinates)


@composed
async def bsr(
    device: Device,
    matrix: scipy.sparse.spmatrix | scipy.sparse.sparray,
    blocksize: tuple[int, int] | None = None,
) -> BsrMatrix:
    """Copy a SciPy sparse matrix of any format to a device, as compressed rows of blocks; see `csr`.

    Args:
        device: The device of the result.
        matrix: See `csr`.
        blocksize: Rows and columns of a block; None for SciPy's choice.

    Raises:
        TypeError, OutOfMemoryError: As of `csr`.
        ValueError: See `csr`; or the shape is not a multiple of the blocks.
    """
    return await _put(BsrMatrix, "bsr", device, matrix, lambda rows: _in_rows(rows.tobsr(blocksize)))


async def _put(
    cls: Callable[..., MatrixT],
    name: str,
    device: Device,
    matrix: Any,
    arrays: Callable[[Any], tuple[Any, ...]],
) -> MatrixT:
    """Copy the arrays of a matrix in canonical form to a device."""
    check_device(name, device)

    def convert() -> tuple[Any, ...]:
        rows = _canonical(name, matrix)
        try:
            return arrays(rows)
        except ValueError as error:
            message = f"blocksize must be two integers that divide those of shape {rows.shape}"
            raise ValueError(f"{name}: {message}") from error

    placed = [await device.put(array) for array in await run_in_thread(convert)]
    return cls(tuple(map(int, matrix.shape)), *placed)


def _in_rows(matrix: Any) -> tuple[HostArray, HostArray, HostArray]:
    """Take row pointers, columns and values, with one dtype of indices."""
    indptr, indices = matrix.indptr, matrix.indices
    if indptr.dtype != indices.dtype:
        indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    return indptr, indices, matrix.data


def _as_coordinates(matrix: Any) -> tuple[HostArray, HostArray, HostArray]:
    coordinates = matrix.tocoo()
    return *coordinates.coords, coordinates.data


def _canonical(name: str, matrix: Any) -> Any:
    """Bring a matrix into canonical form. Runs in a thread: it may be large, and loads SciPy."""
    import scipy.sparse

    # SciPy's own annotations do not follow a matrix of any format and dtype through this.
    issparse = cast("Callable[[object], bool]", scipy.sparse.issparse)
    csr_array = cast("Callable[..., Any]", scipy.sparse.csr_array)
    if not issparse(matrix):
        raise TypeError(
            f"{name}: matrix must be a SciPy sparse matrix, got {type(matrix).__name__}; "
            "make one with scipy.sparse.csr_array(matrix)"
        )
    for part in ("data", "indices", "indptr", "row", "col"):
        check_plain(f"{name}: matrix.{part}", getattr(matrix, part, None))
    if matrix.ndim != 2:
        raise ValueError(f"{name}: matrix must have two axes, got shape {matrix.shape}")
    if matrix.dtype not in NATIVE:
        allowed = ", ".join(str(dtype) for dtype in NATIVE)
        raise TypeError(f"{name}: matrix has dtype {matrix.dtype}; allowed: {allowed} (use matrix.astype)")
    try:
        if matrix.format in ("csr", "csc", "bsr"):
            # SciPy's conversions trust the indices. Another object of the same arrays, because
            # the check may change what it looks at.
            matrix = type(matrix)((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
            matrix.check_format(full_check=True)
        elif matrix.format == "coo":
            matrix = type(matrix)((matrix.data, matrix.coords), shape=matrix.shape)
        canonical = csr_array(matrix, copy=matrix.format == "csr")
    except ValueError as error:
        raise ValueError(f"{name}: matrix is inconsistent: {error}") from error
    canonical.sum_duplicates()
    return canonical


@composed
async def tocsr(matrix: SparseMatrix) -> CsrMatrix:
    """Convert a matrix to compressed rows, as SciPy's ``tocsr``.

    Columns of each row ascend in the result, and values of one place are added up where `matrix` is of
    coordinates or blocks. A matrix of rows is returned itself; see `sum_duplicates`.

    Args:
        matrix: Matrix of any format.

    Raises:
        TypeError: `matrix` is not a sparse matrix, or has wrong dtypes.
        ValueError: Its arrays have wrong shapes.
        LibraryError: Its structure is wrong.
        NotSupportedError: On CUDA, sorting needs the package cuda-cccl.
    """
    if isinstance(matrix, CsrMatrix):
        return matrix
    if isinstance(matrix, CscMatrix):
        return (await matrix.device.ask(CsrToCsc(matrix.T))).T
    _check("tocsr", matrix)
    return await matrix.device.ask(CooToCsr(matrix) if isinstance(matrix, CooMatrix) else BsrToCsr(matrix))


@composed
async def tocsc(matrix: SparseMatrix) -> CscMatrix:
    """Convert a matrix to compressed columns, as SciPy's ``tocsc``; see `tocsr`."""
    if isinstance(matrix, CscMatrix):
        return matrix
    if isinstance(matrix, CooMatrix):
        return (await tocsr(matrix.T)).T
    rows = await tocsr(matrix)
    return await rows.device.ask(CsrToCsc(rows))


@composed
async def tocoo(matrix: SparseMatrix) -> CooMatrix:
    """Convert a matrix to coordinates, as SciPy's ``tocoo``, which share columns and values with `matrix`.

    Every backend converts compressed rows and columns. A matrix of blocks is converted by `tocsr`.

    Args:
        matrix: Matrix of any format.

    Raises:
        TypeError, ValueError, LibraryError: As of `tocsr`.
    """
    if isinstance(matrix, CooMatrix):
        return matrix
    if isinstance(matrix, CscMatrix):
        return (await tocoo(matrix.T)).T
    rows = await tocsr(matrix)
    return CooMatrix(rows.shape, await row_indices(rows), rows.indices, rows.data)


@composed
async def tobsr(matrix: SparseMatrix, blocksize: tuple[int, int]) -> BsrMatrix:
    """Convert a matrix to rows of blocks, as SciPy's ``tobsr``. A first operation counts the blocks.

    Args:
        matrix: Matrix of any format, which is brought into rows first.
        blocksize: Rows and columns of a block.

    Raises:
        TypeError, LibraryError, NotSupportedError: As of `tocsr`.
        ValueError: The shape is not a multiple of the blocks.
    """
    rows = await tocsr(matrix)
    size: int = await rows.device.ask(CsrToBsr(rows, blocksize))
    blocks: BsrMatrix = await rows.device.ask(CsrToBsr(rows, blocksize, size))
    return blocks


@composed
async def transpose(matrix: SparseMatrix) -> CsrMatrix:
    """Transpose a matrix, into compressed rows. ``matrix.T`` is the transpose without a copy.

    Args:
        matrix: Matrix of any format; one of blocks is brought into rows first.

    Raises:
        TypeError, ValueError, LibraryError, NotSupportedError: As of `tocsr`.
    """
    rows = await tocsr(matrix) if isinstance(matrix, BsrMatrix) else matrix
    _check("transpose", rows)
    return await tocsr(rows.T)


@composed
async def add(a: CsrMatrix, b: CsrMatrix, alpha: complex = 1.0, beta: complex = 1.0) -> CsrMatrix:
    """Add two sparse matrices: ``alpha * a + beta * b``.

    Args:
        a: Matrix of shape (m, n).
        b: Matrix of the same shape and dtypes.
        alpha: Factor of `a`; real unless the matrices are complex.
        beta: Factor of `b`, likewise.

    Returns:
        The sum. Elements that cancel out are not stored.

    Raises:
        TypeError: The formats are not supported, or the dtypes differ.
        ValueError: The shapes differ.
        LibraryError: A structure is wrong.
        NotSupportedError: On CUDA, sorting needs the package cuda-cccl.
    """
    terms: list[CsrMatrix] = []
    for name, matrix, times, factor in (("a", a, "alpha", alpha), ("b", b, "beta", beta)):
        check_csr("add", matrix, name)
        data = matrix.data if factor == 1 else await _SCALED[times](matrix.data, factor)
        if data.dtype is not matrix.dtype:
            raise TypeError(f"sparse.add: {name} is of {matrix.dtype}, which a factor of {factor!r} is not")
        terms.append(CsrMatrix(matrix.shape, matrix.indptr, matrix.indices, data))
    return await a.device.ask(SumOfTwo(*terms))


_SCALED = {
    factor: Elementwise[AccelRef](f"data * {factor}", operation="sparse.add") for factor in ("alpha", "beta")
}


def _check(name: str, matrix: SparseMatrix) -> None:
    if not isinstance(cast("object", matrix), SparseMatrix):
        raise TypeError(f"sparse.{name}: matrix must be a sparse matrix, got {type(matrix).__name__}")
