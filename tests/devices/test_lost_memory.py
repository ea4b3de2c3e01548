"""Workers with memory that ends with them: a new context follows, and its arrays are lost, as inline."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from functools import partial

import numpy as np
import pytest
import third_backend
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends import register
from trio_accel.devices import Copy, Put
from trio_accel.testing import inject_fault

pytestmark = [
    pytest.mark.no_device,
    pytest.mark.skipif(BACKEND != "cpu", reason="a backend of its own"),
]
OFTEN = ta.Intensity(100, 60.0)
HOST = np.arange(1000.0)


@pytest.fixture(autouse=True)
def _register() -> None:
    register(third_backend.IN_WORKERS, "third_backend:ThirdInWorkers")


@pytest.fixture(params=[0, 1], ids=["without a spare", "with a spare"])
def options(request: pytest.FixtureRequest) -> ta.DeviceOptions:
    return ta.DeviceOptions(spares=request.param, intensity=OFTEN)


@pytest.fixture
async def device(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(third_backend.IN_WORKERS, options=options) as device:
        assert device.isolation == "process"
        yield device


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not is_so():  # noqa: ASYNC110  # nothing tells of it
            await trio.sleep(0.005)


async def kill(device: ta.Device) -> None:
    """Kill the worker, and wait for the next one."""
    generation = device.generation
    pid = (await device.statistics()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: device.generation > generation)


async def test_arrays_are_lost_and_new_ones_work(device: ta.Device) -> None:
    add = jit.elementwise("r = x + 1")
    pids = set[int | None]()
    for number in range(1, 5):
        pids.add((await device.statistics()).pid)
        x = await device.put(HOST)
        made = await add(x)
        view = x[10:20]
        await kill(device)
        for one in (x, made, view):
            with pytest.raises(ta.StaleRefError, match=f"lost with generation {number} of the device"):
                await add(one)
            with pytest.raises(ta.StaleRefError, match="make it again"):
                await one.to_host()
        again = await add(await device.put(HOST))
        np.testing.assert_array_equal(await again.to_host(), HOST + 1)
        # Its memory was given back with the worker's.
        assert (await device.statistics()).memory.blocks <= 2
    assert len(pids) == 4


async def test_large_arrays_go_by_shared_memory(device: ta.Device) -> None:
    host = np.arange(3e6)
    for _ in range(2):
        x = await device.put(host)
        np.testing.assert_array_equal(await (await ta.arrays.add(x, 1)).to_host(), host + 1)
        await kill(device)


async def test_waiting_work_runs_unless_its_arrays_are_lost(system: ta.System) -> None:
    options = ta.DeviceOptions(intensity=OFTEN, in_flight=2, retry=1)
    async with system.open_device(third_backend.IN_WORKERS, options=options) as device:
        x = await device.put(np.eye(3))
        errors, results = list[type[BaseException]](), list[float]()

        async def of_lost() -> None:
            with pytest.raises(ta.AccelError) as told:
                await ta.linalg.matmul(x, x)
            errors.append(told.type)

        async def of_new(number: float) -> None:
            results.append(float(await (await ta.arrays.sum(await device.full(10, number))).to_host()))

        inject_fault(device, ta.linalg.Matmul, hang=True)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(of_lost)
            await trio.testing.wait_all_tasks_blocked(0.05)
            pid = (await device.statistics()).pid
            assert pid is not None
            # It makes no array that would be lost with it.
            os.kill(pid, signal.SIGSTOP)
            for number in range(5):
                nursery.start_soon(of_new, float(number))
            await trio.testing.wait_all_tasks_blocked()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: device.generation == 2)
        assert sorted(results) == [0.0, 10.0, 20.0, 30.0, 40.0]
        # The worker had two of them, and they may have begun.
        assert len(errors) == 8
        assert errors.count(ta.StaleRefError) >= 6
        assert set(errors) <= {ta.StaleRefError, ta.ContextLostError}


async def test_work_handed_over_is_made_by_the_next_worker(system: ta.System) -> None:
    options = ta.DeviceOptions(retry=3, intensity=OFTEN)
    async with system.open_device(third_backend.IN_WORKERS, options=options) as device:
        x = await device.put(np.eye(3))
        inject_fault(device, Put, hang=True)
        first = device.submit(Put(HOST))
        second = device.submit(Copy(first.value))
        of_lost = device.submit(Copy(x))
        await kill(device)
        third = device.submit(Copy(second.value))
        with trio.fail_after(60):
            for one in (third, second, first):
                np.testing.assert_array_equal(await (await one.wait()).to_host(), HOST)
            # Whether it had begun is the worker's affair.
            with pytest.raises((ta.StaleRefError, ta.ContextLostError)):
                await of_lost.wait()


async def test_a_poisoned_context_is_made_again(device: ta.Device) -> None:
    x = await device.put(HOST)
    inject_fault(device, ta.linalg.Matmul, poison=True)
    square = x[:900].reshape(30, 30)
    with pytest.raises(ta.ContextPoisonedError, match="ask again"):
        await ta.linalg.matmul(square, square)
    with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
        await ta.arrays.add(x, 1)
    made = await ta.arrays.add(await device.put(HOST), 1)
    np.testing.assert_array_equal(await made.to_host(), HOST + 1)


async def test_the_host_reaches_its_memory_by_copies(device: ta.Device, system: ta.System) -> None:
    x = await device.put(HOST)
    with pytest.raises(ta.NotSupportedError, match="cannot address the memory"):
        async with x.lease():
            pass
    async with system.open_device("cpu") as other:
        moved = await x.copy_to(other)
        np.testing.assert_array_equal(await moved.to_host(), HOST)
        back = await moved.copy_to(device)
        np.testing.assert_array_equal(await back.to_host(), HOST)


async def test_a_given_up_device_leaves_nothing(system: ta.System) -> None:
    options = ta.DeviceOptions(intensity=ta.Intensity(0, 60.0))
    device = await system.open_device(third_backend.IN_WORKERS, options=options)
    x = await device.put(HOST)
    pid = (await device.statistics()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: device.is_ended)
    with pytest.raises(ta.DeviceLostError) as told:
        await device.put(HOST)
    assert "intact" not in str(told.value)
    with pytest.raises(ta.DeviceLostError, match="the memory of this device ends with its worker"):
        await system.open_device(adopt=device)
    with pytest.raises(ta.AccelError):
        await x.to_host()


async def test_nothing_is_left_open(system: ta.System) -> None:
    open_ = partial(system.open_device, third_backend.IN_WORKERS, options=ta.DeviceOptions(intensity=OFTEN))

    async def use(kills: int) -> int:
        async with open_() as device:
            for _ in range(kills):
                await device.put(HOST)
                await kill(device)
            await device.put(HOST)
        return len(os.listdir("/proc/self/fd"))

    before = await use(0)
    assert await use(3) <= before
