"""Sizes in a message, and shapes of a matrix: native code trusts none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import IS_STAND_IN
from sparse_matrices import HAS_STRUCTURES, NEEDS_STRUCTURES, dense, random_matrix

import trio_accel as ta
from trio_accel import sparse

MATRIX = random_matrix(40, 40, 0.3)
MATRIX.eliminate_zeros()
ROWS = np.array([3, 3, 0, 39])

MAKERS: dict[str, tuple[Callable[[Any, int | None], Any], Any]] = {
    "rows": (lambda a, size: sparse.TakeRows(a, ROWS, size), MATRIX[ROWS]),
    "product": (lambda a, size: sparse.Spgemm(a, a, size), MATRIX @ MATRIX),
    "blocks": (lambda a, size: sparse.CsrToBsr(a, (4, 2), size), MATRIX),
}


def needs(maker: str) -> None:
    if not HAS_STRUCTURES:
        pytest.skip("only the CPU and CUDA do this")
    if IS_STAND_IN and maker == "product":
        pytest.skip("the stand-in has no products of sparse matrices")


@pytest.mark.parametrize("maker", MAKERS)
async def test_too_small_a_size_is_an_error_and_too_large_a_size_is_not(
    device: ta.Device, maker: str
) -> None:
    needs(maker)
    message, expected = MAKERS[maker]
    a = await sparse.csr(device, MATRIX)
    counted = await device.ask(message(a, None))
    for size in (0, 1, counted - 1):
        with pytest.raises(ta.LibraryError, match=f"size is {size}, but the result has {counted} values"):
            await device.ask(message(a, size))
    for size in (counted, counted + 1, 3 * counted):
        made = await device.ask(message(a, size))
        assert made.indices.size == counted
        np.testing.assert_allclose(await dense(made), expected.toarray(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="size must not be negative, got -1"):
        await device.ask(message(a, -1))
    assert device.generation == 1


@pytest.mark.parametrize("maker", MAKERS)
async def test_a_structure_written_after_the_count(device: ta.Device, maker: str) -> None:
    needs(maker)
    if IS_STAND_IN:
        pytest.skip("a GPU looks at a structure once")
    n = 40
    # All rows have all values in the first column. Then they are everywhere, or in the first row.
    pointers, columns = np.arange(0, n * n + 1, n, dtype=np.int32), np.zeros(n * n, np.int32)
    first, wide = np.full(n + 1, n * n, np.int32), np.tile(np.arange(n, dtype=np.int32), n)
    first[0] = 0
    arrays = [await device.put(one) for one in (pointers, columns, np.ones(n * n))]
    a, (message, _) = sparse.CsrMatrix((n, n), *arrays), MAKERS[maker]
    counted = await device.ask(message(a, None))
    await (arrays[0].assign(first) if maker == "rows" else arrays[1].assign(wide))
    with pytest.raises(ta.LibraryError, match="count them again"):
        await device.ask(message(a, counted))
    assert device.generation == 1


@NEEDS_STRUCTURES
async def test_a_count_beyond_32_bits(device: ta.Device) -> None:
    n = 1 << 16
    arrays = np.array([0, n], np.int32), np.arange(n, dtype=np.int32), np.ones(n, np.float32)
    a = sparse.CsrMatrix((1, n), *[await device.put(one) for one in arrays])
    for rows in (n, n + 1):
        wanted = np.zeros(rows, np.int32)
        assert await device.ask(sparse.TakeRows(a, wanted)) == rows * n
        with pytest.raises(ValueError, match=f"up to {rows * n} values need indices of int64"):
            await sparse.take_rows(a, wanted)
        with pytest.raises(ta.LibraryError, match=f"size is 5, but the result has {rows * n} values"):
            await device.ask(sparse.TakeRows(a, wanted, 5))


@pytest.mark.parametrize("made", [sparse.BsrMatrix, sparse.CooMatrix, sparse.CscMatrix, sparse.CsrMatrix])
async def test_a_shape_that_no_matrix_has(device: ta.Device, made: Any) -> None:
    data = np.zeros((1, 1, 1) if made is sparse.BsrMatrix else 1)
    for index, most in (("int32", 2**31 - 1), ("int64", 2**63 - 1)):
        arrays = [await device.put(one) for one in (np.zeros(1, index), np.zeros(1, index), data)]
        for shape in ((-1, 3), (3, -1), (most + 1, 1), (1, most + 1)):
            text = f"shape must have numbers from 0 to {most}, got|shape must be from .* a number of 64 bits"
            with pytest.raises(ValueError, match=text):
                made(shape, *arrays)
        assert made((0, most), *arrays).shape == (0, most)
        with pytest.raises(ValueError, match="shape must be a pair of rows and columns"):
            made((1, 2, 3), *arrays)
        with pytest.raises(TypeError, match="shape must be an integer"):
            made((1.5, 2), *arrays)


@NEEDS_STRUCTURES
@pytest.mark.parametrize("function", [sparse.ilu0, sparse.ic0])
async def test_factors_take_only_rows(device: ta.Device, function: Any) -> None:
    a = await sparse.coo(device, scipy.sparse.eye_array(3).tocoo())
    with pytest.raises(TypeError, match="must be a CsrMatrix, got CooMatrix"):
        await function(a)
