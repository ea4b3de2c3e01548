"""Collectives inside of programs, against NumPy."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import reduce
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meeting_programs import Calls, Meets
from worlds import BUSY, DTYPES, devices_of, elements, opened_world

import trio_accel as ta
from trio_accel.collectives import CollectiveMismatchError, RankFailedError, World
from trio_accel.programs import Program, current_rank

SUMS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
Opened = tuple[World, list[Program[Meets]]]


@asynccontextmanager
async def opened(
    system: ta.System, size: int, options: ta.DeviceOptions | None = None
) -> AsyncGenerator[Opened, None]:
    async with (
        system.open_devices(["cpu"] * size, options=options) as devices,
        ta.open_world(devices) as world,
    ):
        yield world, [await ta.open_program(device, Meets, np.zeros(3)) for device in devices]


async def hosts(arrays: Sequence[Any]) -> list[Any]:
    return [await array.to_host() for array in arrays]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_each_collective_is_that_of_numpy(system: ta.System, size: int) -> None:
    async with opened(system, size) as (world, programs):
        for number, dtype in enumerate(DTYPES):
            if dtype.startswith("complex") or dtype == "bool":
                continue
            xs = [elements((size * 3, 2), dtype, 10 * number + rank) for rank in range(size)]
            for how, function in SUMS.items():
                want = reduce(function, [x.astype(np.float64) for x in xs])
                for found in await hosts(await world.call(programs, Meets.reduce, xs, [how] * size)):
                    assert found.dtype == xs[0].dtype
                    np.testing.assert_array_equal(found.astype(np.float64), want)
            total = reduce(np.add, [x.astype(np.float64) for x in xs])
            for rank, made in enumerate(await world.call(programs, Meets.all, xs)):
                part, whole, cast, got = await hosts(made)
                np.testing.assert_array_equal(part.astype(np.float64), total[rank * 3 : rank * 3 + 3])
                np.testing.assert_array_equal(whole, np.concatenate(xs))
                np.testing.assert_array_equal(cast, xs[-1])
                if size > 1:
                    np.testing.assert_array_equal(got, xs[(rank - 1) % size])


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 100_001)])
async def test_arrays_of_any_size(system: ta.System, shape: tuple[int, ...]) -> None:
    """The largest takes several pieces of shared memory, and the last of them is short."""
    async with opened(system, 2) as (world, programs):
        xs = [np.random.default_rng(rank).normal(size=shape) for rank in range(2)]
        for found in await hosts(await world.call(programs, Meets.reduce, xs, ["mean"] * 2)):
            np.testing.assert_array_equal(found, (xs[0] + xs[1]) / 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_short_numbers_are_rounded_once(system: ta.System, dtype: str) -> None:
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    large = 256.0 if dtype == "bfloat16" else 2048.0
    async with opened(system, 3) as (world, programs):
        xs = [np.array([value], element) for value in (large, 1.0, 1.0)]
        found = await hosts(await world.call(programs, Meets.reduce, xs, ["sum"] * 3))
        assert [float(one[0]) for one in found] == [large + 2] * 3


async def test_groups_meet_among_themselves(system: ta.System) -> None:
    async with opened(system, 4) as (world, programs):
        xs = [np.full(3, float(rank)) for rank in range(4)]
        groups = {"pair": [[0, 2], [1, 3]]}
        for found in await hosts(await world.call(programs, Meets.pairs, xs, groups=groups)):
            np.testing.assert_array_equal(found, np.full(3, 2 * 2.0 + 2 * 3.0))
        with pytest.raises(ValueError, match="group 'pair' must have each of 4 ranks once"):
            await world.call(programs, Meets.pairs, xs, groups={"pair": [[0, 1], [1, 3]]})


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "broadcast", "send"]), st.sampled_from(sorted(SUMS)), st.integers(0, 2)
    ),
    max_size=12,
)


@given(calls=CALLS, length=st.sampled_from([1, 5, 70_000]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_calls_is_that_of_a_model(calls: Calls, length: int) -> None:
    xs = [np.random.default_rng(rank).integers(0, 97, length) for rank in range(3)]
    want = [x.copy() for x in xs]
    for name, how, root in calls:
        if name == "all_reduce":
            want = [reduce(SUMS[how], want)] * 3
        elif name == "broadcast":
            want = [want[root]] * 3
        else:
            want[(root + 1) % 3] = want[root]
        want = [x % 97 for x in want]

    async def compute() -> None:
        async with ta.open_system("model") as system, opened(system, 3) as (world, programs):
            found = await hosts(await world.call(programs, Meets.series, xs, [calls] * 3))
            for one, other in zip(found, want, strict=True):
                np.testing.assert_array_equal(one, other)

    trio.run(compute)


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("other", "asks for number 2, .*broadcast"),
        ("longer", "all_reduce.sum. of 5 float64"),
        ("leaves", "rank 1 has ended its call, and rank [02] waits in all_reduce"),
    ],
)
async def test_ranks_with_different_calls_get_an_error(
    system: ta.System, isolation: Any, what: str, text: str
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with opened(system, 3, options) as (world, programs):
        with pytest.raises(CollectiveMismatchError, match=text):
            await world.call(programs, Meets.odd, [what] * 3)
        await check_right(world, programs)


async def check_right(world: World, programs: list[Program[Meets]]) -> None:
    """Require that the next call is right."""
    xs = [np.full(2, rank + 1.0) for rank in range(world.size)]
    found = await hosts(await world.call(programs, Meets.reduce, xs, ["sum"] * world.size))
    assert [one.tolist() for one in found] == [[sum(range(1, world.size + 1))] * 2] * world.size


async def test_an_error_of_one_rank_ends_all(system: ta.System) -> None:
    async with opened(system, 3) as (world, programs):
        with pytest.raises(RankFailedError, match=r"rank 1, .*a bad batch") as caught:
            await world.call(programs, Meets.odd, ["raises"] * 3)
        assert caught.value.rank == 1
        await check_right(world, programs)


async def test_a_late_rank_is_named(system: ta.System) -> None:
    async with opened(system, 3) as (world, programs):
        with pytest.raises(
            RankFailedError, match=r"ranks \[0, 1, 2\] have not ended their call within 0.3 s"
        ):
            await world.call(programs, Meets.odd, ["sleeps"] * 3, within=0.3)
        await check_right(world, programs)
        with trio.move_on_after(0.3) as scope:
            await world.call(programs, Meets.forever, [np.ones(3)] * 3)
        assert scope.cancelled_caught
        await check_right(world, programs)


async def test_a_killed_rank_ends_all_and_the_next_call_is_right(system: ta.System) -> None:
    async with opened(system, 2, BUSY) as (world, programs):
        await world.call(programs, Meets.add, [np.ones(3)] * 2)
        for rank in (1, 0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_soon, world.devices[rank])
                with pytest.raises(RankFailedError) as caught:
                    await world.call(programs, Meets.forever, [np.ones(3)] * 2)
            assert caught.value.rank == rank
            assert isinstance(caught.value.__cause__, ta.ContextLostError)
            await check_right(world, programs)
        await world.call(programs, Meets.add, [np.ones(3)] * 2)
        assert not any(program.is_damaged for program in programs)


@pytest.mark.parametrize("way", ["library"], indirect=True)
async def test_a_rank_waiting_for_a_stuck_rank_is_not_lost_too(system: ta.System, way: str) -> None:
    if BACKEND == "cuda" and not IS_STAND_IN and len(devices_of()) < 2:
        pytest.skip("NCCL takes one rank of each GPU, and there is one GPU")
    options = attrs.evolve(BUSY, stuck_after=0.5)
    async with opened_world(system, 2, options=options, transport=way) as world:
        devices = world.devices
        programs = [await ta.open_program(device, Meets, await device.put(np.zeros(3))) for device in devices]

        async def come(pause: float) -> list[Any]:
            # The continuing rank invalidates its targets at some time.
            xs = [await device.put(np.ones(3)) for device in devices]
            await world.call(programs, Meets.late, xs, [0.0, pause])
            return [(await x.to_host()).tolist() for x in xs]

        assert await come(0.0) == [[2.0] * 3] * 2
        with trio.fail_after(60), pytest.raises(RankFailedError, match="within stuck_after") as caught:
            await come(60.0)
        assert caught.value.rank == 1
        assert await come(0.0) == [[2.0] * 3] * 2
        assert [device.generation for device in devices] == [1, 2]


async def kill_soon(device: ta.Device) -> None:
    # clock: any moment will do
    await trio.sleep(0.1)
    pid = (await device.statistics()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_arguments_that_do_not_fit_are_refused(system: ta.System) -> None:
    async with opened(system, 2) as (world, programs):
        with pytest.raises(ValueError, match="argument 0 must have 2 values, one for each rank"):
            await world.call(programs, Meets.add, [np.ones(3)])
        with pytest.raises(ValueError, match="programs must have one of each device"):
            await world.call(programs[::-1], Meets.add, [np.ones(3)] * 2)
        with pytest.raises(RuntimeError, match="current_rank: the method was not called by"):
            current_rank()
        with pytest.raises(ta.ActorFailedError, match="the method was not called by"):
            await programs[0].ask(Meets.odd, "other")
