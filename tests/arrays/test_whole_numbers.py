"""Functions of integers, at the ends of all dtypes: against NumPy and SciPy in float64."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import scipy.special
import scipy.stats

import trio_accel as ta

arrays: Any = ta.arrays
nn: Any = ta.nn
WHOLE = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
Case: TypeAlias = tuple[Callable[[Any], Awaitable[Any]], Callable[[Any], Any]]
WEIGHTS = np.array([3, 1, 200, 7, 100, 9, 8, 2], "uint8")


def numbers(dtype: str) -> Any:
    """Numbers at both ends of a dtype, in no order."""
    if dtype == "bool":
        return np.array([True, False, False, True, True, False, True, True])
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.array([most, least, most - 1, 3, least + 1, most // 2, 0, most], dtype)


def halves(x: Any) -> Any:
    return x[:4], x[4:]


def pair(function: str, **more: Any) -> Case:
    """The function of NumPy's name, of two halves."""
    return (
        lambda x: getattr(arrays, function)(*halves(x), **more),
        lambda x: getattr(np, function)(*halves(x.astype(float)), **more),
    )


def one(function: str, *given: Any, **more: Any) -> Case:
    """The function of NumPy's name, of the numbers."""
    return (
        lambda x: getattr(arrays, function)(x, *given, **more),
        lambda x: getattr(np, function)(x.astype(float), *given, **more),
    )


def _softmax(x: Any) -> Any:
    return scipy.special.softmax(x.astype(float))


async def _histogram(x: Any) -> Any:
    return (await arrays.histogram(x, 5)).counts


async def _interpolated(x: Any) -> Any:
    once = np.unique(await x.to_host())
    return await arrays.interp(await x.device.put(np.linspace(-9.0, 500.0, 9)), once, once)


