"""Counts are true at every moment, and memory is in the place chosen by the program."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices import CacheStatistics, KeptStatistics, LibraryStatistics, QueueStatistics

pytestmark = pytest.mark.any_backend

BLAS = "trio_accel.linalg:BlasActor"
FFT = "trio_accel.fft:FftActor"
RANDOM = "trio_accel.random:RngActor"
NONE = QueueStatistics(waiting=0, in_flight=0)


async def test_counts_are_true_at_every_moment(system: ta.System, isolation: Isolation) -> None:
    """Ten slow operations of one library and two of another, in windows of two."""
    options = ta.DeviceOptions(isolation=isolation, in_flight=2)
    async with system.open_device(BACKEND, options=options) as device:
        x, y = await device.put(np.ones(4)), await device.put(np.ones(4))
        # Libraries are opened, so that nothing but the operations takes time.
        await ta.linalg.scal(1.0, x)
        await ta.fft.fft(y, out=await device.zeros(4, complex))
        await device.synchronize()
        base = await device.statistics()
        assert (base.launched, base.completed, base.in_flight, base.queues) == (5, 5, 0, {})
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.4, count=10)
        ta.testing.inject_fault(device, ta.fft.Fft, delay=0.4, count=2)
        seen: list[tuple[QueueStatistics, QueueStatistics]] = []
        completed = 0
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ta.linalg.scal, 2.0, x)
            for _ in range(2):
                nursery.start_soon(ta.fft.fft, y)
            for _ in range(2):
                # All are asked by then.
                await trio.lowlevel.checkpoint()
            with trio.fail_after(60):
                while completed < 12:
                    now = await device.statistics()
                    blas, fft = now.queues.get(BLAS, NONE), now.queues.get(FFT, NONE)
                    assert completed <= now.completed - base.completed
                    completed = now.completed - base.completed
                    assert now.in_flight == blas.in_flight + fft.in_flight
                    assert now.launched - base.launched == completed + now.in_flight
                    assert max(blas.in_flight, fft.in_flight) <= 2
                    assert completed + now.in_flight + blas.waiting + fft.waiting <= 12
                    if not seen or seen[-1] != (blas, fft):
                        seen.append((blas, fft))
        full = [blas.waiting for blas, _ in seen if blas.in_flight == 2]
        assert full == sorted(full, reverse=True)
        # The delays of two operations in flight run at the same time, so both may end together.
        assert {0, 2, 4, 6, 8} <= set(full)
        assert any(fft == QueueStatistics(waiting=0, in_flight=2) for _, fft in seen)
        assert seen[-1] == (NONE, NONE)
        np.testing.assert_array_equal(await x.to_host(), np.full(4, 1024.0))


def kept(counted: ta.DeviceStatistics, side: str) -> tuple[int, int, int, int]:
    row = counted.plan_caches.get(side, KeptStatistics())
    return row.unplanned, row.recorded, row.hits, row.evicted


async def test_plans_and_templates_are_counted(system: ta.System, isolation: Isolation) -> None:
    """Seven products of one kind, five of another: the first of each plans, the second makes a template."""
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        for size, count in ((8, 7), (16, 5)):
            x = await device.put(np.ones((size, size), np.float32))
            before = kept(await device.statistics(), "link")
            for _ in range(count):
                await ta.linalg.matmul(x, x)
            after = kept(await device.statistics(), "link")
            more = tuple([now - then for now, then in zip(after, before, strict=True)])
            assert more == ((1, 1, count - 2, 0) if isolation == "process" else (0, 0, 0, 0))
        statistics = await device.statistics()
        counted = statistics.libraries.get(BLAS, LibraryStatistics())
        # The CPU's libraries keep no plans.
        plans = CacheStatistics(hits=10, created=2) if BACKEND == "cuda" else CacheStatistics()
        assert counted.plans == plans
        assert kept(statistics, "application") == (0, 0, 0, 0)
        ta.testing.poison(device, "for the test")
        with trio.fail_after(60):
            while device.generation == 1:
                with suppress(ta.AccelError):
                    await device.zeros(3)
        # Another generation counts again, but for the application.
        x = await device.put(np.ones((8, 8), np.float32))
        await ta.linalg.matmul(x, x)
        for _ in range(4):
            await (x + 1.0 + x)
        statistics = await device.statistics()
        counted = statistics.libraries.get(BLAS, LibraryStatistics())
        made = CacheStatistics(created=1) if BACKEND == "cuda" else CacheStatistics()
        assert counted.plans == made
        assert kept(statistics, "link")[3] == 0
        assert kept(statistics, "application") == (0, 1, 3, 0)
        # Recipes are recorded, and bound to blocks.
        assert statistics.plan_caches["executor"].bound > 0


async def test_draws_that_differ_in_their_place_have_one_plan_and_one_template(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        generator = ta.random.Generator(device, seed=3)
        drawn = [tuple(await (await generator.normal((8,))).to_host()) for _ in range(6)]
        assert len(set(drawn)) == 6
        before = kept(await device.statistics(), "link")
        for _ in range(6):
            await generator.normal((8,))
        statistics = await device.statistics()
        counted = statistics.libraries.get(RANDOM, LibraryStatistics())
        plans = CacheStatistics(hits=11, created=1) if BACKEND == "cuda" else CacheStatistics()
        assert counted.plans == plans
        if isolation == "process":
            seen, recorded, found, _ = kept(statistics, "link")
            assert (seen, recorded, found) == (before[0], before[1], before[2] + 6)


async def test_senders_wait_for_room_and_are_not_refused(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, in_flight=1)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=3.0)
        async with trio.open_nursery() as nursery:
            # Fewer are all there while the first one runs, even on a busy machine.
            for _ in range(60):
                nursery.start_soon(ta.linalg.scal, -1.0, x)
            with trio.fail_after(60):
                while (await device.statistics()).queues.get(BLAS, NONE).waiting < 59:
                    pass
            # A full library delays no other.
            assert (
                await (await ta.fft.fft(np.ones(3), out=await device.zeros(3, complex))).to_host() is not None
            )
            # A submission does not wait: it is refused.
            first = device.submit(ta.linalg.Scal(1.0, x))
            with pytest.raises(ta.QueueFullError, match="1 submitted operations of BlasActor are not done"):
                device.submit(ta.linalg.Scal(1.0, x))
        await first.wait()
        np.testing.assert_array_equal(await x.to_host(), np.ones(3))


async def test_memory_is_counted_and_comes_back(device: ta.Device) -> None:
    async def memory() -> tuple[int, int]:
        await device.synchronize()
        counted = (await device.statistics()).memory
        assert counted.used <= counted.peak
        assert counted.used <= counted.reserved
        return counted.used, counted.blocks

    assert await memory() == (0, 0)
    x = await device.put(np.ones((100, 10)))
    view = x[10:20].T
    assert await memory() == (8000, 1)  # a view shares the memory of its base
    del x
    gc.collect()
    assert await memory() == (8000, 1)
    again = await view.copy()
    assert await memory() == (8800, 2)
    view.release()
    assert await memory() == (800, 1)
    del again, view
    gc.collect()
    assert await memory() == (0, 0)
    assert (await device.statistics()).memory.peak == 8800


async def test_arrays_dropped_at_once_do_not_pile_up(device: ta.Device) -> None:
    for _ in range(50):
        await device.zeros(1 << 17)  # 1 MiB each
    memory = (await device.statistics()).memory
    assert memory.blocks == 0
    assert memory.peak <= 4 << 20


async def test_synchronize_waits_for_all_launched_work(device: ta.Device) -> None:
    x = await device.put(np.ones(4))
    # To make a plan, a vendor's library may wait for all that runs.
    await ta.fft.fft(x)
    ta.testing.inject_fault(device, ta.linalg.Scal, delay=1.0)
    pending = [device.submit(ta.linalg.Scal(2.0, x)), device.submit(ta.fft.Fft(x))]
    with trio.fail_after(60):
        while (await device.statistics()).in_flight < 2:
            pass
        await device.synchronize()
    assert (await device.statistics()).in_flight == 0
    for operation in pending:
        await operation.wait()


async def test_too_little_memory_in_many_tasks_harms_nothing(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, memory_limit=100_000)
    async with system.open_device(BACKEND, options=options) as device:
        kept = await device.put(np.arange(1000.0))
        outcomes: list[tuple[int, int] | None] = []

        async def work(number: int) -> None:
            try:
                ref = await device.full(2000, number)
                assert (await ref.to_host())[-1] == number
            except ta.OutOfMemoryError as error:
                outcomes.append((error.requested, error.total))
            else:
                outcomes.append(None)

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(partial(work, number))
        assert len(outcomes) == 40
        assert None in outcomes
        assert set(outcomes) <= {None, (16_000, 100_000)}
        np.testing.assert_array_equal(await kept.to_host(), np.arange(1000.0))
        await device.synchronize()
        statistics = await device.statistics()
        assert (statistics.memory.used, statistics.memory.blocks) == (8000, 1)
        assert statistics.generation == 1
