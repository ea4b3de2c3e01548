"""The machine was suspended, or the program stopped: hours pass between two looks of the watchdogs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.testing import ManualCompletion

HOURS = 8 * 3600.0


async def test_an_operation_is_not_hung_because_the_machine_slept(
    mock_clock: MockClock, system: ta.System
) -> None:
    manual = ManualCompletion(is_holding=False)
    options = ta.DeviceOptions(isolation="inline", completion=manual, stuck_after=1.0, close_grace=0.1)
    async with system.open_device(BACKEND, options=options) as device:
        await ta.linalg.nrm2(await device.put(np.ones(3)))
        manual.hold()
        done: list[ta.AccelRef] = []

        async def put() -> None:
            done.append(await device.put(np.ones(3)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            await manual.wait_held()
            for seconds in (0.05, HOURS, 0.05, HOURS, 0.05):
                mock_clock.jump(seconds)
                await wait_all_tasks_blocked()
            manual.pass_all()
        assert (await done[0].to_host()).tolist() == [1.0] * 3
        assert device.generation == 1


class Link:
    """The application's end of a worker that beats, and is killed if need be; no worker is at the other."""

    def __init__(self, kind: type[Any]) -> None:
        self.killed = 0
        self.page = SimpleNamespace(heartbeat=1, looks=1, frames=())
        process = SimpleNamespace(
            pid=1, kill=self._kill, processor_time=lambda: 0.0, is_in_disk_wait=lambda: False
        )
        channel = SimpleNamespace(send=lambda _: None)
        where = {"device": "cpu:0", "path": "s/cpu:0"}
        self.link = kind(process, channel, self.page, heartbeat_timeout=15.0, stuck_after=None, **where)

    def _kill(self) -> None:
        self.killed += 1


@pytest.fixture
async def ends(mock_clock: MockClock, system: ta.System) -> Link:
    """Of the class that a device has for its worker."""
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as device:
        return Link(type(device.dispatch._sender.link))


async def settle(clock: MockClock, seconds: float) -> None:
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


WATCHES: dict[str, Callable[[Link], Any]] = {
    "heart": lambda ends: ends.link._listen_to_heart(),
    "looks": lambda ends: ends.link._watch_the_watch(2.0),
    "processor": lambda ends: ends.link._watch_the_process(2.0),
}


@pytest.mark.parametrize("watch", WATCHES)
async def test_time_asleep_does_not_count_against_a_worker(
    mock_clock: MockClock, nursery: trio.Nursery, ends: Link, watch: str
) -> None:
    """It is silent for some looks after the machine awakes, and then continues."""
    ends.link.is_ready = True
    ends.link.is_asked = lambda: True
    nursery.start_soon(WATCHES[watch], ends)
    for _ in range(3):
        for _ in range(3):
            await settle(mock_clock, HOURS)
        ends.page.heartbeat += 1
        ends.page.looks += 1
        await settle(mock_clock, HOURS)
    assert ends.link.how is None
    # A silent worker is detected, in seconds of an awake machine.
    for _ in range(int(20.0 / 0.1)):
        await settle(mock_clock, 0.1)
    assert ends.killed
    nursery.cancel_scope.cancel()


async def test_a_worker_may_start_while_the_machine_sleeps(
    mock_clock: MockClock, nursery: trio.Nursery, ends: Link
) -> None:
    nursery.start_soon(ends.link._listen_to_heart)
    for _ in range(4):
        await settle(mock_clock, HOURS)
    assert ends.link.how is None
    for _ in range(61):
        await settle(mock_clock, 1.0)
    assert ends.killed
    assert ends.link.how == "was not ready after 60 s and was killed"
