"""Functions that move, choose and count elements, with every dtype: against NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from array_numbers import DTYPES, REALS, numbers, wide
from chosen import IS_STAND_IN

import trio_accel as ta

arrays: Any = ta.arrays
WHOLE = tuple(name for name in REALS if "int" in name)
SHAPE = (4, 5)
ROWS, COLUMNS = np.array([2, -1, 0]), np.array([0, 4, -5])
LINES = np.array([[1], [0], [-1], [3]])
MASK = numbers(SHAPE, "bool", 5)


async def _first(asked: Awaitable[Any]) -> Any:
    return (await asked)[0]


async def _last(asked: Awaitable[Any]) -> Any:
    return (await asked)[-1]


async def _found(x: ta.AccelRef) -> Any:
    return await arrays.searchsorted(await arrays.sort(x[0]), x[1])


async def _changed(x: ta.AccelRef, name: str, indices: Any, *more: Any) -> Any:
    return await getattr(arrays, name)(await x.copy(), indices, *more)


def _set(x: Any, place: Any) -> Any:
    made = x.copy()
    made[place] = 1
    return made


def _unique(x: Any, number: int) -> Any:
    return np.unique(wide(x), return_inverse=True, return_counts=True)[number]


def _runs(x: Any) -> Any:
    return x[np.append(True, x[1:] != x[:-1])]


# By name: the dtypes, and a device's and NumPy's results for an array `x` of shape `SHAPE`.
CASES: dict[str, tuple[tuple[str, ...], Callable[[Any], Awaitable[Any]], Callable[[Any], Any]]] = {
    "asarray": (DTYPES, lambda x: arrays.asarray(x.device, x, copy=True), lambda x: x),
    "clip": (
        REALS[1:],
        lambda x: arrays.clip(x, 1, 4),
        lambda x: np.clip(wide(x), 1, 4),
    ),
    "compress": (DTYPES, lambda x: arrays.compress(MASK, x), lambda x: x[MASK]),
    "concat": (DTYPES, lambda x: arrays.concat([x, x[:1]]), lambda x: np.concatenate([x, x[:1]])),
    "stack": (DTYPES, lambda x: arrays.stack([x, x], axis=1), lambda x: np.stack([x, x], axis=1)),
    "gather_nd": (DTYPES, lambda x: arrays.gather_nd(x, (ROWS, COLUMNS)), lambda x: x[ROWS, COLUMNS]),
    "nonzero": (DTYPES, lambda x: _first(arrays.nonzero(x)), lambda x: np.nonzero(x)[0]),
    "pad": (DTYPES, lambda x: arrays.pad(x, 1), lambda x: np.pad(x, 1)),
    "partition": (DTYPES, lambda x: _first(arrays.partition(MASK, x)), lambda x: x[MASK]),
    "put": (DTYPES, lambda x: _changed(x, "put", ROWS, True, 0), lambda x: _set(x, ROWS)),
    "put_along_axis": (
        DTYPES,
        lambda x: _changed(x, "put_along_axis", LINES, True, 1),
        lambda x: _set(x, (np.arange(4), LINES[:, 0])),
    ),
    "repeat": (DTYPES, lambda x: arrays.repeat(x, 2, axis=1), lambda x: np.repeat(x, 2, axis=1)),
    "reshape": (DTYPES, lambda x: arrays.reshape(x.T, (2, 10)), lambda x: x.T.reshape(2, 10)),
    "roll": (DTYPES, lambda x: arrays.roll(x, 2, axis=1), lambda x: np.roll(x, 2, axis=1)),
    "scatter_nd": (
        DTYPES,
        lambda x: _changed(x, "scatter_nd", (ROWS, COLUMNS), True),
        lambda x: _set(x, (ROWS, COLUMNS)),
    ),
    "take": (DTYPES, lambda x: arrays.take(x, ROWS, axis=1), lambda x: x[:, ROWS]),
    "take_along_axis": (
        DTYPES,
        lambda x: arrays.take_along_axis(x, LINES, axis=1),
        lambda x: x[np.arange(4)[:, None], LINES],
    ),
    "tile": (DTYPES, lambda x: arrays.tile(x, 2), lambda x: np.tile(x, 2)),
    "tril": (DTYPES, arrays.tril, np.tril),
    "where": (DTYPES, lambda x: arrays.where(MASK, x, x[0]), lambda x: np.where(MASK, x, x[0])),
    "full_like": (DTYPES, lambda x: arrays.full_like(x, 1), np.ones_like),
    "cumulative_sum": (
        DTYPES,
        lambda x: arrays.cumulative_sum(x, axis=1),
        lambda x: np.cumsum(wide(x), axis=1),
    ),
    "segmented_reduce": (
        REALS,
        lambda x: arrays.segmented_reduce(x[0], np.array([0, 2, 5]), "max"),
        lambda x: np.stack([x[0, :2].max(), x[0, 2:].max()]),
    ),
    "diff": (DTYPES[1:], arrays.diff, lambda x: x[:, 1:] - x[:, :-1]),
    "bincount": (WHOLE, lambda x: arrays.bincount(x[0]), lambda x: np.bincount(x[0].astype(int))),
    "histogram": (
        REALS,
        lambda x: _first(arrays.histogram(x, np.array([-1.0, 0.0, 1.0, 5.0]))),
        lambda x: np.histogram(wide(x), [-1, 0, 1, 5])[0],
    ),
    "one_hot": (WHOLE, lambda x: arrays.one_hot(x, 4), lambda x: x[..., None] == np.arange(4)),
    "searchsorted": (
        REALS,
        _found,
        lambda x: np.searchsorted(np.sort(wide(x[0])), wide(x[1])),
    ),
    "top_k": (REALS, lambda x: _first(arrays.top_k(x, 2)), lambda x: np.sort(wide(x))[:, :-3:-1]),
    "unique_values": (REALS, arrays.unique_values, lambda x: np.unique(wide(x))),
    "unique_counts": (REALS, lambda x: _last(arrays.unique_counts(x)), lambda x: _unique(x, 2)),
    "unique_inverse": (REALS, lambda x: _last(arrays.unique_inverse(x)), lambda x: _unique(x, 1)),
    "run_lengths": (DTYPES, lambda x: _first(arrays.run_lengths(x[0])), lambda x: _runs(x[0])),
}


@pytest.mark.parametrize("name", list(CASES)[::4] if IS_STAND_IN else CASES)
async def test_every_dtype(device: ta.Device, name: str) -> None:
    dtypes, ask, numpy = CASES[name]
    for dtype in dtypes:
        x = numbers(SHAPE, dtype)
        got = await (await ask(await device.put(x))).to_host()
        want = np.asarray(numpy(x))
        assert got.shape == want.shape, dtype
        if name in ("cumulative_sum", "diff"):
            tolerance = {"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-6)
            np.testing.assert_allclose(wide(got), wide(want), rtol=tolerance, atol=tolerance, err_msg=dtype)
        else:
            np.testing.assert_array_equal(got.astype(want.dtype), want, err_msg=dtype)
            assert got.dtype in (ta.DType(dtype).dtype, np.int64, np.float32), dtype


@pytest.mark.parametrize("dtype", DTYPES)
async def test_numbers_of_every_dtype(device: ta.Device, dtype: str) -> None:
    kind = ta.DType(dtype).dtype
    if dtype != "bool":
        got = await (await arrays.arange(device, 1, 9, 2, dtype=dtype)).to_host()
        np.testing.assert_array_equal(got, np.array([1, 3, 5, 7]).astype(kind))
    if ta.DType(dtype).is_inexact:
        got = await (await arrays.linspace(device, 1, 2, 5, dtype=dtype)).to_host()
        np.testing.assert_array_equal(got, np.linspace(1, 2, 5).astype(kind))
    for name in ("zeros", "ones", "empty"):
        got = await (await getattr(arrays, name)(device, 3, dtype=dtype)).to_host()
        np.testing.assert_array_equal(got, np.full(3, name == "ones").astype(kind))
    got = await (await arrays.eye(device, 3, dtype=dtype)).to_host()
    np.testing.assert_array_equal(got, np.eye(3).astype(kind))
