"""Operations with sparse matrices by SciPy's compiled loops, systems by SuperLU, incomplete factors by rows.

Arrays of SciPy's own classes would check all indices, and make another array, for each operation. SciPy's
loops add to the given result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
from scipy import sparse
from scipy.sparse import _sparsetools, linalg

from ...base import (
    NATIVE,
    HostArray,
    HostCall,
    check_structure,
    kernel,
    misplaced,
    scalar_of,
    unordered,
)
from ...base.kit.library import ComputingCall
from ..runtime.blas_threads import NUMPY, SCIPY, matrix_product
from ._sparse_steps import factor_triangle, make_steps
from .blas import norm_of

_tools: Any = _sparsetools
_linalg: Any = linalg
_sparse: Any = sparse

_OUT, _DTYPES = {"out": NATIVE}, {"matrix_data": NATIVE}

# Elements of the rows and columns that one piece of a sampled product gathers.
_CHUNK_ELEMENTS = 1 << 18


@kernel("sparse.spmv", backend="cpu", dtypes=_OUT)
def spmv(spec: Any, call: HostCall) -> None:
    """Multiply a matrix and a vector."""
    indptr, indices = _structure(spec, call, may_end_before=True)
    with _contiguous(call.array(spec.out)) as out:
        out.fill(0)
        data, x = call.array(spec.matrix_data), call.array(spec.x)
        _tools.csr_matvec(*spec.matrix, indptr, indices, data, x, out)


@kernel("sparse.spmm", backend="cpu", dtypes=_OUT)
def spmm(spec: Any, call: HostCall) -> None:
    """Multiply a matrix and a dense one."""
    alpha = scalar_of("sparse", "alpha", spec.alpha, spec.out.dtype)
    beta = scalar_of("sparse", "beta", spec.beta, spec.out.dtype)
    indptr, indices = _structure(spec, call)
    old, data, b = call.array(spec.out), call.array(spec.matrix_data), call.array(spec.b)
    with _contiguous(old) as out:
        if beta == 0:
            out.fill(0)
        else:
            np.multiply(old, out.dtype.type(beta), out=out)
        b = np.ascontiguousarray(b if alpha == 1 else b * b.dtype.type(alpha))
        if spec.transpose == "N":
            tool = _tools.csr_matvecs
        else:
            # The same arrays are the transpose by columns.
            tool = _tools.csc_matvecs
            data = np.conj(data) if spec.transpose == "C" else data
        tool(len(out), len(b), b.shape[1], indptr, indices, data, b.reshape(-1), out.reshape(-1))


@kernel("sparse.sddmm", backend="cpu", dtypes=_OUT)
def sddmm(spec: Any, call: HostCall) -> None:
    """Compute selected elements of a dense matrix product."""
    indptr, indices = _structure(spec, call)
    a, b = call.array(spec.a), call.array(spec.b)
    rows = np.repeat(np.arange(len(a)), np.diff(indptr))
    step = max(_CHUNK_ELEMENTS // max(a.shape[1], 1), 1)
    with _contiguous(call.array(spec.out)) as out:
        for first in range(0, len(out), step):
            piece = slice(first, first + step)
            np.einsum("ij,ij->i", a[rows[piece]], b.T[indices[piece]], out=out[piece])


@kernel("sparse.to_dense", backend="cpu", dtypes=_OUT)
def to_dense(spec: Any, call: HostCall) -> None:
    """Make a dense matrix."""
    indptr, indices = _structure(spec, call, may_end_before=True)
    with _contiguous(call.array(spec.out)) as out:
        out.fill(0)
        _tools.csr_todense(*spec.matrix, indptr, indices, call.array(spec.matrix_data), out)


@contextmanager
def _contiguous(out: HostArray) -> Generator[HostArray]:
    """Have an array filled, by way of one in C order where its own layout differs."""
    result: HostArray = out if out.flags.c_contiguous else np.empty_like(out, order="C")
    yield result
    if result is not out:
        np.copyto(out, result)


def _structure(spec: Any, call: HostCall, *, may_end_before: bool = False) -> tuple[HostArray, HostArray]:
    """Take the row pointers and columns, once they are found to lead nowhere outside of the arrays."""
    indptr, indices = call.array(spec.matrix_indptr), call.array(spec.matrix_indices)
    return checked(indptr, indices, spec.matrix, may_end_before=may_end_before)


_MatrixOrCount: TypeAlias = "int | tuple[HostArray, HostArray, HostArray]"


@kernel("sparse.make", backend="cpu")
def make(spec: Any, call: HostCall) -> None:
    """Make a matrix, or count the values that it will have."""
    call.status(spec.count)
    result: _MatrixOrCount = _FUNCTIONS[spec.function](spec, *map(call.array, spec.arrays))
    if isinstance(result, tuple):
        for target, array in zip((spec.indptr, spec.indices, spec.data), result, strict=True):
            call.array(target)[: len(array)] = array
        result = len(result[1])
    spec.count.view(np.int64)[0] = result


def checked(
    indptr: HostArray, indices: HostArray, shape: tuple[int, int], *, may_end_before: bool = False
) -> tuple[HostArray, HostArray]:
    """Return row pointers and columns, once they are found to lead nowhere outside of the arrays."""
    used = indices[: max(int(indptr[-1]), 0)]
    if indptr[0] != 0 or not 0 <= indptr[-1] <= len(indices):
        fault = 1
    elif not may_end_before and indptr[-1] != len(indices):
        fault = 4
    elif np.any(indptr[1:] < indptr[:-1]):
        fault = 2
    else:
        fault = 3 if used.size and not 0 <= used.min() <= used.max() < shape[1] else 0
    check_structure(fault, shape, len(indices))
    return indptr, indices


def _has_room(spec: Any, size: int) -> bool:
    """Return whether `size` values fit; False if they are only counted, or the count was too low."""
    return spec.indices is not None and size <= spec.indices.size


def _within(argument: str, indices: HostArray, limit: int) -> None:
    """Refuse indices outside."""
    bad = np.flatnonzero((indices < 0) | (indices >= limit))
    if bad.size:
        raise misplaced(argument, int(bad[0]), int(indices[bad[0]]), limit)


def _coo_to_csr(spec: Any, row: HostArray, col: HostArray, data: HostArray) -> _MatrixOrCount:
    rows, columns = spec.numbers
    _within("row", row, rows)
    _within("col", col, columns)
    csr = np.empty(rows + 1, row.dtype), np.empty_like(col), np.empty_like(data)
    _tools.coo_tocsr(rows, columns, len(data), row, col, data, *csr)
    return _canonical(spec.numbers, *csr)


def _sum_duplicates(spec: Any, *arrays: HostArray) -> _MatrixOrCount:
    checked(arrays[0], arrays[1], spec.numbers)
    return _canonical(spec.numbers, *[array.copy() for array in arrays])


def _canonical(
    shape: tuple[int, int], indptr: HostArray, indices: HostArray, data: HostArray
) -> _MatrixOrCount:
    """Sort in place, and add up the values of equal places."""
    _tools.csr_sort_indices(shape[0], indptr, indices, data)
    _tools.csr_sum_duplicates(*shape, indptr, indices, data)
    return indptr, indices[: indptr[-1]], data[: indptr[-1]]


def _csr_to_csc(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _MatrixOrCount:
    checked(indptr, indices, spec.numbers)
    csc = np.empty(spec.numbers[1] + 1, indptr.dtype), np.empty_like(indices), np.empty_like(data)
    _tools.csr_tocsc(*spec.numbers, indptr, indices, data, *csc)
    return csc


def _bsr_to_csr(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _MatrixOrCount:
    rows, columns = (extent // block for extent, block in zip(spec.numbers, data.shape[1:], strict=True))
    checked(indptr, indices, (rows, columns))
    csr = (
        np.empty(spec.numbers[0] + 1, indptr.dtype),
        np.empty(data.size, indptr.dtype),
        np.empty(data.size, data.dtype),
    )
    _tools.bsr_tocsr(rows, columns, *data.shape[1:], indptr, indices, data.reshape(-1), *csr)
    return _canonical(spec.numbers, *csr)


def _csr_to_bsr(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _MatrixOrCount:
    *shape, rows, columns = spec.numbers
    checked(indptr, indices, spec.numbers[:2])
    # The loops multiply the sides of a block in the type of the indices.
    indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    blocks = int(_tools.csr_count_blocks(*spec.numbers, indptr, indices))
    if not _has_room(spec, blocks):
        return blocks
    structure = np.empty(shape[0] // rows + 1, indptr.dtype), np.empty(blocks, indptr.dtype)
    values = np.zeros((blocks, rows, columns), data.dtype)
    _tools.csr_tobsr(*spec.numbers, indptr, indices, data, *structure, values.reshape(-1))
    return *structure, values


def _add(spec: Any, *arrays: HostArray) -> _MatrixOrCount:
    first, second = arrays[:3], arrays[3:]
    checked(first[0], first[1], spec.numbers)
    checked(second[0], second[1], spec.numbers)
    size = len(first[1]) + len(second[1])
    result = np.empty_like(first[0]), np.empty(size, first[1].dtype), np.empty(size, first[2].dtype)
    _tools.csr_plus_csr(*spec.numbers, *first, *second, *result)
    return result[0], result[1][: result[0][-1]], result[2][: result[0][-1]]


def _spgemm(spec: Any, *arrays: HostArray) -> _MatrixOrCount:
    rows, inner, columns = spec.numbers
    first, second = arrays[:3], arrays[3:]
    checked(first[0], first[1], (rows, inner))
    checked(second[0], second[1], (inner, columns))
    size = int(_tools.csr_matmat_maxnnz(rows, columns, *first[:2], *second[:2]))
    if not _has_room(spec, size):
        return size
    product = np.empty_like(first[0]), np.empty(size, first[1].dtype), np.empty(size, first[2].dtype)
    _tools.csr_matmat(rows, columns, *first, *second, *product)
    _tools.csr_sort_indices(rows, *product)
    return product[0], product[1][: product[0][-1]], product[2][: product[0][-1]]


def _take_rows(
    spec: Any, indptr: HostArray, indices: HostArray, data: HostArray, rows: HostArray
) -> _MatrixOrCount:
    checked(indptr, indices, spec.numbers)
    _within("indices", rows, spec.numbers[0])
    rows = rows.astype(indptr.dtype)
    # A row may be taken many times, so the sum may exceed the type of the indices.
    pointers = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.diff(indptr)[rows], out=pointers[1:])
    size = int(pointers[-1])
    if not _has_room(spec, size):
        return size
    elements = np.empty(size, indices.dtype), np.empty(size, data.dtype)
    _tools.csr_row_index(len(rows), rows, indptr, indices, data, *elements)
    return pointers, *elements


def _select(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _MatrixOrCount:
    """Keep the nonzero values, or the values on one side of a diagonal."""
    rows, columns, *diagonal = spec.numbers
    checked(indptr, indices, (rows, columns))
    row_numbers = np.repeat(np.arange(rows, dtype=indices.dtype), np.diff(indptr))
    if spec.function == "eliminate_zeros":
        mask = data != 0
    else:
        above = indices - row_numbers
        mask = above <= diagonal[0] if spec.function == "tril" else above >= diagonal[0]
    pointers = np.zeros_like(indptr)
    np.cumsum(np.bincount(row_numbers[mask], minlength=rows), out=pointers[1:])
    return pointers, indices[mask], data[mask]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "bsr_to_csr": _bsr_to_csr,
    "coo_to_csr": _coo_to_csr,
    "csr_to_bsr": _csr_to_bsr,
    "csr_to_csc": _csr_to_csc,
    "eliminate_zeros": _select,
    "spgemm": _spgemm,
    "sum_duplicates": _sum_duplicates,
    "take_rows": _take_rows,
    "tril": _select,
    "triu": _select,
}


@kernel("sparse.check_structure", backend="cpu")
def check_structure_only(spec: Any, call: HostCall) -> None:
    """Look at a structure."""
    _structure(spec, call)


class _KeptFactors(threading.local):
    """The factors of the matrices with which a stream's thread solved last.

    Iterations solve with the same few matrices in each step, and a factorization takes much longer than a
    solution. An entry has copies of the arrays, because their memory may change.

    SuperLU frees its memory in the thread that took it, and in no other one.

    Attributes:
        by_number: The factors that programs hold, by their numbers.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[object, list[HostArray], Any]] = []
        self.by_number: dict[int, Any] = {}

    def drop(self, number: int) -> None:
        """Free factors that no program holds any longer."""
        self.by_number.pop(number, None)

    def find(self, spec: Any, call: HostCall, how: tuple[Any, ...], make: Callable[[Any], Any]) -> Any:
        """Return the factors of a matrix, or another result of `make` for it."""
        arrays = [call.array(array) for array in (spec.matrix_data, spec.matrix_indices, spec.matrix_indptr)]
        key = spec.matrix, how, *[array.dtype for array in arrays]
        for number, (cached_key, cached_arrays, factors) in enumerate(self._kept):
            if cached_key == key and all(map(np.array_equal, cached_arrays, arrays)):
                self._kept.insert(0, self._kept.pop(number))
                return factors
        factors = make(_matrix(spec, call))
        if factors is not None and factors.nnz * arrays[0].itemsize <= _MAX_KEPT_BYTES:
            self._kept.insert(0, (key, [array.copy() for array in arrays], factors))
            del self._kept[_MAX_KEPT_FACTORS:]
        return factors


