"""Sparse matrices of others, by SciPy's compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import _sparsetools

from ...base.contract.errors import LibraryError
from ...base.kit.checks import check_structure
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray

__all__ = ["checked", "make"]

_tools: Any = _sparsetools
_Made: TypeAlias = "int | tuple[HostArray, HostArray, HostArray]"


@kernel("sparse.make", backend="cpu")
def make(spec: Any, call: HostCall) -> None:
    """Make a matrix, or count the values that it will have."""
    call.status(spec.count)
    made: _Made = _FUNCTIONS[spec.function](spec, *map(call.array, spec.arrays))
    if isinstance(made, tuple):
        for wanted, array in zip((spec.indptr, spec.indices, spec.data), made, strict=True):
            call.array(wanted)[: len(array)] = array
        made = len(made[1])
    spec.count.view(np.int64)[0] = made


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
    """Tell whether so many values are wanted: not where they are counted, or were counted too low."""
    return spec.indices is not None and size <= spec.indices.size


def _within(what: str, found: HostArray, limit: int) -> None:
    """Refuse indices outside."""
    bad = np.flatnonzero((found < 0) | (found >= limit))
    if bad.size:
        text = f"{what}[{bad[0]}] is {found[bad[0]]}; it must be from 0 to {limit - 1}"
        raise LibraryError(text, library="sparse", code="invalid_value")


def _coo_to_csr(spec: Any, row: HostArray, col: HostArray, data: HostArray) -> _Made:
    rows, columns = spec.numbers
    _within("row", row, rows)
    _within("col", col, columns)
    made = np.empty(rows + 1, row.dtype), np.empty_like(col), np.empty_like(data)
    _tools.coo_tocsr(rows, columns, len(data), row, col, data, *made)
    return _canonical(spec.numbers, *made)


def _sum_duplicates(spec: Any, *arrays: HostArray) -> _Made:
    checked(arrays[0], arrays[1], spec.numbers)
    return _canonical(spec.numbers, *[array.copy() for array in arrays])


def _canonical(shape: tuple[int, int], indptr: HostArray, indices: HostArray, data: HostArray) -> _Made:
    """Sort in place, and add up what has one place."""
    _tools.csr_sort_indices(shape[0], indptr, indices, data)
    _tools.csr_sum_duplicates(*shape, indptr, indices, data)
    return indptr, indices[: indptr[-1]], data[: indptr[-1]]


def _csr_to_csc(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _Made:
    checked(indptr, indices, spec.numbers)
    made = np.empty(spec.numbers[1] + 1, indptr.dtype), np.empty_like(indices), np.empty_like(data)
    _tools.csr_tocsc(*spec.numbers, indptr, indices, data, *made)
    return made


def _bsr_to_csr(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _Made:
    rows, columns = (extent // block for extent, block in zip(spec.numbers, data.shape[1:], strict=True))
    checked(indptr, indices, (rows, columns))
    made = (
        np.empty(spec.numbers[0] + 1, indptr.dtype),
        np.empty(data.size, indptr.dtype),
        np.empty(data.size, data.dtype),
    )
    _tools.bsr_tocsr(rows, columns, *data.shape[1:], indptr, indices, data.reshape(-1), *made)
    return _canonical(spec.numbers, *made)


def _csr_to_bsr(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _Made:
    *shape, rows, columns = spec.numbers
    checked(indptr, indices, spec.numbers[:2])
    # The loops multiply the sides of a block in the type of the indices.
    indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    blocks = int(_tools.csr_count_blocks(*spec.numbers, indptr, indices))
    if not _has_room(spec, blocks):
        return blocks
    made = np.empty(shape[0] // rows + 1, indptr.dtype), np.empty(blocks, indptr.dtype)
    values = np.zeros((blocks, rows, columns), data.dtype)
    _tools.csr_tobsr(*spec.numbers, indptr, indices, data, *made, values.reshape(-1))
    return *made, values


def _add(spec: Any, *arrays: HostArray) -> _Made:
    first, second = arrays[:3], arrays[3:]
    checked(first[0], first[1], spec.numbers)
    checked(second[0], second[1], spec.numbers)
    size = len(first[1]) + len(second[1])
    made = np.empty_like(first[0]), np.empty(size, first[1].dtype), np.empty(size, first[2].dtype)
    _tools.csr_plus_csr(*spec.numbers, *first, *second, *made)
    return made[0], made[1][: made[0][-1]], made[2][: made[0][-1]]


def _spgemm(spec: Any, *arrays: HostArray) -> _Made:
    rows, inner, columns = spec.numbers
    first, second = arrays[:3], arrays[3:]
    checked(first[0], first[1], (rows, inner))
    checked(second[0], second[1], (inner, columns))
    size = int(_tools.csr_matmat_maxnnz(rows, columns, *first[:2], *second[:2]))
    if not _has_room(spec, size):
        return size
    made = np.empty_like(first[0]), np.empty(size, first[1].dtype), np.empty(size, first[2].dtype)
    _tools.csr_matmat(rows, columns, *first, *second, *made)
    _tools.csr_sort_indices(rows, *made)
    return made[0], made[1][: made[0][-1]], made[2][: made[0][-1]]


def _take_rows(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray, rows: HostArray) -> _Made:
    checked(indptr, indices, spec.numbers)
    _within("indices", rows, spec.numbers[0])
    rows = rows.astype(indptr.dtype)
    # A row may be taken many times: their sum may be beyond the type of the indices.
    pointers = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.diff(indptr)[rows], out=pointers[1:])
    size = int(pointers[-1])
    if not _has_room(spec, size):
        return size
    made = np.empty(size, indices.dtype), np.empty(size, data.dtype)
    _tools.csr_row_index(len(rows), rows, indptr, indices, data, *made)
    return pointers, *made


def _selection(
    is_kept: Callable[..., Any],
) -> Callable[..., _Made]:
    """Make the function that keeps values, given their rows, columns and values, and numbers."""

    def select(spec: Any, indptr: HostArray, indices: HostArray, data: HostArray) -> _Made:
        rows, columns, *numbers = spec.numbers
        checked(indptr, indices, (rows, columns))
        places = np.repeat(np.arange(rows, dtype=indices.dtype), np.diff(indptr))
        kept = is_kept(places, indices, data, *numbers)
        pointers = np.zeros_like(indptr)
        np.cumsum(np.bincount(places[kept], minlength=rows), out=pointers[1:])
        return pointers, indices[kept], data[kept]

    return select


def _is_not_zero(rows: HostArray, columns: HostArray, data: HostArray) -> Any:
    return data != 0


def _is_below(rows: HostArray, columns: HostArray, data: HostArray, k: int) -> Any:
    return columns - rows <= k


def _is_above(rows: HostArray, columns: HostArray, data: HostArray, k: int) -> Any:
    return columns - rows >= k


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "bsr_to_csr": _bsr_to_csr,
    "coo_to_csr": _coo_to_csr,
    "csr_to_bsr": _csr_to_bsr,
    "csr_to_csc": _csr_to_csc,
    "eliminate_zeros": _selection(_is_not_zero),
    "spgemm": _spgemm,
    "sum_duplicates": _sum_duplicates,
    "take_rows": _take_rows,
    "tril": _selection(_is_below),
    "triu": _selection(_is_above),
}
