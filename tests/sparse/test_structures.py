"""Matrices composed of others, and functions of their elements, against SciPy and NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from chosen import BACKEND, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_matrices import (
    EXAMPLES,
    HAS_STRUCTURES,
    NEEDS_STRUCTURES,
    cases,
    check,
    dense,
    on_device,
    random_matrix,
)

import trio_accel as ta
from trio_accel import sparse

NO_SPMM = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no products of matrices")


@NEEDS_STRUCTURES
@NO_SPMM
@given(case=cases, columns=st.integers(0, 8), factors=st.sampled_from([(1.0, 1.0), (2.0, -0.5), (1.0, -1.0)]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_sums_and_products_of_two(case: Any, columns: int, factors: tuple[float, float]) -> None:
    dtype, other = case["dtype"], {**case, "seed": case["seed"] + 1}
    a, b = random_matrix(**case), random_matrix(**other)
    c = random_matrix(**{**case, "rows": case["columns"], "columns": columns, "seed": case["seed"] + 2})
    wide = complex if dtype.startswith("complex") else float
    one, two, three = (each.toarray().astype(wide) for each in (a, b, c))

    async def test(device: ta.Device) -> None:
        first, second, third = [await sparse.csr(device, each) for each in (a, b, c)]
        made = await sparse.spgemm(first, third)
        assert made.indptr.dtype is first.indptr.dtype
        check(await dense(made), one @ three, dtype, a.shape[1])
        added = await sparse.add(first, second, *factors)
        check(await dense(added), factors[0] * one + factors[1] * two, dtype)
        if factors == (1.0, -1.0):
            assert (await sparse.add(first, first, 1.0, -1.0)).nnz == 0
        assert made.nnz == (a @ c).nnz

    on_device(test)


@NEEDS_STRUCTURES
@given(case=cases, k=st.integers(-14, 14), wanted=st.lists(st.integers(0, 11), max_size=6))
@settings(max_examples=EXAMPLES, deadline=None)
def test_parts(case: Any, k: int, wanted: list[int]) -> None:
    matrix, dtype = random_matrix(**case), case["dtype"]
    full, wanted = matrix.toarray(), [row for row in wanted if row < case["rows"]]

    async def test(device: ta.Device) -> None:
        a = await sparse.csr(device, matrix)
        for function, expected in ((sparse.tril, scipy.sparse.tril), (sparse.triu, scipy.sparse.triu)):
            made = await function(a, k)
            assert made.nnz == expected(matrix, k).nnz
            check(await dense(made), expected(matrix, k).toarray(), dtype)
        made = await sparse.eliminate_zeros(a)
        assert made.nnz == np.count_nonzero(full)
        check(await dense(made), full, dtype)
        taken = await sparse.take_rows(a, np.array(wanted, np.int64))
        check(await dense(taken), full[wanted], dtype)

    on_device(test)


@given(case=cases, start=st.integers(-14, 14), stop=st.integers(-14, 14), k=st.integers(-11, 11))
@settings(max_examples=EXAMPLES, deadline=None)
def test_elements(case: Any, start: int, stop: int, k: int) -> None:
    matrix, dtype = random_matrix(**case), case["dtype"]
    full, (m, n) = matrix.toarray(), matrix.shape
    generator = np.random.default_rng(3)

    async def test(device: ta.Device) -> None:
        a = await sparse.csr(device, matrix)
        check(await dense(await sparse.rows(a, start, stop)), full[start:stop], dtype)
        for shape in ((), (n,), (m, 1), (1, n), (m, n)):
            x = generator.normal(size=shape).astype(dtype)
            made = await sparse.multiply(a, x if shape else 2.5)
            check(await dense(made), full * (x if shape else 2.5), dtype)
        if -m < k < n:
            check(await (await sparse.diagonal(a, k)).to_host(), np.diagonal(full, k), dtype)
        if not IS_STAND_IN:
            for axis in (None, 0, 1):
                check(await (await sparse.sum(a, axis)).to_host(), np.sum(full, axis), dtype, m * n)

    on_device(test)


@given(case=cases)
@settings(max_examples=EXAMPLES, deadline=None)
def test_extremes(case: Any) -> None:
    dtype = {"complex64": "float32", "complex128": "float64"}.get(case["dtype"], case["dtype"])
    matrix = random_matrix(**{**case, "dtype": dtype})
    full = matrix.toarray()

    async def test(device: ta.Device) -> None:
        a = await sparse.csr(device, matrix)
        for axis in (None, 0, 1):
            for function, expected in ((sparse.max, np.max), (sparse.min, np.min)):
                if (full.size if axis is None else full.shape[axis]) == 0:
                    with pytest.raises(ValueError, match="is empty"):
                        await function(a, axis)
                else:
                    check(await (await function(a, axis)).to_host(), expected(full, axis), dtype)

    on_device(test)


@NO_SPMM
@given(case=cases)
@settings(max_examples=EXAMPLES, deadline=None)
def test_norms(case: Any) -> None:
    matrix, dtype = random_matrix(**case), case["dtype"]
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    full = matrix.toarray()

    async def test(device: ta.Device) -> None:
        a = await sparse.csr(device, matrix)
        for order in (None, "fro", 1, -1, np.inf, -np.inf):
            if 0 in full.shape and order not in (None, "fro"):
                continue
            expected = np.linalg.norm(full, order)
            check(await (await sparse.norm(a, order)).to_host(), expected, real, full.size)
        for axis in (0, 1):
            for order in (None, 1, 2, np.inf):
                if full.shape[axis]:
                    expected = np.linalg.norm(full, order, axis)
                    check(await (await sparse.norm(a, order, axis)).to_host(), expected, real, full.size)

    on_device(test)


@pytest.mark.parametrize(("dtype", "scale"), [("float64", 1e-200), ("complex128", 1e250), ("float32", 1e-30)])
@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no products with dense matrices by cuSPARSE")
async def test_norms_with_squares_beyond_the_dtype(device: ta.Device, dtype: str, scale: float) -> None:
    full = np.array([[3, 0, 4], [0, 0, 0], [-6, 8, 0]], dtype)
    a = await sparse.csr(device, scipy.sparse.csr_array(full * full.dtype.type(scale)))
    for order, axis in ((None, None), ("fro", None), (None, 0), (2, 0), (2, 1)):
        found = await (await sparse.norm(a, order, axis)).to_host()  # type: ignore[arg-type]
        expected = np.linalg.norm(full, order, axis)  # type: ignore[call-overload]
        np.testing.assert_allclose(found / found.dtype.type(scale), expected, rtol=1e-6)
    full[0, 0] = np.inf
    a = await sparse.csr(device, scipy.sparse.csr_array(full))
    np.testing.assert_array_equal(await (await sparse.norm(a, 2, 1)).to_host(), [np.inf, 0, 10])


async def test_a_nan_is_the_largest_and_the_smallest(device: ta.Device) -> None:
    a = await sparse.csr(device, scipy.sparse.csr_array(np.array([[1.0, np.nan], [2.0, 0.0]])))
    assert np.isnan(await (await sparse.norm(a)).item())
    if BACKEND == "cpu":
        assert np.isnan(await (await sparse.max(a, 1)).to_host()).tolist() == [True, False]


@NEEDS_STRUCTURES
@NO_SPMM
async def test_columns_in_any_order(device: ta.Device) -> None:
    arrays = [np.array(one) for one in ([0, 3, 4], [1, 0, 1, 0], [1.0, 2.0, 4.0, 8.0])]
    a = sparse.CsrMatrix((2, 2), *[await device.put(one) for one in arrays])
    made = await sparse.sum_duplicates(a)
    assert (await made.indices.to_host()).tolist() == [0, 1, 0]
    assert (await made.data.to_host()).tolist() == [2.0, 5.0, 8.0]
    # Unordered elements are right all the same.
    check(await dense(await sparse.spgemm(a, a)), made_squared(), "float64")
    assert (await (await sparse.diagonal(a)).to_host()).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
async def test_a_diagonal_has_nothing_of_its_neighbours(device: ta.Device, dtype: str) -> None:
    full = np.array([[1, np.nan, 2], [np.inf, 3, 0]], dtype)
    a = await sparse.csr(device, scipy.sparse.csr_array(full))
    for k in range(-1, 3):
        np.testing.assert_array_equal(await (await sparse.diagonal(a, k)).to_host(), np.diagonal(full, k))


def made_squared() -> Any:
    full = np.array([[2.0, 5.0], [8.0, 0.0]])
    return full @ full


FAULTS: dict[str, tuple[list[int], list[int], str]] = {
    "a column outside": ([0, 1, 2], [0, 2], "column"),
    "a negative column": ([0, 1, 2], [0, -1], "column"),
    "a pointer that descends": ([0, 3, 2], [0, 1], "row pointers|indptr"),
    "a pointer beyond": ([0, 1, 3], [0, 1], "row pointers|indptr"),
    "a pointer that ends before": ([0, 1, 1], [0, 1], "row pointers|indptr"),
}
USES: dict[str, Callable[[sparse.CsrMatrix], Awaitable[object]]] = {
    "spgemm": lambda a: sparse.spgemm(a, a),
    "add": lambda a: sparse.add(a, a),
    "tocsc": sparse.tocsc,
    "tocoo": sparse.tocoo,
    "tobsr": lambda a: sparse.tobsr(a, (1, 1)),
    "tril": sparse.tril,
    "rows": lambda a: sparse.rows(a, 0, 1),
    "take_rows": lambda a: sparse.take_rows(a, np.array([0])),
    "sum": sparse.sum,
    "diagonal": sparse.diagonal,
    "max": sparse.max,
    "norm": sparse.norm,
    "multiply": lambda a: sparse.multiply(a, np.ones(2)),
    "sum_duplicates": sparse.sum_duplicates,
    "spsolve": lambda a: sparse.spsolve(a, np.ones(2)),
    "spsolve_triangular": lambda a: sparse.spsolve_triangular(a, np.ones(2)),
    "ilu0": sparse.ilu0,
    "cg": lambda a: sparse.cg(a, np.ones(2)),
    "eigsh": lambda a: sparse.eigsh(a, 1),
}
ANYWHERE = ("tocoo", "rows", "sum", "diagonal", "max", "norm", "multiply", "cg", "eigsh")


@pytest.mark.parametrize(("indptr", "indices", "message"), FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("use", USES)
async def test_wrong_structures(
    device: ta.Device, use: str, indptr: list[int], indices: list[int], message: str
) -> None:
    if not HAS_STRUCTURES and use not in ANYWHERE:
        pytest.skip("only the CPU and CUDA have this operation")
    arrays = [await device.put(np.array(one)) for one in (indptr, indices, [1.0, 2.0])]
    with pytest.raises(ta.LibraryError):
        await USES[use](sparse.CsrMatrix((2, 2), *arrays))
    good = await sparse.csr(device, scipy.sparse.eye_array(3).tocsr())
    assert (await (await sparse.spmv(good, np.ones(3))).to_host()).tolist() == [1.0, 1.0, 1.0]


REFUSED: dict[str, tuple[Callable[[Any, Any], Awaitable[object]], type[Exception], str]] = {
    "shapes of a sum": (sparse.add, ValueError, r"must have one shape, got \(3, 4\)"),
    "shapes of a product": (lambda a, b: sparse.spgemm(a, a), ValueError, r"shapes \(m, k\) and \(k, n\)"),
    "another format": (lambda a, b: sparse.add(a, a.T), TypeError, "b must be a CsrMatrix, got CscMatrix"),
    "a format of elements": (lambda a, b: sparse.max(a.T), TypeError, "must be a CsrMatrix, got CscMatrix"),
    "a complex factor": (lambda a, b: sparse.add(a, a, 1j), TypeError, "a is of float64"),
    "an axis": (lambda a, b: sparse.sum(a, 2), ValueError, "axis must be None, 0 or 1, got 2"),  # type: ignore[arg-type]
    "a norm": (lambda a, b: sparse.norm(a, 2), ValueError, "ord must be"),
    "a diagonal": (lambda a, b: sparse.diagonal(a, 4), ValueError, "k must be above -3 and below 4, got 4"),
    "no integer": (lambda a, b: sparse.rows(a, 0, 1.5), TypeError, "stop must be an integer"),  # type: ignore[arg-type]
    "no factor": (sparse.multiply, TypeError, "x must be an AccelRef, a NumPy array or a number"),
    "a factor's shape": (lambda a, b: sparse.multiply(a, np.ones(3)), ValueError, "x must broadcast"),
    "blocks": (lambda a, b: sparse.tobsr(a, (2, 2)), ValueError, r"blocks of shape \(2, 2\) do not fit"),
    "no blocks": (lambda a, b: sparse.tobsr(a, 2), TypeError, "blocksize must be a pair"),  # type: ignore[arg-type]
    "indices": (lambda a, b: sparse.take_rows(a, np.ones(2)), TypeError, "indices must be a vector of int32"),
}


@pytest.mark.parametrize(("ask", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_invalid_structures_are_refused(
    device: ta.Device, ask: Callable[[Any, Any], Awaitable[object]], error: type[Exception], message: str
) -> None:
    a, b = [await sparse.csr(device, random_matrix(3, columns, 0.9)) for columns in (4, 5)]
    with pytest.raises(error, match=message):
        await ask(a, b)


@NEEDS_STRUCTURES
async def test_dtypes_that_differ(device: ta.Device) -> None:
    matrix = random_matrix(3, 3, 0.9)
    a, b = await sparse.csr(device, matrix), await sparse.csr(device, matrix.astype("float32"))
    with pytest.raises(TypeError, match="float32"):
        await sparse.add(a, b)
    wide = await sparse.csr(device, random_matrix(3, 3, 0.9, index="int64"))
    with pytest.raises(TypeError, match="must all be int32 or int64"):
        await sparse.spgemm(a, wide)
    with pytest.raises(ta.LibraryError, match=r"indices\[1\] is 3; it must be from 0 to 2"):
        await sparse.take_rows(a, np.array([0, 3]))


@given(seed=st.integers(0, 99), rows=st.integers(1, 6), columns=st.integers(1, 6), stored=st.integers(0, 20))
@settings(max_examples=EXAMPLES, deadline=None)
@NEEDS_STRUCTURES
@NO_SPMM
def test_values_of_one_place_are_one_element(seed: int, rows: int, columns: int, stored: int) -> None:
    generator = np.random.default_rng(seed)
    if BACKEND == "cuda":
        # cuSPARSE takes no more values than a matrix has places.
        stored = min(stored, rows * columns)
    row, col = np.sort(generator.integers(0, rows, stored)), generator.integers(0, columns, stored)
    indptr, data = np.searchsorted(row, np.arange(rows + 1)), generator.integers(-3, 4, stored) * 1.0
    full = scipy.sparse.coo_array((data, (row, col)), shape=(rows, columns)).toarray()

    async def test(device: ta.Device) -> None:
        a = sparse.CsrMatrix((rows, columns), *[await device.put(one) for one in (indptr, col, data)])
        for axis in (None, 0, 1):
            check(await (await sparse.max(a, axis)).to_host(), full.max(axis), "float64")
            check(await (await sparse.min(a, axis)).to_host(), full.min(axis), "float64")
            check(await (await sparse.sum(a, axis)).to_host(), full.sum(axis), "float64")
        for order in ("fro", 1, -1, np.inf, -np.inf):
            check(await (await sparse.norm(a, order)).to_host(), np.linalg.norm(full, order), "float64")
        for axis in (0, 1):
            for order in (1, 2, np.inf):
                expected = np.linalg.norm(full, order, axis)
                check(await (await sparse.norm(a, order, axis)).to_host(), expected, "float64")
        for made, expected in (
            (await sparse.tocsc(a), full),
            (await sparse.tobsr(a, (1, 1)), full),
            (await sparse.transpose(a), full.T),
            (await sparse.multiply(a, 2.0), 2 * full),
            (await sparse.add(a, a), 2 * full),
            (await sparse.tril(a), np.tril(full)),
            (await sparse.take_rows(a, np.array([0, 0])), full[[0, 0]]),
            (await sparse.spgemm(a, await sparse.transpose(a)), full @ full.T),
        ):
            check(await dense(made), expected, "float64", columns)

    on_device(test)
