"""Conjugate gradients by one operation for many steps, against the steps one by one."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import trio
from chosen import BACKEND, INLINE
from sparse_matrices import laplacian

import trio_accel as ta
from trio_accel import sparse

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="the CPU has this operation")

KINDS: list[Any] = [None, "jacobi", "ilu0", "ic0"]
RTOL = {"float64": 1e-10, "complex128": 1e-10, "float32": 2e-4, "complex64": 2e-4}
ITERATIONS: Any = importlib.import_module("trio_accel.sparse._iterations")
TRIANGLES: Any = importlib.import_module("trio_accel.backends.cpu.compiled._triangles")


def scaled(dtype: str) -> Any:
    """Make a Hermitian matrix with a varying diagonal."""
    scale = np.sqrt(np.geomspace(1, 30, 400))
    if dtype.startswith("complex"):
        scale = scale * np.exp(1j * np.arange(400))
    return scipy.sparse.csr_array((laplacian(20) * scale[:, None] * scale.conj()[None, :]).astype(dtype))


async def solve_both(device: ta.Device, matrix: Any, b: Any, kind: Any, rtol: float, **more: Any) -> Any:
    """Solve by many steps at a time, and by a function in place of the matrix, with single steps."""
    a, there = await sparse.csr(device, matrix), await device.put(b)
    m = None if kind is None else await sparse.precondition(a, kind)

    async def product(x: ta.AccelRef) -> ta.AccelRef:
        return await sparse.spmv(a, x)

    return [await sparse.cg(each, there, rtol=rtol, M=m, **more) for each in (a, product)]


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("kind", KINDS)
async def test_steps_match_separate_operations(device: ta.Device, kind: Any, dtype: str) -> None:
    matrix, generator = scaled(dtype), np.random.default_rng(3)
    b = generator.normal(size=400)
    b = (b + 1j * b[::-1] if dtype.startswith("complex") else b).astype(dtype)
    for every in (1, 10):
        many, single = await solve_both(device, matrix, b, kind, RTOL[dtype], check_every=every)
        assert abs(many.iterations - single.iterations) <= every
        x = await many.x.to_host()
        assert (x.shape, x.dtype) == (b.shape, b.dtype)
        wide = matrix.astype(np.result_type(dtype, np.float64))
        residual = float(np.linalg.norm(b - wide @ x.astype(wide.dtype)))
        limit = RTOL[dtype] * float(np.linalg.norm(b))
        assert residual <= 1.05 * limit
        assert abs(many.residual - residual) <= 0.05 * limit


async def test_as_many_steps_as_scipy(device: ta.Device) -> None:
    matrix, b, steps = laplacian(30), np.random.default_rng(1).normal(size=900), list[Any]()
    expected, info = scipy.sparse.linalg.cg(matrix, b, rtol=1e-9, callback=steps.append)
    found = await sparse.cg(await sparse.csr(device, matrix), b, rtol=1e-9, check_every=1)
    assert info == 0
    assert abs(found.iterations - len(steps)) <= 1
    np.testing.assert_allclose(await found.x.to_host(), expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
async def test_all_steps_are_few_operations(device: ta.Device, kind: Any) -> None:
    matrix, b = laplacian(40), np.random.default_rng(8).normal(size=1600)
    a, there = await sparse.csr(device, matrix), await device.put(b)
    m = None if kind is None else await sparse.precondition(a, kind)
    before = (await device.statistics()).launched
    found = await sparse.cg(a, there, rtol=1e-10, M=m)
    assert found.iterations >= 30
    assert (await device.statistics()).launched - before <= 10


@pytest.mark.parametrize("kind", KINDS)
async def test_parts_of_any_size_have_the_same_bits(
    device: ta.Device, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, b = scaled("float64"), np.random.default_rng(4).normal(size=400)
    a, seen = await sparse.csr(device, matrix), list[ta.AccelRef]()
    m = None if kind is None else await sparse.precondition(a, kind)
    found = [await sparse.cg(a, b, rtol=1e-10, M=m)]
    found.append(await sparse.cg(a, b, rtol=1e-10, M=m, callback=seen.append))
    assert len(seen) == found[0].iterations / 10
    monkeypatch.setattr(ITERATIONS, "_MOST_WORK", 1)
    found.append(await sparse.cg(a, b, rtol=1e-10, M=m))
    assert len({one[1:] for one in found}) == 1
    assert len({(await one.x.to_host()).tobytes() for one in found}) == 1


@pytest.mark.parametrize("kind", ["ilu0", "ic0"])
@pytest.mark.parametrize("index", ["int32", "int64"])
async def test_triangles_without_a_compiler(
    system: ta.System, kind: Any, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, b = scaled("float64"), np.random.default_rng(5).normal(size=400)
    matrix.indptr, matrix.indices = matrix.indptr.astype(index), matrix.indices.astype(index)
    async with system.open_device(BACKEND, options=INLINE) as device:
        a = await sparse.csr(device, matrix)
        m = await sparse.precondition(a, kind)
        compiled = await sparse.cg(a, b, rtol=1e-10, M=m)
        monkeypatch.setattr(TRIANGLES, "mode", lambda: "never")
        by_superlu = await sparse.cg(a, b, rtol=1e-10, M=m)
        assert by_superlu.iterations == compiled.iterations
        x = await compiled.x.to_host()
        np.testing.assert_allclose(await by_superlu.x.to_host(), x, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("check_every", [1, 10])
async def test_the_best_look_is_kept_among_many(device: ta.Device, check_every: int) -> None:
    # An indefinite matrix: residuals go up and down, and the last one is not the least.
    matrix = scipy.sparse.csr_array(laplacian(7) - 2.3 * scipy.sparse.eye_array(49))
    b, errors, residuals = np.random.default_rng(2).normal(size=49), list[Any](), list[float]()
    a = await sparse.csr(device, matrix)

    async def look(x: ta.AccelRef) -> None:
        residuals.append(float(np.linalg.norm(b - matrix @ await x.to_host())))

    for callback in (None, look):
        with pytest.raises(sparse.ConvergenceError) as caught:
            await sparse.cg(a, b, rtol=1e-15, maxiter=60, check_every=check_every, callback=callback)
        errors.append(caught.value)
    first, second = errors
    assert first.residual == second.residual <= min(residuals) * (1 + 1e-9)
    np.testing.assert_array_equal(await first.x.to_host(), await second.x.to_host())


async def test_a_deadline_ends_a_long_iteration(device: ta.Device) -> None:
    points = 400
    matrix, b = laplacian(points), np.random.default_rng(6).normal(size=points**2)
    a = await sparse.csr(device, matrix)
    with trio.fail_after(60):
        with trio.move_on_after(0.3) as scope:
            # That takes seconds, because the residual is never 0.
            await sparse.cg(a, b, rtol=0.0, maxiter=10**9)
        assert scope.cancelled_caught
        await device.synchronize()
    assert (await sparse.cg(a, b, rtol=1e-3)).iterations > 0


async def test_a_preconditioner_of_another_shape_is_refused(device: ta.Device) -> None:
    a = await sparse.csr(device, laplacian(5))
    m = await sparse.precondition(await sparse.csr(device, laplacian(4)))
    with pytest.raises(ValueError, match="shapes"):
        await sparse.cg(a, np.ones(25), M=m)
