"""Systems with sparse matrices by SuperLU, and incomplete factors row by row."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from ...base.contract.errors import LibraryError
from ...base.kit.checks import NATIVE
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray
from ._sparse_structures import checked

__all__ = ["check_structure_only", "incomplete", "least_residual", "solve", "solve_triangular"]

_DTYPES = {"matrix_data": NATIVE}
_linalg: Any = linalg
_sparse: Any = sparse


@kernel("sparse.check_structure", backend="cpu")
def check_structure_only(spec: Any, call: HostCall) -> None:
    """Look at a structure."""
    checked(call.array(spec.matrix_indptr), call.array(spec.matrix_indices), spec.matrix)


@kernel("sparse.spsolve_triangular", backend="cpu", dtypes=_DTYPES)
def solve_triangular(spec: Any, call: HostCall) -> None:
    """Solve with one triangle."""
    call.status(spec.info)
    matrix, b, out = _matrix(spec, call), call.array(spec.b), call.array(spec.out)
    triangle = _sparse.tril(matrix, format="csr") if spec.lower else _sparse.triu(matrix, format="csr")
    bad = np.flatnonzero(triangle.diagonal() == 0)
    if bad.size and not spec.unit_diagonal:
        spec.info[0] = bad[0] + 1
        return
    if not out.size:
        return
    is_lower = spec.lower
    if spec.trans != "N":
        triangle, is_lower = triangle.T, not is_lower
        triangle = triangle.conj() if spec.trans == "C" else triangle
    if spec.unit_diagonal:
        triangle = triangle.tocsr()
        triangle.setdiag(1)
    with np.errstate(all="ignore"):
        x = _linalg.spsolve_triangular(triangle.tocsc(), b, lower=is_lower, unit_diagonal=spec.unit_diagonal)
        np.copyto(out, x, casting="same_kind")


@kernel("sparse.spsolve", backend="cpu", dtypes=_DTYPES)
def solve(spec: Any, call: HostCall) -> None:
    """Factor and solve."""
    call.status(spec.info)
    matrix, b, out = _matrix(spec, call), call.array(spec.b), call.array(spec.out)
    if not np.isfinite(matrix.data).all():
        spec.info[0] = -1
        return
    if not matrix.shape[0]:
        return
    try:
        factors = _linalg.splu(matrix.tocsc())
    except RuntimeError:
        # SuperLU's word for a pivot of zero.
        spec.info[0] = 1
        return
    if out.size:
        np.copyto(out, factors.solve(np.ascontiguousarray(b)))


@kernel("sparse.ilu0", backend="cpu", dtypes=_DTYPES)
@kernel("sparse.ic0", backend="cpu", dtypes=_DTYPES)
def incomplete(spec: Any, call: HostCall) -> None:
    """Factor within the structure: L and U, or of those L @ sqrt(D) and its transpose."""
    call.status(spec.info)
    is_cholesky, out = spec.operation == "sparse.ic0", call.array(spec.out)
    indptr, indices = checked(call.array(spec.matrix_indptr), call.array(spec.matrix_indices), spec.matrix)
    rows: HostArray = np.repeat(np.arange(int(spec.matrix[0])), np.diff(indptr))
    bad = np.flatnonzero((np.diff(indices) <= 0) & (rows[1:] == rows[:-1]))
    if bad.size:
        raise LibraryError(
            f"the columns of row {rows[bad[0]]} do not ascend; bring them into order: sparse.sum_duplicates",
            library="sparse",
            code="invalid_value",
        )
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
    made: HostArray = np.array(values, data.dtype)
    if is_cholesky:
        # The pivots: U is D @ L^H.
        roots: HostArray = np.sqrt(np.real(made[rows == indices]))
        is_below = indices < rows
        made[is_below] *= roots[indices[is_below]]
        made[~is_below] /= roots[rows[~is_below]]
    np.copyto(out, made)


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
        y = np.linalg.lstsq(part, target[: count + 1])[0]
        left = float(np.linalg.norm(target[: count + 1] - part @ y))
        if left <= spec.wanted / 2 or sizes[count - 1] <= limit:
            break
    out.fill(0)
    out[: len(y)] = y
    call.array(spec.count)[...] = call.array(spec.made) + count


def _eliminate(
    indptr: list[int], indices: list[int], values: list[complex], *, is_cholesky: bool
) -> tuple[list[complex], int]:
    """Eliminate row by row in place; returns the values, and the number of a row without a pivot, from 1."""
    diagonal: list[int] = []
    for row, (start, end) in enumerate(pairwise(indptr)):
        places = {indices[place]: place for place in range(start, end)}
        for place in range(start, end):
            column = indices[place]
            if column >= row:
                break
            factor = values[place] = values[place] / values[diagonal[column]]
            for other in range(diagonal[column] + 1, indptr[column + 1]):
                changed = places.get(indices[other])
                if changed is not None:
                    values[changed] -= factor * values[other]
        pivot = values[places[row]] if row in places else 0
        if not math.isfinite(abs(pivot)) or pivot == 0 or (is_cholesky and pivot.real <= 0):
            return values, row + 1
        diagonal.append(places[row])
    return values, 0


def _is_hermitian(matrix: Any) -> bool:
    """Tell whether it is, but for roundings."""
    off, tolerance = abs(matrix - matrix.conj().T), 16 * np.finfo(matrix.dtype).eps
    return not off.nnz or bool(off.max() <= tolerance * abs(matrix).max())


def _matrix(spec: Any, call: HostCall) -> Any:
    """Make SciPy's matrix of copied arrays, once their structure is found right."""
    arrays: list[HostArray] = [
        call.array(one).copy() for one in (spec.matrix_data, spec.matrix_indices, spec.matrix_indptr)
    ]
    checked(arrays[2], arrays[1], spec.matrix)
    matrix = _sparse.csr_array(tuple(arrays), shape=spec.matrix)
    matrix.sum_duplicates()
    return matrix
