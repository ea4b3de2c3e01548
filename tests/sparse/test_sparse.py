"""Sparse matrices and their products against SciPy in double precision."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import sparse

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "complex128": 1e-12, "complex64": 1e-5}


def random_matrix(rows: int, columns: int, dtype: str, density: float = 0.2, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    matrix = scipy.sparse.random_array((rows, columns), density=density, rng=generator, format="csr")
    if dtype.startswith("complex"):
        matrix = matrix + 1j * scipy.sparse.random_array((rows, columns), density=density, rng=generator)
    return matrix.astype(dtype)


def random_vector(n: int, dtype: str, seed: int = 1) -> Any:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=n)
    if dtype.startswith("complex"):
        values = values + 1j * generator.normal(size=n)
    return values.astype(dtype)


def check_product(result: Any, matrix: Any, x: Any, dtype: str) -> None:
    wide = complex if dtype.startswith("complex") else float
    dense = matrix.toarray().astype(wide)
    expected = dense @ x.astype(wide)
    assert (result.shape, result.dtype) == (expected.shape, np.dtype(dtype))
    scale = np.abs(dense) @ np.abs(x.astype(wide))
    tolerance = TOLERANCE[dtype] * np.sqrt(max(matrix.shape[1], 1))
    assert np.all(np.abs(result - expected) <= tolerance * scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (1, 7), (7, 1), (100, 30), (0, 4), (4, 0), (0, 0)])
async def test_products(device: ta.Device, dtype: str, rows: int, columns: int) -> None:
    matrix, x = random_matrix(rows, columns, dtype), random_vector(columns, dtype)
    a = await sparse.csr(device, matrix)
    assert (a.shape, a.dtype, a.nnz, a.device) == ((rows, columns), dtype, matrix.nnz, device)
    result = await sparse.spmv(a, await device.put(x))
    check_product(await result.to_host(), matrix, x, dtype)
    check_product(await (await sparse.spmv(a, x)).to_host(), matrix, x, dtype)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr", "dia", "dok", "lil"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
async def test_every_format_of_scipy(device: ta.Device, layout: str, kind: str) -> None:
    plain = random_matrix(6, 9, "float64")
    matrix = getattr(scipy.sparse, f"{layout}_{kind}")(plain)
    before = matrix.toarray()
    a = await sparse.csr(device, matrix)
    x = random_vector(9, "float64")
    check_product(await (await sparse.spmv(a, x)).to_host(), plain, x, "float64")
    np.testing.assert_array_equal(matrix.toarray(), before)
    assert matrix.format == layout


async def test_duplicate_entries_are_added_up(device: ta.Device) -> None:
    entries = ([1.0, 2.0, 4.0, 8.0], ([0, 0, 1, 0], [1, 1, 0, 0]))
    a = await sparse.csr(device, scipy.sparse.coo_array(entries, shape=(2, 2)))
    assert a.nnz == 3
    assert (await (await sparse.spmv(a, np.array([1.0, 10.0]))).to_host()).tolist() == [38.0, 4.0]
    twice = scipy.sparse.csr_array(
        (np.array([1.0, 2.0, 3.0]), np.array([1, 0, 1]), np.array([0, 3])), shape=(1, 2)
    )
    b = await sparse.csr(device, twice)
    assert (await b.indices.to_host()).tolist() == [0, 1]
    assert (await b.data.to_host()).tolist() == [2.0, 4.0]
    assert twice.nnz == 3  # the arguments are unchanged


async def test_empty_rows_and_explicit_zeros(device: ta.Device) -> None:
    matrix = scipy.sparse.csr_array((np.array([2.0, 0.0]), np.array([3, 1]), np.array([0, 0, 1, 1, 2, 2])))
    a = await sparse.csr(device, matrix)
    assert (a.shape, a.nnz) == ((5, 4), 2)
    out = await device.full(5, np.nan)
    assert await sparse.spmv(a, np.arange(4.0), out=out) is out
    assert (await out.to_host()).tolist() == [0.0, 6.0, 0.0, 0.0, 0.0]


async def test_indices_of_eight_bytes(device: ta.Device) -> None:
    matrix = random_matrix(20, 20, "float64")
    wide = scipy.sparse.csr_array(
        (matrix.data, matrix.indices.astype(np.int64), matrix.indptr.astype(np.int64)), shape=matrix.shape
    )
    a = await sparse.csr(device, wide)
    assert a.indptr.dtype is a.indices.dtype
    x = random_vector(20, "float64")
    check_product(await (await sparse.spmv(a, x)).to_host(), matrix, x, "float64")
    by_hand = sparse.CsrMatrix(
        (20, 20),
        await device.put(matrix.indptr.astype(np.int64)),
        await device.put(matrix.indices.astype(np.int64)),
        await device.put(matrix.data),
    )
    check_product(await (await sparse.spmv(by_hand, x)).to_host(), matrix, x, "float64")


async def test_attributes_of_a_matrix(device: ta.Device) -> None:
    a = await sparse.csr(device, random_matrix(3, 4, "float32", density=0.5))
    assert repr(a) == f"<CsrMatrix float32 (3, 4), 6 stored, on {device.name}>"
    a.release()
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0
    with pytest.raises(ta.StaleRefError, match=r"sparse\.spmv: matrix\.indptr: its memory was released"):
        await sparse.spmv(a, np.ones(4, np.float32))


async def test_a_matrix_that_does_not_fit_leaves_nothing(system: ta.System) -> None:
    matrix = random_matrix(10, 10, "float64", density=0.5)
    limit = matrix.indptr.nbytes + matrix.indices.nbytes + matrix.data.nbytes - 1
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation="inline", memory_limit=limit)
    ) as device:
        with pytest.raises(ta.OutOfMemoryError):
            await sparse.csr(device, matrix)
        await device.synchronize()
        assert (await device.statistics()).memory.used == 0


@given(
    rows=st.integers(0, 12),
    columns=st.integers(0, 12),
    density=st.floats(0.0, 1.0),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_random_matrices(rows: int, columns: int, density: float, dtype: str, seed: int) -> None:
    matrix, x = random_matrix(rows, columns, dtype, density, seed), random_vector(columns, dtype, seed)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            a = await sparse.csr(device, matrix)
            check_product(await (await sparse.spmv(a, x)).to_host(), matrix, x, dtype)

    trio.run(main)


@attrs.frozen
class Given:
    """The arguments of the wrong requests."""

    device: ta.Device
    a: sparse.CsrMatrix
    x: ta.AccelRef


def broken(**changes: Any) -> Any:
    """A matrix with arrays changed after it was made."""
    matrix = scipy.sparse.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]]))
    for name, values in changes.items():
        setattr(matrix, name, np.array(values))
    return matrix


def broken_format(layout: str) -> Any:
    """A matrix with a row far outside: in SciPy's own conversion it crashes the interpreter."""
    matrix = scipy.sparse.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]])).asformat(layout)
    rows = matrix.coords[0] if layout == "coo" else matrix.indices
    rows[0] = 1_000_000_000
    return matrix


