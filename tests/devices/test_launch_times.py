"""Observers of operations get the time of the launch in a worker, and the devices of a system are known."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from isolations import isolated

import trio_accel as ta
from trio_accel.devices import Around, Ask, Launch, Operation, Phase, opened


def unchanged(ask: Ask) -> Ask:
    return ask


@isolated
async def test_a_worker_reports_the_launch_of_an_operation(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.eye(8))
    seen: list[tuple[Phase, Launch]] = []

    def see(phase: Phase, launch: Launch) -> None:
        seen.append((phase, launch))

    before = time.monotonic_ns()
    with opened(device).observed(see, unchanged):
        await ta.linalg.matmul(x, x)
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(ta.linalg.matmul, x, x)
    after = time.monotonic_ns()
    launches = [launch for phase, launch in seen if phase is Phase.REPLY]
    assert len(launches) == 31
    worker = system.tree().find(f"{device.path}/context").pid
    for launch in launches:
        assert launch.times is not None
        assert launch.times.process == worker != os.getpid()
        assert before < launch.times.begun < launch.times.completed < after
    # One stream: they were launched, and were complete, in order.
    begun = [launch.times.begun for launch in launches if launch.times]
    assert begun == sorted(begun)
    seen.clear()
    await ta.linalg.matmul(x, x)
    assert not seen


@isolated
async def test_the_next_worker_reports_launches_too(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.eye(8))
    launches: list[Launch] = []
    with opened(device).observed(lambda phase, launch: launches.append(launch), unchanged):
        ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True)
        with pytest.raises(ta.ContextLostError):
            await ta.linalg.matmul(x, x)
        assert launches[-1].times is None  # nobody was left to notify
        await ta.linalg.matmul(x, x)
    assert launches[-1].times is not None


async def test_asks_pass_through_their_wrappers(device: ta.Device) -> None:
    order: list[str] = []

    def around(name: str) -> Around:
        def make(ask: Ask) -> Ask:
            async def asking(operation: Operation[Any, Any]) -> Any:
                order.append(name)
                return await ask(operation)

            return asking

        return make

    def see(phase: Phase, launch: Launch) -> None:
        pass

    x = await device.put(np.eye(2))
    with opened(device).observed(see, around("inner")):
        with opened(device).observed(see, around("outer")):
            await ta.linalg.matmul(x, x)
        await x.to_host()
    await x.to_host()
    assert order == ["outer", "inner", "inner"]


async def test_the_open_devices_of_a_system(system: ta.System) -> None:
    assert system.devices == ()
    async with system.open_device(BACKEND) as device:
        assert system.devices == (device,)
    assert system.devices == ()
    async with system.open_device(BACKEND) as again:
        assert system.devices == (again,)
