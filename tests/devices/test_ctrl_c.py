"""Ctrl-C at any line of a device: the program ends, with that and nothing else, and nothing hangs."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from chosen import BACKEND
from interrupter import interrupt_everywhere

import trio_accel as ta

PARTS = ("actors", "backends", "devices", "linalg")


async def program() -> None:
    """Two tasks that do everything, and one that is cancelled."""
    async with (
        ta.open_system("s") as system,
        system.open_device("cpu", options=ta.DeviceOptions(isolation="inline", cancel_grace=0.5)) as device,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_work, device)
        nursery.start_soon(_work, device)
        nursery.start_soon(_give_up, device)


async def _work(device: ta.Device) -> None:
    ref = await device.put(np.eye(8))
    out = await ta.linalg.matmul(ref, ref)
    await device.submit(ta.linalg.Scal(2.0, out)).wait()
    await out.to_host()
    async with out.lease(write=True) as array:
        array[0, 0] = 2.0
    await device.statistics()
    await device.synchronize()
    with pytest.raises(ValueError, match="last axis"):
        await ta.linalg.matmul(ref, await device.zeros((3, 3)))
    copy = await ref.copy()
    copy.release()


async def _give_up(device: ta.Device) -> None:
    with trio.move_on_after(0.001):
        while True:
            await ta.linalg.nrm2(await device.put(np.ones(1 << 16)))


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "cpu", reason="no driver is to be met in the middle")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line(caplog: pytest.LogCaptureFixture) -> None:
    interrupt_everywhere(program, PARTS, caplog, step=13, least=5000)