CASES: dict[str, Case] = {
    "average": (
        lambda x: arrays.average(x, weights=WEIGHTS),
        lambda x: np.average(x.astype(float), weights=WEIGHTS),
    ),
    "corrcoef": (
        lambda x: arrays.corrcoef(x.reshape((2, 4))),
        lambda x: np.corrcoef(x.astype(float).reshape(2, 4)),
    ),
    "cov": (lambda x: arrays.cov(x.reshape((2, 4))), lambda x: np.cov(x.astype(float).reshape(2, 4))),
    "gradient": one("gradient"),
    "gradient of coordinates": (
        lambda x: arrays.gradient(np.arange(2.0), x[1:4:2]),
        lambda x: np.gradient(np.arange(2.0), x[1:4:2].astype(float)),
    ),
    "interp": (
        lambda x: arrays.interp(np.linspace(0, 7, 15), np.arange(8, dtype="uint8"), x),
        lambda x: np.interp(np.linspace(0, 7, 15), np.arange(8), x.astype(float)),
    ),
    "interp between coordinates": (
        _interpolated,
        lambda x: np.interp(
            np.linspace(-9.0, 500.0, 9), np.unique(x).astype(float), np.unique(x).astype(float)
        ),
    ),
    "isclose": (
        lambda x: arrays.isclose(*halves(x)),
        lambda x: np.isclose(*halves(x.astype(float))),
    ),
    "logsumexp": (
        arrays.logsumexp,
        lambda x: scipy.special.logsumexp(x.astype(float)),
    ),
    "log_softmax": (
        arrays.log_softmax,
        lambda x: scipy.special.log_softmax(x.astype(float)),
    ),
    "softmax": (arrays.softmax, _softmax),
    "logaddexp2": pair("logaddexp2"),
    "mean": one("mean"),
    "median": one("median"),
    "percentile": one("percentile", 37.0),
    "quantile": one("quantile", [0.1, 0.5, 0.9]),
    "quantile, midpoint": one("quantile", 0.4, method="midpoint"),
    "std": one("std"),
    "var": one("var"),
    "nanmean": one("nanmean"),
    "nanvar": one("nanvar"),
    "skew": (arrays.skew, lambda x: scipy.stats.skew(x.astype(float))),
    "kurtosis": (arrays.kurtosis, lambda x: scipy.stats.kurtosis(x.astype(float))),
    "zscore": (arrays.zscore, lambda x: scipy.stats.zscore(x.astype(float))),
    "trapezoid": one("trapezoid"),
    "trapezoid over coordinates": (
        lambda x: arrays.trapezoid(np.arange(8.0), x),
        lambda x: np.trapezoid(np.arange(8.0), x.astype(float)),
    ),
    "sinc": (
        lambda x: arrays.sinc(x[3:4]),
        lambda x: np.sinc(x[3:4].astype(float)),
    ),
    "degrees": (arrays.degrees, lambda x: np.degrees(x.astype(float))),
    "radians": (arrays.radians, lambda x: np.radians(x.astype(float))),
    "rsqrt": (lambda x: arrays.rsqrt(x[:1]), lambda x: 1 / np.sqrt(x[:1].astype(float))),
    "histogram": (_histogram, lambda x: np.histogram(x.astype(float), 5)[0]),
    "polyval": (
        lambda x: arrays.polyval(np.array([0.5, 2.0]), x),
        lambda x: np.polyval(np.array([0.5, 2.0]), x.astype(float)),
    ),
    "nn.l1_loss": (
        lambda x: nn.l1_loss(*halves(x)),
        lambda x: np.mean(abs(x[:4].astype(float) - x[4:].astype(float))),
    ),
    "nn.mse_loss": (
        lambda x: nn.mse_loss(*halves(x)),
        lambda x: np.mean((x[:4].astype(float) - x[4:].astype(float)) ** 2),
    ),
    "nn.pairwise_distance": (
        lambda x: nn.pairwise_distance(*halves(x)),
        lambda x: np.sqrt(np.sum((x[:4].astype(float) - x[4:].astype(float) + 1e-6) ** 2)),
    ),
    "nn.normalize": (
        lambda x: nn.normalize(x, axis=0),
        lambda x: x.astype(float) / np.sqrt(np.sum(x.astype(float) ** 2)),
    ),
    "nn.softsign": (
        nn.softsign,
        lambda x: x.astype(float) / (1 + abs(x.astype(float))),
    ),
}


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("name", CASES)
async def test_nothing_wraps_around_on_the_way(device: ta.Device, name: str, dtype: str) -> None:
    x = numbers(dtype)
    asked, numpy = CASES[name]
    with np.errstate(all="ignore"):
        want = np.asarray(numpy(x))
    got = await (await asked(await device.put(x))).to_host()
    most = np.max(np.abs(want), where=np.isfinite(want), initial=0.0)
    np.testing.assert_allclose(got, want, rtol=2e-12, atol=1e-12 * most)


KEPT: dict[str, Case] = {
    "cumulative_prod": (lambda x: arrays.cumulative_prod(x[3:7]), lambda x: np.cumprod(x[3:7])),
    "cumulative_sum": (arrays.cumulative_sum, np.cumsum),
    "diff": (arrays.diff, np.diff),
    "polyval": (lambda x: arrays.polyval(x[1:4], x), lambda x: np.polyval(x[1:4], x)),
    "prod": (arrays.prod, np.prod),
    "ptp": (arrays.ptp, np.ptp),
    "sum": (arrays.sum, np.sum),
    "vander": (lambda x: arrays.vander(x, 4), lambda x: np.vander(x, 4)),
    "vander, increasing": (
        lambda x: arrays.vander(x, 3, increasing=True),
        lambda x: np.vander(x, 3, increasing=True),
    ),
}


@pytest.mark.parametrize("dtype", WHOLE[1:])
@pytest.mark.parametrize("name", KEPT)
async def test_whole_results_have_numpys_dtype(device: ta.Device, name: str, dtype: str) -> None:
    x = numbers(dtype)
    asked, numpy = KEPT[name]
    want = np.asarray(numpy(x))
    got = await (await asked(await device.put(x))).to_host()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-15 if want.dtype.kind == "f" else 0)


async def test_derivatives_over_coordinates_of_unsigned_numbers(device: ta.Device) -> None:
    y = np.array([1.0, 4.0, 9.0, 16.0])
    for at in (np.array([250, 200, 7, 0], "uint8"), np.array([-128, -100, 20, 127], "int8")):
        got = await (await arrays.gradient(await device.put(y), at)).to_host()
        np.testing.assert_allclose(got, np.gradient(y, at.astype(float)), rtol=1e-13)
