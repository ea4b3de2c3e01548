"""Bandwidth between two devices, measured by copies."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from chosen import BACKEND

import trio_accel as ta

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")


class Clock:
    """In place of `time`: copies take this many seconds."""

    def __init__(self, *seconds: float) -> None:
        self._times = [0.0, *(edge for taken in seconds for edge in (taken, 0.0))]

    def perf_counter(self) -> float:
        return self._times.pop(0)


async def blocks(*devices: ta.Device) -> list[int]:
    for device in devices:
        await device.synchronize()
    return [(await device.statistics()).memory.blocks for device in devices]


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_between_two_devices_and_within_one(system: ta.System, isolation: Any) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    first, second = [await system.open_device(BACKEND, options=options) for _ in range(2)]
    for target in (second, first):
        assert await ta.measure_bandwidth(first, target, nbytes=1 << 20, repeats=2) > 0
    assert await blocks(first, second) == [0, 0]


async def test_it_is_the_median_after_the_first_copy(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = await system.open_device(BACKEND)
    monkeypatch.setattr(f"{ta.measure_bandwidth.__module__}.time", Clock(100.0, 0.5, 8.0, 0.25))
    assert await ta.measure_bandwidth(device, device, nbytes=1000, repeats=3) == 2000.0


async def test_memory_is_given_back_when_it_is_cancelled_or_fails(system: ta.System) -> None:
    first = await system.open_device(BACKEND)
    second = await system.open_device(BACKEND, options=ta.DeviceOptions(memory_limit=1000))
    with trio.move_on_after(0.05):
        await ta.measure_bandwidth(first, first, nbytes=1 << 20, repeats=1 << 30)
    with pytest.raises(ta.OutOfMemoryError):
        await ta.measure_bandwidth(first, second, nbytes=2000)
    assert await blocks(first, second) == [0, 0]


async def test_bad_input(system: ta.System) -> None:
    device = await system.open_device(BACKEND)
    bad: list[Any] = ["cpu", 1.5, {"repeat": 1}]
    with pytest.raises(TypeError, match="measure_bandwidth: device must be an open Device, got str"):
        await ta.measure_bandwidth(device, bad[0])
    with pytest.raises(TypeError, match=r"measure_bandwidth: nbytes must be an integer, got 1\.5"):
        await ta.measure_bandwidth(device, device, nbytes=bad[1])
    with pytest.raises(ValueError, match="measure_bandwidth: repeats must be at least 1, got 0"):
        await ta.measure_bandwidth(device, device, repeats=0)
    with pytest.raises(TypeError, match=r"measure_bandwidth\b.*did you mean 'repeats'"):
        await ta.measure_bandwidth(device, device, **bad[2])