# An element of the diagonal is the pivot if it is at least this fraction of its column's largest element.
_LEAST_PIVOT = 0.1
_MAX_KEPT_FACTORS = 4
_MAX_KEPT_BYTES = 1 << 25
_factors = _KeptFactors()


def _triangle(matrix: Any, spec: Any) -> Any:
    triangle = _sparse.tril(matrix, format="csr") if spec.lower else _sparse.triu(matrix, format="csr")
    if spec.unit_diagonal:
        triangle.setdiag(1)
    return triangle


def _factor_triangle(matrix: Any, spec: Any) -> Any:
    """Factor a triangle in its own order, which fills nothing in.

    Returns:
        None if `spsolve_triangular` does better, because it computes with numbers that are not finite, and
        with pivots that are zeros to SuperLU.
    """
    triangle = _triangle(matrix, spec)
    if not np.isfinite(triangle.data).all() or (triangle.diagonal() == 0).any():
        return None
    try:
        return factor_triangle(triangle)
    except RuntimeError:
        # SuperLU takes some very small pivots for zeros.
        return None


@kernel("sparse.spsolve_triangular", backend="cpu", dtypes=_DTYPES)
def solve_triangular(spec: Any, call: HostCall) -> None:
    """Solve with one triangle."""
    call.status(spec.info)
    b, out, how = call.array(spec.b), call.array(spec.out), (spec.lower, spec.unit_diagonal)
    with np.errstate(all="ignore"), SCIPY.for_work(spec.matrix[0] ** 3):
        factors = spec.matrix[0] and _factors.find(
            spec, call, how, lambda matrix: _factor_triangle(matrix, spec)
        )
        if factors:
            np.copyto(out, factors.solve(np.ascontiguousarray(b), spec.trans if spec.trans != "C" else "H"))
            return
        triangle = _triangle(_matrix(spec, call), spec)
        bad = np.flatnonzero(triangle.diagonal() == 0)
        if bad.size:
            spec.info[0] = bad[0] + 1
        elif out.size:
            is_lower = spec.lower
            if spec.trans != "N":
                triangle, is_lower = triangle.T, not is_lower
                triangle = triangle.conj() if spec.trans == "C" else triangle
            x = _linalg.spsolve_triangular(triangle.tocsc(), b, lower=is_lower)
            np.copyto(out, x, casting="same_kind")


