"""The table of dropped blocks, and the waker behind it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import pytest
import trio
from isolations import inline
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.devices._availability import Availability
from trio_accel.devices._blocks import BlockTable
from trio_accel.devices._bridge import LoopWaker

LARGE = 8 << 20


@inline
async def test_small_blocks_wait_for_the_next_operation_unless_there_are_many(device: ta.Device) -> None:
    kept = [await device.zeros(8) for _ in range(3)]
    del kept
    await wait_all_tasks_blocked()
    assert device.dispatch.session is not None
    memory = device.dispatch.session.engine.device.memory
    assert memory().blocks == 3
    result = await device.zeros(8)
    assert memory().blocks == 1
    many = [await device.zeros(8) for _ in range(100)]
    del many, result
    await wait_all_tasks_blocked()
    assert memory().blocks < 64
    assert (await device.statistics()).memory.blocks == 0


async def test_the_bell_is_rung_again_after_a_drain_by_hand() -> None:
    freed: list[int] = []
    table = BlockTable("cpu:0", Availability())
    table.release = freed.extend
    for _ in range(3):
        block = table.new(LARGE)
        name = block.id
        block.release()
        table.drain()
        assert freed[-1] == name
        second = table.new(LARGE)
        name = second.id
        del second
        await wait_all_tasks_blocked()
        assert freed[-1] == name
    assert len(freed) == 6


async def test_a_block_added_by_another_thread_at_the_worst_moment_is_freed() -> None:
    """The thread looks at the queue before the drain takes the last block, and adds its own after it."""
    freed: list[int] = []
    table = BlockTable("cpu:0", Availability())
    first, second = table.new(LARGE), table.new(LARGE)
    ids = [first.id, second.id]

    def release(blocks: Sequence[int]) -> None:
        freed.extend(blocks)
        if ids[0] in blocks:
            # In the midst of the drain, when the queue is empty already.
            thread = threading.Thread(target=second.release)
            thread.start()
            thread.join()

    table.release = release
    first.release()
    await wait_all_tasks_blocked()
    assert freed == ids


@pytest.mark.parametrize(("size", "may_wait"), [(LARGE, 0), (8, 63)])
async def test_blocks_dropped_by_many_threads_are_all_freed(size: int, may_wait: int) -> None:
    """Large ones at once; the last few small ones wait for the next operation."""
    freed: list[int] = []
    table = BlockTable("cpu:0", Availability())
    table.release = freed.extend
    ids: set[int] = set()

    def make_and_drop() -> None:
        for _ in range(200):
            ids.add(table.new(size).id)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(trio.to_thread.run_sync, make_and_drop)
    gc.collect()
    await wait_all_tasks_blocked()
    assert len(ids) == 800
    assert len(freed) >= 800 - may_wait
    table.drain()
    assert len(freed) == 800
    assert set(freed) == ids


async def test_rings_before_the_callback_are_one() -> None:
    calls: list[int] = []
    waker = LoopWaker(lambda: calls.append(1))
    for _ in range(5):
        waker.ring()
    await wait_all_tasks_blocked()
    assert (calls, waker.rings, waker.wakeups) == ([1], 5, 1)
    waker.ring()
    waker.close()
    await wait_all_tasks_blocked()
    assert calls == [1]


def test_a_ring_after_the_end_of_the_program_is_nothing() -> None:
    wakers: list[LoopWaker] = []
    calls: list[int] = []

    async def main() -> None:
        wakers.append(LoopWaker(lambda: calls.append(1)))
        await trio.lowlevel.checkpoint()

    trio.run(main)
    wakers[0].ring()
    assert (calls, wakers[0].rings, wakers[0].wakeups) == ([], 1, 0)


async def test_a_callback_that_fails_ends_nothing() -> None:
    calls: list[int] = []

    def callback() -> None:
        calls.append(1)
        raise RuntimeError("broken")

    waker = LoopWaker(callback)
    waker.ring()
    await wait_all_tasks_blocked()
    waker.ring()
    await wait_all_tasks_blocked()
    assert calls == [1, 1]
