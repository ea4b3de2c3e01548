"""Inverses, determinants and eigenvalues, by residuals and against NumPy and SciPy in float64."""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import trio
from chosen import BACKEND, IS_STAND_IN

import trio_accel as ta
from trio_accel import linalg

pytestmark = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuSOLVER")
has_eig = pytest.mark.skipif(BACKEND not in ("cpu", "cuda"), reason="the backend has no such operation")

Array = npt.NDArray[Any]

TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}
WIDE = {"float32": "float64", "complex64": "complex128"}
REAL = {"complex64": "float32", "complex128": "float64"}
COMPLEX = {"float32": "complex64", "float64": "complex128"}
SHAPES: list[tuple[int, ...]] = [
    (0, 0),
    (1, 1),
    (2, 2),
    (7, 7),
    (33, 33),
    (3, 5, 5),
    (2, 3, 2, 2),
    (0, 4, 4),
    (3, 0, 0),
]

TRIANGULAR: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((5, 5), (5,)),
    ((1, 1), (1, 2)),
    ((33, 33), (33, 3)),
    ((3, 4, 4), (3, 4, 2)),
    ((2, 1, 3, 3), (4, 3, 1)),
    ((0, 3, 3), (3,)),
    ((0, 0), (0, 2)),
    ((3, 3), (3, 0)),
]
LEAST_SQUARES = [(7, 3, 2), (3, 7, 1), (5, 5, 0), (40, 6, 3), (4, 0, 2), (0, 4, 2), (0, 0, 0), (1, 1, 1)]

dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    return (values + 1j * generator.normal(size=shape) if "complex" in dtype else values).astype(dtype)


def hermitian(shape: tuple[int, ...], dtype: str) -> Array:
    values = normal(shape, dtype)
    return ((values + adjoint(values)) / 2).astype(dtype)


def definite(shape: tuple[int, ...], dtype: str) -> Array:
    values = normal(shape, dtype, 1)
    return (values @ adjoint(values) + shape[-1] * np.eye(shape[-1])).astype(dtype)


def adjoint(matrices: Array) -> Array:
    return matrices.conj().swapaxes(-1, -2)


async def host(ref: ta.AccelRef, shape: tuple[int, ...], dtype: str) -> Array:
    """A result in double precision; its shape and dtype are looked at before."""
    assert (ref.shape, ref.dtype) == (shape, dtype)
    return (await ref.to_host()).astype(WIDE.get(dtype, dtype))


def check_same(left: Array, right: Array, dtype: str, size: int) -> None:
    """Compare relative to the largest element, times the square root of the summands' number."""
    assert left.shape == right.shape
    scale = max(np.abs(right).max(initial=0), 1.0) * math.sqrt(size + 1)
    np.testing.assert_allclose(left, right, rtol=0, atol=4 * TOLERANCE[dtype] * scale)


@dtypes
async def test_inv(device: ta.Device, dtype: str) -> None:
    for shape in SHAPES:
        a = definite(shape, dtype) + normal(shape, dtype)
        inverse = await host(await linalg.inv(await device.put(a)), shape, dtype)
        check_same(inverse, np.linalg.inv(a.astype(WIDE.get(dtype, dtype))), dtype, shape[-1])


@dtypes
async def test_determinants(device: ta.Device, dtype: str) -> None:
    for shape in SHAPES:
        a = normal(shape, dtype)
        ref, exact = await device.put(a), a.astype(WIDE.get(dtype, dtype))
        det = await host(await linalg.det(ref), shape[:-2], dtype)
        check_same(det, np.asarray(np.linalg.det(exact)), dtype, shape[-1])
        result = await linalg.slogdet(ref)
        assert isinstance(result, linalg.SlogdetResult)
        sign, logabsdet = np.linalg.slogdet(exact)
        check_same(await host(result.sign, shape[:-2], dtype), np.asarray(sign), dtype, shape[-1])
        logs = await host(result.logabsdet, shape[:-2], REAL.get(dtype, dtype))
        check_same(logs, np.asarray(logabsdet), dtype, shape[-1])