Ask = Callable[[Given], Awaitable[object]]

WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "a dense matrix": (
        lambda g: sparse.csr(g.device, np.eye(2)),  # type: ignore[arg-type]
        TypeError,
        r"csr: matrix must be a SciPy sparse matrix, got ndarray; make one with scipy\.sparse\.csr_array",
    ),
    "no device": (
        lambda g: sparse.csr(scipy.sparse.eye_array(2), g.device),  # type: ignore[arg-type]
        TypeError,
        r"csr: device must be an open Device, got dia_array",
    ),
    "integers": (
        lambda g: sparse.csr(g.device, scipy.sparse.csr_array(np.eye(2, dtype=np.int64))),
        TypeError,
        r"csr: matrix has dtype int64; allowed: float32, float64, .* \(use matrix\.astype\)",
    ),
    "long doubles": (
        lambda g: sparse.csr(g.device, scipy.sparse.csr_array(np.eye(2, dtype=np.longdouble))),
        TypeError,
        r"csr: matrix has dtype (longdouble|float128); allowed: float32",
    ),
    "one axis": (
        lambda g: sparse.csr(g.device, scipy.sparse.coo_array(np.ones(3))),
        ValueError,
        r"csr: matrix must have two axes, got shape \(3,\)",
    ),
    "columns that are not there": (
        lambda g: sparse.csr(g.device, broken(indices=[0, 7, 1])),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "negative columns": (
        lambda g: sparse.csr(g.device, broken(indices=[0, -1, 1])),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "rows that run backwards": (
        lambda g: sparse.csr(g.device, broken(indptr=[0, 3, 2])),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "rows that are not there, csc": (
        lambda g: sparse.csr(g.device, broken_format("csc")),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "rows that are not there, bsr": (
        lambda g: sparse.csr(g.device, broken_format("bsr")),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "rows that are not there, coo": (
        lambda g: sparse.csr(g.device, broken_format("coo")),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "rows beyond the end": (
        lambda g: sparse.csr(g.device, broken(indptr=[0, 2, 9])),
        ValueError,
        r"csr: matrix is inconsistent: ",
    ),
    "length of x": (
        lambda g: sparse.spmv(g.a, np.ones(3)),
        ValueError,
        r"sparse\.spmv: x must have shape \(2,\), got matrix of shape \(2, 2\) .* x of shape \(3,\)",
    ),
    "a matrix as x": (
        lambda g: sparse.spmv(g.a, np.eye(2)),
        ValueError,
        r"x must have one axis, got shape \(2, 2\)",
    ),
    "dtype of x": (
        lambda g: sparse.spmv(g.a, np.ones(2, np.float32)),
        TypeError,
        r"must share a dtype, got matrix float64.* x float32; write ",
    ),
    "a SciPy matrix": (
        lambda g: sparse.spmv(scipy.sparse.eye_array(2), g.x),  # type: ignore[arg-type]
        TypeError,
        r"spmv: matrix must be a CsrMatrix, got dia_array; use sparse\.csr",
    ),
    "out of another shape": (
        lambda g: sparse.spmv(g.a, g.x, out=g.a.data),
        ValueError,
        r"out must have shape \(2,\) and dtype float64, got shape \(3,\)",
    ),
    "out is x": (
        lambda g: sparse.spmv(g.a, g.x, out=g.x),
        ValueError,
        r"out must not share memory with x; give one of them as a copy\(\)",
    ),
    "x a list": (
        lambda g: sparse.spmv(g.a, [1.0, 2.0]),  # type: ignore[arg-type]
        TypeError,
        r"x must be an AccelRef or a NumPy array, got list",
    ),
}


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_arguments_are_refused_before_anything_is_launched(
    system: ta.System, device: ta.Device, wrong: Ask, error: type[Exception], message: str
) -> None:
    a = await sparse.csr(device, scipy.sparse.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]])))
    x = await device.put(np.array([1.0, 10.0]))
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(Given(device, a, x))
    await device.synchronize()
    after = await device.statistics()
    assert (after.launched, after.memory.used) == (before.launched, before.memory.used)
    assert (await (await sparse.spmv(a, x)).to_host()).tolist() == [21.0, 30.0]
    assert all(node.restarts == 0 for node in system.tree().walk())


async def test_an_inconsistent_matrix_made_by_hand(system: ta.System, device: ta.Device) -> None:
    arrays = [
        await device.put(np.array(values)) for values in (np.array([0, 2, 9]), np.array([0, 1]), np.ones(2))
    ]
    with pytest.raises(ValueError, match=r"matrix\.indptr must have shape \(4,\)"):
        await sparse.spmv(sparse.CsrMatrix((3, 2), *arrays), np.ones(2))
    floats = [await array.cast("float64") for array in arrays]
    with pytest.raises(TypeError, match=r"must all be int32 or int64, got float64 and float64"):
        await sparse.spmv(sparse.CsrMatrix((2, 2), *floats), np.ones(2))
    with pytest.raises(
        ValueError, match=r"matrix\.data must have shape \(3,\), got .*matrix\.data of shape \(2,\)"
    ):
        await sparse.spmv(sparse.CsrMatrix((2, 2), arrays[0], arrays[0], arrays[2]), np.ones(2))
    with pytest.raises(ta.LibraryError, match="indptr: 2 rows need 3 elements") as caught:
        await sparse.spmv(sparse.CsrMatrix((2, 2), *arrays), np.ones(2))
    assert caught.value.library == "sparse"
    assert system.tree().find(f"test/{device.name}/context/sparse").restarts == 0


async def test_failed_products_let_go_of_their_arrays(device: ta.Device) -> None:
    used: list[int] = []
    for _ in range(4):
        arrays = [
            await device.put(array) for array in (np.array([0, 1, 9]), np.array([0, 1]), np.array([1.0, 2.0]))
        ]
        with pytest.raises(ta.LibraryError):
            await sparse.spmv(sparse.CsrMatrix((2, 2), *arrays), np.ones(2))
        gc.collect()
        await device.synchronize()
        used.append((await device.statistics()).memory.used)
    # The error of one may be kept with the stream.
    assert used[1] == used[2] == used[3]
