"""Operations of a user's own on all ranks: right, in order, blamed on the rank that fails."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import own_operations as own
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from own_operations import Accumulate, Bare, Double, Sum
from trio.testing import wait_all_tasks_blocked
from worlds import BUSY, contents, kill, opened_world, put

import trio_accel as ta
from trio_accel.collectives import CollectiveMismatchError, Rank, RankFailedError, World, WorldBrokenError
from trio_accel.devices import opened
from trio_accel.devices.dispatch._inline_dispatch import InlineDispatch

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")
own_kernels = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in keeps what a program has compiled")
cpu = pytest.mark.skipif(BACKEND != "cpu", reason="its kernels are functions of Python")

HOSTS = np.random.default_rng(153).normal(size=(2, 6, 8))
TOTAL = HOSTS[0] + HOSTS[1]
MIXES: tuple[tuple[ta.Isolation, ta.Isolation], ...] = (
    ("process", "process"),
    ("inline", "inline"),
    ("process", "inline"),
    ("inline", "process"),
)


@pytest.fixture(params=MIXES, ids="-".join)
async def world(request: pytest.FixtureRequest, system: ta.System) -> AsyncGenerator[World, None]:
    async with opened_world(system, 2, *request.param, transport="mapped") as world:
        yield world


@pytest.fixture
async def workers(system: ta.System) -> AsyncGenerator[World, None]:
    async with opened_world(system, 2, options=BUSY, transport="mapped") as world:
        yield world


async def lose(device: ta.Device) -> None:
    """Have it lose its context, and get the next."""
    generation = device.generation
    if device.isolation == "process":
        await kill(device)
    else:
        ta.testing.poison(device)
    with trio.fail_after(60):
        while device.generation == generation:
            with suppress(ta.ContextLostError):
                await device.zeros((1,))


async def check_usable(world: World) -> None:
    """All devices compute, on their own and together, and nothing is held."""
    with trio.fail_after(60):
        arrays = await put(world, HOSTS)
        for array, host in zip(arrays, HOSTS, strict=True):
            await array.assign(host)
        for total in await world.all_reduce(arrays):
            np.testing.assert_array_equal(await total.to_host(), TOTAL)
        if not IS_STAND_IN:
            for total in await world.run(Sum, arrays):
                np.testing.assert_array_equal(await total.to_host(), TOTAL)
                await total.device.ask(Double(total))


async def test_a_message_of_the_package_on_all_ranks(world: World) -> None:
    xs, ys = await put(world, HOSTS), await put(world, HOSTS + 1)
    products = await world.run(lambda rank, xs, ys: ta.linalg.Matmul(xs[0], ys[1].T), xs, ys)
    for device, product in zip(world.devices, products, strict=True):
        assert product.device is device
        np.testing.assert_allclose(await product.to_host(), HOSTS[0] @ (HOSTS[1] + 1).T, rtol=1e-12)
    # Each writes to an array of its own.
    await world.run(lambda rank, xs: ta.linalg.Axpy(2.0, xs[1 - rank], ys[rank]), xs)
    for number, y in enumerate(await contents(ys)):
        np.testing.assert_allclose(y, HOSTS[number] + 1 + 2 * HOSTS[1 - number], rtol=1e-12)
    await check_usable(world)


@own_kernels
async def test_a_sum_over_ranks(world: World) -> None:
    sums = await world.run(Sum, await put(world, HOSTS))
    assert [total.device for total in sums] == list(world.devices)
    for total in sums:
        np.testing.assert_array_equal(await total.to_host(), TOTAL)
    await check_usable(world)


@cpu
@pytest.mark.parametrize("size", [1, 3])
async def test_other_numbers_of_ranks(system: ta.System, size: int) -> None:
    async with opened_world(system, size, "inline", "process") as world:
        hosts = np.random.default_rng(size).normal(size=(size, 7))
        results = await contents(await world.run(Sum, await put(world, hosts)))
        np.testing.assert_allclose(results[0], hosts.sum(0), rtol=1e-12)
        assert all(result.tobytes() == results[0].tobytes() for result in results)


@cpu
async def test_views_and_arrays_of_several_shapes(world: World) -> None:
    views = [array[1:5, ::-2].T for array in await put(world, HOSTS)]
    others = [await device.full((number + 1,), 2.0) for number, device in enumerate(world.devices)]
    outs = [await device.zeros((8, 4)) for device in world.devices]

    def message(rank: int, terms: list[ta.AccelRef], others: list[ta.AccelRef]) -> Sum:
        assert [one.shape for one in others] == [(1,), (2,)]
        return Sum(rank, [*terms, np.ones((4, 4))], outs[rank][::2])

    await world.run(message, views, others)
    for out in await contents(outs):
        np.testing.assert_allclose(out[::2], TOTAL[1:5, ::-2].T + 1, rtol=1e-12)
        np.testing.assert_array_equal(out[1::2], 0)
    await check_usable(world)


@cpu
async def test_arrays_changed_by_ranks_and_empty_replies(world: World) -> None:
    arrays, totals = await put(world, HOSTS), [await device.full((6, 8), 1.0) for device in world.devices]
    for _ in range(3):
        replies = await world.run(lambda rank, terms: Accumulate(terms, totals[rank]), arrays)
        assert replies == [2, 2]
    for total in await contents(totals):
        np.testing.assert_allclose(total, 1 + 3 * TOTAL, rtol=1e-12)
    await check_usable(world)


@own_kernels
async def test_nothing_is_left(world: World) -> None:
    async def blocks() -> list[int]:
        for device in world.devices:
            await device.synchronize()
        return [(await device.statistics()).memory.blocks for device in world.devices]

    arrays = await put(world, HOSTS)
    await world.run(Sum, arrays)
    before = await blocks()
    for _ in range(5):
        await world.run(Sum, arrays)
        with pytest.raises(RankFailedError):
            await world.run(lambda rank, terms: Bare(terms), arrays)
    assert await blocks() == before
    assert [(await device.statistics()).in_flight for device in world.devices] == [0, 0]


@cpu
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["fails", "crashes"])
async def test_a_kernel_that_fails(world: World, rank: int, how: str) -> None:
    arrays, totals = await put(world, HOSTS), [await device.full((6, 8), 1.0) for device in world.devices]
    with pytest.raises(RankFailedError, match="on purpose") as caught:
        await world.run(
            lambda number, terms: Accumulate(terms, totals[number], how if number == rank else ""), arrays
        )
    assert caught.value.rank == rank
    assert isinstance(caught.value.__cause__, ta.LibraryError if how == "fails" else ta.ActorFailedError)
    # The targets of the ranks are unusable; the rank that did not fail ran or did not, if it was asked.
    with pytest.raises(ta.StaleRefError, match=r"spoiled by own_operations\.Accumulate"):
        await totals[rank].to_host()
    if totals[1 - rank].block.damaged_by is None:
        np.testing.assert_array_equal(await totals[1 - rank].to_host(), 1.0)
    assert [device.generation for device in world.devices] == [1, 1]
    for array, host in zip(await contents(arrays), HOSTS, strict=True):
        np.testing.assert_array_equal(array, host)
    await check_usable(world)


@cpu
async def test_a_failure_invalidates_the_changes_of_other_ranks(world: World) -> None:
    arrays, totals = await put(world, HOSTS), [await device.full((6, 8), 1.0) for device in world.devices]
    ta.testing.inject_fault(world.devices[1], Accumulate, delay=0.3)
    with pytest.raises(RankFailedError):
        await world.run(lambda rank, terms: Accumulate(terms, totals[rank], "fails" if rank else ""), arrays)
    for total in totals:
        with pytest.raises(ta.StaleRefError, match="spoiled by"):
            await total.to_host()
    await check_usable(world)


@own_kernels
@pytest.mark.parametrize("retry", [0, 1])
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_rank(system: ta.System, lost: int, retry: int) -> None:
    async with opened_world(system, 2, options=BUSY, retry=retry, transport="mapped") as world:
        arrays = await put(world, HOSTS)
        await world.run(Sum, arrays)
        ta.testing.inject_fault(world.devices[lost], Sum, kill=True)
        if retry:
            for total in await contents(await world.run(Sum, arrays)):
                np.testing.assert_array_equal(total, TOTAL)
        else:
            with pytest.raises(RankFailedError) as caught:
                await world.run(Sum, arrays)
            assert caught.value.rank == lost
            assert isinstance(caught.value.__cause__, ta.ContextLostError)
        for array, host in zip(await contents(arrays), HOSTS, strict=True):
            np.testing.assert_array_equal(array, host)
        await check_usable(world)
        assert [device.generation for device in world.devices] == [1 + (lost == rank) for rank in range(2)]


@cpu
async def test_an_operation_that_changes_arrays_does_not_run_again(system: ta.System) -> None:
    async with opened_world(system, 2, options=BUSY, retry=3) as world:
        arrays, totals = await put(world, HOSTS), [await device.full((6, 8), 1.0) for device in world.devices]
        ta.testing.inject_fault(world.devices[1], Accumulate, kill=True)
        with pytest.raises(RankFailedError) as caught:
            await world.run(lambda rank, terms: Accumulate(terms, totals[rank]), arrays)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, ta.ContextLostError)
        with pytest.raises(ta.StaleRefError, match=r"spoiled by own_operations\.Accumulate"):
            await totals[1].to_host()
        if totals[0].block.damaged_by is None:
            np.testing.assert_array_equal(await totals[0].to_host(), 1.0)
        for array, host in zip(await contents(arrays), HOSTS, strict=True):
            np.testing.assert_array_equal(array, host)
        assert [device.generation for device in world.devices] == [1, 2]
        await check_usable(world)


async def test_a_lost_inline_rank(system: ta.System) -> None:
    async with opened_world(system, 2, "process", "inline") as world:
        arrays = await put(world, HOSTS)
        message = ta.linalg.Matmul
        ta.testing.inject_fault(world.devices[1], message, poison=True)
        with pytest.raises(RankFailedError) as caught:
            await world.run(lambda rank, terms: message(terms[0], terms[0].T), arrays)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, ta.ContextLostError)
        np.testing.assert_array_equal(await arrays[0].to_host(), HOSTS[0])
        with trio.fail_after(60):
            await arrays[0].fill(1.0)
        assert world.devices[0].generation == 1
        await check_usable(world)


async def test_an_inline_rank_lost_before_its_array_is_lent(system: ta.System) -> None:
    async with opened_world(system, 2, "inline") as world:
        arrays = await put(world, HOSTS)
        ta.testing.inject_fault(world.devices[1], "devices.Fill", delay=0.3)
        filling = world.devices[1].submit(ta.devices.Fill(arrays[1], 1.0))
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises((RankFailedError, ta.StaleRefError)):
                    await world.run(lambda rank, terms: ta.linalg.Matmul(terms[0], terms[1].T), arrays)

            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            await lose(world.devices[1])
        with pytest.raises(ta.ContextLostError):
            await filling.wait()
        with trio.fail_after(60):
            await arrays[0].fill(1.0)
        await check_usable(world)


@cpu
async def test_only_the_stuck_rank_is_blamed(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", stuck_after=0.3)
    async with opened_world(system, 2, options=options) as world:
        arrays = await put(world, HOSTS)
        ta.testing.inject_fault(world.devices[1], Sum, hang=True)
        with trio.fail_after(60), pytest.raises(RankFailedError) as caught:
            await world.run(Sum, arrays)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, ta.CompletionTimeoutError)
        await check_usable(world)
        assert [device.generation for device in world.devices] == [1, 2]


@own_kernels
async def test_many_at_once_and_writes_between_them(world: World) -> None:
    """None waits for another for ever, whoever holds and writes what; two worlds take turns."""
    a, b = await put(world, HOSTS)
    outs = [await device.zeros((6, 8)) for device in world.devices]
    async with ta.open_world(world.devices[::-1], transport="mapped") as other:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(world.run, lambda rank, xs: Sum(rank, xs, outs[rank]), [a, b])
                    nursery.start_soon(other.run, lambda rank, xs: Sum(rank, xs, outs[1 - rank]), [b, a])
                    nursery.start_soon(world.run, Sum, outs)
                    nursery.start_soon(other.all_reduce, outs[::-1])
                    # An operation of the same library that writes to lent memory.
                    nursery.start_soon(a.device.ask, Double(a))
                    nursery.start_soon(a.copy_to, b.device)
        np.testing.assert_array_equal(await a.to_host(), HOSTS[0] * 64)
    await check_usable(world)


@own_kernels
async def test_a_write_to_a_lent_array_before_the_parts_is_ordered(workers: World) -> None:
    """It waits for the parts that read the array, and not the other way round."""
    arrays = await put(workers, HOSTS)
    a, pid = arrays[0], (await workers.devices[1].statistics()).pid
    assert pid is not None
    sums: list[ta.AccelRef] = []

    async def run() -> None:
        sums.extend(await workers.run(Sum, arrays))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            # The arrays are held by now, and the other device does not know them yet.
            os.kill(pid, signal.SIGSTOP)
            nursery.start_soon(run)
            # clock: the arrays are held before anything is sent, so any moment will do
            await trio.sleep(0.2)
            nursery.start_soon(a.device.ask, Double(a))
            # clock: any moment will do
            await trio.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
    for total in await contents(sums):
        np.testing.assert_array_equal(total, TOTAL)
    np.testing.assert_array_equal(await a.to_host(), 2 * HOSTS[0])


@pytest.mark.parametrize("moment", [0.0, 0.1])
async def test_cancelled(world: World, moment: float) -> None:
    arrays = await put(world, HOSTS)
    ta.testing.inject_fault(world.devices[1], ta.linalg.Matmul, delay=0.3)
    with ta.cancel_grace(0.0), trio.move_on_after(moment) as scope:
        await world.run(lambda rank, terms: ta.linalg.Matmul(terms[0], terms[1].T), arrays)
    assert scope.cancelled_caught
    # A part that runs on reads them to its end.
    await arrays[0].fill(1.0)
    await check_usable(world)


@cpu
async def test_tasks_of_ranks(workers: World) -> None:
    arrays, results, errors = await put(workers, HOSTS), dict[int, Any](), list[type[Exception]]()

    async def task(rank: Rank, operation: Any, seconds: float = 20.0) -> None:
        try:
            with trio.move_on_after(seconds):
                results[rank.number] = await rank.run(operation, arrays[rank.number])
        except (RankFailedError, CollectiveMismatchError) as error:
            errors.append(type(error))

    async def ask(*tasks: partial[Any]) -> None:
        async with trio.open_nursery() as nursery:
            for one in tasks:
                nursery.start_soon(one)

    first, second = workers.ranks
    await ask(partial(task, first, Sum), partial(task, second, Sum))
    for rank, total in results.items():
        assert total.device is workers.devices[rank]
        np.testing.assert_array_equal(await total.to_host(), TOTAL)
    await ask(partial(task, first, Sum), partial(task, second, partial(Sum)))
    assert errors == [CollectiveMismatchError] * 2
    # The deadline of one also ends it for the other.
    ta.testing.inject_fault(workers.devices[0], Sum, delay=0.5)
    with ta.cancel_grace(0.0):
        await ask(partial(task, first, Sum, 0.1), partial(task, second, Sum))
    assert errors[2:] == [RankFailedError]
    async with workers.group() as group:
        both = [group.add(rank.run, Sum, array) for rank, array in zip(workers.ranks, arrays, strict=True)]
    np.testing.assert_array_equal(await both[1].value.to_host(), TOTAL)


@cpu
async def test_invalid_arguments_are_refused(world: World) -> None:
    a, b = await put(world, HOSTS)
    launched = [(await device.statistics()).launched for device in world.devices]
    wrong: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (Sum, ([a],), ValueError, r"arrays\[0\] must name 2, one of each rank, got 1"),
        (Sum, (a,), ValueError, "got one array"),
        (Sum, ([b, a],), ValueError, r"arrays\[0\]\[0\] is on .*, and rank 0 is"),
        (Sum, ([a, b], [a, HOSTS[1]]), TypeError, r"arrays\[1\]\[1\] must be an AccelRef, got ndarray"),
        (3, ([a, b],), TypeError, "operation must be callable, got int"),
        (lambda rank, terms: terms, ([a, b],), TypeError, "must return a message that names its library"),
        (
            lambda rank, terms: Sum(rank, [terms[0], terms[1][0]]),
            ([a, b],),
            ValueError,
            "one shape and dtype",
        ),
        (lambda rank, terms: Sum(rank, [a, b]), ([a, b],), ValueError, "is on .*, this runs on"),
        (
            lambda rank, terms: Accumulate(terms, [a, b][rank]),
            ([a, b],),
            ValueError,
            "while other ranks read",
        ),
        (lambda rank, terms: Accumulate(terms, terms[rank]), ([a, b],), ValueError, "can only be read"),
    ]
    for operation, arrays, kind, match in wrong:
        with pytest.raises(kind, match=match):
            await world.run(operation, *arrays)
    if world.devices[0].isolation == world.devices[1].isolation:
        # Otherwise there were copies.
        assert [(await device.statistics()).launched for device in world.devices] == launched
    with pytest.raises(RankFailedError, match=r"has no \S*BareSpec") as caught:
        await world.run(lambda rank, terms: Bare(terms), [a, b])
    assert isinstance(caught.value.__cause__, ta.NotSupportedError)
    released = await world.devices[1].put(HOSTS[1])
    released.release()
    with pytest.raises(ta.StaleRefError, match="its memory was released"):
        await world.run(Sum, [a, released])
    world.close()
    with pytest.raises(WorldBrokenError, match="run: the world is closed"):
        await world.run(Sum, [a, b])
    with trio.fail_after(60):
        await a.fill(1.0)


@cpu
async def test_a_closed_rank(world: World) -> None:
    a, b = await put(world, HOSTS)
    await world.devices[1].close()
    with pytest.raises((RankFailedError, ta.StaleRefError, ta.DeviceLostError)):
        await world.run(Sum, [a, b])
    # Nothing of the other one is held.
    with trio.fail_after(60):
        await a.fill(1.0)


@cpu
async def test_the_parts_run_at_the_same_time(system: ta.System) -> None:
    async with opened_world(system, 2, "inline") as world:
        meeting = own.MEETINGS["meets"] = own.threading.Barrier(2)
        arrays, totals = await put(world, HOSTS), [await device.zeros((6, 8)) for device in world.devices]
        await world.run(lambda rank, terms: Accumulate(terms, totals[rank], "meets"), arrays)
        assert not meeting.broken
        for total in await contents(totals):
            np.testing.assert_array_equal(total, TOTAL)


@cpu
async def test_a_failure_reaches_all_later_operations_in_any_order_of_their_ends(
    system: ta.System,
) -> None:
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
        array = await device.put(HOSTS[0])
        scale, copy = ta.linalg.Scal(2.0, array), ta.devices.Copy(array, array.dtype)
        # The libraries are open.
        await device.ask(scale)
        await device.ask(Double(array))
        barrier = own.MEETINGS["fails"] = own.threading.Barrier(2)
        dispatch = opened(device).dispatch
        assert isinstance(dispatch, InlineDispatch)
        assert dispatch.session is not None
        failing = device.submit(Accumulate([array], array, "fails"))
        await wait_all_tasks_blocked()
        scaled, copied = device.submit(scale), device.submit(copy)
        await wait_all_tasks_blocked()
        in_flight = [one for queue in dispatch.session.engine.streams.all for one in queue.operations]
        assert len(in_flight) == 3
        barrier.wait()
        del own.MEETINGS["fails"]
        while not all(one.event.is_done for one in in_flight):
            # Without the loop: all ends are seen at once, the copy's end first.
            pass
        for following in (scaled, copied):
            with pytest.raises(ta.InputFailedError):
                await following.wait()
        with pytest.raises(ta.LibraryError):
            await failing.wait()