@kernel("sparse.spsolve", backend="cpu", dtypes=_DTYPES)
def solve(spec: Any, call: HostCall) -> None:
    """Factor, unless that was done recently, and solve."""

    def find() -> Any:
        return _factors.find(spec, call, (), lambda matrix: _linalg.splu(matrix.tocsc()))

    _solve_by(find, spec, call)


@kernel("sparse.factor", "sparse.solve_factored", backend="cpu", dtypes=_DTYPES)
def solve_factored(spec: Any, call: ComputingCall) -> None:
    """Factor, unless this thread has the factors of the number, and solve if there is a right-hand side."""

    def find() -> Any:
        factors = _factors.by_number.get(spec.number)
        if factors is None:
            factors = _factors.by_number[spec.number] = _factored(_matrix(spec, call))
            call.device.invalidate_with(
                spec.matrix_data.block, partial(_drop_factors, ref(call.stream), spec.number)
            )
        return factors

    _solve_by(find, spec, call)


def _factored(matrix: Any) -> Any:
    """Make LU factors; an order of a symmetric structure fills fewer elements in."""
    columns = matrix.tocsc()
    structures = zip((matrix.indptr, matrix.indices), (columns.indptr, columns.indices), strict=True)
    if not all(np.array_equal(*pair) for pair in structures):
        return _linalg.splu(columns)
    options = {"SymmetricMode": True}
    return _linalg.splu(columns, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=_LEAST_PIVOT, options=options)


