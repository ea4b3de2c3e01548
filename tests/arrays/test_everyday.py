"""Statistics, quantiles, sets and functions of samples: against NumPy and SciPy in float64."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
from array_numbers import numbers
from differences import widest
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import arrays
from trio_accel.arrays import QuantileMethod

METHODS = get_args(QuantileMethod)
TOLERANCES = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 3e-6, "float64": 1e-12, "int32": 1e-12}


def with_gaps(dtype: str, shape: tuple[int, ...] = (4, 9, 5)) -> Any:
    """Numbers with NaN in between, and a line of only NaN."""
    x = numbers(shape, dtype)
    if x.dtype.kind != "i":
        x[np.random.default_rng(8).random(shape) < 0.2] = math.nan
        x[1, :, 2] = math.nan
    return x


def assert_near(got: Any, want: Any, dtype: str = "float64", name: str = "") -> None:
    assert np.shape(got) == np.shape(want), name
    kept = np.asarray(got).astype(complex if np.asarray(got).dtype.kind == "c" else float)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(kept, want, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*(empty slice|All-NaN|Degrees of freedom|catastrophic):RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_statistics(device: ta.Device, dtype: str) -> None:
    import scipy.stats  # takes seconds, for which every run of the tests would wait

    x = with_gaps(dtype)
    on, wide = await device.put(x), widest(x)
    for axis in (None, 1, (0, 2), -1):
        for name in ("nansum", "nanprod", "nanmean", "nanmax", "nanmin", "nanvar", "nanstd", "ptp"):
            want = getattr(np, name)(wide, axis=axis, keepdims=True)
            found = await getattr(arrays, name)(on, axis, keepdims=True)
            assert_near(await found.to_host(), want, dtype, name)
        corrected = await arrays.nanvar(on, axis, correction=1)
        assert_near(await corrected.to_host(), np.nanvar(wide, axis=axis, ddof=1), dtype)
        for name in ("skew", "kurtosis"):
            found = await getattr(arrays, name)(on, axis)
            want = getattr(scipy.stats, name)(wide, axis=axis)
            assert_near(await found.to_host(), want, "bfloat16" if dtype == "float16" else dtype, name)
    for axis in (0, 1, 2):
        scores = await (await arrays.zscore(on, axis, correction=1)).to_host()
        assert_near(scores, scipy.stats.zscore(wide, axis=axis, ddof=1), dtype)
    rest = np.delete(x, 1, 0)
    for name in ("nanargmax", "nanargmin"):
        found = await getattr(arrays, name)(await device.put(rest), 1)
        np.testing.assert_array_equal(await found.to_host(), getattr(np, name)(widest(rest), 1))
    with pytest.raises(ValueError, match=r"arrays\.nanmax: .*empty|arrays\.nanmax: .*no elements"):
        await arrays.nanmax(await device.zeros((0, 2)), 0)


@pytest.mark.parametrize("name", ["nanargmax", "nanargmin"])
async def test_places_in_long_rows_are_found_in_steps(device: ta.Device, name: str) -> None:
    x = np.random.default_rng(3).normal(size=(2, 140_000)).astype(np.float32)
    x[:, ::7] = np.nan
    on, function = await device.put(x), getattr(arrays, name)
    for axis in (None, 1, -1):
        for keepdims in (False, True):
            found, want = (
                await function(on, axis, keepdims=keepdims),
                getattr(np, name)(x, axis=axis, keepdims=keepdims),
            )
            np.testing.assert_array_equal(await found.to_host(), want)
    for rows in (on, on[:, :9]):
        with pytest.raises(TypeError, match=rf"arrays\.{name}: axis must be one axis or None, got \(0, 1\)"):
            await function(rows, (0, 1))


@pytest.mark.filterwarnings("ignore:.*(All-NaN):RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_quantiles(device: ta.Device, dtype: str) -> None:
    x, shares = with_gaps(dtype), [0.0, 0.1, 0.25, 0.5, 0.625, 0.99, 1.0]
    on, wide = await device.put(x), widest(x)
    for axis in (None, 1, (0, 2)):
        for name in ("median", "nanmedian"):
            found = await getattr(arrays, name)(on, axis, keepdims=True)
            assert found.dtype == ("float64" if dtype == "int32" else dtype)
            assert_near(await found.to_host(), getattr(np, name)(wide, axis=axis, keepdims=True), dtype)
        for name, scale in (("quantile", 1), ("nanquantile", 1), ("percentile", 100), ("nanpercentile", 100)):
            q = np.array(shares) * scale
            found = await getattr(arrays, name)(on, q, axis)
            assert_near(await found.to_host(), getattr(np, name)(wide, q, axis=axis), dtype, name)
    assert (await arrays.quantile(on, 0.3)).shape == ()
    assert (await arrays.percentile(on, [10], axis=0)).shape == (1, 9, 5)


@pytest.mark.parametrize("method", METHODS)
async def test_methods_of_quantiles(device: ta.Device, method: QuantileMethod) -> None:
    shares = [*np.linspace(0, 1, 41), 1 / 3, 0.0625]
    for n in (1, 2, 5, 12):
        x = np.random.default_rng(n).normal(size=(3, n))
        x[0, -1] = math.inf
        found = await arrays.quantile(await device.put(x), shares, 1, method=method)
        with np.errstate(invalid="ignore"):
            want = np.quantile(x, shares, 1, method=method)
        kept = await found.to_host()
        # NumPy has NaN if it adds infinity times 0.
        there = ~np.isnan(want)
        np.testing.assert_allclose(kept[there], want[there], rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    q=st.floats(0, 1),
)
def test_medians_of_any_shape(shape: list[int], seed: int, q: float) -> None:
    import trio

    x = np.random.default_rng(seed).integers(-4, 5, shape)

    async def compute() -> None:
        async with ta.open_system("medians") as system, system.open_device("cpu") as device:
            on = await device.put(x)
            for axis in (None, *range(-len(shape), len(shape))):
                np.testing.assert_array_equal(
                    await (await arrays.median(on, axis)).to_host(), np.median(x, axis)
                )
                np.testing.assert_allclose(
                    await (await arrays.quantile(on, q, axis)).to_host(),
                    np.quantile(x, q, axis),
                    rtol=1e-12,
                    atol=1e-15,
                )

    trio.run(compute)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
async def test_quantiles_of_nothing_are_not_numbers(device: ta.Device, dtype: str) -> None:
    for shape, axis in (((2, 0), 1), ((0, 3), 0), ((0,), None), ((2, 0, 3), (1, 2)), ((0, 2), 1)):
        x = await device.zeros(shape, dtype)
        want = np.full(np.zeros(shape).sum(axis=axis).shape, np.nan)
        for asked in (arrays.median(x, axis), arrays.nanmedian(x, axis), arrays.quantile(x, 0.3, axis)):
            found = await asked
            assert found.dtype == ("float32" if dtype == "float32" else "float64")
            np.testing.assert_array_equal(await found.to_host(), want)
        found = await arrays.quantile(x, [0.1, 0.2], axis, keepdims=True)
        np.testing.assert_array_equal(
            await found.to_host(), np.full((2, *np.zeros(shape).sum(axis=axis, keepdims=True).shape), np.nan)
        )


async def test_quantiles_refuse_invalid_arguments(device: ta.Device) -> None:
    one = await device.zeros(3)
    with pytest.raises(ValueError, match=r"arrays\.quantile: q must be from 0 to 1"):
        await arrays.quantile(one, 1.5)
    with pytest.raises(ValueError, match=r"arrays\.percentile: q must be from 0 to 100"):
        await arrays.percentile(one, [50, math.nan])
    with pytest.raises(ValueError, match=r"arrays\.quantile: method must be .*, got 'best'"):
        await arrays.quantile(one, 0.5, method="best")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"arrays\.quantile: q must be a number"):
        await arrays.quantile(one, one)  # type: ignore[arg-type]
    for wrong in ("half", [0.5, "half"], [[0.1, 0.2]], [0.1, [0.2]]):
        with pytest.raises(TypeError, match=r"arrays\.quantile: q must be a number"):
            await arrays.quantile(one, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"arrays\.percentile: q must be a number"):
        await arrays.percentile(one, "half")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"complex"):
        await arrays.median(await device.zeros(3, "complex64"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint8", "bool"])
async def test_sets(device: ta.Device, dtype: str) -> None:
    x, y = numbers((6, 4), dtype), numbers((9,), dtype, 5)
    y[:3] = x[0, :3]
    on, other = await device.put(x), await device.put(y)
    for name in ("intersect1d", "setdiff1d", "setxor1d", "union1d"):
        found = await getattr(arrays, name)(on, other)
        assert found.dtype == dtype
        np.testing.assert_array_equal(await found.to_host(), getattr(np, name)(x, y), err_msg=name)
    for invert in (False, True):
        found = await arrays.isin(on, other, invert=invert)
        np.testing.assert_array_equal(await found.to_host(), np.isin(x, y, invert=invert))
        nothing = await arrays.isin(on, other[:0], invert=invert)
        np.testing.assert_array_equal(await nothing.to_host(), np.full(x.shape, invert))


async def test_nan_is_in_no_set(device: ta.Device) -> None:
    x, y = np.array([math.nan, 1.0, math.inf, -0.0]), np.array([math.nan, math.inf, 0.0])
    found = await arrays.isin(await device.put(x), y)
    np.testing.assert_array_equal(await found.to_host(), np.isin(x, y))


async def test_averages_and_covariances(device: ta.Device) -> None:
    rng = np.random.default_rng(3)
    x, weights, along = rng.normal(size=(5, 8)), rng.random((5, 8)), rng.random(8)
    on = await device.put(x)
    for axis in (None, 0, 1):
        found = await arrays.average(on, axis, weights=weights)
        assert_near(await found.to_host(), np.average(x, axis, weights=weights))
    vector = await arrays.average(on, 1, weights=along, keepdims=True)
    assert_near(await vector.to_host(), np.average(x, 1, weights=along, keepdims=True))
    assert_near(await (await arrays.average(on)).to_host(), x.mean())
    z = x[:, :4] + 1j * x[:, 4:]
    for one in (x, x[0], z, (x * 9).astype(int)):
        for correction in (0, 1):
            found = await arrays.cov(await device.put(one), correction=correction)
            assert_near(await found.to_host(), np.cov(one, ddof=correction))
    assert_near(await (await arrays.corrcoef(on)).to_host(), np.corrcoef(x))
    with pytest.raises(ValueError, match=r"arrays\.average: weights must have the shape \(5, 8\) of x"):
        await arrays.average(on, 1, weights=np.zeros(5))
    with pytest.raises(ValueError, match=r"arrays\.cov: x must be of variables and more observations"):
        await arrays.cov(on[:, :1])
    with pytest.raises(ValueError, match=r"arrays\.corrcoef: x must have two axes"):
        await arrays.corrcoef(on[0])


async def test_samples(device: ta.Device) -> None:
    rng = np.random.default_rng(4)
    y, x = rng.normal(size=(4, 7)), np.sort(rng.normal(size=7))
    on, at = await device.put(y), await device.put(x)
    for axis in (0, 1):
        found = await arrays.gradient(on, 0.5, axis=axis)
        assert isinstance(found, ta.AccelRef)
        assert_near(await found.to_host(), np.gradient(y, 0.5, axis=axis))
    for found, want in zip(await arrays.gradient(on), np.gradient(y), strict=True):
        assert_near(await found.to_host(), want)
    uneven = await arrays.gradient(on, at, axis=1)
    assert isinstance(uneven, ta.AccelRef)
    assert_near(await uneven.to_host(), np.gradient(y, x, axis=1))
    assert_near(await (await arrays.trapezoid(on, dx=0.1)).to_host(), np.trapezoid(y, dx=0.1))
    assert_near(await (await arrays.trapezoid(on, at)).to_host(), np.trapezoid(y, x))
    assert_near(await (await arrays.trapezoid(on, y * 2, axis=0)).to_host(), np.trapezoid(y, y * 2, axis=0))
    places = np.array([[-9.0, x[0], x[3]], [(x[2] + x[3]) / 2, 9.0, math.nan]])
    for options in ({}, {"left": -1.0, "right": 5.0}):
        found = await arrays.interp(await device.put(places), at, y[0], **options)
        assert_near(await found.to_host(), np.interp(places, x, y[0], **options))
    assert_near(await (await arrays.interp(places, at, y[0] * 1j)).to_host(), np.interp(places, x, y[0] * 1j))
    for right in (False, True):
        bins = await arrays.digitize(await device.put(places), x, right=right)
        np.testing.assert_array_equal(await bins.to_host(), np.digitize(places, x, right=right))
    angles = np.cumsum(rng.normal(0, 2, (3, 40)), 1) % (2 * np.pi)
    unwrapped = await arrays.unwrap(await device.put(angles))
    np.testing.assert_allclose(await unwrapped.to_host(), np.unwrap(angles), rtol=1e-12, atol=1e-12)
    turns = await arrays.unwrap(await device.put(angles.T * 10), axis=0, period=20)
    np.testing.assert_allclose(await turns.to_host(), np.unwrap(angles.T * 10, axis=0, period=20), atol=1e-12)
    coefficients = await device.put(np.array([2.0, 0.0, -1.0, 0.5]))
    assert_near(await (await arrays.polyval(coefficients, on)).to_host(), np.polyval([2.0, 0, -1, 0.5], y))
    for increasing in (False, True):
        powers = await arrays.vander(await device.put(np.arange(1, 5)), 3, increasing=increasing)
        np.testing.assert_array_equal(
            await powers.to_host(), np.vander(range(1, 5), 3, increasing=increasing)
        )
    with pytest.raises(ValueError, match=r"arrays\.gradient: an axis must have two samples"):
        await arrays.gradient(on[:1])
    with pytest.raises(ValueError, match=r"arrays\.interp: xp and fp must be vectors of one length"):
        await arrays.interp(on, at, y)
    with pytest.raises(ValueError, match=r"arrays\.trapezoid: x must have the shape \(4, 7\) of y"):
        await arrays.trapezoid(on, np.zeros(4))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "bfloat16", "float32", "float64"])
async def test_largest_so_far(device: ta.Device, dtype: str) -> None:
    x = numbers((3, 300), dtype)
    if x.dtype.kind not in "iu":
        x[1, 250] = math.nan
    on, wide = await device.put(x), widest(x)
    for name, of in (("cumulative_max", np.maximum), ("cumulative_min", np.minimum)):
        for axis in (0, 1):
            found = await getattr(arrays, name)(on, axis=axis)
            assert found.dtype == dtype
            np.testing.assert_array_equal(widest(await found.to_host()), of.accumulate(wide, axis))
    sums = await arrays.cumulative_logsumexp(on, axis=1)
    with np.errstate(invalid="ignore"):
        want = np.logaddexp.accumulate(wide, 1)
    known = "float64" if "int" in dtype else dtype
    assert sums.dtype == known
    np.testing.assert_allclose(widest(await sums.to_host()), want, rtol=4 * TOLERANCES[known], atol=1e-12)
    assert (await arrays.cumulative_max(on[:0, 0])).shape == (0,)
    with pytest.raises(TypeError, match="complex"):
        await arrays.cumulative_max(await device.zeros(3, "complex64"))


async def test_large_exponents_so_far(device: ta.Device) -> None:
    x = np.array([-math.inf, -1e300, 1e300, 1e300, -5.0])
    found = await arrays.cumulative_logsumexp(await device.put(x))
    np.testing.assert_array_equal(await found.to_host(), np.logaddexp.accumulate(x))


async def test_made_arrays(device: ta.Device) -> None:
    for k in (-2, 0, 3):
        np.testing.assert_array_equal(await (await arrays.tri(device, 3, 4, k=k)).to_host(), np.tri(3, 4, k))
        made = await arrays.diag(await device.put(np.arange(6).reshape(2, 3)), k=k)
        np.testing.assert_array_equal(
            await made.to_host(), np.stack([np.diag(row, k) for row in np.arange(6).reshape(2, 3)])
        )
    for endpoint in (True, False):
        assert_near(
            await (await arrays.logspace(device, -1, 2, 7, endpoint=endpoint)).to_host(),
            np.logspace(-1, 2, 7, endpoint=endpoint),
        )
        ratio = await (await arrays.geomspace(device, 1, 1000, 7, endpoint=endpoint)).to_host()
        assert_near(ratio / 1000, np.geomspace(1, 1000, 7, endpoint=endpoint) / 1000)
    with pytest.raises(ValueError, match=r"arrays\.geomspace: start and stop must be finite, not 0"):
        await arrays.geomspace(device, 0, 3, 4)


async def test_places_and_choices(device: ta.Device) -> None:
    x = np.array([[0, 3, 0], [2, 0, 1]])
    on = await device.put(x)
    np.testing.assert_array_equal(await (await arrays.argwhere(on)).to_host(), np.argwhere(x))
    for found, want in zip(
        await arrays.unravel_index(await device.put(np.array([[0, 22], [41, 7]])), (3, 2, 7)),
        np.unravel_index([[0, 22], [41, 7]], (3, 2, 7)),
        strict=True,
    ):
        np.testing.assert_array_equal(await found.to_host(), want)
    chosen = await arrays.select([await arrays.greater(on, 2), await arrays.greater(on, 0)], [on, -x], 7)
    np.testing.assert_array_equal(await chosen.to_host(), np.select([x > 2, x > 0], [x, -x], 7))
    keys = np.random.default_rng(1).integers(0, 3, (3, 40))
    order = await arrays.lexsort([await device.put(key) for key in keys])
    np.testing.assert_array_equal(await order.to_host(), np.lexsort(keys))
    for k in range(-1, 5):
        turned = await arrays.rot90(on, k).copy()
        np.testing.assert_array_equal(await turned.to_host(), np.rot90(x, k))
    assert arrays.swapaxes(on, 0, -1).shape == (3, 2)
    with pytest.raises(ValueError, match=r"arrays\.select: each condition must have a choice, got 1 and 0"):
        await arrays.select([True], [])
    with pytest.raises(ValueError, match=r"arrays\.lexsort: keys must be of one shape"):
        await arrays.lexsort([on, on[0]])
    with pytest.raises(ValueError, match=r"arrays\.unravel_index: shape must have axes"):
        await arrays.unravel_index(on, (2, 0))
    with pytest.raises(TypeError, match=r"arrays\.unravel_index: x must have an integer dtype, got float64"):
        await arrays.unravel_index(await device.zeros(2), (2,))
