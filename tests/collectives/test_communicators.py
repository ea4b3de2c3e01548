"""Worlds with collectives by a vendor's library: the logic of communicators, on a fake of NCCL."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Generator
from typing import Any, cast

import attrs
import fake_nccl
import numpy as np
import pytest
import trio
from chosen import BACKEND
from fakes import FAKE, fake_libraries
from worlds import BUSY, DTYPES, REDUCTIONS, contents, elements, kill, opened_world, put, reduced

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend
from trio_accel.collectives import RankFailedError, World

pytestmark = [
    pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning"),
    pytest.mark.skipif(BACKEND != "cpu", reason="the fake computes with NumPy"),
]

SIZE = 3
HOSTS = [np.random.default_rng(seed).normal(size=(60, 5)) for seed in range(SIZE)]
TOTAL = reduced("sum", HOSTS)
REFUSED = ta.LibraryError("refused", library="fake", code="REFUSED")


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    with fake_libraries(monkeypatch):
        yield


@pytest.fixture
async def world(system: ta.System) -> AsyncGenerator[World, None]:
    async with opened_world(system, SIZE, options=BUSY) as world:
        assert world.transport == "nccl"
        yield world


async def check_whole(world: World, arrays: list[ta.AccelRef]) -> None:
    """All arrays are as they were, and the next collective is right."""
    for one, host in zip(await contents(arrays), HOSTS, strict=True):
        assert one.tobytes() == host.tobytes()
    for one in await contents(await world.all_reduce(arrays)):
        np.testing.assert_array_equal(one, TOTAL)
    assert world.transport == "nccl"


def _communicator(world: World) -> Any:
    return world._communicator


async def test_the_way_is_shown(world: World, system: ta.System) -> None:
    assert repr(world).endswith("by the fake>")
    assert world.why_mapped is None
    async with ta.open_world(world.devices, transport="mapped") as other:
        assert other.transport == "mapped"
        assert repr(other).endswith("by mapped arrays: it was asked for>")
        arrays = await put(other, HOSTS)
        for one in await contents(await other.all_reduce(arrays)):
            np.testing.assert_array_equal(one, TOTAL)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_dtypes_that_it_does_not_have_go_by_mapped_arrays(world: World, dtype: str) -> None:
    hosts = [elements((6, 4), dtype, seed) for seed in range(SIZE)]
    arrays = await put(world, hosts)
    kind = hosts[0].dtype.kind
    for reduction in REDUCTIONS:
        if (kind == "c" and reduction in ("min", "max")) or (kind in "bui" and reduction == "mean"):
            continue
        for one in await contents(await world.all_reduce(arrays, cast("Any", reduction))):
            assert one.tobytes() == reduced(reduction, hosts).tobytes()


async def test_only_supported_operations_use_it(world: World) -> None:
    arrays = await put(world, [host.astype(np.float32) for host in HOSTS])
    await world.all_reduce(arrays)
    with_it = ta.testing.inject_fault(world.devices[0], "collectives.sum", delay=0.0)
    joint = _communicator(world)
    assert joint.life.stage == "open"
    await world.all_reduce(arrays, "min")
    assert not with_it.hit
    assert ta.DType.float32 not in joint.vendor.reductions["min"]
    assert ta.DType.int32 in joint.vendor.reductions["min"]


async def test_a_communicator_is_opened_once_and_again_after_a_loss(world: World) -> None:
    arrays = await put(world, HOSTS)
    joint = _communicator(world)
    assert joint.life.stage == "none"
    await check_whole(world, arrays)
    first = joint.number
    await check_whole(world, arrays)
    assert joint.number == first
    await kill(world.devices[2])
    while world.devices[2].generation == 1:  # noqa: ASYNC110  # seen by the device's own tasks
        await trio.sleep(0.01)
    await check_whole(world, arrays)
    assert joint.number != first
    assert [device.generation for device in world.devices] == [1, 1, 2]


@pytest.mark.parametrize("fault", ["kill", "poison", "segfault", "hang"])
async def test_a_rank_is_lost_in_the_middle(system: ta.System, fault: str) -> None:
    options = attrs.evolve(BUSY, stuck_after=0.3)
    async with opened_world(system, SIZE, options=options) as world:
        arrays = await put(world, HOSTS)
        await world.all_reduce(arrays)
        ta.testing.inject_fault(world.devices[1], "collectives.sum", **{fault: True})
        with trio.fail_after(60), pytest.raises(RankFailedError) as caught:
            await world.all_reduce(arrays)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, (ta.ContextLostError, ta.CompletionTimeoutError))
        with trio.fail_after(60):
            await check_whole(world, arrays)
        assert [device.generation for device in world.devices] == [1, 2, 1]


@pytest.mark.parametrize("fault", ["kill", "poison", "hang"])
async def test_a_rank_is_lost_while_the_communicator_is_opened(system: ta.System, fault: str) -> None:
    async with opened_world(system, SIZE, options=attrs.evolve(BUSY, stuck_after=0.3)) as world:
        arrays = await put(world, HOSTS)
        ta.testing.inject_fault(world.devices[1], "collectives.OpenCommunicator", **{fault: True})
        with trio.fail_after(60), pytest.raises(RankFailedError) as caught:
            await world.all_reduce(arrays)
        assert caught.value.rank == 1
        with trio.fail_after(60):
            await check_whole(world, arrays)


async def test_a_rank_waiting_for_others_is_not_stuck(system: ta.System) -> None:
    """It waits longer than its `stuck_after` for a late, but working, rank."""
    hasty = attrs.evolve(BUSY, stuck_after=0.8)
    async with (
        system.open_device(BACKEND, options=hasty) as early,
        system.open_device(BACKEND, options=BUSY) as late,
        ta.open_world([early, late]) as world,
    ):
        arrays = await put(world, HOSTS[:2])
        for operation in ("OpenCommunicator", "sum"):
            ta.testing.inject_fault(late, f"collectives.{operation}", delay=1.5)
        for _ in range(2):
            for one in await contents(await world.all_reduce(arrays)):
                np.testing.assert_array_equal(one, HOSTS[0] + HOSTS[1])
        assert [device.generation for device in world.devices] == [1, 1]


async def test_with_retry_it_runs_again(system: ta.System) -> None:
    async with opened_world(system, SIZE, options=BUSY, retry=1) as world:
        arrays = await put(world, HOSTS)
        for _ in range(2):
            ta.testing.inject_fault(world.devices[0], "collectives.sum", kill=True)
            await check_whole(world, arrays)
        assert world.devices[0].generation == 3


async def test_devices_that_retry_by_themselves(system: ta.System) -> None:
    """The part of the lost rank runs again on a worker without a communicator: all is done again."""
    async with opened_world(system, SIZE, options=attrs.evolve(BUSY, retry=3)) as world:
        arrays = await put(world, HOSTS)
        await world.all_reduce(arrays)
        for operation in ("collectives.sum", "collectives.OpenCommunicator"):
            ta.testing.inject_fault(world.devices[1], operation, kill=True)
            with trio.fail_after(60):
                await check_whole(world, arrays)
            await kill(world.devices[2])
        with trio.fail_after(60):
            await check_whole(world, arrays)


async def test_a_cancelled_collective_leaves_nobody_waiting(world: World) -> None:
    arrays = await put(world, HOSTS)
    await world.all_reduce(arrays)
    ta.testing.inject_fault(world.devices[1], "collectives.sum", delay=1.0)
    with trio.move_on_after(0.2) as scope:
        await world.all_reduce(arrays)
    assert scope.cancelled_caught
    with trio.fail_after(60):
        await check_whole(world, arrays)
    assert [device.generation for device in world.devices] == [1, 1, 1]


async def zeros(world: World) -> list[ta.AccelRef]:
    return [await device.zeros(TOTAL.shape) for device in world.devices]


async def test_results_go_straight_to_out(world: World) -> None:
    """There is no operation that copies them, unless they replace what a rank has given."""
    arrays, out = await put(world, HOSTS), await zeros(world)
    await world.all_reduce(arrays)
    for given, operations in ((out, 1), (arrays, 2)):
        before = [(await device.statistics()).launched for device in world.devices]
        made = await world.all_reduce(arrays, out=given)
        after = [(await device.statistics()).launched for device in world.devices]
        assert all(one is other for one, other in zip(made, given, strict=True))
        for one in await contents(given):
            np.testing.assert_array_equal(one, TOTAL)
        assert np.subtract(after, before).tolist() == [operations] * SIZE


@pytest.mark.parametrize("how", ["kill", "poison", "cancel"])
async def test_half_written_arrays_are_refused_until_they_are_written(world: World, how: str) -> None:
    arrays, out = await put(world, HOSTS), await zeros(world)
    await world.all_reduce(arrays, out=out)
    fault: dict[str, Any] = {"delay": 1.0} if how == "cancel" else {how: True}
    ta.testing.inject_fault(world.devices[1], "collectives.sum", **fault)
    if how == "cancel":
        with trio.move_on_after(0.2):
            await world.all_reduce(arrays, out=out)
    else:
        with pytest.raises(RankFailedError):
            await world.all_reduce(arrays, out=out)
    for one in out:
        with pytest.raises(ta.StaleRefError, match="spoiled by collectives"):
            await one.to_host()
    with trio.fail_after(60):
        await world.all_reduce(arrays, out=out)
    for one in await contents(out):
        np.testing.assert_array_equal(one, TOTAL)
    await check_whole(world, arrays)


@pytest.mark.parametrize("by", ["world", "devices"])
async def test_with_retry_out_is_written_again(system: ta.System, by: str) -> None:
    options = BUSY if by == "world" else attrs.evolve(BUSY, retry=1)
    async with opened_world(system, SIZE, options=options, retry=int(by == "world")) as world:
        arrays, out = await put(world, HOSTS), await zeros(world)
        ta.testing.inject_fault(world.devices[0], "collectives.sum", kill=True)
        await world.all_reduce(arrays, out=out)
        for one in await contents(out):
            np.testing.assert_array_equal(one, TOTAL)
        assert world.devices[0].generation == 2


async def test_a_stopped_rank_is_named(system: ta.System) -> None:
    options = attrs.evolve(BUSY, heartbeat_timeout=1.5)
    async with opened_world(system, SIZE, options=options) as world:
        arrays = await put(world, HOSTS)
        await world.all_reduce(arrays)
        launched = (await world.devices[2].statistics()).launched
        ta.testing.inject_fault(world.devices[2], "collectives.sum", delay=1000.0)
        caught: list[RankFailedError] = []

        async def ask() -> None:
            with pytest.raises(RankFailedError) as raised:
                await world.all_reduce(arrays)
            caught.append(raised.value)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                while (await world.devices[2].statistics()).launched == launched:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                await kill(world.devices[2], signal.SIGSTOP)
            assert [error.rank for error in caught] == [2]
            await check_whole(world, arrays)


@pytest.mark.parametrize("retry", [0, 1])
async def test_a_rank_stopped_before_is_named(system: ta.System, retry: int) -> None:
    """Its part has not begun: nobody waits until the next worker, which has no communicator, has it."""
    options = attrs.evolve(BUSY, heartbeat_timeout=1.5)
    async with opened_world(system, SIZE, options=options, retry=retry) as world:
        arrays = await put(world, HOSTS)
        await world.all_reduce(arrays)
        await kill(world.devices[2], signal.SIGSTOP)
        if not retry:
            with trio.fail_after(60), pytest.raises(RankFailedError) as caught:
                await world.all_reduce(arrays)
            assert caught.value.rank == 2
            assert isinstance(caught.value.__cause__, ta.ContextLostError)
        with trio.fail_after(60):
            await check_whole(world, arrays)
        assert [device.generation for device in world.devices] == [1, 1, 2]


async def test_a_lost_rank_is_named_even_if_another_rank_noticed_first(world: World) -> None:
    """The library of a rank fails because another rank has gone; its loss becomes known later."""
    arrays = await put(world, HOSTS)
    await world.all_reduce(arrays)
    ta.testing.inject_fault(world.devices[0], "collectives.sum", fail=REFUSED)
    ta.testing.inject_fault(world.devices[2], "collectives.sum", delay=10.0)
    launched = (await world.devices[2].statistics()).launched
    caught: list[RankFailedError] = []

    async def ask() -> None:
        with pytest.raises(RankFailedError) as raised:
            await world.all_reduce(arrays)
        caught.append(raised.value)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while (await world.devices[2].statistics()).launched == launched:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await kill(world.devices[2])
    assert [error.rank for error in caught] == [2]
    await check_whole(world, arrays)


async def test_tasks_of_ranks_get_one_error(world: World) -> None:
    arrays = await put(world, HOSTS)
    await world.all_reduce(arrays)
    ta.testing.inject_fault(world.devices[1], "collectives.sum", kill=True)
    failed: list[int] = []

    async def task(rank: ta.collectives.Rank) -> None:
        try:
            await rank.all_reduce(arrays[rank.number])
        except RankFailedError as error:
            failed.append(error.rank)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for rank in world.ranks:
                nursery.start_soon(task, rank)
    assert failed == [1] * SIZE
    await check_whole(world, arrays)


async def test_two_worlds_take_turns(world: World) -> None:
    """Their kernels would wait for each other if each had one device."""
    async with ta.open_world(world.devices[::-1]) as other:
        arrays = await put(world, HOSTS)

        async def ask(one: World, mine: list[ta.AccelRef]) -> None:
            for _ in range(4):
                for made in await contents(await one.all_gather(mine)):
                    assert made.shape == (180, 5)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, world, arrays)
                nursery.start_soon(ask, other, arrays[::-1])


async def test_a_library_that_does_not_work_is_left(
    system: ta.System, caplog: pytest.LogCaptureFixture
) -> None:
    fake_nccl.broken().touch()
    try:
        async with opened_world(system, 2, options=BUSY) as world:
            arrays = await put(world, HOSTS[:2])
            for one in await contents(await world.all_reduce(arrays)):
                np.testing.assert_array_equal(one, HOSTS[0] + HOSTS[1])
            assert world.transport == "mapped"
            assert "the fake is broken" in str(world.why_mapped)
            assert "by mapped arrays: the fake cannot serve them: the fake is broken" in caplog.text
            async with ta.open_world(world.devices, transport="nccl") as strict:
                with pytest.raises(ta.LibraryError, match="the fake is broken"):
                    await strict.all_reduce(arrays)
    finally:
        fake_nccl.broken().unlink()


async def test_operations_without_a_library(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_world(system, 2, "process", "inline") as world:
        assert str(world.why_mapped).startswith("rank 1, ")
        assert str(world.why_mapped).endswith(" is inline")
        with pytest.raises(ta.NotSupportedError, match="NCCL cannot serve these devices: rank 1"):
            async with ta.open_world(world.devices, transport="nccl"):
                pass
        with pytest.raises(ValueError, match="transport must be 'auto', 'nccl' or 'mapped', got 'ring'"):
            async with ta.open_world(world.devices, transport=cast("Any", "ring")):
                pass
        async with ta.open_world(world.devices[:1]) as alone:
            assert alone.why_mapped == "there is one rank"
    async with opened_world(system, 2) as world:
        assert world.transport == "nccl"
        monkeypatch.setattr(CpuBackend, "collectives", attrs.evolve(FAKE, is_apart=True))
        async with ta.open_world(world.devices) as together:
            assert together.why_mapped == "ranks 0 and 1 are on one device, cpu:0"
        monkeypatch.setattr(CpuBackend, "collectives", attrs.evolve(FAKE, package="no_such_package"))
        async with ta.open_world(world.devices) as without:
            assert without.why_mapped == "the fake is not installed"
        monkeypatch.setattr(CpuBackend, "collectives", None)
        async with ta.open_world(world.devices) as other:
            assert other.why_mapped == "the devices are of cpu"


async def test_nothing_is_left(world: World) -> None:
    arrays = await put(world, [np.ones((SIZE * 10, 7))] * SIZE)

    async def used() -> list[tuple[int, int]]:
        for device in world.devices:
            await device.synchronize()
        memory = [(await device.statistics()).memory for device in world.devices]
        return [(each.used, each.blocks) for each in memory]

    before = await used()
    for _ in range(2):
        await world.all_reduce(arrays)
        await world.all_gather(arrays)
        await world.all_to_all(arrays)
        ta.testing.inject_fault(world.devices[1], "collectives.sum", fail=REFUSED)
        with pytest.raises(RankFailedError):
            await world.all_reduce(arrays)
    assert await used() == before
