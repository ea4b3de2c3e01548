"""Other libraries' writes to arrays, and their arrays as input, are content from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE, IS_STAND_IN
from foreign_arrays import ByDlpack, ByInterface
from random_work import replayed

import trio_accel as ta
from trio_accel import replay

pytestmark = [
    pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning"),
    pytest.mark.skipif(BACKEND == "cuda" and not IS_STAND_IN, reason="NumPy shows the memory"),
]
HOST = np.arange(24.0).reshape(4, 6)
CONSUMERS: dict[str, Callable[[Any], Any]] = {"DLPack": ByDlpack, "its interface": ByInterface}
if BACKEND == "cpu":
    CONSUMERS |= {"from_dlpack": np.from_dlpack, "a view": lambda array: array[...]}


async def check(system: ta.System, journal: replay.RecordingJournal, read: list[Any]) -> None:
    for isolation in ("inline", "process"):
        report = await replayed(system, journal, isolation)  # type: ignore[arg-type]
        assert report.is_same, report
        assert not report.skipped, report
        assert report.compared >= len(read)


@pytest.mark.parametrize("isolation", ["inline", "process"] if BACKEND == "cpu" else ["inline"])
@pytest.mark.parametrize("way", CONSUMERS)
async def test_leases_that_write(system: ta.System, way: str, isolation: ta.Isolation) -> None:
    journal = replay.MemoryJournal()
    read: list[Any] = []
    options = INLINE if isolation == "inline" else ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        before = await device.put(HOST)
        async with replay.record(device, journal):
            for turn, array in enumerate(
                [before, await device.put(HOST), (await device.put(HOST))[1:3, ::2]]
            ):
                read.append(await (array + 1.0).to_host())
                async with array.lease(write=True) as given:
                    consumer = CONSUMERS[way](given)
                    np.asarray(consumer)[...] = turn + 0.5
                    del consumer
                # It is used in an operation, a chain that changes it, and a started call.
                await ta.linalg.scal(2.0, array)
                read.append(await ta.nn.relu(array - 1.0).to_host())
                pending = (array * 3.0).start()
                read.append(await pending.value.to_host())
                np.testing.assert_array_equal(read[-2], 2 * turn)
                async with array.lease() as given:
                    consumer = CONSUMERS[way](given)
                    read.append(await array.to_host())
                    np.testing.assert_array_equal(np.asarray(consumer), read[-1])
                    del consumer
    del given
    await check(system, journal, read)


@pytest.mark.skipif(BACKEND != "cpu", reason="the memory is the host's")
async def test_arrays_of_other_libraries_are_put(system: ta.System) -> None:
    """Content is their value at the put; each later change of theirs is no change of the array."""
    journal = replay.MemoryJournal()
    owner = HOST.copy()
    async with system.open_device(BACKEND) as device, replay.record(device, journal):
        x = await device.put(np.from_dlpack(owner))
        owner[...] = 7.0
        y = await device.put(np.from_dlpack(owner)[::2])
        owner[...] = 9.0
        read = [await (x + 1.0).to_host(), await (y @ x.T).to_host()]
    np.testing.assert_array_equal(read[0], HOST + 1)
    await check(system, journal, read)


@pytest.mark.skipif(BACKEND != "cuda", reason="the memory is a GPU's")
async def test_arrays_of_a_gpu_are_put(system: ta.System) -> None:
    journal = replay.MemoryJournal()
    async with (
        system.open_device(BACKEND, options=INLINE) as device,
        system.open_device(BACKEND, options=INLINE, name="other") as other,
    ):
        lent = await other.put(HOST)
        async with replay.record(device, journal), lent.lease() as given:
            x = await device.put(given)
            read = [await (x + 1.0).to_host()]
    np.testing.assert_array_equal(read[0], HOST + 1)
    await check(system, journal, read)
