"""Direct solutions of sparse systems, by SuperLU on the CPU and cuDSS on CUDA, against NumPy and SciPy."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_matrices import (
    EXAMPLES,
    NEEDS_DIRECT,
    NEEDS_STRUCTURES,
    TOLERANCE,
    check,
    laplacian,
    on_device,
    random_matrix,
    sides,
    systems,
    well_conditioned,
)

import trio_accel as ta
from trio_accel import sparse

pytestmark = NEEDS_DIRECT

scipys: Any = scipy.sparse.linalg.spsolve


async def solved(device: ta.Device, matrix: Any, b: Any) -> Any:
    return await (await sparse.spsolve(await sparse.csr(device, matrix), b)).to_host()


@given(case=systems, columns=st.sampled_from([None, 0, 1, 3]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_small_systems(case: Any, columns: int | None) -> None:
    matrix, dtype = well_conditioned(**case), case["dtype"]
    b = sides(case["n"], columns, dtype)
    expected: Any = np.linalg.solve(matrix.toarray().astype(complex if "complex" in dtype else float), b)

    async def test(device: ta.Device) -> None:
        check(await solved(device, matrix, b), expected, dtype, case["n"])

    on_device(test)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
async def test_pivots_off_the_diagonal(device: ta.Device, dtype: str) -> None:
    # The first is wrong without a look at other rows, and so is the last one, by far more than roundings.
    for full in ([[0, 1], [1, 0]], [[0, 2, 1], [1, 0, 3], [4, 1, 0]], [[1e-30, 1], [1, 1]]):
        matrix, b = np.array(full), sides(len(full), 2, dtype)
        found = await solved(device, scipy.sparse.csr_array(matrix.astype(dtype)), b)
        check(found, np.linalg.solve(matrix, b), dtype, 4)


@pytest.mark.parametrize("n", [150, pytest.param(600, marks=pytest.mark.slow)])
async def test_random_matrices(device: ta.Device, n: int) -> None:
    generator = np.random.default_rng(n)
    values = generator.normal(size=(n, n))
    dense, b = np.where(generator.random((n, n)) < 0.1, values, 0), generator.normal(size=(n, 2))
    found = await solved(device, scipy.sparse.csr_array(dense), b)
    # No pivot is on the diagonal on its own: the promise is a small residual.
    scale = np.abs(dense).sum(1).max() * np.abs(found).max() + np.abs(b).max()
    assert np.abs(b - dense @ found).max() <= 1e-12 * scale


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
async def test_a_matrix_without_a_diagonal_that_dominates(device: ta.Device, dtype: str) -> None:
    # With 2000 unknowns cuDSS finds no pivots in blocks without options, and fails with pivots of whole
    # columns. Others would take a minute.
    n = 2000 if BACKEND == "cuda" and not IS_STAND_IN else 300
    generator = np.random.default_rng(2)
    random = scipy.sparse.random_array(
        (n, n), density=10 / n, rng=generator, data_sampler=lambda size: generator.normal(size=size)
    )
    matrix = scipy.sparse.csr_array(random + 0.01 * scipy.sparse.eye_array(n)).astype(dtype)
    b = sides(n, 2, dtype)
    found = await solved(device, matrix, b)
    scale = abs(matrix).sum(1).max() * np.abs(found).max() + np.abs(b).max()
    assert np.abs(b - matrix @ found).max() <= 1000 * np.finfo(dtype).eps * scale


@pytest.mark.parametrize("scale", [1e-200, 1e-13, 1e200])
async def test_matrices_of_another_scale(device: ta.Device, scale: float) -> None:
    matrix, b = laplacian(8), np.arange(64.0)
    found = await solved(device, scipy.sparse.csr_array(matrix * scale), b)
    np.testing.assert_allclose(found * scale, scipys(matrix.tocsc(), b), rtol=1e-11)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_both_isolations(system: ta.System, isolation: Any) -> None:
    matrix, b = laplacian(6), np.arange(36.0)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        for _ in range(2):
            np.testing.assert_allclose(matrix @ await solved(device, matrix, b), b, atol=1e-11)
            with pytest.raises(ta.LinAlgError, match="is singular") as caught:
                await solved(device, scipy.sparse.csr_array((3, 3)), np.ones(3))
            assert caught.value.operation == "sparse.Spsolve"


async def test_views_as_operands_and_as_results(device: ta.Device) -> None:
    matrix, b = laplacian(4), np.random.default_rng(1).normal(size=(3, 32))
    expected: Any = np.linalg.solve(matrix.toarray(), b.T[::2])
    there = (await device.put(b)).T[::2]
    found = await (await sparse.spsolve(await sparse.csr(device, matrix), there)).to_host()
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@NEEDS_STRUCTURES
async def test_columns_that_do_not_ascend_and_values_of_one_place(device: ta.Device) -> None:
    # Row 0 has its columns in another order, and the diagonal of row 1 twice.
    arrays = [np.array(one) for one in ([0, 2, 5], [1, 0, 1, 0, 1], [1.0, 2.0, 1.0, 5.0, 3.0])]
    a = sparse.CsrMatrix((2, 2), *[await device.put(one) for one in arrays])
    found = await (await sparse.spsolve(a, np.array([3.0, 9.0]))).to_host()
    np.testing.assert_allclose(found, [1.0, 1.0], rtol=1e-14)


async def test_an_infinite_or_nan_side_is_no_fault_of_the_matrix(device: ta.Device) -> None:
    b = np.array([[1.0, np.nan], [2.0, 1.0]])
    found = await solved(device, scipy.sparse.csr_array([[2.0, 1.0], [1.0, 3.0]]), b)
    np.testing.assert_allclose(found[:, 0], [0.2, 0.6], rtol=1e-14)
    assert np.isnan(found[:, 1]).all()


def full(*rows: list[float]) -> Any:
    made = scipy.sparse.csr_array(np.array(rows, float))
    made.eliminate_zeros()
    return made


ZERO = scipy.sparse.csr_array((np.zeros(3), np.arange(3), np.arange(4)), shape=(3, 3))
ONES = np.ones(3)
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no value in a row": (full([2, 0, 1], [0, 2, 0], [0, 0, 0]), ONES, ta.LinAlgError, "matrix is singular"),
    "nor in a column": (full([2, 0, 0], [0, 2, 0], [1, 1, 0]), ONES, ta.LinAlgError, "matrix is singular"),
    "equal rows": (full([1, 2, 3], [1, 2, 3], [0, 1, 1]), ONES, ta.LinAlgError, "matrix is singular"),
    "multiples": (full([1, 2, 0], [2, 4, 0], [0, 0, 1]), ONES, ta.LinAlgError, "matrix is singular"),
    "zeros": (ZERO, ONES, ta.LinAlgError, "matrix is singular"),
    "without a side": (full([1, 2, 0], [2, 4, 0], [0, 0, 1]), np.ones((3, 0)), ta.LinAlgError, "is singular"),
    "a NaN": (full([1, np.nan, 0], [0, 1, 0], [0, 0, 1]), ONES, ta.LinAlgError, "NaN or an infinity"),
    "an infinity": (full([1, np.inf, 0], [0, 1, 0], [0, 0, 1]), ONES, ta.LinAlgError, "NaN or an infinity"),
    "not square": (random_matrix(3, 4), ONES, ValueError, "must be square"),
    "too short": (full([1, 0, 0], [0, 1, 0], [0, 0, 1]), np.ones(2), ValueError, "b"),
    "a dtype": (full([1, 0, 0], [0, 1, 0], [0, 0, 1]), np.ones(3, np.float32), TypeError, "float32"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_invalid_arguments_are_refused(device: ta.Device, case: str) -> None:
    matrix, b, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        await solved(device, matrix, b)
    # The library continues.
    assert (await solved(device, scipy.sparse.eye_array(3, format="csr"), ONES)).tolist() == ONES.tolist()


async def test_others_continue_meanwhile(device: ta.Device) -> None:
    matrix, found = laplacian(20), list[Any]()

    async def one(ask: Callable[[], Awaitable[Any]]) -> None:
        found.append(await ask())

    b = np.random.default_rng(1).normal(size=400)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one, lambda: solved(device, matrix, b))
    expected = scipys(matrix.tocsc(), b)
    for x in found:
        np.testing.assert_allclose(x, expected, rtol=1e-10)


def from_the_collection(name: str) -> Any:
    """Read a matrix of the SuiteSparse collection, from SciPy's tests."""
    tests = importlib.import_module("scipy.sparse.linalg.tests")
    with np.load(Path(tests.__path__[0]) / "propack_test_data.npz", allow_pickle=True) as data:
        return scipy.sparse.csr_array(data[name].item())


