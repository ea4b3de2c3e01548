"""One function of each kind at the sizes, layouts and values where kernels go wrong: against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from chosen import IS_STAND_IN

import trio_accel as ta

arrays: Any = ta.arrays
Array = npt.NDArray[Any]

SIZES = (0, 1, 31, 32, 255, 256, 257, 1024, 1025)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 1e-45, 0.5)


@attrs.frozen
class Case:
    """A function and its reference.

    Attributes:
        ask: Asks a device, of an array.
        numpy: NumPy's result.
        is_finite: Whether it is asked only of finite numbers: sums of others are NaN.
        takes_none: Whether it is asked of no elements.
    """

    ask: Callable[[Any], Any]
    numpy: Callable[[Array], Any]
    is_finite: bool = False
    takes_none: bool = True


def _unique(x: Array) -> Array:
    return np.unique(x, equal_nan=False)


async def _compressed(x: ta.AccelRef) -> Any:
    return await arrays.compress(await arrays.greater(x, 0), x)


async def _first_nonzero(x: ta.AccelRef) -> Any:
    return (await arrays.nonzero(x))[0]


# On the last axis, where it is one axis.
CASES: dict[str, Case] = {
    "add": Case(lambda x: arrays.add(x, x), lambda x: x + x),
    "minimum": Case(lambda x: arrays.minimum(x, 1), lambda x: np.minimum(x, x.dtype.type(1))),
    "floor": Case(arrays.floor, np.floor),
    "where": Case(lambda x: arrays.where(True, x, x), lambda x: x),
    "isfinite": Case(arrays.isfinite, np.isfinite),
    "sum": Case(lambda x: arrays.sum(x, -1), lambda x: np.sum(x, -1, dtype=float), is_finite=True),
    "max": Case(lambda x: arrays.max(x, -1), lambda x: np.max(x, -1), takes_none=False),
    "argmin": Case(lambda x: arrays.argmin(x, -1), lambda x: np.argmin(x, -1), takes_none=False),
    "any": Case(lambda x: arrays.any(x, -1), lambda x: np.any(x, -1)),
    "cumulative_sum": Case(
        lambda x: arrays.cumulative_sum(x, axis=-1),
        lambda x: np.cumsum(x, -1, dtype=float),
        is_finite=True,
    ),
    "sort": Case(arrays.sort, np.sort),
    "argsort": Case(arrays.argsort, lambda x: np.argsort(x, kind="stable")),
    "unique_values": Case(arrays.unique_values, _unique),
    "compress": Case(_compressed, lambda x: x[x > 0]),
    "nonzero": Case(_first_nonzero, lambda x: np.nonzero(x)[0]),
    "diff": Case(arrays.diff, np.diff),
    "roll": Case(lambda x: arrays.roll(x, 5), lambda x: np.roll(x, 5)),
    "concat": Case(lambda x: arrays.concat([x, x]), lambda x: np.concatenate([x, x])),
    "pad": Case(lambda x: arrays.pad(x, 2), lambda x: np.pad(x, 2)),
    "take": Case(
        lambda x: arrays.take(x, np.array([0, -1, 0]), axis=0), lambda x: x[[0, -1, 0]], takes_none=False
    ),
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: x,
    "every second, backwards": lambda x: x[::-2],
    "transposed": lambda x: x.reshape((2, -1)).T if len(x) % 2 == 0 else x[1:].reshape((2, -1)).T,
}


def _values(size: int, dtype: str, *, is_finite: bool = False) -> Array:
    rng = np.random.default_rng(size)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        x = rng.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)
        x[: 4 * (size > 4)] = [limits.min, limits.max, 0, limits.max][: 4 * (size > 4)]
        return x
    x = rng.normal(size=size).astype(dtype)
    if not is_finite:
        # At both ends, and where blocks of 256 begin.
        with np.errstate(over="ignore"):
            special = np.array(SPECIAL, float).astype(dtype)
        for start in (0, 254, size - len(SPECIAL)):
            if 0 <= start <= size - len(SPECIAL):
                x[start : start + len(SPECIAL)] = special
    return x


def _compare(got: Array, want: Any, name: str) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape, name
    if got.dtype.kind == "f" and name in ("sum", "cumulative_sum"):
        scale = float(np.abs(np.nan_to_num(want)).max(initial=1.0))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * scale, err_msg=name)
        return
    np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=name)
    if got.dtype.kind == "f" and name not in ("sort", "unique_values", "minimum", "max"):
        number = ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number], err_msg=name)


async def _check(device: ta.Device, name: str, host: Array, view: Callable[[Any], Any], *, ndim: int) -> None:
    case, laid = CASES[name], view(host)
    if (not laid.size and not case.takes_none) or (ndim > 1 and name in ("nonzero", "roll", "concat", "pad")):
        return
    with np.errstate(all="ignore"):
        want = case.numpy(laid)
    on = view(await device.put(host))
    _compare(await (await case.ask(on)).to_host(), want, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(CASES)[::4] if IS_STAND_IN else CASES)
async def test_small_sizes_and_layouts(device: ta.Device, name: str, layout: str) -> None:
    for size in SIZES:
        if size or layout == "plain":
            host = _values(size, "float32", is_finite=CASES[name].is_finite)
            await _check(device, name, host, LAYOUTS[layout], ndim=2 if layout == "transposed" else 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
async def test_extremes_of_whole_numbers(device: ta.Device, dtype: str) -> None:
    names = [one for one in CASES if one not in ("sum", "cumulative_sum")]
    for name in names[::4] if IS_STAND_IN else names:
        for size in (257, 1025):
            await _check(device, name, _values(size, dtype), LAYOUTS["plain"], ndim=1)
    # Sums wrap around in 64 bits.
    x = _values(1025, dtype)
    on = await device.put(x)
    wide = np.uint64 if dtype.startswith("u") else np.int64
    np.testing.assert_array_equal(await (await arrays.sum(on)).to_host(), np.sum(x, dtype=wide))
    np.testing.assert_array_equal(await (await arrays.cumulative_sum(on)).to_host(), np.cumsum(x, dtype=wide))


async def test_elements_of_views_that_repeat(device: ta.Device) -> None:
    x = np.array([[np.nan], [-0.0], [3.5]], np.float32)
    on, wide = arrays.broadcast_to(await device.put(x), (3, 1025)), np.broadcast_to(x, (3, 1025))
    for name in list(CASES)[::4] if IS_STAND_IN else CASES:
        if name not in ("nonzero", "roll", "concat", "pad"):
            with np.errstate(all="ignore"):
                want = CASES[name].numpy(wide)
            _compare(await (await CASES[name].ask(on)).to_host(), want, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_a_million_and_one(device: ta.Device, name: str) -> None:
    host = _values(10**6 + 1, "float32", is_finite=CASES[name].is_finite)
    for layout in ("plain", "every second, backwards"):
        await _check(device, name, host, LAYOUTS[layout], ndim=1)


@pytest.mark.slow
async def test_fifty_millions(device: ta.Device) -> None:
    host = np.arange(5 * 10**7, dtype=np.float32) % np.float32(1000)
    host[-1] = 2000
    on = await device.put(host)
    assert float(await (await arrays.sum(on)).item()) == np.float32(host.sum(dtype=np.float64))
    assert float(await (await arrays.max(on)).item()) == 2000
    assert int(await (await arrays.argmax(on)).item()) == 5 * 10**7 - 1
    assert int(await (await arrays.count_nonzero(on)).item()) == np.count_nonzero(host)
    assert await arrays.add(on, 1, out=on) is on
    host += 1
    np.testing.assert_array_equal(await on.to_host(), host)
