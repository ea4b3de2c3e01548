"""BLAS 2 and 3 in all combinations of letters, against NumPy in double precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

Array = npt.NDArray[Any]

TOLERANCE = {"float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13}
LAYOUTS = ("rows", "columns", "wide rows", "wide columns", "gaps", "backwards")
FLAGS = (False, True)
STAND_IN = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has products of general matrices only")


def made(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.uniform(-1, 1, shape)
    if dtype.startswith("complex"):
        values = values + 1j * generator.uniform(-1, 1, shape)
    return values.astype(dtype)


async def put(device: ta.Device, host: Array, layout: str) -> ta.AccelRef:
    """An array on the device with this layout."""
    if host.ndim == 1:
        step = {"gaps": 3, "wide rows": 2, "backwards": -1}.get(layout, 1)
        base = np.full(len(host) * abs(step), np.nan, host.dtype)
        base[::step] = host
        return (await device.put(base))[::step]
    if layout.endswith("columns"):
        return (await put(device, host.T, "wide rows" if layout.startswith("wide") else "rows")).T
    steps = {"wide rows": (1, 1), "gaps": (2, 3), "backwards": (-1, 1)}.get(layout, (1, 1))
    extra = 3 if layout == "wide rows" else 0
    extents = host.shape[-2] * abs(steps[0]), host.shape[-1] * abs(steps[1]) + extra
    base = np.full((*host.shape[:-2], *extents), np.nan, host.dtype)
    view = (..., slice(None, None, steps[0]), slice(0, host.shape[-1] * abs(steps[1]), steps[1]))
    base[view] = host
    return (await device.put(base))[view]


def op(matrix: Array, letter: str) -> Array:
    return {"N": matrix, "T": matrix.swapaxes(-1, -2), "C": matrix.conj().swapaxes(-1, -2)}[letter]


def wide(array: Array) -> Array:
    return array.astype(complex if array.dtype.kind == "c" else float)


def triangle(matrix: Array, *, lower: bool, unit: bool = False) -> Array:
    half = wide(np.tril(matrix) if lower else np.triu(matrix))
    if unit:
        half[..., range(half.shape[-1]), range(half.shape[-1])] = 1
    return half


def whole(matrix: Array, *, lower: bool, hermitian: bool) -> Array:
    """The symmetric or Hermitian matrix of which a triangle is given."""
    half = triangle(matrix, lower=lower)
    diagonal = np.diag(half.diagonal())
    if not hermitian:
        return half + half.T - diagonal
    return half + half.conj().T - diagonal.conj() + (diagonal.real - diagonal)


def factors(dtype: str, *, is_real: bool = False) -> Iterator[tuple[Any, Any]]:
    yield 1.0, 0.0
    yield (-0.5, 1.5) if is_real or not dtype.startswith("complex") else (0.5 - 2j, 1j - 0.25)


async def check(ref: ta.AccelRef, expected: Array, terms: int, dtype: str) -> None:
    host = await ref.to_host()
    assert (host.shape, host.dtype) == (expected.shape, np.dtype(dtype))
    scale = np.abs(expected).max(initial=1.0) * (terms + 1)
    np.testing.assert_allclose(wide(host), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def layouts(number: int) -> Iterator[str]:
    """Layouts, other ones for each number."""
    for place in range(4):
        yield LAYOUTS[number // len(LAYOUTS) ** place % len(LAYOUTS)]


def trans_of(dtype: str, *, hermitian: bool) -> tuple[str, str]:
    return "N", "C" if hermitian and dtype.startswith("complex") else "T"


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_gemv_and_ger(device: ta.Device, dtype: str) -> None:
    m, n = 5, 4
    for number, trans in enumerate(("N", "T", "C") * 12):
        of_a, of_x, of_y, of_g = layouts(number * 37)
        a, x = made((m, n) if trans == "N" else (n, m), dtype, 1), made((n,), dtype, 2)
        for alpha, beta in factors(dtype):
            y = made((m,), dtype, 3) if beta else np.full(m, np.nan, dtype)
            ref = await put(device, y, of_y)
            refs = await put(device, a, of_a), await put(device, x, of_x)
            assert await linalg.gemv(alpha, *refs, beta, ref, trans) is ref
            expected = alpha * op(wide(a), trans) @ wide(x)
            await check(ref, expected + (beta * wide(y) if beta else 0), n, dtype)
        await check(await linalg.gemv(alpha, *refs, trans=trans), expected, n, dtype)
        left, right = made((n,), dtype, 4), made((m,), dtype, 5)
        conjugate = bool(number % 2)
        g = made((n, m), dtype, 6)
        ref = await put(device, g, of_g)
        assert await linalg.ger(alpha, await put(device, left, of_x), right, ref, conjugate) is ref
        row = wide(right).conj() if conjugate else wide(right)
        await check(ref, alpha * np.outer(wide(left), row) + wide(g), 1, dtype)


@STAND_IN
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hermitian", FLAGS)
async def test_symmetric_products(device: ta.Device, dtype: str, hermitian: bool) -> None:
    m, n = 5, 3
    options = itertools.product(("L", "R"), FLAGS, LAYOUTS)
    for number, (side, lower, of_a) in enumerate(options):
        of_b, of_c, *_ = layouts(number * 5)
        size = m if side == "L" else n
        a, b = made((size, size), dtype, 1), made((m, n), dtype, 2)
        matrix = whole(a, lower=lower, hermitian=hermitian)
        ref_a = await put(device, a, of_a)
        for alpha, beta in factors(dtype):
            c = made((m, n), dtype, 3) if beta else np.full((m, n), np.nan, dtype)
            ref = await put(device, c, of_c)
            ref_b = await put(device, b, of_b)
            assert await linalg.symm(alpha, ref_a, ref_b, beta, ref, side, lower, hermitian) is ref
            product = matrix @ wide(b) if side == "L" else wide(b) @ matrix
            await check(ref, alpha * product + (beta * wide(c) if beta else 0), size, dtype)
            x, y = made((size,), dtype, 4), made((size,), dtype, 5)
            ref_y = await put(device, y, of_c)
            await linalg.symv(alpha, ref_a, await put(device, x, of_b), beta, ref_y, lower, hermitian)
            added = beta * wide(y) if beta else 0
            await check(ref_y, alpha * matrix @ wide(x) + added, size, dtype)


@STAND_IN
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hermitian", FLAGS)
async def test_rank_updates(device: ta.Device, dtype: str, hermitian: bool) -> None:
    n, k = 4, 3
    options = itertools.product(trans_of(dtype, hermitian=hermitian), FLAGS, LAYOUTS)
    for number, (trans, lower, of_c) in enumerate(options):
        of_a, of_b, *_ = layouts(number * 5)
        shape = (n, k) if trans == "N" else (k, n)
        a, b, x, y = (made(size, dtype, seed) for seed, size in enumerate((shape, shape, (n,), (n,))))
        of_one = [[wide(a) if trans == "N" else op(wide(a), trans)], [wide(x)[:, None]]]
        of_two = [wide(b) if trans == "N" else op(wide(b), trans), wide(y)[:, None]]
        ref_a, ref_b = await put(device, a, of_a), await put(device, b, of_b)
        ref_x, ref_y = await put(device, x, of_a), await put(device, y, of_b)
        letter = "C" if hermitian else "T"
        for is_two in FLAGS:
            for alpha, beta in factors(dtype, is_real=hermitian):
                factor = alpha * (1 + 2j) if is_two and hermitian and dtype.startswith("complex") else alpha
                for vectors, left, right in zip(FLAGS, (o[0] for o in of_one), of_two, strict=True):
                    c = made((n, n), dtype, 7)
                    ref = await put(device, c, of_c)
                    flags = lower, hermitian
                    if vectors and is_two:
                        await linalg.syr2(factor, ref_x, ref_y, ref, *flags)
                    elif vectors:
                        await linalg.syr(factor, ref_x, ref, *flags)
                    elif is_two:
                        await linalg.syr2k(factor, ref_a, ref_b, beta, ref, trans, *flags)
                    else:
                        await linalg.syrk(factor, ref_a, beta, ref, trans, *flags)
                    added = wide(c) if vectors else beta * wide(c)
                    product = factor * left @ op(right if is_two else left, letter)
                    if is_two:
                        second = np.conj(factor) if hermitian else factor
                        product = product + second * right @ op(left, letter)
                    full = product + added
                    if hermitian:
                        full = full - 1j * np.diag(full.diagonal().imag) if full.dtype.kind == "c" else full
                    mask = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
                    await check(ref, np.where(mask, full, wide(c)), k, dtype)


@STAND_IN
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("solve", FLAGS)
async def test_triangular_matrices(device: ta.Device, dtype: str, solve: bool) -> None:
    m, n = 4, 3
    options = itertools.product(("L", "R"), FLAGS, ("N", "T", "C"), FLAGS, LAYOUTS)
    for number, (side, lower, trans, unit, of_a) in enumerate(options):
        of_b, *_ = layouts(number * 7)
        size = m if side == "L" else n
        # The other triangle is not read, nor is a diagonal of ones.
        a = made((size, size), dtype, 1) / 4 + 2 * np.eye(size, dtype=dtype)
        half = op(triangle(a, lower=lower, unit=unit), trans)
        a = _unread(a, half, lower=lower, unit=unit, trans=trans)
        inverse = np.linalg.inv(half) if solve else half
        b, x = made((m, n), dtype, 2), made((size,), dtype, 3)
        ref_a, ref_b, ref_x = (
            await put(device, a, of_a),
            await put(device, b, of_b),
            await put(device, x, of_b),
        )
        multiply, by_vector = (linalg.trsm, linalg.trsv) if solve else (linalg.trmm, linalg.trmv)
        for alpha, _ in factors(dtype):
            expected = alpha * (inverse @ wide(b) if side == "L" else wide(b) @ inverse)
            fresh = await multiply(alpha, ref_a, ref_b, side, trans, lower, unit)
            await check(fresh, expected, 4 * size, dtype)
        assert await multiply(alpha, ref_a, ref_b, side, trans, lower, unit, out=ref_b) is ref_b
        await check(ref_b, expected, 4 * size, dtype)
        fresh = await by_vector(ref_a, x, trans, lower, unit)
        await check(fresh, inverse @ wide(x), 4 * size, dtype)
        assert await by_vector(ref_a, ref_x, trans, lower, unit, out=ref_x) is ref_x
        await check(ref_x, inverse @ wide(x), 4 * size, dtype)


def _unread(a: Array, half: Array, *, lower: bool, unit: bool, trans: str) -> Array:
    """The matrix with NaN where it must not be read."""
    stored = op(half, trans)
    rows, columns = np.indices(stored.shape)
    is_read = (rows >= columns) if lower else (rows <= columns)
    if unit:
        is_read &= rows != columns
    return np.where(is_read, stored, np.nan).astype(a.dtype)


@STAND_IN
@pytest.mark.parametrize("solve", FLAGS)
@pytest.mark.parametrize(
    ("stack_a", "stack_b", "order"),
    [((3,), (3,), "C"), ((), (2, 3), "C"), ((2, 1), (3,), "C"), ((3,), (), "F"), ((2,), (2,), "F")],
    ids=str,
)
async def test_stacks_of_triangular_matrices(
    device: ta.Device, solve: bool, stack_a: tuple[int, ...], stack_b: tuple[int, ...], order: Any
) -> None:
    n, k = 4, 3
    a = made((*stack_a, n, n), "float64", 1) / 4 + 2 * np.eye(n)
    b = np.asarray(made((*stack_b, n, k), "float64", 2), order=order)
    half = triangle(a, lower=True)
    expected = np.linalg.solve(half, np.broadcast_to(b, (*stack_b, n, k))) if solve else half @ b
    multiply = linalg.trsm if solve else linalg.trmm
    whole_a = await device.put(a)
    result = await multiply(2.0, whole_a, b, lower=True)
    await check(result, 2.0 * expected, 4 * n, "float64")
    out = await put(device, np.zeros(expected.shape), "gaps")
    assert await multiply(1.0, whole_a, b, lower=True, out=out) is out
    await check(out, expected, 4 * n, "float64")


@STAND_IN
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    flags=st.tuples(*[st.booleans()] * 3),
    letters=st.tuples(st.sampled_from("LR"), st.sampled_from("NTC")),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    lies=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
)
async def test_any_size(sizes: Any, flags: Any, letters: Any, dtype: str, lies: Any) -> None:
    (m, n), (lower, unit, hermitian), (side, trans) = sizes, flags, letters
    size = m if side == "L" else n
    a, b = made((size, size), dtype, 1) / max(size, 1) + 2 * np.eye(size, dtype=dtype), made((m, n), dtype, 2)
    half = op(triangle(a, lower=lower, unit=unit), trans)
    matrix = whole(a, lower=lower, hermitian=hermitian)
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
        ref_a, ref_b = await put(device, a, lies[0]), await put(device, b, lies[1])
        solved = await linalg.trsm(1.0, ref_a, ref_b, side, trans, lower, unit)  # type: ignore[arg-type]
        back = half @ wide(await solved.to_host()) if side == "L" else wide(await solved.to_host()) @ half
        np.testing.assert_allclose(back, wide(b), rtol=0, atol=TOLERANCE[dtype] * 40)
        product = await linalg.symm(1.0, ref_a, ref_b, side=side, lower=lower, hermitian=hermitian)
        await check(product, matrix @ wide(b) if side == "L" else wide(b) @ matrix, size, dtype)
        c = await device.zeros((size, size), dtype)
        of_a = "C" if hermitian and dtype.startswith("complex") else "T"
        await linalg.syrk(1.0, ref_a, 0.0, c, lower=lower, hermitian=hermitian)
        expected = wide(a) @ op(wide(a), of_a)
        await check(c, np.tril(expected) if lower else np.triu(expected), size, dtype)


@STAND_IN
async def test_an_empty_sum_keeps_the_factor_of_the_old_elements(device: ta.Device) -> None:
    a = await device.zeros((3, 0))
    c = await device.put(np.ones((3, 3)))
    await linalg.syrk(1.0, a, 0.5, c)
    np.testing.assert_array_equal(await c.to_host(), np.where(np.tri(3, k=-1), 1.0, 0.5))
    await linalg.syr2k(1.0, a, np.empty((3, 0)), 0.0, c)
    np.testing.assert_array_equal(await c.to_host(), np.tri(3, k=-1))
    y = await device.put(np.ones(3))
    await linalg.gemv(1.0, a, np.empty(0), 0.5, y)
    assert (await y.to_host()).tolist() == [0.5] * 3


@STAND_IN
async def test_a_singular_triangle_makes_infinities(device: ta.Device) -> None:
    a = await device.put(np.array([[1.0, 2.0], [0.0, 0.0]]))
    result = await (await linalg.trsv(a, np.ones(2))).to_host()
    assert np.isinf(result).tolist() == [True, True]