NEEDS_COLLECTION = pytest.mark.skipif(
    IS_STAND_IN or find_spec("scipy.sparse.linalg.tests") is None,
    reason="a SciPy without its tests, or the stand-in, which factors dense matrices",
)


@NEEDS_COLLECTION
async def test_an_ill_conditioned_matrix(device: ta.Device) -> None:
    # Bai/mhd1280b: 5e12.
    matrix = from_the_collection("A_complex")
    b = sides(1280, None, "complex128")
    found = await solved(device, matrix, b)
    assert np.abs(b - matrix @ found).max() <= 1e-13 * abs(matrix).sum(1).max() * np.abs(found).max()


@NEEDS_COLLECTION
@pytest.mark.slow
async def test_least_squares_as_a_system(device: ta.Device) -> None:
    # HB/illc1850, with the residuals as unknowns: nothing is stored on most of the diagonal.
    tall = from_the_collection("A_real")
    blocks: Any = [[scipy.sparse.eye_array(1850), tall], [tall.T, None]]
    b = np.zeros(1850 + 712)
    b[:1850] = np.random.default_rng(7).normal(size=1850)
    found = await solved(device, scipy.sparse.csr_array(scipy.sparse.block_array(blocks)), b)
    expected: Any = np.linalg.lstsq(tall.toarray(), b[:1850])[0]
    np.testing.assert_allclose(found[1850:], expected, atol=1e-9 * np.abs(expected).max())