def _drop_factors(stream: ref[Any], number: int, _block: int) -> None:
    """Have the thread of a stream free factors, unless it has ended."""
    live_stream = stream()
    if live_stream is not None:
        with suppress(RuntimeError):
            live_stream.enqueue(partial(_factors.drop, number))


def _solve_by(find: Callable[[], Any], spec: Any, call: HostCall) -> None:
    call.status(spec.info)
    if not np.isfinite(call.array(spec.matrix_data)).all():
        spec.info[0] = -1
        return
    if not spec.matrix[0]:
        return
    with SCIPY.for_work(spec.matrix[0] ** 3):
        try:
            factors = find()
        except RuntimeError:
            # SuperLU's word for a pivot of zero.
            spec.info[0] = 1
            return
        out = call.array(spec.out) if hasattr(spec, "out") else None
        if out is not None and out.size:
            trans = getattr(spec, "trans", "N")
            b = np.ascontiguousarray(call.array(spec.b))
            np.copyto(out, factors.solve(b, "H" if trans == "C" else trans))


@kernel("sparse.ilu0", backend="cpu", dtypes=_DTYPES)
@kernel("sparse.ic0", backend="cpu", dtypes=_DTYPES)
def incomplete(spec: Any, call: HostCall) -> None:
    """Factor within the structure: L and U, or of those L @ sqrt(D) and its transpose."""
    call.status(spec.info)
    is_cholesky, out = spec.operation == "sparse.ic0", call.array(spec.out)
    indptr, indices = _structure(spec, call)
    rows: HostArray = np.repeat(np.arange(int(spec.matrix[0])), np.diff(indptr))
    bad = np.flatnonzero((np.diff(indices) <= 0) & (rows[1:] == rows[:-1]))
    if bad.size:
        raise unordered(int(rows[bad[0]]))
    data = call.array(spec.matrix_data)
    if not np.isfinite(data).all():
        spec.info[0] = -1
        return
    if is_cholesky and not _is_hermitian(_matrix(spec, call)):
        spec.info[0] = -2
        return
    values, spec.info[0] = _eliminate(
        indptr.tolist(), indices.tolist(), data.tolist(), is_cholesky=is_cholesky
    )
    if spec.info[0]:
        return
    factors: HostArray = np.array(values, data.dtype)
    if is_cholesky:
        # The pivots: U is D @ L^H.
        roots: HostArray = np.sqrt(np.real(factors[rows == indices]))
        is_below = indices < rows
        factors[is_below] *= roots[indices[is_below]]
        factors[~is_below] /= roots[rows[~is_below]]
    np.copyto(out, factors)


