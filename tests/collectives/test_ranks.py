"""Collectives that the tasks of ranks ask for: they meet, or all learn why not."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from worlds import contents, elements, opened_world, put, reduced

import trio_accel as ta
from trio_accel.collectives import (
    CollectiveMismatchError,
    Rank,
    RankFailedError,
    Result,
    World,
    WorldBrokenError,
)

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

SIZE = 3
HOSTS = [elements((6, 2), "float64", seed) for seed in range(SIZE)]


@pytest.fixture
async def world(system: ta.System) -> AsyncGenerator[World, None]:
    # Operations of ranks are the same in workers; `test_world` has those.
    async with opened_world(system, SIZE, "inline") as world:
        yield world


async def run(world: World, task: Callable[[Rank, ta.AccelRef], Awaitable[Any]]) -> list[Any]:
    """Run one task for each rank, with its array; returns what each returns or raises."""
    arrays = await put(world, HOSTS)
    made: list[Any] = [None] * world.size

    async def one(rank: Rank) -> None:
        try:
            made[rank.number] = await task(rank, arrays[rank.number])
        except Exception as error:  # noqa: BLE001  # it is the result
            made[rank.number] = error

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for rank in world.ranks:
                nursery.start_soon(one, rank)
    return made


async def test_every_collective(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> dict[str, Any]:
        mine = x if rank.number == 1 else None
        await rank.barrier()
        return {
            "all_reduce": await rank.all_reduce(x, "max"),
            "reduce": await rank.reduce(x, root=1),
            "reduce_scatter": await rank.reduce_scatter(x),
            "broadcast": await rank.broadcast(mine, root=1),
            "scatter": await rank.scatter(mine, root=1),
            "gather": await rank.gather(x, root=2),
            "all_gather": await rank.all_gather(x),
            "all_to_all": await rank.all_to_all(x),
            "split": await rank.all_to_all(x, splits=[6 - rank.number, rank.number, 0]),
        }

    made = await run(world, task)
    total, joined = reduced("sum", HOSTS), np.concatenate(HOSTS)
    starts = np.cumsum([[0, 6 - rank, rank, 0] for rank in range(SIZE)], axis=1)
    expected = [
        {
            "all_reduce": reduced("max", HOSTS),
            "reduce": total if rank == 1 else None,
            "reduce_scatter": total[2 * rank : 2 * rank + 2],
            "broadcast": HOSTS[1],
            "scatter": HOSTS[1][2 * rank : 2 * rank + 2],
            "gather": joined if rank == 2 else None,
            "all_gather": joined,
            "all_to_all": np.concatenate([host[2 * rank : 2 * rank + 2] for host in HOSTS]),
            "split": np.concatenate(
                [host[start[rank] : start[rank + 1]] for host, start in zip(HOSTS, starts, strict=True)]
            ),
        }
        for rank in range(SIZE)
    ]
    for found, wanted in zip(made, expected, strict=True):
        for name, array in wanted.items():
            if array is None:
                assert found[name] is None, name
            else:
                np.testing.assert_array_equal(await found[name].to_host(), array, err_msg=name)


async def test_out_of_each_rank(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> ta.AccelRef:
        # A single rank may name an array.
        out = await rank.device.zeros((6, 2)) if rank.number == 0 else None
        made = await rank.all_reduce(x, out=out)
        assert out is None or made is out
        return made

    for one in await contents(await run(world, task)):
        np.testing.assert_array_equal(one, reduced("sum", HOSTS))


async def test_a_ring_of_sends(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> ta.AccelRef:
        for _ in range(SIZE):
            async with world.group() as group:
                group.add(rank.send, x, (rank.number + 1) % SIZE)
                got = group.add(rank.recv, (rank.number - 1) % SIZE)
            x = got.value
        return x

    for one, host in zip(await contents(await run(world, task)), HOSTS, strict=True):
        np.testing.assert_array_equal(one, host)


async def test_sends_of_one_rank_arrive_in_its_order(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> list[float]:
        if rank.number == 0:
            for value in range(5):
                await rank.send(await rank.device.full((), value), to=2)
        if rank.number == 2:
            return [await (await rank.recv(0)).item() for _ in range(5)]
        return []

    assert await run(world, task) == [[], [], [0, 1, 2, 3, 4]]


async def test_a_group_of_the_world_has_one_outcome(world: World) -> None:
    arrays = await put(world, HOSTS)
    async with world.group() as group:
        total = group.add(world.all_reduce, arrays)
        copies = group.add(world.broadcast, arrays[2], root=2)
        with pytest.raises(RuntimeError, match="the group has not run"):
            _ = total.value
    np.testing.assert_array_equal(await total.value[1].to_host(), reduced("sum", HOSTS))
    np.testing.assert_array_equal(await copies.value[0].to_host(), HOSTS[2])
    late: list[Result[Any]] = []

    async def fail() -> None:
        async with world.group() as group:
            late.append(group.add(world.all_gather, arrays))
            group.add(world.broadcast, arrays[2], root=7)

    with pytest.raises(ValueError, match="root must be a rank"):
        await fail()
    with pytest.raises(RuntimeError, match="the group has not run"):
        _ = late[0].value


async def test_a_group_inside_of_a_group_is_refused(world: World) -> None:
    with pytest.raises(RuntimeError, match="group: this task is inside of a group"):
        async with world.group(), world.group():
            pass
    async with world.group():
        pass


async def test_different_collectives_fail_on_all_ranks(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> Any:
        await (rank.all_gather(x) if rank.number == 2 else rank.all_reduce(x))

    for error in await run(world, task):
        assert isinstance(error, CollectiveMismatchError)
        assert "all_gather()" in str(error)
        assert "all_reduce(reduction='sum')" in str(error)
        assert "all ranks must ask for the same collectives in the same order" in str(error)
    # Both have had their first, and continue.
    assert await (await world.all_reduce(await put(world, HOSTS)))[0].to_host() is not None


async def test_different_options_fail_on_all_ranks(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> Any:
        await rank.broadcast(x, root=rank.number)

    errors = await run(world, task)
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    assert "asks for broadcast(root=" in str(errors[0])


async def test_wrong_arrays_fail_on_all_ranks(world: World) -> None:
    async def task(rank: Rank, x: ta.AccelRef) -> Any:
        await rank.all_reduce(x[:3] if rank.number == 1 else x)

    errors = await run(world, task)
    assert {type(error) for error in errors} == {ValueError}
    assert len({id(error) for error in errors}) == SIZE
    assert "got float64 (6, 2) of rank 0 and float64 (3, 2) of rank 1" in str(errors[0])


async def test_a_rank_never_arrives(world: World) -> None:
    """A deadline of one rank ends it for all, who learn which ranks were missing."""

    async def task(rank: Rank, x: ta.AccelRef) -> Any:
        if rank.number == 2:
            return None
        if rank.number == 0:
            with trio.move_on_after(0.05) as scope:
                await rank.all_reduce(x)
            return scope.cancelled_caught
        return await rank.all_reduce(x)

    first, second, third = await run(world, task)
    assert (first, third) == (True, None)
    assert isinstance(second, RankFailedError)
    assert second.rank == 0
    assert "the task of rank 0 was cancelled; ranks that had not come: 2" in str(second)
    # Arrays of the ranks that arrived are released, though one rank is missing. The error's frames have some.
    second.__traceback__ = None
    gc.collect()
    await world.devices[0].synchronize()
    assert (await world.devices[0].statistics()).memory.used == 0
    # It arrives late: it gets the same error, and then the ranks are in step.
    with pytest.raises(RankFailedError, match="the task of rank 0 was cancelled"):
        await world.ranks[2].all_reduce((await put(world, HOSTS))[2])

    async def again(rank: Rank, x: ta.AccelRef) -> ta.AccelRef:
        return await rank.all_reduce(x)

    for one in await contents(await run(world, again)):
        np.testing.assert_array_equal(one, reduced("sum", HOSTS))


async def test_tasks_that_failed_begin_again(world: World) -> None:
    """One fails before its collective, when others wait there: then their counts differ."""
    expected = reduced("sum", HOSTS)
    arrays = await put(world, HOSTS)
    for failing in (0, SIZE - 1):
        async with trio.open_nursery() as nursery:
            for rank in world.ranks:
                if rank.number != failing:
                    nursery.start_soon(rank.all_reduce, arrays[rank.number])
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        world.realign()
        for made in await run(world, lambda rank, array: rank.all_reduce(array)):
            np.testing.assert_allclose(await made.to_host(), expected)


async def test_ranks_that_wait_when_all_begin_again(world: World) -> None:
    errors: list[RankFailedError] = []
    first, *_ = await put(world, HOSTS)

    async def wait() -> None:
        with pytest.raises(RankFailedError, match="ranks that had not come: 1, 2") as caught:
            await world.ranks[0].all_reduce(first)
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        world.realign()
    assert [error.rank for error in errors] == [1]


async def test_a_task_is_cancelled_while_it_runs(world: World) -> None:
    arrays = await put(world, HOSTS)
    ta.testing.inject_fault(world.devices[1], "collectives.sum", delay=3.0)
    errors: list[Exception] = []
    scopes = [trio.CancelScope() for _ in range(SIZE)]

    async def one(rank: Rank) -> None:
        with scopes[rank.number]:
            try:
                await rank.all_reduce(arrays[rank.number])
            except RankFailedError as error:
                errors.append(error)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for rank in world.ranks:
                nursery.start_soon(one, rank)
            # clock: a tenth of the time for which it runs
            await trio.sleep(0.3)
            scopes[0].cancel()
    assert scopes[0].cancelled_caught
    assert [str(error).startswith("the task of rank 0 was cancelled") for error in errors] == [True, True]
    for one_, host in zip(await contents(arrays), HOSTS, strict=True):
        np.testing.assert_array_equal(one_, host)


async def test_the_end_of_the_world_ends_all_that_wait(system: ta.System) -> None:
    errors: list[WorldBrokenError] = []
    async with trio.open_nursery() as nursery, opened_world(system, 2, "inline") as world:
        arrays = await put(world, HOSTS[:2])

        async def wait() -> None:
            try:
                await world.ranks[1].all_reduce(arrays[1])
            except WorldBrokenError as error:
                errors.append(error)

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
    assert ["the world is closed; ranks that had not come: 0" in str(error) for error in errors] == [True]


async def test_a_closed_world_refuses_requests_of_all_ranks(system: ta.System) -> None:
    async with opened_world(system, 2, "inline") as world:
        (x, _), (_, rank) = await put(world, HOSTS[:2]), world.ranks
        world.close()
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "all_reduce": lambda: rank.all_reduce(x),
            "reduce": lambda: rank.reduce(x),
            "reduce_scatter": lambda: rank.reduce_scatter(x),
            "broadcast": rank.broadcast,
            "scatter": rank.scatter,
            "gather": lambda: rank.gather(x),
            "all_gather": lambda: rank.all_gather(x),
            "all_to_all": lambda: rank.all_to_all(x),
            "send": lambda: rank.send(x, to=0),
            "barrier": rank.barrier,
        }
        for name, ask in asked.items():
            with trio.fail_after(60), pytest.raises(WorldBrokenError, match=f"{name}: the world is closed"):
                await ask()
        with trio.fail_after(60), pytest.raises(WorldBrokenError, match="the world is closed"):
            await rank.recv(0)
        with trio.fail_after(60), pytest.raises(WorldBrokenError, match="the world is closed"):
            async with world.group() as group:
                group.add(rank.barrier)


async def test_a_breaking_world_ends_waiting_and_later_requests(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process")
    async with opened_world(system, 2, options=options, intensity=ta.Intensity(0, 60.0)) as world:
        arrays = await put(world, HOSTS[:2])
        told: list[str] = []

        async def wait() -> None:
            with pytest.raises(WorldBrokenError) as caught:
                await world.ranks[1].barrier()
            told.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            ta.testing.inject_fault(world.devices[0], "collectives.sum", kill=True)
            with pytest.raises(RankFailedError):
                await world.all_reduce(arrays)
        await wait()
    assert "the world has broken" in told[0]
    assert "ranks that had not come: 0" in told[0]
    assert "the world has broken" in told[1]


async def test_bad_input(world: World) -> None:
    rank = world.ranks[1]
    x = await rank.device.zeros((2,))
    for to in (1, 3, -1, True):
        with pytest.raises(ValueError, match="send: it needs another rank below 3"):
            await rank.send(x, to)
    with pytest.raises(ValueError, match="recv: it needs another rank below 3, got 9 on rank 1"):
        await rank.recv(9)
    with pytest.raises(TypeError, match=r"all_reduce.*redcution"):
        await rank.all_reduce(x, redcution="sum")  # type: ignore[call-arg]
