"""Operations of devices as they are recorded, inline and in workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel.telemetry import OperationRow, Recorder, record

ISOLATIONS: tuple[ta.Isolation, ...] = ("inline", "process")


@pytest.fixture(params=ISOLATIONS)
async def device(request: pytest.FixtureRequest) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(isolation=request.param)
    async with ta.open_system("app") as system, system.open_device("cpu", options=options) as opened:
        yield opened


def row(recorder: Recorder, name: str) -> OperationRow:
    [found] = [row for row in recorder.snapshot().operations if row.message_type == name]
    return found


async def test_each_operation_counts_once(device: ta.Device) -> None:
    with record(device.system) as recorder:
        array = await device.put(np.ones((16, 16), np.float32))
        for _ in range(5):
            await ta.linalg.matmul(array, array)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ta.linalg.matmul, array, array)
        found = row(recorder, "linalg.Matmul")
        assert (found.completed, found.failed, found.cancelled) == (25, 0, 0)
        assert found.run.count == found.queue.count == 25
        assert found.run.total > 0
        assert found.path == "app/cpu:0/context/blas"
        paths = {actor.path for actor in recorder.snapshot().actors}
        assert found.path in paths
        assert row(recorder, "devices.Put").completed == 1


async def test_submissions_count(device: ta.Device) -> None:
    array = await device.put(np.ones((16, 16), np.float32))
    with record(device.system) as recorder:
        pending = device.submit(ta.linalg.Matmul(array, array))
        await pending.wait()
        assert row(recorder, "linalg.Matmul").completed == 1


async def test_the_way_past_the_mailbox_stays(device: ta.Device) -> None:
    array = await device.put(np.ones((16, 16), np.float32))
    await ta.linalg.matmul(array, array)
    with record(device.system) as recorder:
        await ta.linalg.matmul(array, array)
        # An operation in the mailbox of its library has spent time there. In a worker it is the way there.
        assert (row(recorder, "linalg.Matmul").queue.total == 0.0) is (device.isolation == "inline")
        with device.system.subscribe(lambda event: None):
            await ta.linalg.matmul(array, array)
        found = row(recorder, "linalg.Matmul")
        assert (found.completed, found.queue.count) == (2, 2)


async def test_a_refused_operation_fails(device: ta.Device) -> None:
    singular = await device.put(np.zeros((4, 4)))
    with record(device.system) as recorder:
        with pytest.raises(ta.LibraryError):
            await ta.linalg.inv(singular)
        found = row(recorder, "linalg.Inv")
        assert (found.completed, found.failed) == (0, 1)
        assert any(failure.message_type == "linalg.Inv" for failure in recorder.snapshot().failures)


async def test_an_operation_that_the_loss_took_fails(device: ta.Device) -> None:
    array = await device.put(np.ones((16, 16), np.float32))
    await ta.linalg.matmul(array, array)
    with record(device.system) as recorder:
        ta.testing.poison(device, "for the test")
        with pytest.raises(ta.ContextPoisonedError):
            await ta.linalg.matmul(array, array)
        assert row(recorder, "linalg.Matmul").failed == 1


async def test_a_cancelled_operation_is_distinguished(device: ta.Device) -> None:
    array = await device.put(np.ones((2000, 2000)))
    out = await device.put(np.ones((2000, 2000)))
    with record(device.system) as recorder:
        with trio.move_on_after(0.02) as scope, ta.cancel_grace(0.0):
            await ta.linalg.matmul(array, array, out=out)
        assert scope.cancelled_caught
        await device.synchronize()
        found = row(recorder, "linalg.Matmul")
        assert (found.completed, found.failed, found.cancelled) == (0, 0, 1)


async def test_nobody_measures_and_then_somebody(device: ta.Device) -> None:
    array = await device.put(np.ones((16, 16), np.float32))
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ta.linalg.matmul, array, array)
        await trio.lowlevel.checkpoint()
        with record(device.system):
            await ta.linalg.matmul(array, array)
        # Operations begun under the recorder may end without one.
        nursery.start_soon(ta.linalg.matmul, array, array)
    with record(device.system) as recorder:
        await ta.linalg.matmul(array, array)
        assert row(recorder, "linalg.Matmul").completed == 1