@kernel("sparse.least_residual", backend="cpu", dtypes={"h": NATIVE})
def least_residual(spec: Any, call: HostCall) -> None:
    """Find the combination of the first vectors that makes a residual small enough, or least."""
    h, sizes, out = call.array(spec.h), call.array(spec.sizes), call.array(spec.y)
    steps = len(sizes)
    hessenberg: HostArray = np.zeros((steps + 1, steps), h.dtype)
    hessenberg[:steps] = h.T
    hessenberg[range(1, steps + 1), range(steps)] = sizes
    target: HostArray = np.zeros(steps + 1, h.dtype)
    target[0] = call.array(spec.size)
    is_finite = bool(np.isfinite(hessenberg).all())
    y, count = np.full(steps, np.nan, h.dtype), steps
    limit = np.finfo(h.dtype).eps * np.abs(hessenberg).max(initial=0)
    for count in range(1, steps + 1) if is_finite else ():
        part = hessenberg[: count + 1, :count]
        with NUMPY.for_work(steps**3):
            y = np.linalg.lstsq(part, target[: count + 1])[0]
            residual = float(np.linalg.norm(target[: count + 1] - part @ y))
        if residual <= spec.tolerance / 2 or sizes[count - 1] <= limit:
            break
    out.fill(0)
    out[: len(y)] = y
    call.array(spec.count)[...] = call.array(spec.step_count) + count


