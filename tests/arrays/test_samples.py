"""Functions of samples next to overflows and infinite numbers: against NumPy, and known results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import arrays

BIG = 1.6e308


async def host(asked: Any) -> Any:
    return await (await asked).to_host()


async def test_derivatives_are_in_the_order_of_the_axes(device: ta.Device) -> None:
    x = np.random.default_rng(1).normal(size=(3, 4, 5)).astype("float32")
    found: Any = await arrays.gradient(await device.put(x), axis=(2, 0, -2))
    for got, want in zip(found, np.gradient(x, axis=(2, 0, -2)), strict=True):
        assert got.dtype == want.dtype == np.float32
        np.testing.assert_allclose(await got.to_host(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
async def test_derivatives_have_the_dtype_of_the_samples(device: ta.Device, dtype: str) -> None:
    x = (np.arange(6) ** 2).astype(dtype)
    for spacing in (1.0, 0.5, np.arange(6.0) ** 1.5):
        got = await host(arrays.gradient(await device.put(x), spacing))
        assert got.dtype == dtype
        np.testing.assert_allclose(got, np.gradient((np.arange(6) ** 2.0), spacing), rtol=2e-3)


async def test_quotients_that_fit_over_differences_that_do_not(device: ta.Device) -> None:
    x = await device.put(np.array([-BIG, BIG, -BIG]))
    np.testing.assert_allclose(await host(arrays.gradient(x, 4.0)), [BIG / 2, 0, -BIG / 2])
    np.testing.assert_allclose(await host(arrays.trapezoid(x[:2], dx=0.5)), 0)
    same = await device.put(np.full(2, BIG))
    np.testing.assert_allclose(await host(arrays.trapezoid(same, dx=0.5)), BIG / 2)
    half = await device.put(np.full(3, 60000, "float16"))
    np.testing.assert_allclose(await host(arrays.trapezoid(half, dx=0.25)), 30000)


async def test_interpolation_between_distant_samples(device: ta.Device) -> None:
    at, ends = np.array([-BIG, -BIG / 2, 0, BIG / 4, BIG]), np.array([-BIG, BIG])
    np.testing.assert_allclose(await host(arrays.interp(await device.put(at), ends, ends)), at, atol=1e292)
    np.testing.assert_allclose(
        await host(arrays.interp(await device.put(at), ends, 1j * ends)), 1j * at, atol=1e292
    )


@pytest.mark.parametrize(
    ("xp", "fp"),
    [
        ([-np.inf, 1.0], [0.0, 10.0]),
        ([0.0, np.inf], [0.0, 10.0]),
        ([-np.inf, np.inf], [1.0, 10.0]),
        ([0.0, 1.0, 2.0], [0.0, np.inf, 1.0]),
        ([0.0, 1.0, 2.0], [np.inf, np.inf, np.nan]),
        ([0.0, 1.0, 2.0], [-np.inf, 1.0, 5.0]),
        ([0.0, 0.0, 2.0], [1.0, 3.0, 5.0]),
    ],
)
async def test_between_infinite_samples_as_numpy_has_it(
    device: ta.Device, xp: list[float], fp: list[float]
) -> None:
    at = np.array([-np.inf, -1.0, 0.0, 0.25, 1.0, 1.5, 2.0, 9.0, np.inf, np.nan])
    got = await host(arrays.interp(await device.put(at), np.array(xp), np.array(fp)))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got, np.interp(at, xp, fp))


async def test_between_numbers_with_an_infinite_distance(device: ta.Device) -> None:
    low, high = await device.put(np.array([-BIG, BIG, np.inf])), await device.put(np.array([BIG, -BIG, 1.0]))
    for weight, want in ((0.0, [-BIG, BIG, np.inf]), (0.5, [0, 0, np.inf]), (1.0, [BIG, -BIG, 1.0])):
        np.testing.assert_allclose(await host(arrays.lerp(low, high, weight)), want)


async def test_correlations_with_squares_that_overflow_or_vanish(device: ta.Device) -> None:
    x = np.random.default_rng(2).normal(size=(3, 9))
    for scale in (1.0, 1e200, 1e-200):
        got = await host(arrays.corrcoef(await device.put(x * scale)))
        np.testing.assert_allclose(got, np.corrcoef(x), rtol=1e-12)


async def test_nan_edges_come_last(device: ta.Device) -> None:
    x = np.array([0, 1, 1.5, 2, 3, np.nan, -np.inf, np.inf])
    for edges in ([1, 2, np.nan], [np.nan, 2, 1], [np.nan, np.nan], [np.nan, np.inf, 1], [np.nan]):
        for right in (False, True):
            bins = np.array(edges)
            want = np.digitize(x, bins, right=right)
            for given in (bins, await device.put(bins)):
                got = await host(arrays.digitize(await device.put(x), given, right=right))
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
async def test_edges_that_fall(device: ta.Device, dtype: str) -> None:
    x = np.array([0, 1, 2, 3, 3, 200, 5], dtype)
    for edges in ([3, 2, 1], [200, 3], [1, 2, 3], [2], [], [2, 2], [5, 3, 3, 0]):
        for right in (False, True):
            bins = np.array(edges, dtype)
            want = np.digitize(x, bins, right=right)
            for given in (bins, await device.put(bins)):
                got = await host(arrays.digitize(await device.put(x), given, right=right))
                np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match=r"^arrays\.digitize: bins must ascend or descend"):
        await arrays.digitize(await device.put(x), np.array([1, 3, 2], dtype))
