"""Priorities of streams in the driver's range."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.no_device

PROGRAM = """
import trio
from cuda.bindings import driver
import trio_accel as ta
from trio_accel.backends import resolve

device = resolve("cuda")[0].open_device(0, memory_limit=None)
for asked in (0, 1, 3, 100, -4):
    stream = device.open_stream("s", asked)
    print(asked, int(driver.cuStreamGetPriority(stream.handle)[1]))
assert device.close(10)


async def main():
    options = ta.DeviceOptions(isolation="inline", streams=ta.PerActorStreams(priorities={"memory": 2}))
    async with ta.open_system("s") as system, system.open_device("cuda", options=options) as device:
        a = await device.put(__import__("numpy").eye(3))
        await ta.linalg.nrm2(a.reshape(9))
        queues = device.dispatch.session.engine.streams.all
        print(sorted(int(driver.cuStreamGetPriority(queue.stream.handle)[1]) for queue in queues))


trio.run(main)
"""


def test_priorities_are_as_requested_within_the_devices_range(run_on_stand_in):
    said = run_on_stand_in(PROGRAM).splitlines()
    assert said == ["0 0", "1 -1", "3 -3", "100 -5", "-4 0", "[-2, 0]"]