@kernel("sparse.cg_steps", backend="cpu")
def cg_steps(spec: Any, call: HostCall) -> None:
    """Make steps of conjugate gradients."""
    make_steps(spec, call, checked)


@kernel("sparse.extend_basis", backend="cpu", dtypes={"w": NATIVE})
def extend_basis(spec: Any, call: HostCall) -> None:
    """Subtract the components along the vectors of a basis, twice, and normalize the rest."""
    basis, remainder = call.array(spec.basis), call.array(spec.w).copy()
    for noted in (spec.first, spec.second):
        parts = np.conj(matrix_product(basis, np.conj(remainder)))
        remainder -= matrix_product(parts, basis)
        call.array(noted)[...] = parts
    length = norm_of(remainder, spec.size.dtype)
    call.array(spec.size)[...] = length
    np.divide(
        remainder, remainder.dtype.type(np.maximum(length, spec.smallest_divisor)), out=call.array(spec.unit)
    )


def _eliminate(
    indptr: list[int], indices: list[int], values: list[complex], *, is_cholesky: bool
) -> tuple[list[complex], int]:
    """Eliminate row by row in place; returns the values, and the number of a row without a pivot, from 1."""
    diagonal: list[int] = []
    for row, (start, end) in enumerate(pairwise(indptr)):
        positions = {indices[position]: position for position in range(start, end)}
        for position in range(start, end):
            column = indices[position]
            if column >= row:
                break
            factor = values[position] = values[position] / values[diagonal[column]]
            for pivot_position in range(diagonal[column] + 1, indptr[column + 1]):
                changed = positions.get(indices[pivot_position])
                if changed is not None:
                    values[changed] -= factor * values[pivot_position]
        pivot = values[positions[row]] if row in positions else 0
        if not math.isfinite(abs(pivot)) or pivot == 0 or (is_cholesky and pivot.real <= 0):
            return values, row + 1
        diagonal.append(positions[row])
    return values, 0


def _is_hermitian(matrix: Any) -> bool:
    """Return whether the matrix is Hermitian, except for rounding."""
    off, tolerance = abs(matrix - matrix.conj().T), 16 * np.finfo(matrix.dtype).eps
    return not off.nnz or bool(off.max() <= tolerance * abs(matrix).max())


def _matrix(spec: Any, call: HostCall) -> Any:
    """Make SciPy's matrix of copied arrays, once their structure is found right."""
    arrays: list[HostArray] = [
        call.array(array).copy() for array in (spec.matrix_data, spec.matrix_indices, spec.matrix_indptr)
    ]
    checked(arrays[2], arrays[1], spec.matrix)
    matrix = _sparse.csr_array(tuple(arrays), shape=spec.matrix)
    matrix.sum_duplicates()
    return matrix
