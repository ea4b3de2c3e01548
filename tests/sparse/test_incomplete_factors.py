"""Checks of an incomplete Cholesky factor, because cuSPARSE takes the root of any pivot."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND, INLINE, IS_STAND_IN
from sparse_matrices import NEEDS_STRUCTURES

import trio_accel as ta
from trio_accel import sparse

pytestmark = NEEDS_STRUCTURES

DTYPES = ["float32", "float64", "complex64", "complex128"]


def values_at(address: int, count: int, dtype: Any) -> Any:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def factor(library: Any, spec: Any, call: Any, addresses: tuple[int, int, int], name: str) -> None:
    """Factor without fill as the vendor does, with the root of a pivot's absolute value."""
    call.stream.synchronize()
    rows, stored = spec.matrix[0], spec.matrix_indices.size
    index = spec.matrix_indptr.dtype.value
    indptr, indices = values_at(addresses[0], rows + 1, index), values_at(addresses[1], stored, index)
    data = values_at(addresses[2], stored, spec.out.dtype.value)
    lower = np.zeros((rows, rows), data.dtype)
    for row in range(rows):
        for item in range(indptr[row], indptr[row + 1]):
            column = indices[item]
            if column > row:
                continue
            rest = data[item] - lower[row, :column] @ lower[column, :column].conj()
            if column == row:
                lower[row, row] = math.sqrt(abs(rest))
            else:
                lower[row, column] = rest / lower[column, column]
            data[item] = lower[row, column]


@pytest.fixture
def with_such_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in, which lacks such a routine, take the routine above."""
    if not IS_STAND_IN:
        return
    from trio_accel.backends.cuda.libraries.sparse import SparseLibrary

    monkeypatch.setattr(SparseLibrary, "_factor", factor)


@pytest.mark.usefixtures("with_such_a_factor")
@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_negative_pivot_is_reported(system: ta.System, dtype: str) -> None:
    rng = np.random.default_rng(3)
    made = scipy.sparse.random_array((40, 40), density=0.1, rng=rng).toarray()
    if "complex" in dtype:
        made = made + 1j * scipy.sparse.random_array((40, 40), density=0.1, rng=rng).toarray()
    matrix = made + made.conj().T + 8 * np.eye(40)
    async with system.open_device(BACKEND, options=INLINE) as device:
        factors = await sparse.ic0(await sparse.csr(device, scipy.sparse.csr_array(matrix.astype(dtype))))
        lower = np.tril(await (await sparse.to_dense(factors)).to_host())
        kept = np.tril(matrix != 0)
        near = 1e-5 if dtype in ("float32", "complex64") else 1e-13
        np.testing.assert_allclose((lower @ lower.conj().T)[kept], matrix[kept], atol=10 * near)
        matrix[17, 17] = 0.01
        with pytest.raises(ta.LinAlgError, match="17"):
            await sparse.ic0(await sparse.csr(device, scipy.sparse.csr_array(matrix.astype(dtype))))
