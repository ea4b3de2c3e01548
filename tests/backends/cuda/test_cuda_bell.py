"""Rings that are on their way when a device is closed."""

from __future__ import annotations

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
