"""The device outlives its contexts: one address, one queue, whoever serves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import trio
from chosen import BACKEND, NAME
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices.dispatch import WorkerDispatch

# A gap long enough to fill.
GAP = ta.Backoff(initial=0.4, base=0.4, jitter=0.0)


async def lose(device: ta.Device) -> None:
    """Have the context lost, and wait until the loss is known."""
    if isinstance(device.dispatch, WorkerDispatch):
        assert device.dispatch.process is not None
        device.dispatch.process.kill()
    else:
        ta.testing.inject_fault(device, ta.linalg.Scal, fail=ta.ContextPoisonedError("lost"))
        with pytest.raises(ta.ContextLostError):
            await ta.linalg.scal(1.0, await device.put(np.ones(1)))
    with trio.fail_after(60):
        while device.state.availability.is_ready:
            await device.state.availability.wait_changed()


async def test_the_address_stays_and_work_sent_in_the_gap_runs_after_it(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation, backoff=GAP)
    async with system.open_device(BACKEND, options=options) as device:
        before = system.tree().find(device.path)
        results: list[float] = []

        async def ask(number: int) -> None:
            ref = await ta.linalg.matmul(np.full((2, 2), number), await device.put(np.eye(2) * 1.0))
            results.append((await ref.to_host())[0, 0])

        await lose(device)
        assert "rebuilding" in repr(device)
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, float(number))
                await wait_all_tasks_blocked()
            assert results == []
        assert sorted(results) == [float(number) for number in range(10)]
        assert (device.generation, device.path) == (2, f"test/{NAME}")
        after = system.tree().find(device.path)
        assert (after.path, after.actor_class, after.incarnation) == (
            before.path,
            before.actor_class,
            before.incarnation,
        )
        assert system.tree().find(f"test/{NAME}/context").restarts == 1


async def test_so_many_requests_wait_in_the_gap_and_no_more(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, backoff=GAP)
    async with system.open_device(BACKEND, options=options) as device:
        await lose(device)
        outcomes: Counter[str] = Counter()
        refusal = f"1024 requests wait already for the context to be rebuilt (device {NAME})"

        async def ask() -> None:
            try:
                await device.put(np.ones(2))
            except ta.QueueFullError as error:
                outcomes[str(error)] += 1
            else:
                outcomes["done"] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(1025):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert outcomes == {refusal: 1}
            with pytest.raises(ta.QueueFullError):
                device.submit(ta.linalg.Matmul(np.eye(2), np.eye(2)))
        assert outcomes == {refusal: 1, "done": 1024}
        assert device.generation == 2


async def test_every_watcher_sees_each_generation_that_lasts(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, intensity=ta.Intensity(10, 60.0))
    seen: list[list[int]] = [[], [], []]

    async def watch(device: ta.Device, mine: list[int]) -> None:
        async for generation in device.watch_generation():
            mine.append(generation)  # noqa: PERF401  # seen while it goes on

    async with trio.open_nursery() as nursery, system.open_device(BACKEND, options=options) as device:
        for mine in seen:
            nursery.start_soon(watch, device, mine)  # noqa: ASYNC111  # those that watch end with the device
        for _ in range(3):
            await wait_all_tasks_blocked()
            await lose(device)
            await device.put(np.ones(1))
        await wait_all_tasks_blocked()
    assert seen == [[1, 2, 3, 4]] * 3


async def test_an_array_of_before(system: ta.System, isolation: Isolation) -> None:
    """Inline it is refused, saying why; isolated it is there, bit for bit."""
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        host = np.random.default_rng(1).standard_normal((70, 900))
        ref = await device.put(host)
        view = ref[::2, 1::3]
        await lose(device)
        if isolation == "inline":
            with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
                await view.to_host()
            return
        np.testing.assert_array_equal(await ref.to_host(), host)
        np.testing.assert_array_equal(await view.to_host(), host[::2, 1::3])
        del ref
        assert await (await ta.linalg.nrm2(view[0])).item() == pytest.approx(
            np.linalg.norm(host[0, 1::3]), rel=1e-12
        )
        view.release()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 0


@pytest.mark.skipif(BACKEND != "cpu", reason="one backend is enough")
async def test_the_fourth_loss_in_the_window_is_the_end_if_every_loss_counts(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(3, 60.0))
    device = await system.open_device(BACKEND, options=options)
    x = await device.put(np.ones(3))
    for generation in (1, 2, 3):
        assert device.generation == generation
        await lose(device)
        np.testing.assert_array_equal(await x.to_host(), np.ones(3))
    assert device.generation == 4
    await lose(device)
    with trio.fail_after(60):
        while not device.state.availability.is_ended:
            await device.state.availability.wait_changed()
    with pytest.raises(ta.DeviceLostError, match="was given up"):
        await x.to_host()
    x.release()