@dtypes
async def test_infinite_nan_and_zero_determinants(device: ta.Device, dtype: str) -> None:
    a = np.tile(np.eye(4, dtype=dtype), (4, 1, 1))
    a[1, 2, 2], a[2, 3, 1], a[2, 1, 3] = 0, np.nan, np.nan
    a[3] *= 1e30
    with np.errstate(all="ignore"):
        det = await (await linalg.det(await device.put(a))).to_host()
        sign, logabsdet = await linalg.slogdet(await device.put(a[[0, 1, 3]]))
    np.testing.assert_array_equal(det[:2], [1, 0])
    assert np.isnan(det[2])
    np.testing.assert_allclose(await sign.to_host(), [1, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(await logabsdet.to_host(), [0, -np.inf, 120 * math.log(10)], rtol=1e-6)


@dtypes
async def test_svdvals(device: ta.Device, dtype: str) -> None:
    for shape in [*SHAPES, (7, 3), (2, 3, 7), (0, 3)]:
        a, k = normal(shape, dtype), min(shape[-2:])
        s = await host(await linalg.svdvals(await device.put(a)), (*shape[:-2], k), REAL.get(dtype, dtype))
        exact = a.astype(WIDE.get(dtype, dtype))
        check_same(s, np.linalg.svd(exact, compute_uv=False), dtype, max(shape[-2:]))


@dtypes
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("trans", [0, "T", 2])
async def test_solve_triangular(device: ta.Device, dtype: str, lower: bool, trans: Any) -> None:
    wide = WIDE.get(dtype, dtype)
    for shape, sides in TRIANGULAR:
        a, b = definite(shape, dtype), normal(sides, dtype)
        keep, clear = (np.tril, np.triu) if lower else (np.triu, np.tril)
        # The other triangle is not looked at, whatever it holds.
        ref = await device.put(a + clear(np.full(shape, np.nan, dtype), 1 if lower else -1))
        half = keep(a).astype(wide)
        matrix = {0: half, "T": half.swapaxes(-1, -2), 2: adjoint(half)}[trans]
        expected = np.linalg.solve(matrix, b.astype(wide))
        x = await linalg.solve_triangular(ref, b, trans, lower)
        check_same(await host(x, expected.shape, dtype), expected, dtype, shape[-1])
    unit = matrix + np.eye(3) * (1 - np.diagonal(matrix))
    x = await linalg.solve_triangular(ref, np.ones(3, dtype), trans, lower, unit_diagonal=True)
    check_same(await host(x, (3,), dtype), np.linalg.solve(unit, np.ones(3)), dtype, 3)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_singular_triangle_is_named(device: ta.Device) -> None:
    a = np.tile(np.eye(4), (3, 2, 1, 1))
    a[2, 1, 3, 3] = 0
    ref, b = await device.put(a), np.ones(4)
    with pytest.raises(
        ta.LinAlgError, match=r"matrix \(2, 1\) of the stack is singular: element 4 of"
    ) as caught:
        await linalg.solve_triangular(ref, b)
    assert (caught.value.index, caught.value.code) == ((2, 1), 4)
    x = await linalg.solve_triangular(ref[:2], b)
    np.testing.assert_array_equal(await x.to_host(), np.ones((2, 2, 4)))
    x = await linalg.solve_triangular(ref, b, unit_diagonal=True)
    np.testing.assert_array_equal(await x.to_host(), np.ones((3, 2, 4)))
    for wrong, message in [(3, "trans must be 0, 1, 2, 'N', 'T' or 'C', got 3"), ("H", "trans must be")]:
        with pytest.raises(ValueError, match=message):
            await linalg.solve_triangular(ref, b, wrong)  # type: ignore[arg-type]
    with pytest.raises(np.linalg.LinAlgError, match="must be square"):
        await linalg.solve_triangular(ref[..., :3], b)
    del x, caught
    await device.synchronize()
    assert (await device.statistics()).memory.used == a.nbytes


@dtypes
async def test_lstsq(device: ta.Device, dtype: str) -> None:
    wide = WIDE.get(dtype, dtype)
    for m, n, columns in [
        (7, 3, 2),
        (3, 7, 1),
        (5, 5, 0),
        (40, 6, 3),
        (4, 0, 2),
        (0, 4, 2),
        (0, 0, 0),
        (1, 1, 1),
    ]:
        a, b = normal((m, n), dtype), normal((m, columns), dtype, 1)
        result = await linalg.lstsq(await device.put(a), b)
        assert isinstance(result, linalg.LstsqResult)
        x, residuals, rank, s = np.linalg.lstsq(a.astype(wide), b.astype(wide))
        check_same(await host(result.x, (n, columns), dtype), x, dtype, m + n)
        real = REAL.get(dtype, dtype)
        check_same(await host(result.residuals, residuals.shape, real), residuals, dtype, m + n)
        check_same(await host(result.s, s.shape, real), s, dtype, m + n)
        assert (result.rank, type(result.rank)) == (rank, int)


async def test_lstsq_without_full_rank(device: ta.Device) -> None:
    a, b = normal((9, 4), "float64"), normal((9,), "float64", 1)
    a[:, 3] = a[:, 0] + a[:, 1]
    ref = await device.put(a)
    for rcond, rank in ((None, 3), (1e-20, 4), (0.9, 1), (1e-9, 3)):
        x, residuals, found, _ = await linalg.lstsq(ref, b, rcond)
        assert (x.shape, found, residuals.shape) == ((4,), rank, (1,) if rank == 4 else (0,))
        if rank < 4:
            np.testing.assert_allclose(
                await x.to_host(), np.linalg.lstsq(a, b, rcond or 1e-15)[0], atol=1e-12
            )
    del x, residuals, _
    for wrong, error, message in [
        (np.ones(8), np.linalg.LinAlgError, r"lstsq: Incompatible dimensions: .* got a of shape \(9, 4\)"),
        (np.ones(9, np.float32), TypeError, "share a dtype, got a float64, b float32"),
        (None, TypeError, "lstsq: b must be an AccelRef or a NumPy array, got None"),
    ]:
        with pytest.raises(error, match=message):
            await linalg.lstsq(ref, wrong)
    with pytest.raises(np.linalg.LinAlgError, match="a must have shape"):
        await linalg.lstsq(ref[None], b)
    await device.synchronize()
    assert (await device.statistics()).memory.used == a.nbytes


@pytest.mark.parametrize("steps", range(5))
async def test_cancelled_chains_leave_nothing(device: ta.Device, steps: int) -> None:
    a, b = definite((40, 40), "float64"), normal((40,), "float64")
    ref = await device.put(a)

    async def give_up(ask: Callable[[], Awaitable[object]]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def run() -> None:
                    await ask()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(run)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

    await give_up(lambda: linalg.lstsq(ref, b))
    await give_up(lambda: linalg.solve_triangular(ref, b))
    # After the abandoned calls, in both libraries.
    x = await linalg.solve_triangular(ref, b)
    np.testing.assert_allclose(np.triu(a) @ await x.to_host(), b, atol=1e-12)
    del x
    gc.collect()
    # Small dropped blocks are freed when the engine comes to rest, a moment after the last reply.
    with trio.fail_after(60):
        while (await device.statistics()).memory.used != a.nbytes:
            await device.synchronize()


@has_eig
@dtypes
async def test_eig(device: ta.Device, dtype: str) -> None:
    kind = COMPLEX.get(dtype, dtype)
    for shape in SHAPES:
        a = normal(shape, dtype)
        result = await linalg.eig(await device.put(a))
        assert isinstance(result, linalg.EigResult)
        w, v = await host(result.eigenvalues, shape[:-1], kind), await host(result.eigenvectors, shape, kind)
        check_same(a @ v, v * w[..., None, :], dtype, shape[-1])
        check_same(np.linalg.norm(v, axis=-2), np.ones(shape[:-1]), dtype, 1)
        values = await host(await linalg.eigvals(await device.put(a)), shape[:-1], kind)
        power = np.sum(values**2, axis=-1), np.trace(a.astype(kind) @ a, axis1=-2, axis2=-1)
        check_same(*power, dtype, shape[-1])
        check_same(np.sort(values, axis=-1).sum(-1), np.sort(w, axis=-1).sum(-1), dtype, shape[-1])


@has_eig
async def test_eig_of_a_rotation_has_pairs(device: ta.Device) -> None:
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    w, v = await linalg.eig(await device.put(np.stack([turn, np.diag([1.0, 2]), -turn])))
    np.testing.assert_allclose(await w.to_host(), [[1j, -1j], [1, 2], [1j, -1j]], atol=1e-15)
    vectors = await v.to_host()
    np.testing.assert_allclose(turn @ vectors[0], vectors[0] * [1j, -1j], atol=1e-15)
    np.testing.assert_array_equal(vectors[1], np.eye(2))


@has_eig
@dtypes
@pytest.mark.parametrize("triangle", ["L", "U"])
async def test_eigh_of_pairs(device: ta.Device, dtype: str, triangle: Any) -> None:
    clear = np.tril if triangle == "U" else np.triu
    for shape in SHAPES:
        a, b = hermitian(shape, dtype), definite(shape, dtype)
        # The other triangles are not looked at, whatever they hold.
        other = clear(np.full(shape, np.nan, dtype), -1 if triangle == "U" else 1)
        refs = await device.put(a + other), await device.put(b + other)
        result = await linalg.eigh(refs[0], triangle, b=refs[1])
        w = await host(result.eigenvalues, shape[:-1], REAL.get(dtype, dtype))
        v = await host(result.eigenvectors, shape, dtype)
        check_same(a @ v, b @ v * w[..., None, :], dtype, shape[-1] ** 2)
        ones = np.broadcast_to(np.eye(shape[-1]), shape)
        check_same(adjoint(v) @ b @ v, ones, dtype, shape[-1])
        values = await linalg.eigvalsh(refs[0], triangle, b=refs[1])
        check_same(await host(values, shape[:-1], REAL.get(dtype, dtype)), w, dtype, shape[-1])
        for index in np.ndindex(shape[:-2]):
            if shape[-1]:
                expected = scipy.linalg.eigh(a[index].astype(complex), b[index], eigvals_only=True)
                check_same(w[index], expected, dtype, shape[-1])


async def test_views_and_their_memory(device: ta.Device) -> None:
    whole = normal((9, 3, 9), "complex128")
    ref = await device.put(whole)
    view, a = ref.T[::2, :, 1:4], whole.T[::2, :, 1:4]
    det = await (await linalg.det(view)).to_host()
    np.testing.assert_allclose(det, np.linalg.det(a), rtol=1e-12)
    inverse = await (await linalg.inv(view)).to_host()
    np.testing.assert_allclose(inverse, np.linalg.inv(a), rtol=1e-9)
    await device.synchronize()
    assert (await device.statistics()).memory.used == whole.nbytes
