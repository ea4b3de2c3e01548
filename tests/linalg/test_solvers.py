"""Solvers of dense matrices, by residuals and against NumPy and SciPy in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

pytestmark = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuSOLVER")

Array = npt.NDArray[Any]

TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}
STACKS: list[tuple[int, ...]] = [(), (3,), (2, 3), (0,)]
SIZES = [0, 1, 2, 7, 33]
SHAPES = [(1, 1), (5, 5), (7, 3), (3, 7), (40, 6), (6, 40), (1, 4), (4, 1), (0, 3), (3, 0), (0, 0)]


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    return (values + 1j * generator.normal(size=shape) if "complex" in dtype else values).astype(dtype)


def definite(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    values = normal(shape, dtype, seed)
    return (values @ adjoint(values) + shape[-1] * np.eye(shape[-1])).astype(dtype)


def hermitian(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    values = normal(shape, dtype, seed)
    return ((values + adjoint(values)) / 2).astype(dtype)


def adjoint(matrices: Array) -> Array:
    return matrices.conj().swapaxes(-1, -2)


def wide(values: Array) -> Array:
    return values.astype(complex if values.dtype.kind == "c" else float)


async def host(ref: ta.AccelRef, shape: tuple[int, ...], dtype: str) -> Array:
    """A result in double precision; its shape and dtype are looked at before."""
    assert (ref.shape, ref.dtype) == (shape, dtype)
    values = await ref.to_host()
    assert (values.shape, values.dtype) == (shape, np.dtype(dtype))
    return wide(values)


def check_same(left: Array, right: Array, dtype: str) -> None:
    """Compare relative to the largest element, times the square root of the summands' number."""
    assert left.shape == right.shape
    scale = max(np.abs(right).max(initial=0), 1.0) * math.sqrt(max(right.shape[-2:], default=1) + 1)
    np.testing.assert_allclose(left, right, rtol=0, atol=4 * TOLERANCE[dtype] * scale)


def check_unitary(columns: Array, dtype: str) -> None:
    check_same(
        adjoint(columns) @ columns,
        np.broadcast_to(np.eye(columns.shape[-1]), columns.shape[:-2] + (columns.shape[-1],) * 2),
        dtype,
    )


def real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stack", STACKS, ids=str)
@pytest.mark.parametrize("upper", [False, True])
async def test_cholesky(device: ta.Device, stack: tuple[int, ...], dtype: str, upper: bool) -> None:
    for n in SIZES:
        a = definite((*stack, n, n), dtype)
        ref = await device.put(a)
        factor = await host(await linalg.cholesky(ref, upper=upper), a.shape, dtype)
        product = adjoint(factor) @ factor if upper else factor @ adjoint(factor)
        check_same(product, wide(a), dtype)
        assert not (np.tril(factor, -1) if upper else np.triu(factor, 1)).any()
        diagonal = np.diagonal(factor, axis1=-2, axis2=-1)
        assert (diagonal.real > 0).all()
        assert not diagonal.imag.any()
        # The operand is as it was, and its other triangle is not looked at.
        np.testing.assert_array_equal(await ref.to_host(), a)
        other = np.tril(np.full_like(a, np.nan), -1) if upper else np.triu(np.full_like(a, np.nan), 1)
        again = await linalg.cholesky(await device.put(a + other), upper=upper)
        np.testing.assert_array_equal(wide(await again.to_host()), factor)


def check_factors(lu: Array, piv: Array, a: Array, dtype: str) -> None:
    """Whether the factors belong to the matrix, for any choice of large elements as pivots.

    LAPACK compares complex numbers by the sum of their parts, and other libraries by their absolute values.
    """
    lower, upper = np.tril(wide(lu), -1) + np.eye(len(lu)), np.triu(wide(lu))
    exchanged = wide(a).copy()
    for row, other in enumerate(piv):
        exchanged[[row, other]] = exchanged[[other, row]]
    check_same(lower @ upper, exchanged, dtype)
    assert np.abs(lower).max() <= np.sqrt(2) * (1 + TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stack", STACKS, ids=str)
async def test_lu_and_its_solutions(device: ta.Device, stack: tuple[int, ...], dtype: str) -> None:
    for n in SIZES:
        a, b = normal((*stack, n, n), dtype, n), normal((*stack, n, 2), dtype, n + 1)
        factors = await linalg.lu(await device.put(a))
        assert isinstance(factors, linalg.LUResult)
        lu = await host(factors.lu, a.shape, dtype)
        piv = await factors.piv.to_host()
        assert (piv.shape, piv.dtype) == (a.shape[:-1], np.dtype(np.int32))
        for index in np.ndindex(stack):
            if n and dtype.startswith("complex") and BACKEND != "cpu":
                check_factors(lu[index], piv[index], a[index], dtype)
            elif n:
                expected = scipy.linalg.lu_factor(wide(a[index]))
                np.testing.assert_array_equal(piv[index], expected[1])
                check_same(lu[index], expected[0], dtype)
        for trans, matrix in ((0, a), (1, a.swapaxes(-1, -2)), (2, adjoint(a))):
            x = await host(await linalg.lu_solve(factors, b, trans), b.shape, dtype)  # type: ignore[arg-type]
            check_residual(matrix, x, b, dtype)


def check_residual(a: Array, x: Array, b: Array, dtype: str) -> None:
    residual = np.abs(wide(a) @ x - wide(b)).max(initial=0)
    scale = np.abs(a).max(initial=0) * np.abs(x).max(initial=0) * max(a.shape[-1], 1)
    assert residual <= TOLERANCE[dtype] * max(scale, 1)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 3), (0, 3), (3, 0)], ids=str)
