"""Formats of sparse matrices: made, converted, and multiplied with dense arrays, against SciPy and NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_matrices import EXAMPLES, NEEDS_STRUCTURES, cases, check, dense, on_device, random_matrix

import trio_accel as ta
from trio_accel import sparse

MAKERS = {"csr": sparse.csr, "csc": sparse.csc, "coo": sparse.coo, "bsr": sparse.bsr}
# The stand-in lacks cuSPARSE products with matrices.
LAYOUTS = ["bsr", "coo"] if IS_STAND_IN else sorted(MAKERS)
WIDE = {"float32": "float64", "complex64": "complex128"}


@given(
    case=cases,
    columns=st.integers(0, 4),
    transpose=st.sampled_from("NTC"),
    layout=st.sampled_from(LAYOUTS),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_products_of_every_format(case: Any, columns: int, transpose: Any, layout: str) -> None:
    matrix, dtype = random_matrix(**case), case["dtype"]
    full = matrix.toarray().astype(WIDE.get(dtype, dtype))
    op = {"N": full, "T": full.T, "C": full.conj().T}[transpose]
    generator = np.random.default_rng(1)
    b, old = (generator.normal(size=(rows, columns)).astype(dtype) for rows in op.shape[::-1])
    x = generator.normal(size=full.shape[1]).astype(dtype)

    async def test(device: ta.Device) -> None:
        a: Any = await MAKERS[layout](device, matrix)
        assert (a.shape, a.dtype) == (matrix.shape, dtype)
        terms = sum(full.shape)
        check(await dense(a), full, dtype)
        check(await (await sparse.to_dense(a)).to_host(), full, dtype)
        check(await (await sparse.spmv(a, x)).to_host(), full @ x, dtype, terms)
        check(await (await sparse.spmm(a, b, transpose=transpose)).to_host(), op @ b, dtype, terms)
        out = await device.put(old)
        assert await sparse.spmm(a, b, alpha=2.0, beta=0.5, out=out, transpose=transpose) is out
        check(await out.to_host(), 2 * op @ b + 0.5 * old, dtype, terms)
        written = await device.full(full.shape[0], np.nan, dtype)
        assert await sparse.spmv(a, x, out=written) is written
        check(await written.to_host(), full @ x, dtype, terms)

    on_device(test)


@NEEDS_STRUCTURES
@given(case=cases, source=st.sampled_from(sorted(MAKERS)))
@settings(max_examples=EXAMPLES, deadline=None)
def test_conversions(case: Any, source: str) -> None:
    matrix, dtype = random_matrix(**case), case["dtype"]
    full = matrix.toarray()

    async def test(device: ta.Device) -> None:
        a: Any = await MAKERS[source](device, matrix)
        for convert, wanted in (
            (sparse.tocsr, sparse.CsrMatrix),
            (sparse.tocsc, sparse.CscMatrix),
            (sparse.tocoo, sparse.CooMatrix),
            (lambda one: sparse.tobsr(one, (1, 1)), sparse.BsrMatrix),
        ):
            made: Any = await convert(a)
            assert type(made) is wanted
            check(await dense(made), full, dtype)
        check(await dense(await sparse.transpose(a)), full.T, dtype)
        if source != "bsr":
            check(await dense(a.T), full.T, dtype)

    on_device(test)


@NEEDS_STRUCTURES
@given(rows=st.integers(1, 8), columns=st.integers(1, 8), count=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=EXAMPLES, deadline=None)
def test_coordinates_in_any_order_and_of_one_place(rows: int, columns: int, count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    row, col = generator.integers(0, rows, count), generator.integers(0, columns, count)
    values = generator.normal(size=count)
    expected = scipy.sparse.coo_array((values, (row, col)), shape=(rows, columns)).tocsr()

    async def test(device: ta.Device) -> None:
        a = sparse.CooMatrix((rows, columns), *[await device.put(one) for one in (row, col, values)])
        made = await sparse.tocsr(a)
        assert made.nnz == expected.nnz
        assert (await made.indices.to_host()).tolist() == expected.indices.tolist()
        check(await dense(made), expected.toarray(), "float64", count)
        check(await (await sparse.to_dense(a)).to_host(), expected.toarray(), "float64", count)

    on_device(test)


@pytest.mark.parametrize("blocksize", [(1, 1), (2, 3), (4, 6), (2, 2)])
async def test_blocks(device: ta.Device, blocksize: tuple[int, int]) -> None:
    matrix = random_matrix(8, 12, 0.2)
    a = await sparse.bsr(device, matrix, blocksize)
    assert a.blocksize == blocksize
    x = np.arange(12.0)
    check(await (await sparse.spmv(a, x)).to_host(), matrix @ x, "float64", 12)
    check(await (await sparse.to_dense(a)).to_host(), matrix.toarray(), "float64")


@NEEDS_STRUCTURES
@pytest.mark.parametrize("blocksize", [(2, 3), (4, 6)])
async def test_blocks_of_rows(device: ta.Device, blocksize: tuple[int, int]) -> None:
    matrix = random_matrix(8, 12, 0.2)
    made = await sparse.tobsr(await sparse.csr(device, matrix), blocksize)
    assert made.data.shape == matrix.tobsr(blocksize).data.shape
    check(await dense(made), matrix.toarray(), "float64")
    check(await dense(await sparse.tocsr(made)), matrix.toarray(), "float64")


async def test_attributes_of_matrices(device: ta.Device) -> None:
    matrix = random_matrix(4, 6, 0.5, "float32")
    a = await sparse.bsr(device, matrix, (2, 2))
    assert repr(a) == f"<BsrMatrix float32 (4, 6), {a.nnz} stored, on {device.name}>"
    b = await sparse.csc(device, matrix)
    assert b.T.T.indices is b.indices
    b.release()
    with pytest.raises(ta.StaleRefError):
        await sparse.to_dense(b)


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a row outside": (lambda a: ([0, 2], [0, 1]), ta.LibraryError, r"row\[1\] is 2; it must be from 0 to 1"),
    "a negative column": (lambda a: ([0, 1], [-1, 1]), ta.LibraryError, r"col\[0\] is -1"),
    "lengths": (lambda a: ([0], [0, 1]), ValueError, r"row and col of shapes \(2,\) and \(2,\), got \(1,\)"),
}


@NEEDS_STRUCTURES
@pytest.mark.parametrize(("indices", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_coordinates(
    device: ta.Device, indices: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    row, col = [await device.put(np.array(one)) for one in indices(None)]
    a = sparse.CooMatrix((2, 2), row, col, await device.put(np.ones(2)))
    with pytest.raises(error, match=message):
        await sparse.tocsr(a)


@pytest.mark.parametrize("row", [[0, 2], [0, -1]])
async def test_products_refuse_coordinates_outside(device: ta.Device, row: list[int]) -> None:
    arrays = [await device.put(np.array(one)) for one in (row, [0, 1], [1.0, 1.0])]
    with pytest.raises(ta.LibraryError):
        await sparse.spmv(sparse.CooMatrix((2, 2), *arrays), np.ones(2))
    with pytest.raises(ta.LibraryError):
        await sparse.spmv(sparse.CooMatrix((2, 2), *arrays).T, np.ones(2))


REFUSED: dict[str, tuple[Callable[[Any, Any], Awaitable[object]], type[Exception], str]] = {
    "a dense matrix": (lambda a, _: sparse.tocsr(a.data), TypeError, "tocsr: matrix must be a sparse matrix"),
    "a vector's length": (lambda a, _: sparse.spmv(a, np.ones(2)), ValueError, r"x must have shape \(3,\)"),
    "a matrix of coordinates": (
        lambda a, _: sparse.tril(a),
        TypeError,
        r"must be a CsrMatrix, got CooMatrix; use await",
    ),
    "another dtype": (
        lambda a, _: sparse.spmm(a, np.ones((3, 1), np.float32)),
        TypeError,
        "b must have dtype",
    ),
    "a letter": (
        lambda a, _: sparse.spmm(a, np.ones((3, 1)), transpose="X"),
        ValueError,
        "transpose must be",
    ),  # type: ignore[arg-type]
    "beta": (
        lambda a, _: sparse.spmm(a, np.ones((3, 1)), beta=1.0),
        ValueError,
        "beta must be 0 without out",
    ),
    "blocks": (lambda a, d: sparse.bsr(d, random_matrix(3, 3), (2, 2)), ValueError, "blocksize must be two"),
    "no matrix": (lambda a, d: sparse.coo(d, np.ones(2)), TypeError, "coo: matrix must be a SciPy"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("ask", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_invalid_arguments_are_refused(
    device: ta.Device, ask: Callable[[Any, Any], Awaitable[object]], error: type[Exception], message: str
) -> None:
    a = await sparse.coo(device, random_matrix(3, 3, 0.9))
    with pytest.raises(error, match=message):
        await ask(a, device)
