"""Operations that span devices of which some have their contexts in workers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import cast

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from collective_library import Accumulate, AllReduce, BarePart, Double, PeerCopy, Round

import trio_accel as ta
from trio_accel.devices import PartPlanner, PlannedParts

pytestmark = [
    pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning"),
    pytest.mark.skipif(IS_STAND_IN, reason="the stand-in keeps what a program has compiled"),
]
cpu = pytest.mark.skipif(BACKEND != "cpu", reason="its kernels are functions of Python")

MIXES = [("process", "process"), ("process", "inline"), ("inline", "process")]
OPTIONS = ta.DeviceOptions(cancel_grace=30.0, intensity=ta.Intensity(30, 60.0), retry=2)
HOSTS = np.random.default_rng(105).normal(size=(2, 6, 8))


@attrs.frozen
class Pair:
    """Two devices with an array each."""

    devices: Sequence[ta.Device]
    arrays: Sequence[ta.AccelRef]

    async def check_usable(self) -> None:
        """Both devices compute, by themselves and together, and nothing is held any more."""
        with trio.fail_after(20):
            for array, host in zip(self.arrays, HOSTS, strict=True):
                await array.assign(host)
            sums = await ta.ask_across(AllReduce(self.arrays))
            for total in sums:
                np.testing.assert_array_equal(await total.to_host(), HOSTS[0] + HOSTS[1])
                await total.device.ask(Double(total))

    async def delay(self, device: ta.Device, seconds: float) -> None:
        """Delay the next sum on a device.

        CUDA loads a kernel at its first launch, and waits there for every stream that is held. So it is
        launched before.
        """
        await ta.ask_across(AllReduce(self.arrays))
        ta.testing.inject_fault(device, AllReduce, delay=seconds)

    async def totals(self) -> list[ta.AccelRef]:
        """Make an array of ones on each."""
        return [await device.full((6, 8), 1.0) for device in self.devices]


async def open_pair(stack: AsyncExitStack, system: ta.System, mix: Sequence[str]) -> Pair:
    devices = [
        await stack.enter_async_context(
            system.open_device(
                BACKEND, options=attrs.evolve(OPTIONS, isolation=cast("ta.Isolation", isolation))
            )
        )
        for isolation in mix
    ]
    return Pair(devices, [await device.put(host) for device, host in zip(devices, HOSTS, strict=True)])


@pytest.fixture(params=MIXES, ids="-".join)
async def any_pair(request: pytest.FixtureRequest, system: ta.System) -> AsyncGenerator[Pair, None]:
    async with AsyncExitStack() as stack:
        yield await open_pair(stack, system, request.param)


@pytest.fixture
async def pair(system: ta.System) -> AsyncGenerator[Pair, None]:
    async with AsyncExitStack() as stack:
        yield await open_pair(stack, system, MIXES[0])


async def pid_of(device: ta.Device) -> int:
    pid = (await device.statistics()).pid
    assert pid != os.getpid()
    return pid


async def test_a_sum_over_devices(any_pair: Pair) -> None:
    pair = any_pair
    sums = await ta.ask_across(AllReduce(pair.arrays))
    assert [total.device for total in sums] == list(pair.devices)
    for total in sums:
        np.testing.assert_array_equal(await total.to_host(), HOSTS[0] + HOSTS[1])
    await pair.check_usable()


@cpu
async def test_a_sum_of_views(any_pair: Pair) -> None:
    pair = any_pair
    views = [array[1:5, ::-2].T for array in pair.arrays]
    outs = [await device.zeros((8, 4)) for device in pair.devices]
    await ta.ask_across(AllReduce(views, out=[out[::2] for out in outs]))
    for out in outs:
        np.testing.assert_array_equal((await out.to_host())[::2], (HOSTS[0] + HOSTS[1])[1:5, ::-2].T)
        np.testing.assert_array_equal((await out.to_host())[1::2], 0)
    await pair.check_usable()


async def test_a_copy_from_one_to_the_other(any_pair: Pair) -> None:
    (source, _), (_, target) = any_pair.arrays, any_pair.devices
    copy = await ta.ask_across(PeerCopy(source, target))
    assert copy.device is target
    np.testing.assert_array_equal(await copy.to_host(), HOSTS[0])


@cpu
async def test_arrays_that_parts_change(any_pair: Pair) -> None:
    totals = await any_pair.totals()
    for _ in range(3):
        await ta.ask_across(Accumulate(any_pair.arrays, totals))
    for total in totals:
        np.testing.assert_allclose(await total.to_host(), 1 + 3 * (HOSTS[0] + HOSTS[1]), rtol=1e-12)
    await any_pair.check_usable()


@cpu
async def test_nothing_is_left(pair: Pair) -> None:
    async def blocks() -> list[int]:
        for device in pair.devices:
            await device.synchronize()
        return [(await device.statistics()).memory.blocks for device in pair.devices]

    await ta.ask_across(AllReduce(pair.arrays))
    before = await blocks()
    for _ in range(5):
        await ta.ask_across(AllReduce(pair.arrays))
        with pytest.raises(ta.NotSupportedError):
            await ta.ask_across(Round(pair.arrays, ["", ""]))
    assert await blocks() == before


@cpu
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("how", ["fails", "crashes"])
async def test_a_kernel_that_fails(any_pair: Pair, part: int, how: str) -> None:
    totals, hows = await any_pair.totals(), ["", ""]
    hows[part] = how
    with pytest.raises(ta.LibraryError if how == "fails" else ta.ActorFailedError, match="on purpose"):
        await ta.ask_across(Accumulate(any_pair.arrays, totals, hows))
    # What the part that failed was to change is not to be used; the other one ran or did not.
    with pytest.raises(ta.StaleRefError, match=r"collective_library.Accumulate"):
        await totals[part].to_host()
    if totals[1 - part].block.damaged_by is None:
        np.testing.assert_array_equal(await totals[1 - part].to_host(), 1.0)
    assert [device.generation for device in any_pair.devices] == [1, 1]
    await any_pair.check_usable()


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_device_whose_worker_dies_runs_its_part_again(pair: Pair, lost: int) -> None:
    device = pair.devices[lost]
    await pair.delay(device, 0.5)
    pid = await pid_of(device)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill_later, pid)
            sums = await ta.ask_across(AllReduce(pair.arrays))
    for total in sums:
        np.testing.assert_array_equal(await total.to_host(), HOSTS[0] + HOSTS[1])
    assert [one.generation for one in pair.devices] == [1 + (one is device) for one in pair.devices]
    await pair.check_usable()


async def test_a_poisoned_device_is_replaced_alone(pair: Pair) -> None:
    device = pair.devices[1]
    ta.testing.poison(device)
    with trio.fail_after(20):
        while device.generation == 1:
            try:
                await ta.ask_across(AllReduce(pair.arrays))
            except ta.ContextPoisonedError as error:
                found = error.device
    assert found == device.name
    assert [one.generation for one in pair.devices] == [1, 2]
    for array, host in zip(pair.arrays, HOSTS, strict=True):
        np.testing.assert_array_equal(await array.to_host(), host)
    await pair.check_usable()


@cpu
async def test_one_that_changes_arrays_does_not_run_again(pair: Pair) -> None:
    totals = await pair.totals()
    ta.testing.inject_fault(pair.devices[1], Accumulate, delay=0.5)
    pid = await pid_of(pair.devices[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_kill_later, pid)
        with pytest.raises(ta.ContextLostError) as seen:
            await ta.ask_across(Accumulate(pair.arrays, totals))
    assert seen.value.device == pair.devices[1].name
    for total in totals:
        with pytest.raises(ta.StaleRefError, match=r"collective_library.Accumulate"):
            await total.to_host()
    for array, host in zip(pair.arrays, HOSTS, strict=True):
        np.testing.assert_array_equal(await array.to_host(), host)
    assert [device.generation for device in pair.devices] == [1, 2]
    await pair.check_usable()


async def _kill_later(pid: int) -> None:
    await trio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)


async def test_an_inline_device_that_is_lost(system: ta.System) -> None:
    async with AsyncExitStack() as stack:
        pair = await open_pair(stack, system, MIXES[1])
        await pair.delay(pair.devices[1], 0.2)
        async with trio.open_nursery() as nursery:

            async def poison() -> None:
                await trio.sleep(0.1)
                ta.testing.poison(pair.devices[1])

            nursery.start_soon(poison)
            with pytest.raises(ta.ContextLostError) as seen:
                await ta.ask_across(AllReduce(pair.arrays))
        assert seen.value.device == pair.devices[1].name
        np.testing.assert_array_equal(await pair.arrays[0].to_host(), HOSTS[0])
        assert pair.devices[0].generation == 1
        with trio.fail_after(10):
            await pair.arrays[0].fill(1.0)
            again = await pair.devices[1].put(HOSTS[1])
            await ta.ask_across(AllReduce([pair.arrays[0], again]))


async def test_opposite_orders_and_writes_at_the_same_time(any_pair: Pair) -> None:
    """None waits for another for ever, whoever holds and writes what."""
    a, b = any_pair.arrays
    outs = [await device.zeros((6, 8)) for device in any_pair.devices]
    with trio.fail_after(50):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ta.ask_across, AllReduce([a, b], out=outs))
                nursery.start_soon(ta.ask_across, AllReduce([b, a]))
                nursery.start_soon(ta.ask_across, PeerCopy(outs[0], b.device))
                nursery.start_soon(ta.ask_across, PeerCopy(b, a.device, outs[0]))
                # An operation of the same library that writes to what is lent.
                nursery.start_soon(a.device.ask, Double(a))
                nursery.start_soon(a.copy_to, b.device)
    doubled = await a.to_host()
    np.testing.assert_array_equal(doubled, HOSTS[0] * 64)
    await any_pair.check_usable()


async def test_a_write_to_what_is_lent_that_comes_before_the_parts(pair: Pair) -> None:
    """It waits for the parts that read the array, and they are not behind it."""
    a, (_, target) = pair.arrays[0], pair.devices
    pid = await pid_of(target)
    copies: list[ta.AccelRef] = []

    async def copy() -> None:
        copies.append(await ta.ask_across(PeerCopy(a, target)))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            # The array is held by now, and the other device does not know it yet.
            os.kill(pid, signal.SIGSTOP)
            nursery.start_soon(copy)
            await trio.sleep(0.2)
            nursery.start_soon(a.device.ask, Double(a))
            await trio.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
    np.testing.assert_array_equal(await copies[0].to_host(), HOSTS[0])
    np.testing.assert_array_equal(await a.to_host(), 2 * HOSTS[0])


@pytest.mark.parametrize("moment", [0.0, 0.1])
async def test_cancelled(any_pair: Pair, moment: float) -> None:
    await any_pair.delay(any_pair.devices[1], 0.3)
    with trio.move_on_after(moment) as scope:
        await ta.ask_across(AllReduce(any_pair.arrays))
    assert scope.cancel_called
    await any_pair.check_usable()


async def test_what_cannot_be_lent(any_pair: Pair, system: ta.System) -> None:
    a, b = any_pair.devices
    launched = [(await device.statistics()).launched for device in (a, b)]
    with pytest.raises(ta.NotSupportedError, match=r"part 0 lends an array that is written.*inline"):
        await ta.ask_across(Round(any_pair.arrays, ["", ""]))
    with pytest.raises(ta.NotSupportedError, match=r"part 0 lends a host array.*await device\.put\(array\)"):
        await ta.ask_across(AllReduce(list(HOSTS), on=[a, b]))
    with pytest.raises(ValueError, match="takes part twice"):
        await ta.ask_across(AllReduce([any_pair.arrays[0]] * 2))
    with pytest.raises(ValueError, match="must have one shape and dtype"):
        await ta.ask_across(AllReduce([any_pair.arrays[0], any_pair.arrays[1][0]]))
    assert [(await device.statistics()).launched for device in (a, b)] == launched
    await b.close()
    with pytest.raises((ta.DeviceLostError, ta.StaleRefError)):
        await ta.ask_across(AllReduce(any_pair.arrays))
    # Nothing of the other one is held.
    with trio.fail_after(10):
        await any_pair.arrays[0].fill(1.0)


@cpu
async def test_a_part_without_a_kernel(pair: Pair) -> None:
    @attrs.frozen(eq=False)
    class Bare(PeerCopy):
        def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[ta.AccelRef]:
            planned = super().plan(planners)
            out = planners[1].output((2,), ta.DType.float64)
            return attrs.evolve(planned, specs=[planned.specs[0], BarePart(out.spec)])

    with pytest.raises(ta.NotSupportedError, match=r"has no \S*BarePart"):
        await ta.ask_across(Bare(pair.arrays[0], pair.devices[1]))
    await pair.check_usable()
