"""Vector operations against NumPy in double precision."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

Array = npt.NDArray[Any]

TOLERANCE = {
    "float64": 1e-12,
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "complex128": 1e-12,
    "complex64": 1e-5,
}
SHAPES: list[tuple[int, ...]] = [(0,), (1,), (7,), (1000,), (3, 4), (2, 0, 3), ()]


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    if dtype.startswith("complex"):
        values = values + 1j * generator.normal(size=shape)
    return np.asarray(values).astype(ta.DType.of(dtype).dtype)


def wide(array: Array) -> Array:
    return array.astype(complex if array.dtype.kind == "c" else float)


def factor(dtype: str) -> complex:
    return 0.75 - 0.5j if dtype.startswith("complex") else 0.75


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_axpy_and_scal(device: ta.Device, dtype: str, shape: tuple[int, ...]) -> None:
    x, y, alpha = normal(shape, dtype, 1), normal(shape, dtype, 2), factor(dtype)
    rx, ry = await device.put(x), await device.put(y)
    assert await linalg.axpy(alpha, rx, ry) is ry
    expected = alpha * wide(x) + wide(y)
    scale = np.abs(alpha * wide(x)) + np.abs(wide(y))
    result = await ry.to_host()
    assert result.dtype == y.dtype
    assert np.all(np.abs(wide(result) - expected) <= TOLERANCE[dtype] * scale)
    assert await linalg.scal(alpha, rx) is rx
    np.testing.assert_allclose(wide(await rx.to_host()), alpha * wide(x), rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [0, 1, 3, 1000])
async def test_dot_and_nrm2(device: ta.Device, dtype: str, n: int) -> None:
    x, y = normal((n,), dtype, 1), normal((n,), dtype, 2)
    result = await linalg.dot(await device.put(x), y)
    assert (result.shape, result.dtype) == ((), dtype)
    expected = np.sum(wide(x) * wide(y))  # without conjugation
    scale = np.sum(np.abs(wide(x) * wide(y)))
    value = complex(await result.item())
    assert abs(value - expected) <= TOLERANCE[dtype] * math.sqrt(max(n, 1)) * max(scale, 1e-30)
    norm = await linalg.nrm2(await device.put(x))
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    assert (norm.shape, norm.dtype) == ((), real)
    expected_norm = math.sqrt(math.fsum((np.abs(wide(x)) ** 2).tolist()))
    assert float(await norm.item()) == pytest.approx(
        expected_norm, rel=TOLERANCE[dtype] * math.sqrt(max(n, 1))
    )


async def test_dot_does_not_conjugate(device: ta.Device) -> None:
    x = np.array([1j, 2.0])
    assert await (await linalg.dot(await device.put(x), x)).item() == 3.0 + 0.0j
    assert await (await linalg.nrm2(await device.put(x))).item() == pytest.approx(math.sqrt(5.0), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([3e200, 4e200], "float64"),
        ([3e-200, 4e-200], "float64"),
        ([3e-320, 4e-320], "float64"),
        ([1e308, 1e308], "float64"),
        ([3e30, 4e30], "float32"),
        ([3e-30, 4e-30], "float32"),
        ([3e30 + 4e30j, 0.0], "complex64"),
        ([3e200j, 4e200], "complex128"),
        ([3e4, 4e4], "float16"),
        ([3e-5, 4e-5], "float16"),
        ([3e30, 4e30], "bfloat16"),
        ([0.0, 0.0], "float64"),
        ([1e200, 1.0], "float64"),
        ([math.inf, 1.0], "float64"),
        ([-math.inf, math.inf], "float32"),
        ([math.nan, 1.0], "float64"),
    ],
    ids=str,
)
async def test_nrm2_of_extreme_values(device: ta.Device, values: list[complex], dtype: str) -> None:
    x = np.array(values).astype(ta.DType.of(dtype).dtype)
    expected = math.hypot(*(part for value in wide(x) for part in (value.real, value.imag)))
    result = float(await (await linalg.nrm2(await device.put(x))).item())
    if math.isnan(expected):
        assert math.isnan(result)
    else:
        # A few subnormals have few digits.
        floor = 5e-324 if dtype == "float64" else 0.0
        assert result == pytest.approx(expected, rel=TOLERANCE[dtype], abs=floor)


async def test_out(device: ta.Device) -> None:
    x = np.array([3.0, 4.0])
    out = await device.zeros(())
    assert await linalg.nrm2(x, out=out) is out
    assert await out.item() == 5.0
    assert await linalg.dot(x, x, out=out) is out
    assert await out.item() == 25.0


async def test_factors_of_any_kind(device: ta.Device) -> None:
    x = await device.put(np.ones(2, np.float32))
    for alpha in (2, np.float64(2.0), np.int8(2), np.float16(2.0)):
        await linalg.scal(alpha, x)
    assert (await x.to_host()).tolist() == [16.0, 16.0]
    await linalg.scal(math.inf, x)
    assert (await x.to_host()).tolist() == [math.inf, math.inf]
    z = await device.put(np.ones(1, np.complex64))
    await linalg.axpy(np.complex128(1j), np.ones(1, np.complex64), z)
    assert await z.item() == 1 + 1j


async def test_a_sum_in_half_precision_is_kept_in_more(device: ta.Device) -> None:
    x = np.ones(4096, ml_dtypes.bfloat16)
    assert await (await linalg.dot(await device.put(x), x)).item() == 4096
    assert await (await linalg.nrm2(await device.put(x))).item() == 64


@given(
    n=st.integers(0, 50),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    alpha=st.floats(-4.0, 4.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_random_vectors(n: int, dtype: str, alpha: float, seed: int) -> None:
    x, y = normal((n,), dtype, seed), normal((n,), dtype, seed + 1)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            ry = await device.put(y)
            await linalg.axpy(alpha, x, ry)
            result = wide(await ry.to_host())
            scale = np.abs(alpha * wide(x)) + np.abs(wide(y))
            # Numbers too small for the dtype are rounded to its smallest numbers.
            tiny = float(ml_dtypes.finfo(y.real.dtype).smallest_subnormal)
            assert np.all(np.abs(result - (alpha * wide(x) + wide(y))) <= TOLERANCE[dtype] * scale + 2 * tiny)

    trio.run(main)


NATIVE = ["float32", "float64", "complex64", "complex128"]


def one_norms(x: Array) -> Array:
    return np.abs(wide(x).real) + np.abs(np.imag(wide(x)))


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has neither")
@pytest.mark.parametrize("dtype", NATIVE)
@pytest.mark.parametrize("n", [0, 1, 5, 1000, 600_000])
async def test_asum_and_iamax(device: ta.Device, dtype: str, n: int) -> None:
    base = normal((3 * n,), dtype, n)
    whole = await device.put(base)
    for step in (1, 3, -2):
        x, part = base[::step], whole[::step]
        total = await linalg.asum(part)
        assert (total.shape, total.dtype) == ((), ta.DType.of(x.real.dtype))
        assert float(await total.item()) == pytest.approx(float(one_norms(x).sum()), rel=TOLERANCE[dtype])
        if n:
            index = await linalg.iamax(part)
            assert (index.shape, index.dtype) == ((), ta.DType.int64)
            assert await index.item() == one_norms(x).argmax()


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in does not have it")
async def test_iamax_takes_the_first_of_equal_elements_and_any_nan(device: ta.Device) -> None:
    out = await device.zeros((), "int64")
    assert await linalg.iamax(np.array([1.0, -3.0, 3.0, 2.0]), out=out) is out
    assert await out.item() == 1
    assert await (await linalg.iamax(await device.put(np.array([1.0, math.inf, 2.0])))).item() == 1
    for values in ([math.nan] * 3, [1.0, math.nan, 5.0], [math.nan, 1.0, 5.0]):
        await out.fill(-1)
        assert await (await linalg.iamax(np.array(values), out=out)).item() in range(3)


@pytest.mark.parametrize("dtype", [*NATIVE, "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_swap(device: ta.Device, dtype: str, shape: tuple[int, ...]) -> None:
    x, y = (normal(shape, "float64", seed).astype(ta.DType.of(dtype).dtype) for seed in (1, 2))
    rx, ry = await device.put(x), await device.put(np.array(y.T, order="C"))
    assert await linalg.swap(rx, ry.T if shape else ry) is not None
    np.testing.assert_array_equal(await rx.to_host(), y)
    np.testing.assert_array_equal(await ry.to_host(), x.T)


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in does not have it")
@pytest.mark.parametrize("dtype", NATIVE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_rot(device: ta.Device, dtype: str, shape: tuple[int, ...]) -> None:
    x, y = normal(shape, dtype, 1), normal(shape, dtype, 2)
    c, s = 0.6, 0.8 - 0.25j if dtype.startswith("complex") else 0.8
    rx, ry = await device.put(x), (await device.put(np.array(y.T, order="C"))).T
    assert await linalg.rot(rx, ry, c, s) == (rx, ry)
    for ref, expected in (
        (rx, c * wide(x) + s * wide(y)),
        (ry, c * wide(y) - np.conj(s) * wide(x)),
    ):
        np.testing.assert_allclose(await ref.to_host(), expected, rtol=0, atol=8 * TOLERANCE[dtype])