async def test_a_device_without_memory_for_factors(system: ta.System) -> None:
    if BACKEND == "cpu":
        pytest.skip("SuperLU takes its memory of the process")
    options = ta.DeviceOptions(isolation="inline", memory_limit=2 << 20)
    async with system.open_device(BACKEND, options=options) as device:
        a, b = await sparse.csr(device, laplacian(40)), await device.put(np.ones(1600))
        with pytest.raises(ta.OutOfMemoryError):
            await sparse.spsolve(a, b)
        small = laplacian(4)
        np.testing.assert_allclose(small @ await solved(device, small, np.ones(16)), np.ones(16), rtol=1e-12)
    async with system.open_device(BACKEND, options=INLINE) as device:
        assert (await solved(device, laplacian(40), np.ones(1600))).shape == (1600,)


@pytest.mark.skipif(BACKEND != "cuda", reason="only CUDA needs cuDSS")
async def test_a_machine_without_cudss_and_one_with_another(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    pathfinder, cudss = (
        importlib.import_module(name) for name in ("cuda.pathfinder", "nvmath.bindings.cudss")
    )
    load, matrix = pathfinder.load_nvidia_dynamic_lib, laplacian(3)

    def find(name: str) -> Any:
        if name == "cudss":
            raise pathfinder.DynamicLibNotFoundError("no such file")
        return load(name)

    async with system.open_device(BACKEND, options=INLINE) as device:
        with monkeypatch.context() as patch:
            patch.setattr(pathfinder, "load_nvidia_dynamic_lib", find)
            with pytest.raises(
                ta.NotSupportedError, match=r"spsolve needs cuDSS, which is missing: pip inst"
            ):
                await solved(device, matrix, np.ones(9))
        with monkeypatch.context() as patch:
            patch.setattr(cudss, "get_property", lambda part: 1 - part)
            with pytest.raises(
                ta.NotSupportedError, match=r"spsolve needs cuDSS 0\.8, and has 1\.0: pip inst"
            ):
                await solved(device, matrix, np.ones(9))
        np.testing.assert_allclose(matrix @ await solved(device, matrix, np.ones(9)), 1, rtol=1e-12)


@pytest.mark.skipif(BACKEND != "cuda", reason="only CUDA needs cuDSS")
async def test_factors_end_with_the_device_when_their_matrix_outlives_it(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudss, matrix = importlib.import_module("nvmath.bindings.cudss"), laplacian(3)
    create, destroy, present = cudss.data_create, cudss.data_destroy, set[int]()

    def created(handle: int) -> int:
        data: int = create(handle)
        present.add(data)
        return data

    def destroyed(handle: int, data: int) -> None:
        destroy(handle, data)
        present.remove(data)

    monkeypatch.setattr(cudss, "data_create", created)
    monkeypatch.setattr(cudss, "data_destroy", destroyed)
    async with system.open_device(BACKEND, options=INLINE) as device:
        a = await sparse.csr(device, matrix)
        for _ in range(2):
            x = await (await sparse.spsolve(a, np.ones(9))).to_host()
            np.testing.assert_allclose(matrix @ x, 1, rtol=1e-12)
        assert len(present) == 1
    assert a.shape == (9, 9)
    assert not present
