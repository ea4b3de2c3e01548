"""Shared helpers for tests of sparse matrices: random matrices, and functions of the CPU only."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import sparse

HAS_STRUCTURES = BACKEND in ("cpu", "cuda")
"""Whether the backend makes matrices of others."""

NEEDS_STRUCTURES = pytest.mark.skipif(not HAS_STRUCTURES, reason="only the CPU and CUDA do this")

NEEDS_SYSTEMS = pytest.mark.skipif(
    IS_STAND_IN or not HAS_STRUCTURES, reason="the stand-in has no triangular solutions by cuSPARSE"
)


def _has_direct() -> bool:
    if BACKEND != "cuda" or IS_STAND_IN:
        return HAS_STRUCTURES
    pathfinder = importlib.import_module("cuda.pathfinder")
    try:
        pathfinder.load_nvidia_dynamic_lib("cudss")
    except pathfinder.DynamicLibNotFoundError:
        return False
    return True


NEEDS_DIRECT = pytest.mark.skipif(not _has_direct(), reason="direct solutions need SuperLU or cuDSS")

# The stand-in driver compiles each expression for each dtype, a second each.
EXAMPLES = 30 if BACKEND == "cpu" else 3

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "complex128": 1e-12, "complex64": 1e-5}

cases = st.fixed_dictionaries(
    {
        "rows": st.integers(0, 12),
        "columns": st.integers(0, 12),
        "density": st.floats(0.0, 1.0),
        "dtype": st.sampled_from(sorted(TOLERANCE)),
        "index": st.sampled_from(["int32", "int64"]),
        "seed": st.integers(0, 1000),
    }
)


def random_matrix(
    rows: int, columns: int, density: float = 0.3, dtype: str = "float64", index: str = "int32", seed: int = 0
) -> Any:
    """Make a matrix with values of both signs; some rows are empty, and some values are stored zeros."""
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(rows, columns))
    if dtype.startswith("complex"):
        values = values + 1j * generator.normal(size=(rows, columns))
    is_stored = generator.random((rows, columns)) < density
    matrix = scipy.sparse.csr_array(np.where(is_stored, values, 0).astype(dtype))
    matrix.data[: matrix.nnz // 5] = 0
    matrix.indptr, matrix.indices = matrix.indptr.astype(index), matrix.indices.astype(index)
    return matrix


systems = st.fixed_dictionaries(
    {
        "n": st.integers(0, 12),
        "density": st.floats(0.0, 0.6),
        "dtype": st.sampled_from(sorted(TOLERANCE)),
        "index": st.sampled_from(["int32", "int64"]),
        "seed": st.integers(0, 99),
    }
)


def well_conditioned(n: int, density: float, dtype: str, index: str, seed: int) -> Any:
    """Make a matrix with a diagonal larger than the sum of its row's rest."""
    matrix = random_matrix(n, n, density, dtype, index, seed)
    full = matrix.toarray()
    np.fill_diagonal(full, 1 + 2 * np.abs(full).sum(1))
    made = scipy.sparse.csr_array(full)
    made.indptr, made.indices = made.indptr.astype(index), made.indices.astype(index)
    return made


def sides(n: int, columns: int | None, dtype: str) -> Any:
    """Make right-hand sides: a vector, or this many columns."""
    made = np.random.default_rng(5).normal(size=(n,) if columns is None else (n, columns))
    return (made + 1j * made[::-1] if dtype.startswith("complex") else made).astype(dtype)


def laplacian(points: int, dtype: str = "float64") -> Any:
    """Make the five-point Laplacian of a square."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points))
    eye = scipy.sparse.eye_array(points)
    return (scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line)).tocsr().astype(dtype)


def on_device(test: Callable[[ta.Device], Awaitable[None]]) -> None:
    """Run a test of one example on a device of its own."""

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            await test(device)

    trio.run(main)


async def dense(matrix: sparse.SparseMatrix) -> Any:
    """Read a matrix by its arrays, without the operations under test."""
    if isinstance(matrix, sparse.CooMatrix):
        row, col, data = [await one.to_host() for one in (matrix.row, matrix.col, matrix.data)]
        return scipy.sparse.coo_array((data, (row, col)), shape=matrix.shape).toarray()
    data, indices, indptr = [await one.to_host() for one in (matrix.data, matrix.indices, matrix.indptr)]
    makers = {
        sparse.CsrMatrix: scipy.sparse.csr_array,
        sparse.CscMatrix: scipy.sparse.csc_array,
        sparse.BsrMatrix: scipy.sparse.bsr_array,
    }
    made = makers[type(matrix)]((data, indices, indptr), shape=matrix.shape)
    made.check_format(full_check=True)
    return made.toarray()


def check(found: Any, expected: Any, dtype: str, terms: int = 1) -> None:
    """Compare with numbers of double precision."""
    assert (found.shape, found.dtype) == (np.shape(expected), np.dtype(dtype))
    tolerance = TOLERANCE[dtype] * max(terms, 1) ** 0.5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(terms, 1))
