"""A rank with a lost worker: one error for all, which names it, and a world that keeps all arrays."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from worlds import BUSY, check_way, contents, kill, opened_world, put, reduced

import trio_accel as ta
from trio_accel.collectives import Rank, RankFailedError, World, WorldBrokenError

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

SIZE = 3 if BACKEND == "cpu" else 2
HOSTS = [np.random.default_rng(seed).normal(size=(60, 5)) for seed in range(SIZE)]
TOTAL = reduced("sum", HOSTS)


@pytest.fixture
async def world(system: ta.System, way: str) -> AsyncGenerator[World, None]:
    async with opened_world(system, SIZE, options=BUSY, transport=way) as world:
        yield world
        check_way(world, way)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", ["mapped", "library"], indirect=True)


async def check_whole(world: World, arrays: list[ta.AccelRef]) -> None:
    """All arrays are as they were, and the next collective is right."""
    assert [hash_of(one) for one in await contents(arrays)] == [hash_of(host) for host in HOSTS]
    for one in await contents(await world.all_reduce(arrays)):
        np.testing.assert_array_equal(one, TOTAL)


def hash_of(host: Any) -> str:
    return hashlib.sha256(host.tobytes()).hexdigest()


@pytest.mark.parametrize("fault", ["kill", "poison", "segfault", "hang"])
async def test_a_rank_is_lost_in_the_middle(system: ta.System, way: str, fault: str) -> None:
    options = ta.DeviceOptions(isolation="process", spares=1, stuck_after=0.3, intensity=ta.Intensity(9, 9.0))
    async with opened_world(system, SIZE, options=options, transport=way) as world:
        arrays = await put(world, HOSTS)
        await world.all_reduce(arrays)
        lost = SIZE - 1
        ta.testing.inject_fault(world.devices[lost], "collectives.sum", **{fault: True})
        with trio.fail_after(60), pytest.raises(RankFailedError) as caught:
            await world.all_reduce(arrays)
        assert caught.value.rank == lost
        assert world.devices[lost].path in str(caught.value)
        assert isinstance(caught.value.__cause__, (ta.ContextLostError, ta.CompletionTimeoutError))
        with trio.fail_after(60):
            await check_whole(world, arrays)
        # The others have kept their contexts.
        assert [device.generation for device in world.devices] == [1] * lost + [2]


@pytest.mark.parametrize("fault", ["kill", "poison"])
async def test_with_retry_it_runs_again(system: ta.System, way: str, fault: str) -> None:
    async with opened_world(system, SIZE, options=BUSY, retry=1, transport=way) as world:
        arrays = await put(world, HOSTS)
        has_two_steps = SIZE > 2 and world.transport == "mapped"
        for function in ("collectives.sum", "collectives.Join" if has_two_steps else "collectives.sum"):
            ta.testing.inject_fault(world.devices[0], function, **{fault: True})
            await check_whole(world, arrays)
        assert world.devices[0].generation == 3


async def test_in_place_nothing_is_written_before_all_have_reduced(world: World) -> None:
    arrays = await put(world, HOSTS)
    ta.testing.inject_fault(world.devices[1], "collectives.sum", kill=True)
    with pytest.raises(RankFailedError):
        await world.all_reduce(arrays, out=arrays)
    await check_whole(world, arrays)


async def test_half_written_arrays_are_refused(world: World) -> None:
    arrays = await put(world, HOSTS)
    ta.testing.inject_fault(world.devices[1], "devices.Assign", kill=True)
    with pytest.raises(RankFailedError) as caught:
        await world.all_reduce(arrays, out=arrays)
    assert caught.value.rank == 1
    for array in arrays:
        with pytest.raises(ta.StaleRefError, match=r"spoiled by (collectives.all_reduce|assign)"):
            await array.to_host()
    fresh = await put(world, HOSTS)
    await world.all_reduce(fresh, out=arrays)
    for one in await contents(arrays):
        np.testing.assert_array_equal(one, TOTAL)
    await check_whole(world, fresh)


async def test_every_rank_gets_one_error(world: World) -> None:
    arrays = await put(world, HOSTS)
    ta.testing.inject_fault(world.devices[1], "collectives.sum", kill=True)
    errors: list[RankFailedError] = []

    async def task(rank: Rank) -> None:
        try:
            await rank.all_reduce(arrays[rank.number])
        except RankFailedError as error:
            errors.append(error)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for rank in world.ranks:
                nursery.start_soon(task, rank)
    assert [error.rank for error in errors] == [1] * SIZE
    assert len({id(error) for error in errors}) == SIZE
    await check_whole(world, arrays)


async def test_a_world_has_an_intensity(system: ta.System, way: str) -> None:
    async with opened_world(system, 2, options=BUSY, intensity=ta.Intensity(1, 60.0), transport=way) as world:
        arrays = await put(world, HOSTS[:2])
        for _ in range(2):
            ta.testing.inject_fault(world.devices[0], "collectives.sum", kill=True)
            with pytest.raises(RankFailedError):
                await world.all_reduce(arrays)
        with pytest.raises(WorldBrokenError, match="has broken: 2 collectives failed by losses within 60 s"):
            await world.all_reduce(arrays)
        # Its devices and arrays continue.
        assert [hash_of(one) for one in await contents(arrays)] == [hash_of(host) for host in HOSTS[:2]]


async def test_a_device_is_given_up(system: ta.System, way: str) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(0, 60.0))
    async with opened_world(system, 2, options=options, transport=way) as world:
        arrays = await put(world, HOSTS[:2])
        await kill(world.devices[1])
        while not world.devices[1].is_ended:  # noqa: ASYNC110  # seen by the device's own tasks
            await trio.sleep(0.01)
        for _ in range(2):
            with trio.fail_after(60), pytest.raises(RankFailedError) as caught:
                await world.all_reduce(arrays)
            assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, ta.DeviceLostError)
        assert hash_of(await arrays[0].to_host()) == hash_of(HOSTS[0])


async def test_a_device_is_closed(world: World) -> None:
    arrays = await put(world, HOSTS)
    await world.devices[0].close()
    with pytest.raises((ta.StaleRefError, RankFailedError)):
        await world.all_reduce(arrays)
    np.testing.assert_array_equal(await arrays[1].to_host(), HOSTS[1])


async def read(array: ta.AccelRef) -> Any:
    """Read an array; a copy in flight at a loss, or a given up copy, is asked for again."""
    while True:
        with suppress(ta.ContextLostError, ta.CompletionTimeoutError):
            return await array.to_host()


@pytest.mark.parametrize("how", ["killed", "poisoned", "stopped"])
async def test_losses_again_and_again_under_load(system: ta.System, way: str, how: str) -> None:
    """Every collective has one outcome, right or an error that names the rank; all arrays stay."""
    rounds, rng = 3, np.random.default_rng(38)
    options = ta.DeviceOptions(
        isolation="process", spares=1, stuck_after=0.5, intensity=ta.Intensity(1000, 1.0)
    )
    async with opened_world(system, SIZE, options=options, transport=way) as world:
        arrays = await put(world, HOSTS)
        failed: list[int] = []
        right = 0
        over = False

        async def ask() -> None:
            nonlocal right
            while not over:
                try:
                    made = await world.all_reduce(arrays)
                except RankFailedError as error:
                    failed.append(error.rank)
                else:
                    for one in made:
                        np.testing.assert_array_equal(await read(one), TOTAL)
                    right += 1

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                for round_ in range(rounds):
                    # clock: any moment will do
                    await trio.sleep(rng.uniform(0.05, 0.2))
                    device = world.devices[round_ % SIZE]
                    generation = device.generation
                    if how == "poisoned":
                        ta.testing.poison(device)
                    else:
                        await kill(device, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                    while device.generation == generation:  # noqa: ASYNC110  # any of many operations finds it
                        await trio.sleep(0.01)
                over = True
        assert right > 0
        assert set(failed) <= set(range(SIZE))
        await check_whole(world, arrays)
