"""Closing devices with unresponsive workers, or an unresponsive launcher: all at the same time."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest
import trio
from chosen import BACKEND
from processes import launcher, workers
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta

pytestmark = [
    pytest.mark.skipif(BACKEND != "cpu", reason="one backend is enough"),
    pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning"),
    pytest.mark.own_launcher,
]
COUNT = 3
Opened = Callable[[ta.System, ta.DeviceOptions], AbstractAsyncContextManager[list[ta.Device]]]


@asynccontextmanager
async def one_by_one(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[list[ta.Device], None]:
    yield [await system.open_device("cpu", options=options) for _ in range(COUNT)]


@asynccontextmanager
async def as_a_group(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[list[ta.Device], None]:
    async with system.open_devices(["cpu"] * COUNT, options=options) as group:
        yield list(group)


@asynccontextmanager
async def as_a_world(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[list[ta.Device], None]:
    async with one_by_one(system, options) as devices, ta.open_world(devices):
        yield devices


@pytest.mark.parametrize(
    ("opened", "is_interrupted", "spares"),
    [
        (one_by_one, False, 0),
        (one_by_one, True, 1),
        (as_a_group, False, 1),
        (as_a_group, True, 0),
        (as_a_world, False, 0),
    ],
)
async def test_stopped_workers_take_the_grace_of_one(
    mock_clock: MockClock, opened: Opened, is_interrupted: bool, spares: int
) -> None:
    options = ta.DeviceOptions(isolation="process", spares=spares, close_grace=3.0)
    ends = trio.Event()

    async def use() -> None:
        async with ta.open_system("s") as system, opened(system, options) as devices:
            for device in devices:
                await device.put(np.ones(3))
            # The time before a spare is started.
            mock_clock.jump(0.1)
            while sum(device.dispatch.spares for device in devices) < COUNT * spares:
                await devices[0].statistics()
            for pid in workers(launcher()):
                os.kill(pid, signal.SIGSTOP)
            ends.set()
            if is_interrupted:
                raise KeyboardInterrupt

    async def run() -> None:
        if is_interrupted:
            with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
                await use()
        else:
            await use()
        done.set()

    done = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await ends.wait()
        await wait_all_tasks_blocked()
        assert not done.is_set()
        # The grace, and a second more: of one device.
        mock_clock.jump(4.1)
        await done.wait()
    assert trio.current_time() == pytest.approx(4.2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_launcher_that_does_not_answer_is_waited_for_once(number: signal.Signals) -> None:
    began = trio.current_time()
    async with ta.open_system("s") as system, one_by_one(system, ta.DeviceOptions(isolation="process")):
        os.kill(launcher(), number)
    # clock: it is silent for three seconds and is killed then; one wait for each device would take longer
    assert trio.current_time() - began < 3.0 * COUNT - 1.0
