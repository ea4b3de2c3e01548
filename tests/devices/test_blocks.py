"""The table of dropped blocks, and its notifier."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from chosen import BACKEND
from hypothesis import given
from hypothesis import strategies as st
from isolations import inline
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices.base._bridge import LoopNotifier
from trio_accel.devices.base._waits import Availability
from trio_accel.devices.engine._leases import LaunchGate
from trio_accel.devices.operations._blocks import Block, BlockTable

LARGE = 8 << 20


@inline
async def test_dropped_memory_waits_for_the_next_operation_unless_it_is_large(device: ta.Device) -> None:
    # Too large to be kept for more than the next operation, and too small to be given back at once.
    size = 5 << 17
    kept = [await device.zeros(size) for _ in range(3)]
    with trio.fail_after(60):
        while device.state.blocks.is_watched:  # noqa: ASYNC110  # nobody is told
            await trio.sleep(0.001)
    del kept
    await wait_all_tasks_blocked()
    assert device.dispatch.session is not None
    memory = device.dispatch.session.engine.device.memory
    assert memory().blocks == 3
    result = await device.zeros(size)
    assert memory().blocks == 1
    many = [await device.zeros(8) for _ in range(100)]
    del many, result
    await wait_all_tasks_blocked()
    assert memory().blocks < 64
    assert (await device.statistics()).memory.blocks == 0


@inline
async def test_small_blocks_wait_longer_and_are_freed_when_the_engine_rests(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the five operations take longer than the time after which the engine looks.
    monkeypatch.setattr("trio_accel.devices.engine._context_state._INTERVAL", 0.5)
    with trio.fail_after(60):
        while device.state.blocks.is_watched:  # noqa: ASYNC110  # nobody is told
            await trio.sleep(0.001)
    kept = [await device.zeros(length) for length in range(1, 5)]
    del kept
    result = await device.zeros(8)
    assert device.dispatch.session is not None
    memory = device.dispatch.session.engine.device.memory
    assert memory().blocks == 5
    with trio.fail_after(60):
        while memory().blocks > 1:  # noqa: ASYNC110  # nobody is told
            await trio.sleep(0.005)
    assert (await result.to_host()).shape == (8,)


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
    blocks = [[table.new(size) for _ in range(200)] for _ in range(4)]
    ids = {block.id for some in blocks for block in some}
    assert len(ids) == 800
    async with trio.open_nursery() as nursery:
        for some in blocks:
            nursery.start_soon(trio.to_thread.run_sync, some.clear)
    gc.collect()
    await wait_all_tasks_blocked()
    assert len(freed) >= 800 - may_wait
    table.drain()
    assert len(freed) == 800
    assert set(freed) == ids


async def test_the_next_block_of_a_dropped_blocks_size_is_that_block() -> None:
    table = BlockTable("cpu:0", Availability())
    first, other = table.new(8), table.new(16)
    number, other_number = first.id, other.id
    del first, other
    again, new = table.new(8), table.new(8)
    assert again.id == number
    # There is no other of this size.
    assert new.id not in (number, other_number)
    assert [number for number, *_ in table.dropped] == [other_number]
    assert table.new(16).id == other_number


async def test_memory_in_use_by_an_operation_becomes_no_other_block() -> None:
    table = BlockTable("cpu:0", Availability())
    released, spoiled = table.new(8), table.new(8)
    ids = {released.id, spoiled.id}
    # Operations in flight hold their blocks, except blocks that the program releases by name.
    released.release()
    spoiled.mark_damaged("linalg.Matmul", None)
    del spoiled
    assert table.new(8).id not in ids
    assert ids <= set(table.take())


async def test_one_of_each_size_is_kept_for_the_next_round() -> None:
    """A program with several arrays in each round drops one and makes another of another size."""
    table = BlockTable("cpu:0", Availability())
    table.is_watched = True
    rounds: list[list[int]] = []
    for _ in range(4):
        ids: list[int] = []
        for size in (8, 16, 24):
            block = table.new(size)
            ids.append(block.id)
            # As the operation that makes it does.
            assert table.take_some() == []
            del block
        rounds.append(ids)
    assert rounds == [rounds[0]] * 4
    assert sorted(table.take()) == sorted(rounds[0])


async def test_no_more_are_kept_than_so_many() -> None:
    table = BlockTable("cpu:0", Availability())
    table.is_watched = True
    blocks = [table.new(size) for size in (4 << 20, (4 << 20) + 1, *range(1, 80))]
    ids = [block.id for block in blocks]
    while blocks:
        del blocks[0]
    # One is too large, and of the others only the last are kept.
    taken = [*table.take_some(), *table.take_some()]
    assert set(taken) == set(ids[:-64])
    large, again = table.new(4 << 20), table.new(79)
    assert large.id not in ids
    assert again.id == ids[-1]
    # With nobody who gives them back soon, the next operation does.
    table.is_watched = False
    assert sorted(table.take_some()) == sorted(ids[-64:-1])


@pytest.mark.parametrize("is_watched", [False, True])
async def test_a_request_frees_a_limited_number_of_blocks(is_watched: bool) -> None:
    table, freed = BlockTable("cpu:0", Availability(), keeps=False), list[int]()
    table.release = freed.extend
    blocks = [table.new(8) for _ in range(1000)]
    table.is_watched = is_watched
    blocks.clear()
    assert len(table.take_some()) == 64
    turns: list[int] = []
    for _ in range(100):
        before = len(freed)
        if is_watched:
            # The watch looks from time to time.
            table.drain_some()
        await trio.lowlevel.checkpoint()
        turns.append(len(freed) - before)
    # Trio runs the callback before or after this task in each turn, so that two of them may come in a row.
    assert max(turns) <= 128
    assert len(freed) == 1000 - 64


async def test_an_allocation_that_would_fail_frees_all_blocks(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="inline", memory_limit=1 << 20)
    async with system.open_device(BACKEND, options=options) as device:
        small = [await device.zeros(128) for _ in range(1000)]
        small.clear()
        assert (await device.zeros(110_000)).shape == (110_000,)


async def test_a_preparation_frees_all_blocks_in_portions() -> None:
    table, freed = BlockTable("cpu:0", Availability(), keeps=False), list[int]()
    table.release = lambda ids: freed.append(len([*ids]))
    table.is_watched = True
    blocks = [table.new(8) for _ in range(1000)]
    blocks.clear()
    launch: Any = object()
    queue: Any = object()
    prepared: list[int] = []
    gate = LaunchGate(table.drain_some)
    assert await gate.prepare(launch, queue, lambda: prepared.append(sum(freed))) is None
    assert prepared == [1000]
    assert max(freed) <= 64


@inline
async def test_nothing_holds_the_loop_for_many_dropped_blocks(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    x = await device.zeros(8)
    many = [await device.zeros(8) for _ in range(500)]
    release = device.state.blocks.release
    monkeypatch.setattr(
        device.state.blocks, "release", lambda ids: (freed.append(len(list(ids))), release(ids))[0]
    )
    many.clear()
    await (x + 1)
    await device.synchronize()
    statistics = await device.statistics()
    assert max(freed, default=0) <= 64
    assert statistics.memory.blocks <= 2


async def test_no_more_bytes_are_kept_than_so_many() -> None:
    table = BlockTable("cpu:0", Availability())
    table.is_watched = True
    # Of three sizes in turn, the least recently used size is dropped first.
    sizes = [(1 << 20) * (1 + number % 3) for number in range(36)]
    blocks = [table.new(size) for size in sizes]
    ids = [block.id for block in blocks]
    while blocks:
        del blocks[0]
    taken = table.take_some()
    assert taken == ids[::3][: len(taken)]
    kept = sum(size for number, size in zip(ids, sizes, strict=True) if number not in taken)
    assert kept <= 64 << 20 < kept + (1 << 20)
    # A requested block comes again, the last one first, and no longer counts.
    again = [table.new(3 << 20) for _ in range(12)]
    assert [block.id for block in again] == ids[2::3][::-1]
    assert table.take_some() == []
    assert sorted(table.take()) == sorted(set(ids) - set(taken) - {block.id for block in again})
    assert not table.retained


@pytest.mark.parametrize("size", [8, 128 << 10])
async def test_nothing_is_kept_under_a_limit_of_bytes(size: int) -> None:
    table = BlockTable("cpu:0", Availability(), keeps=False)
    table.is_watched = True
    block = table.new(size)
    number = block.id
    del block
    assert table.take_some() == [number]


async def test_all_dropped_memory_is_available_under_a_limit_of_bytes(
    system: ta.System, isolation: Isolation
) -> None:
    """Also in a worker, while its application looks after what was dropped only now and then."""
    options = ta.DeviceOptions(isolation=isolation, memory_limit=1000)
    async with system.open_device(BACKEND, options=options) as device:
        for length in (100, 120, 124, 90, 125):
            # One block exists already, so that somebody looks.
            small, large = await device.zeros(1, "uint8"), await device.zeros(length - 1)
            await large.fill(1.0)
            del small, large


async def test_explicitly_released_memory_is_not_kept() -> None:
    table = BlockTable("cpu:0", Availability())
    table.is_watched = True
    block = table.new(8)
    block.release()
    assert table.take_some() == [block.id]


@given(st.lists(st.tuples(st.sampled_from([8, 16, 24]), *[st.booleans()] * 4), max_size=40))
async def test_no_two_live_blocks_share_an_id(
    steps: list[tuple[int, bool, bool, bool, bool]],
) -> None:
    table = BlockTable("cpu:0", Availability())
    freed: list[int] = []
    table.release = freed.extend
    alive: list[Block] = []
    sizes: dict[int, int] = {}
    for size, drops, drains, launches, is_watched in steps:
        table.is_watched = is_watched
        block = table.new(size)
        # A block given back never comes again, and a repeated block has its old size.
        assert block.id not in freed
        assert sizes.setdefault(block.id, size) == size
        alive.append(block)
        if drops:
            alive.pop(0)
        del block
        if launches:
            freed += table.take_some()
        if drains:
            table.drain()
        assert len({block.id for block in alive}) == len(alive)
        kept = {number for entries in table.retained.values() for number, _ in entries}
        assert not {block.id for block in alive} & {number for number, *_ in table.dropped}
        assert not {block.id for block in alive} & kept
    alive.clear()
    table.drain()
    assert sorted(freed) == sorted(sizes)


async def test_rings_before_the_callback_are_one() -> None:
    calls: list[int] = []
    notifier = LoopNotifier(lambda: calls.append(1))
    for _ in range(5):
        notifier.notify()
    await wait_all_tasks_blocked()
    assert (calls, notifier.notifications, notifier.wakeups) == ([1], 5, 1)
    notifier.notify()
    notifier.close()
    await wait_all_tasks_blocked()
    assert calls == [1]


def test_a_ring_after_the_end_of_the_program_is_nothing() -> None:
    notifiers: list[LoopNotifier] = []
    calls: list[int] = []

    async def main() -> None:
        notifiers.append(LoopNotifier(lambda: calls.append(1)))
        await trio.lowlevel.checkpoint()

    trio.run(main)
    notifiers[0].notify()
    assert (calls, notifiers[0].notifications, notifiers[0].wakeups) == ([], 1, 0)


async def test_a_callback_that_fails_ends_nothing() -> None:
    calls: list[int] = []

    def callback() -> None:
        calls.append(1)
        raise RuntimeError("broken")

    notifier = LoopNotifier(callback)
    notifier.notify()
    await wait_all_tasks_blocked()
    notifier.notify()
    await wait_all_tasks_blocked()
    assert calls == [1, 1]