async def test_lu_of_rectangular_matrices(device: ta.Device, shape: tuple[int, ...]) -> None:
    a = normal(shape, "float64")
    factors = await linalg.lu(await device.put(a))
    lu, piv = await factors.lu.to_host(), await factors.piv.to_host()
    m, n = shape[-2:]
    k = min(m, n)
    assert (lu.shape, piv.shape) == (shape, (*shape[:-2], k))
    for index in np.ndindex(shape[:-2]):
        product = (np.tril(lu[index][:, :k], -1) + np.eye(m, k)) @ np.triu(lu[index][:k])
        for row, other in reversed(list(enumerate(piv[index]))):
            product[[row, other]] = product[[other, row]]
        check_same(product, a[index], "float64")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 4), (4,)),
        ((4, 4), (4, 3)),
        ((4, 4), (4, 0)),
        ((3, 4, 4), (4,)),
        ((3, 4, 4), (4, 2)),
        ((4, 4), (5, 4, 2)),
        ((3, 4, 4), (3, 4, 2)),
        ((2, 1, 4, 4), (3, 4, 2)),
        ((1, 4, 4), (3, 4, 1)),
        ((1, 1), (1, 1)),
        ((0, 4, 4), (4,)),
        ((2, 0, 0), (2, 0, 3)),
        ((300, 2, 2), (300, 2, 1)),
        ((40, 40), (40, 50)),
    ],
    ids=str,
)
async def test_solve(device: ta.Device, a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    matrix, sides = normal(a, dtype, 1), normal(b, dtype, 2)
    expected = np.linalg.solve(matrix, sides)
    x = await host(await linalg.solve(await device.put(matrix), sides), expected.shape, dtype)
    check_residual(
        matrix, x[..., None] if len(b) == 1 else x, sides[..., None] if len(b) == 1 else sides, dtype
    )
    factors = await linalg.lu(await device.put(matrix))
    again = await host(await linalg.lu_solve(factors, sides), expected.shape, dtype)
    check_same(again, x, "float32")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stack", STACKS, ids=str)
async def test_qr(device: ta.Device, stack: tuple[int, ...], dtype: str) -> None:
    for m, n in SHAPES:
        a, k = normal((*stack, m, n), dtype), min(m, n)
        ref = await device.put(a)
        for mode, columns in (("reduced", k), ("complete", m)):
            result = await linalg.qr(ref, mode)  # type: ignore[call-overload]
            assert isinstance(result, linalg.QRResult)
            q = await host(result.Q, (*stack, m, columns), dtype)
            r = await host(result.R, (*stack, columns, n), dtype)
            check_unitary(q, dtype)
            check_same(q @ r, wide(a), dtype)
            assert not np.tril(r, -1).any()
        alone = await host(await linalg.qr(ref, "r"), (*stack, k, n), dtype)
        check_same(alone, r[..., :k, :], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stack", STACKS, ids=str)
async def test_svd(device: ta.Device, stack: tuple[int, ...], dtype: str) -> None:
    for m, n in SHAPES:
        a, k = normal((*stack, m, n), dtype), min(m, n)
        ref = await device.put(a)
        expected = np.linalg.svd(wide(a), compute_uv=False)
        for full, columns, rows in ((True, m, n), (False, k, k)):
            result = await linalg.svd(ref, full)
            assert isinstance(result, linalg.SVDResult)
            u = await host(result.U, (*stack, m, columns), dtype)
            vh = await host(result.Vh, (*stack, rows, n), dtype)
            s = await host(result.S, (*stack, k), real(dtype))
            check_unitary(u, dtype)
            check_unitary(adjoint(vh), dtype)
            check_same((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], wide(a), dtype)
            check_same(s, expected, dtype)
        values = await host(await linalg.svd(ref, compute_uv=False), (*stack, k), real(dtype))
        check_same(values, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stack", STACKS, ids=str)
@pytest.mark.parametrize("triangle", ["L", "U"])
async def test_eigh(device: ta.Device, stack: tuple[int, ...], dtype: str, triangle: Any) -> None:
    for n in SIZES:
        a = hermitian((*stack, n, n), dtype)
        expected = np.linalg.eigvalsh(wide(a))
        # The other triangle is not looked at, whatever it holds.
        other = np.full_like(a, np.nan)
        other = np.triu(other, 1) if triangle == "L" else np.tril(other, -1)
        ref = await device.put(a + other)
        result = await linalg.eigh(ref, triangle)
        assert isinstance(result, linalg.EighResult)
        w = await host(result.eigenvalues, (*stack, n), real(dtype))
        v = await host(result.eigenvectors, a.shape, dtype)
        check_same(w, expected, dtype)
        check_unitary(v, dtype)
        check_same(wide(a) @ v, v * w[..., None, :], dtype)
        values = await host(await linalg.eigvalsh(ref, triangle), (*stack, n), real(dtype))
        check_same(values, expected, dtype)


@pytest.mark.parametrize(
    "view", [np.s_[..., ::-1, :], np.s_[::2, 1:9, 1:9], np.s_[1, :, ::2], np.s_[0, ::3, ::-1]], ids=str
)
@pytest.mark.parametrize("is_transposed", [False, True])
async def test_strided_views(device: ta.Device, view: Any, is_transposed: bool) -> None:
    def lies(array: Array) -> Array:
        return np.ascontiguousarray(array.T) if is_transposed else array

    async def strided(array: Array) -> ta.AccelRef:
        ref = await device.put(lies(array))
        return (ref.T if is_transposed else ref)[view]

    whole = normal((3, 9, 9), "complex128")
    ref, a = await strided(whole), whole[view]
    u, s, vh = await linalg.svd(ref, full_matrices=False)
    product = (await u.to_host() * (await s.to_host())[..., None, :]) @ await vh.to_host()
    check_same(product, a, "complex128")
    q, r = await linalg.qr(ref)
    check_same(await q.to_host() @ await r.to_host(), a, "complex128")
    k = min(a.shape[-2:])
    square, matrix = ref[..., :k, :k], a[..., :k, :k]
    x = await (await linalg.solve(square, ref[..., :k, ::-1])).to_host()
    check_residual(matrix, x, a[..., :k, ::-1], "complex128")
    x = await (await linalg.lu_solve(await linalg.lu(square), ref[..., :k, ::-1])).to_host()
    check_residual(matrix, x, a[..., :k, ::-1], "complex128")
    w = await (await linalg.eigvalsh(square)).to_host()
    check_same(w, np.linalg.eigvalsh(matrix), "complex128")
    gram = definite((3, 9, 9), "complex128")
    view = (*view[:-2], slice(None), slice(None))
    factor = await (await linalg.cholesky(await strided(gram))).to_host()
    check_same(factor @ adjoint(factor), gram[view], "complex128")


async def test_host_operands_and_their_memory(device: ta.Device) -> None:
    a, b = definite((4, 4), "float64"), normal((4,), "float64")
    x = await linalg.solve(a.T, await device.put(b))
    np.testing.assert_allclose(await x.to_host(), np.linalg.solve(a, b), rtol=1e-12)
    w, _ = await device.ask(linalg.Eigh(a))
    np.testing.assert_allclose(await w.to_host(), np.linalg.eigvalsh(a), rtol=1e-12)
    del x, w, _
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], str, int]:
    stack = draw(st.lists(st.integers(0, 3), max_size=2))
    shape = (*stack, draw(st.integers(0, 12)), draw(st.integers(0, 12)))
    return shape, draw(st.sampled_from(sorted(TOLERANCE))), draw(st.integers(0, 2**32))


@given(problem=problems())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_shape(problem: tuple[tuple[int, ...], str, int]) -> None:
    shape, dtype, seed = problem
    a = normal(shape, dtype, seed)

    async def main() -> None:
        async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
            ref = await device.put(a)
            q, r = await linalg.qr(ref)
            check_same(wide(await q.to_host()) @ wide(await r.to_host()), wide(a), dtype)
            u, s, vh = await linalg.svd(ref, full_matrices=False)
            product = wide(await u.to_host() * (await s.to_host())[..., None, :]) @ wide(await vh.to_host())
            check_same(product, wide(a), dtype)
            gram = a @ adjoint(a) + np.eye(shape[-2])
            factor = wide(await (await linalg.cholesky(await device.put(gram.astype(dtype)))).to_host())
            check_same(factor @ adjoint(factor), wide(gram), dtype)
            x = wide(await (await linalg.solve(await device.put(gram.astype(dtype)), a)).to_host())
            check_residual(gram, x, a, dtype)

    trio.run(main)
