"""Sparse matrices with dense ones against SciPy in double precision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import sparse

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "complex128": 1e-12, "complex64": 1e-5}
needs_cusparse = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no products of matrices")


def values(shape: Any, dtype: str, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    drawn = generator.normal(size=shape)
    return (drawn + 1j * generator.normal(size=shape) if dtype.startswith("complex") else drawn).astype(dtype)


def random_matrix(rows: int, columns: int, dtype: str, density: float = 0.3, seed: int = 0) -> Any:
    dense = values((rows, columns), dtype, seed)
    dense[np.random.default_rng(seed + 1).random((rows, columns)) >= density] = 0
    return scipy.sparse.csr_array(dense)


def check(result: Any, expected: Any, scale: Any, dtype: str, terms: int) -> None:
    assert (result.shape, result.dtype) == (expected.shape, np.dtype(dtype))
    assert np.all(np.abs(result - expected) <= TOLERANCE[dtype] * np.sqrt(max(terms, 1)) * scale)


@needs_cusparse
@given(
    sizes=st.tuples(*(st.integers(0, 9),) * 3),
    density=st.floats(0.0, 1.0),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    transpose=st.sampled_from(["N", "T", "C"]),
    beta=st.sampled_from([0.0, 1.0, -1.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_random_products(
    sizes: tuple[int, int, int], density: float, dtype: str, transpose: Any, beta: float, seed: int
) -> None:
    rows, columns, n = sizes
    matrix = random_matrix(rows, columns, dtype, density, seed)
    wide = complex if dtype.startswith("complex") else float
    dense = matrix.toarray().astype(wide)
    op = {"N": dense, "T": dense.T, "C": dense.conj().T}[transpose]
    b, c = values((op.shape[1], n), dtype, seed + 2), values((op.shape[0], n), dtype, seed + 3)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            a = await sparse.csr(device, matrix)
            for _ in range(2):
                out = await device.put(c)
                await sparse.spmm(a, b, alpha=0.5, beta=beta, out=out, transpose=transpose)
                scale = np.abs(op) @ np.abs(b) + np.abs(beta * c)
                check(await out.to_host(), 0.5 * op @ b + beta * c, scale, dtype, op.shape[1])
            left = values((rows, n), dtype, seed + 4)
            right = values((n, columns), dtype, seed + 5)
            place = np.repeat(np.arange(rows), np.diff(matrix.indptr)), matrix.indices
            sampled = await (await sparse.sddmm(a, left, right)).to_host()
            scale = (np.abs(left) @ np.abs(right))[place]
            check(sampled, (left.astype(wide) @ right.astype(wide))[place], scale, dtype, n)
            np.testing.assert_array_equal(await (await sparse.to_dense(a)).to_host(), matrix.toarray())

    trio.run(main)


@needs_cusparse
async def test_old_elements_of_out_do_not_count_without_beta(device: ta.Device) -> None:
    a = await sparse.csr(device, scipy.sparse.csr_array(np.array([[0.0, 2.0], [0.0, 0.0]])))
    out = await device.full((2, 2), np.nan)
    assert await sparse.spmm(a, np.array([[np.inf, 1.0], [3.0, 4.0]]), out=out) is out
    assert (await out.to_host()).tolist() == [[6.0, 8.0], [0.0, 0.0]]


@needs_cusparse
async def test_a_sampled_product_makes_a_matrix_of_the_same_structure(device: ta.Device) -> None:
    matrix = random_matrix(6, 5, "float64")
    a = await sparse.csr(device, matrix)
    left, right = values((6, 3), "float64", 1), values((3, 5), "float64", 2)
    result = await sparse.sddmm(a, left, right)
    made = sparse.CsrMatrix(a.shape, a.indptr, a.indices, result)
    dense = await (await sparse.to_dense(made)).to_host()
    np.testing.assert_allclose(
        dense, np.where(matrix.toarray() != 0, left @ right, 0), rtol=1e-12, atol=1e-12
    )


async def test_a_wrong_structure_made_by_hand(device: ta.Device) -> None:
    indptr, data = await device.put(np.array([0, 1, 2])), await device.put(np.ones(2))
    outside = await device.put(np.array([0, 2]))
    wrong = sparse.CsrMatrix((2, 2), indptr, outside, data)
    asks = [lambda: sparse.spmv(wrong, np.ones(2)), lambda: sparse.to_dense(wrong)]
    if not IS_STAND_IN:
        asks += [lambda: sparse.spmm(wrong, np.eye(2)), lambda: sparse.sddmm(wrong, np.eye(2), np.eye(2))]
    for ask in asks:
        with pytest.raises(ta.LibraryError, match="indices: a matrix of 2 columns has them from 0 on"):
            await ask()
    right = sparse.CsrMatrix((2, 2), indptr, await device.put(np.array([0, 1])), data)
    assert (await (await sparse.to_dense(right)).to_host()).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@attrs.frozen
class Given:
    """The arguments of the wrong requests."""

    a: sparse.CsrMatrix
    square: ta.AccelRef


Ask = Callable[[Given], Awaitable[object]]

WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "a vector": (
        lambda g: sparse.spmm(g.a, np.ones(2)),
        ValueError,
        r"sparse\.spmm: b must have two axes, got shape \(2,\)",
    ),
    "rows of b": (
        lambda g: sparse.spmm(g.a, np.ones((3, 2))),
        ValueError,
        r"b must have shape \(2, c\), got matrix of shape \(2, 2\)",
    ),
    "dtype of b": (
        lambda g: sparse.spmm(g.a, np.ones((2, 2), np.float32)),
        TypeError,
        r"must share a dtype, got matrix float64.* b float32; write ",
    ),
    "a letter": (
        lambda g: sparse.spmm(g.a, g.square, transpose="H"),  # type: ignore[arg-type]
        ValueError,
        r"transpose must be 'N', 'T' or 'C', got 'H'",
    ),
    "beta alone": (lambda g: sparse.spmm(g.a, g.square, beta=1.0), ValueError, "beta must be 0 without out"),
    "a complex factor": (
        lambda g: sparse.spmm(g.a, g.square, alpha=1j),
        TypeError,
        r"alpha 1j is complex, the arrays are float64",
    ),
    "out is b": (
        lambda g: sparse.spmm(g.a, g.square, out=g.square),
        ValueError,
        r"spmm: out must not share memory with b; give one of them as a copy\(\)",
    ),
    "out is part of b": (
        lambda g: sparse.sddmm(g.a, g.square, np.eye(2), out=g.square.reshape(4)[:3]),
        ValueError,
        r"sddmm: out must not share memory with a",
    ),
    "out of another shape": (
        lambda g: sparse.spmm(g.a, g.square, out=g.a.data),
        ValueError,
        r"out must have shape \(2, 2\) and dtype float64, got shape \(3,\)",
    ),
    "inner lengths": (
        lambda g: sparse.sddmm(g.a, g.square, np.ones((3, 2))),
        ValueError,
        r"sddmm: b must have shape \(2, 2\), got matrix of shape \(2, 2\) .* b of shape \(3, 2\)",
    ),
    "rows of a": (lambda g: sparse.sddmm(g.a, np.ones((3, 2)), g.square), ValueError, r"a must have shape"),
    "dense out": (
        lambda g: sparse.to_dense(g.a, out=g.a.data),
        ValueError,
        r"to_dense: out must have shape \(2, 2\) and dtype float64, got shape \(3,\)",
    ),
    "no sparse matrix": (
        lambda g: sparse.to_dense(g.square),  # type: ignore[arg-type]
        TypeError,
        r"to_dense: matrix must be a CsrMatrix, got AccelRef; use sparse\.csr",
    ),
}


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_arguments_are_refused_before_anything_is_launched(
    system: ta.System, device: ta.Device, wrong: Ask, error: type[Exception], message: str
) -> None:
    a = await sparse.csr(device, scipy.sparse.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]])))
    square = await device.put(np.array([[1.0, 10.0], [2.0, 20.0]]))
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(Given(a, square))
    await device.synchronize()
    after = await device.statistics()
    assert (after.launched, after.memory.used) == (before.launched, before.memory.used)
    assert all(node.restarts == 0 for node in system.tree().walk())
