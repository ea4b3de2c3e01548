"""Rings: the function called by the driver, its stream, and rings in flight when a device is closed."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.no_device

PROGRAM = """
from cuda.bindings import driver
from trio_accel.backends import resolve

backend, _ = resolve("cuda")
device = backend.open_device(0, memory_limit=None)
stream, other = device.open_stream("rings"), device.open_stream("other")


class Bell:
    def ring(self):
        pass


hold = stream.hold()
stream.notify(stream.record(), Bell())
# What the driver is about to call takes a while to come.
slow = other.hold()._word
assert driver.cuStreamWaitValue32(stream.side(), slow.address, slow.sequence, 0)[0] == 0
hold.release()
stream.synchronize()
other.close()
print(stream.close(), stream.has_ended)
slow.write(slow.sequence)
while not stream.has_ended:
    pass
print(device.close(10))
"""


def test_a_stream_has_ended_when_the_last_ring_has_been_heard(run_on_stand_in):
    assert run_on_stand_in(PROGRAM).splitlines() == ["None False", "True"]


WHERE = """
import ctypes
import numpy as np, trio
from cuda.bindings import driver
import trio_accel as ta
from trio_accel.backends.cuda._device import CudaDevice

streams, calls = [], []
real_open, real_launch = CudaDevice.open_stream, driver.cuLaunchHostFunc


def open_stream(self, *args, **kwargs):
    stream = real_open(self, *args, **kwargs)
    streams.append(stream)
    return stream


def launch(handle, function, data):
    calls.append((int(handle), int(function)))
    return real_launch(handle, function, data)


CudaDevice.open_stream, driver.cuLaunchHostFunc = open_stream, launch


async def main():
    options = ta.DeviceOptions(isolation="inline", completion=ta.HostCallbackCompletion())
    async with ta.open_system("s") as system, system.open_device("cuda", options=options) as device:
        x = await device.put(np.ones((4, 4), np.float32))
        # What is done when it is asked for needs no ring.
        ta.testing.inject_fault(device, ta.linalg.Matmul, delay=0.02, count=3)
        for _ in range(3):
            await ta.linalg.matmul(x, x)
        ours, sides = {stream.handle for stream in streams}, {stream.side() for stream in streams}
        print(len(calls) >= 3, not ours & sides)
        print({handle for handle, _ in calls} <= sides)
        # A function of the C library itself: there is no Python for the driver's thread to run.
        posts = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value
        print({function for _, function in calls} == {posts})


trio.run(main)
"""


@pytest.mark.slow
def test_the_driver_calls_the_c_library_concurrently_with_the_work(run_on_stand_in):
    assert run_on_stand_in(WHERE).split() == ["True"] * 4
