"""Factors that are made once and used for many solutions, against NumPy and SciPy."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import trio
from chosen import BACKEND, INLINE
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

pytestmark = [NEEDS_DIRECT, NEEDS_STRUCTURES]

ON_CPU = pytest.mark.skipif(BACKEND != "cpu", reason="looks at SuperLU")
TRANSPOSED: dict[str, Callable[[Any], Any]] = {
    "N": lambda a: a,
    "T": lambda a: a.T,
    "C": lambda a: a.conj().T,
}
LETTERS = sorted(TRANSPOSED) if BACKEND == "cpu" else ["N"]


class Counted:
    """SuperLU's factors, which note the thread that frees them."""

    def __init__(self, factors: Any, freed: list[int]) -> None:
        self.factors, self.freed, self.nnz = factors, freed, factors.nnz

    def solve(self, *arguments: Any) -> Any:
        return self.factors.solve(*arguments)

    def __del__(self) -> None:
        self.freed.append(threading.get_ident())


@pytest.fixture
def superlu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Count factorizations of the CPU backend in this process, and the factors that are freed."""
    kernels: Any = pytest.importorskip("trio_accel.backends.cpu.libraries.sparse")
    counted = SimpleNamespace(made=[], freed=[], living=[])

    def splu(*arguments: Any, **options: Any) -> Counted:
        counted.made.append(threading.get_ident())
        found = Counted(scipy.sparse.linalg.splu(*arguments, **options), counted.freed)
        counted.living.append(ref(found))
        return found

    monkeypatch.setattr(kernels, "_linalg", SimpleNamespace(splu=splu))
    return counted


@given(case=systems, columns=st.sampled_from([None, 0, 1, 3]), trans=st.sampled_from(LETTERS))
@settings(max_examples=EXAMPLES, deadline=None)
def test_small_systems(case: Any, columns: int | None, trans: Any) -> None:
    matrix, dtype = well_conditioned(**case), case["dtype"]
    b = sides(case["n"], columns, dtype)
    wide = matrix.toarray().astype(complex if "complex" in dtype else float)
    solve: Any = np.linalg.solve
    expected = solve(TRANSPOSED[trans](wide), b)

    async def test(device: ta.Device) -> None:
        factors = await sparse.factor(await sparse.csr(device, matrix))
        assert (factors.shape, factors.dtype, factors.device) == (matrix.shape, ta.DType(dtype), device)
        for _ in range(2):
            found = await (await factors.solve(b, trans=trans)).to_host()
            check(found, expected, dtype, case["n"])

    on_device(test)


async def test_as_scipy(device: ta.Device) -> None:
    general = scipy.sparse.csr_array(random_matrix(90, 90, 0.1, seed=4) + 3 * scipy.sparse.eye_array(90))
    indefinite = scipy.sparse.csr_array(laplacian(9) - 2.9 * scipy.sparse.eye_array(81))
    for matrix in (general, indefinite, laplacian(15)):
        b = np.random.default_rng(2).normal(size=(matrix.shape[0], 4))
        lu: Any = scipy.sparse.linalg.splu(matrix.tocsc())
        expected = lu.solve(b)
        factors = await sparse.factor(await sparse.csr(device, matrix))
        there = await device.put(b)
        out = await device.zeros(b.T.shape)
        made = await factors.solve(there, out=out.T)
        np.testing.assert_allclose(await made.to_host(), expected, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose((await out.to_host()).T, expected, rtol=1e-9, atol=1e-11)
        vector = await factors.solve(there[:, 2])
        np.testing.assert_allclose(await vector.to_host(), expected[:, 2], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
async def test_pivots_that_are_not_on_the_diagonal(device: ta.Device, dtype: str) -> None:
    # The structures are symmetric, so that the order of SuperLU is another one than that of `spsolve`.
    for full in ([[0, 1], [1, 0]], [[0, 2, 1], [1, 0, 3], [4, 1, 0]], [[1e-30, 1], [1, 1]]):
        matrix, b = np.array(full), sides(len(full), 2, dtype)
        factors = await sparse.factor(await sparse.csr(device, scipy.sparse.csr_array(matrix.astype(dtype))))
        check(await (await factors.solve(b)).to_host(), np.linalg.solve(matrix, b), dtype, 4)


async def test_later_changes_of_the_matrix_change_nothing(device: ta.Device) -> None:
    matrix, b = laplacian(5), np.arange(25.0)
    a = await sparse.csr(device, matrix)
    factors = await sparse.factor(a)
    await a.data.fill(0)
    a.release()
    np.testing.assert_allclose(matrix @ await (await factors.solve(b)).to_host(), b, atol=1e-11)


async def test_columns_that_do_not_ascend_and_values_of_one_place(device: ta.Device) -> None:
    arrays = [np.array(one) for one in ([0, 2, 5], [1, 0, 1, 0, 1], [1.0, 2.0, 1.0, 5.0, 3.0])]
    a = sparse.CsrMatrix((2, 2), *[await device.put(one) for one in arrays])
    found = await (await (await sparse.factor(a)).solve(np.array([3.0, 9.0]))).to_host()
    np.testing.assert_allclose(found, [1.0, 1.0], rtol=1e-14)


@ON_CPU
async def test_factors_are_made_once_and_freed_in_their_thread(
    system: ta.System, superlu: SimpleNamespace
) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        a, other = [await sparse.csr(device, laplacian(points)) for points in (6, 7)]
        b = await device.put(np.ones(36))
        factors, kept = await sparse.factor(a), await sparse.factor(other)
        for _ in range(5):
            await factors.solve(b)
        assert len(superlu.made) == 2
        assert repr(factors) == "<Factors float64 (36, 36), on cpu:0>"
        factors.release()
        await device.synchronize()
        await kept.solve(np.ones(49))
        # SuperLU frees nothing in another thread than its own.
        assert superlu.freed == superlu.made[:1]
        with pytest.raises(ta.StaleRefError, match="its memory was released"):
            await factors.solve(b)
        # Those that nobody has any more are freed as well.
        del kept
        again = await sparse.factor(a)
        await again.solve(b)
        await device.synchronize()
        await again.solve(b)
        assert superlu.freed == superlu.made[:2]


@pytest.mark.skipif(BACKEND != "cuda", reason="counts factors of cuDSS")
async def test_factors_that_outlive_their_device_are_freed_with_it(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudss: Any = pytest.importorskip("nvmath.bindings.cudss")
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
    matrix = laplacian(3)
    async with system.open_device(BACKEND, options=INLINE) as device:
        factors = await sparse.factor(await sparse.csr(device, matrix))
        for _ in range(2):
            found = await (await factors.solve(np.ones(9))).to_host()
            np.testing.assert_allclose(matrix @ found, 1, rtol=1e-12)
        assert len(present) == 1
    assert factors.shape == (9, 9)
    assert not present


@ON_CPU
async def test_eigsh_factors_once(system: ta.System, superlu: SimpleNamespace) -> None:
    matrix = laplacian(9)
    async with system.open_device(BACKEND, options=INLINE) as device:
        a = await sparse.csr(device, matrix)
        before = (await device.statistics()).launched
        found = await sparse.eigsh(a, 4, sigma=0.0)
        launched = (await device.statistics()).launched - before
        np.testing.assert_allclose(
            await found.eigenvalues.to_host(), np.linalg.eigvalsh(matrix.toarray())[:4], rtol=1e-10
        )
    assert len(superlu.made) == 1
    # A solution and one more operation for each vector of the basis: at least 20, in two runs and more.
    assert launched <= 200


async def test_a_worker_that_dies_takes_no_factors_along(system: ta.System) -> None:
    matrix, b = laplacian(6), np.arange(36.0)
    options = ta.DeviceOptions(isolation="process", retry=2)
    async with system.open_device(BACKEND, options=options) as device:
        factors = await sparse.factor(await sparse.csr(device, matrix))
        before = await (await factors.solve(b)).to_host()
        ta.testing.inject_fault(device, sparse.SolveFactored, kill=True)
        after = await (await factors.solve(b)).to_host()
        assert device.generation == 2
        np.testing.assert_array_equal(after, before)


async def test_a_context_that_is_lost_takes_arrays_along(system: ta.System) -> None:
    matrix, b = laplacian(4), np.arange(16.0)
    async with system.open_device(BACKEND, options=INLINE) as device:
        factors = await sparse.factor(await sparse.csr(device, matrix))
        await factors.solve(b)
        ta.testing.poison(device)
        with pytest.raises(ta.AccelError):
            await factors.solve(b)
        a = await sparse.csr(device, matrix)
        with pytest.raises(ta.StaleRefError, match="generation 1"):
            await factors.solve(b)
        again = await sparse.factor(a)
        np.testing.assert_allclose(matrix @ await (await again.solve(b)).to_host(), b, atol=1e-11)


async def test_a_cancelled_solution_leaves_the_factors(device: ta.Device) -> None:
    matrix, b = laplacian(20), np.arange(400.0)
    factors = await sparse.factor(await sparse.csr(device, matrix))
    with trio.CancelScope() as scope:
        scope.cancel()
        await factors.solve(b)
    assert scope.cancelled_caught
    np.testing.assert_allclose(matrix @ await (await factors.solve(b)).to_host(), b, atol=1e-9)


SINGULAR = scipy.sparse.csr_array(np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 1.0]]))
NAN = scipy.sparse.csr_array(np.diag([1.0, np.nan, 2.0]))
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "singular": (SINGULAR, ta.LinAlgError, "factor: the matrix is singular"),
    "an empty row": (scipy.sparse.csr_array((3, 3)), ta.LinAlgError, "factor: the matrix is singular"),
    "a NaN": (NAN, ta.LinAlgError, "factor: the matrix holds a NaN or an infinity"),
    "not square": (random_matrix(3, 4), ValueError, "matrix must be square"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_matrices_that_are_refused(device: ta.Device, case: str) -> None:
    matrix, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        await sparse.factor(await sparse.csr(device, matrix))
    # The library goes on.
    factors = await sparse.factor(await sparse.csr(device, scipy.sparse.eye_array(3, format="csr")))
    assert (await (await factors.solve(np.ones(3))).to_host()).tolist() == [1.0, 1.0, 1.0]


async def test_arguments_that_are_refused(device: ta.Device) -> None:
    factors = await sparse.factor(await sparse.csr(device, laplacian(3)))
    with pytest.raises(TypeError, match=r"CsrMatrix, got CooMatrix; use await sparse\.tocsr\(\.\.\.\)$"):
        await sparse.factor(await sparse.coo(device, laplacian(3)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"CsrMatrix, got csr_array; use sparse\.csr$"):
        await sparse.factor(laplacian(3))
    b = await device.put(np.ones(9))
    asks: list[tuple[Callable[[], Awaitable[object]], type[Exception], str]] = [
        (
            lambda: factors.solve(np.ones(8)),
            ValueError,
            r"b must have shape \(9,\) or \(9, c\), got matrix of shape \(9, 9\) and b of shape \(8,\)$",
        ),
        (lambda: factors.solve(np.ones(9, np.float32)), TypeError, "float32"),
        (lambda: factors.solve(b, trans="X"), ValueError, "trans must be"),  # type: ignore[arg-type]
        (lambda: factors.solve(b, out=b), ValueError, "out"),
        (lambda: factors.solve(b, out=b[:8]), ValueError, "out"),
    ]
    for ask, error, message in asks:
        with pytest.raises(error, match=message):
            await ask()
