"""Writes to places of an array that a loss of the context interrupts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel import arrays
from trio_accel.testing import inject_fault

OPTIONS = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=OPTIONS) as device:
        yield device


@pytest.mark.parametrize("reduce", ["set", "min", "max"])
async def test_repeatable_scatters_run_again(device: ta.Device, reduce: Any) -> None:
    x = await device.put(np.arange(12.0).reshape(4, 3))
    places = await device.put(np.array([2, 0]))
    inject_fault(device, "arrays.scatter_nd", kill=True)
    await arrays.scatter_nd(x, (places,), np.full((2, 3), 4.5), reduce=reduce)
    expected = np.arange(12.0).reshape(4, 3)
    combine = {"set": lambda _, y: y, "min": np.minimum, "max": np.maximum}[reduce]
    expected[[2, 0]] = combine(expected[[2, 0]], 4.5)
    np.testing.assert_array_equal(await x.to_host(), expected)
    assert device.generation == 2


async def test_a_sum_and_a_scatter_from_its_own_array_do_not_run_again(device: ta.Device) -> None:
    x = await device.put(np.arange(12.0).reshape(4, 3))
    given: list[tuple[Any, Any]] = [(np.ones((1, 3)), "add"), (x[3:], "set")]
    for values, reduce in given:
        inject_fault(device, "arrays.scatter", kill=True)
        with pytest.raises(ta.ContextLostError):
            await arrays.scatter(x[:3], np.array([1]), values, axis=0, reduce=reduce)
        with pytest.raises(ta.StaleRefError, match=r"spoiled by arrays\.scatter"):
            await x.to_host()
        await x.assign(np.arange(12.0).reshape(4, 3))
