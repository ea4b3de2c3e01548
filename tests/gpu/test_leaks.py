"""Ten thousand operations, and twenty losses, leave everything as it was."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from chosen import BACKEND
from holdings import Holdings
from processes import until
from recovery_load import AT_ONCE, MANY
from scale import scaled

import trio_accel as ta
from trio_accel.backends.base import Isolation

OPERATIONS = scaled(10_000, 400)
WARM_UP = scaled(2_000, 200)
LOSSES = scaled(20, 3)
ASKERS = 8
MIB = 1 << 20
# The C library's and Python's allocators keep some of the returned memory.
ROOM = 4 * MIB
# Trio keeps threads in reserve, in each process; each has up to four mappings.
THREADS = 8


async def operate(device: ta.Device, count: int) -> None:
    """Do this many operations of all libraries, several at a time."""
    x = await device.put(np.ones((16, 16), np.float32))
    large = np.ones(MIB // 4, np.float32)

    async def some(times: int) -> None:
        for _ in range(times):
            y = await ta.linalg.matmul(x, x)
            await y.to_host()
            z = await ta.fft.fft(y)
            await z.copy()
            await ta.linalg.scal(1.0, x.reshape(-1))
            await device.ask(ta.random.Bits(1, 0, (4,)))
            ref = await device.put(large)
            await ref.to_host()

    async with trio.open_nursery() as nursery:
        for _ in range(ASKERS):
            nursery.start_soon(some, max(1, count // 8 // ASKERS))


def check_flat(before: Holdings, after: Holdings) -> None:
    assert (after.processes, after.descriptors) == (before.processes, before.descriptors)
    assert (after.blocks, after.used) == (before.blocks, before.used)
    assert after.threads <= before.threads + THREADS
    assert after.mappings <= before.mappings + 4 * THREADS
    assert after.reserved <= before.reserved
    # A worker that has replaced another lacks an earlier figure.
    both = before.resident.keys() & after.resident.keys()
    grown = {pid: after.resident[pid] - before.resident[pid] for pid in both}
    assert len(grown) >= min(2, after.processes)
    assert sum(grown.values()) <= ROOM * after.processes, grown
    assert after.device_free >= before.device_free - ROOM


@pytest.mark.timeout(300)
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_operations_leave_nothing_behind(system: ta.System, isolation: Isolation) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        await operate(device, WARM_UP)
        before = await Holdings.now(device)
        await operate(device, OPERATIONS)
        check_flat(before, await Holdings.now(device))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["illegal_address", "trap", "assert"])
async def test_losses_leave_nothing_behind(system: ta.System, how: str) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=MANY, backoff=AT_ONCE, spares=1)
    async with system.open_device(BACKEND, options=options) as device:

        async def lose(times: int) -> None:
            for _ in range(times):
                await operate(device, 64)
                ta.testing.inject_fault(device, ta.linalg.Nrm2, poison=True, how=how)
                with pytest.raises(ta.ContextPoisonedError):
                    await device.ask(ta.linalg.Nrm2(np.ones(4)))
            await operate(device, 64)
            await until(lambda: device.dispatch.spares == 1)

        await lose(2)
        before = await Holdings.now(device)
        await lose(LOSSES)
        check_flat(before, await Holdings.now(device))
        assert device.generation == 3 + LOSSES
