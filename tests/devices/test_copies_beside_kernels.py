"""Copies of host arrays continue while a kernel computes."""

from __future__ import annotations

import numpy as np
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation

NBYTES = 16 << 20


async def test_copies_end_while_a_kernel_does_not(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, close_grace=0.2)
    async with system.open_device(BACKEND, options=options) as device:
        source, target = (device.host_empty((NBYTES // 8,), np.uint64) for _ in range(2))
        source[:] = np.arange(source.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        # NVIDIA's libraries load what they need first only when nothing runs.
        await device.ask(ta.linalg.Nrm2(np.ones(4)))
        await (await device.put(source)).to_host(out=target)
        target[:] = 0
        ta.testing.inject_fault(device, ta.linalg.Nrm2, hang=True, how="kernel")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.ask, ta.linalg.Nrm2(np.ones(4)))
            with trio.fail_after(60):
                while not (await device.statistics()).in_flight:  # noqa: ASYNC110  # nobody tells of a launch
                    await trio.sleep(0.001)
                await (await device.put(source)).to_host(out=target)
            assert (await device.statistics()).in_flight == 1
            np.testing.assert_array_equal(target, source)
            nursery.cancel_scope.cancel()
