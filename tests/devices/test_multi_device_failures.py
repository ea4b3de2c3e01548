"""Operations that span devices, where a part is refused, fails, is lost, or nobody waits for it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

import attrs
import collective_library as collective
import numpy as np
import pytest
import trio
from collective_library import AllReduce, Double, OtherDouble, OtherRound, PeerCopy, Round
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import ops
from trio_accel.devices import MultiDeviceOperation, PartPlanner, Phase, PlannedParts, opened
from trio_accel.devices.inline._dispatch import InlineDispatch

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

INLINE = ta.DeviceOptions(isolation="inline", cancel_grace=30.0, intensity=ta.Intensity(30, 60.0))


@attrs.frozen
class Pair:
    """Two devices with an array of ones and one of twos."""

    devices: Sequence[ta.Device]
    arrays: Sequence[ta.AccelRef]

    async def check_usable(self) -> None:
        """Both devices compute, by themselves and together."""
        ones = [await device.put(np.ones(4)) for device in self.devices]
        for one in ones:
            await one.device.ask(Double(one))
        sums = await ta.ask_across(AllReduce(ones))
        for total in sums:
            np.testing.assert_array_equal(await total.to_host(), np.full(4, 4.0))
        assert [(await device.statistics()).in_flight for device in self.devices] == [0, 0]


async def open_pair(stack: AsyncExitStack, system: ta.System, *options: ta.DeviceOptions) -> Pair:
    devices = [await stack.enter_async_context(system.open_device("cpu", options=one)) for one in options]
    arrays = [await device.put(np.full(4, 1.0 + n)) for n, device in enumerate(devices)]
    return Pair(devices, arrays)


@pytest.fixture
async def pair(system: ta.System) -> AsyncGenerator[Pair, None]:
    async with AsyncExitStack() as stack:
        yield await open_pair(stack, system, INLINE, INLINE)


async def contents(arrays: Sequence[ta.AccelRef]) -> list[float]:
    return [float((await array.to_host())[0]) for array in arrays]


@attrs.frozen(eq=False)
class Odd(MultiDeviceOperation[None]):
    """What `devices` and `plan` return."""

    library = collective.PATH
    among: object
    planned: object = None

    @property
    def devices(self) -> Sequence[ta.Device]:
        return self.among  # type: ignore[return-value]  # on purpose

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[None]:
        return self.planned  # type: ignore[return-value]  # on purpose


async def test_wrong_devices(pair: Pair) -> None:
    first, second = pair.devices
    with pytest.raises(ValueError, match="no device takes part"):
        await ta.ask_across(Odd([]))
    with pytest.raises(ValueError, match="cpu:0 takes part twice"):
        await ta.ask_across(Odd([first, second, first]))
    with pytest.raises(TypeError, match="a device must be opened by a system"):
        await ta.ask_across(Odd([first, "cpu"]))
    with pytest.raises(TypeError, match="is no operation that spans devices"):
        await ta.ask_across(Double(pair.arrays[0]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is no operation of a device"):
        await first.ask(AllReduce(pair.arrays))  # type: ignore[arg-type]
    await pair.check_usable()


async def test_wrong_plans(pair: Pair) -> None:
    first, second = pair.arrays
    with pytest.raises(TypeError, match=r"plan\(\) must return PlannedParts"):
        await ta.ask_across(Odd(pair.devices))
    part = collective.SendPart(first.spec)
    with pytest.raises(ValueError, match=r"one specification per device \(2\), got 1"):
        await ta.ask_across(Odd(pair.devices, PlannedParts([part])))
    with pytest.raises(TypeError, match="must return specifications, got int"):
        await ta.ask_across(Odd(pair.devices, PlannedParts([part, 1])))  # type: ignore[list-item]
    other = await pair.devices[1].put(np.ones(4))
    lent = ops.Peers((ops.PeerArray(second.spec, 1, None),))
    receive = collective.ReceivePart(first.spec, lent)
    with pytest.raises(
        ValueError, match="part 1 lends an array that its own specification, BarePart, has in"
    ):
        await ta.ask_across(Odd(pair.devices, PlannedParts([receive, collective.BarePart(other.spec)])))
    wrong = collective.ReceivePart(first.spec, (lent,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ReceivePart.source must be made by planner.peers\(\)"):
        await ta.ask_across(Odd(pair.devices, PlannedParts([wrong, part])))
    await pair.check_usable()


async def test_wrong_arrays(pair: Pair, system: ta.System) -> None:
    first, second = pair.arrays
    async with system.open_device("cpu", options=INLINE) as third:
        stranger = await third.put(np.ones(4))
        with pytest.raises(ValueError, match="is on test/cpu:0#3, this runs on test/cpu:0#2"):
            await ta.ask_across(AllReduce([first, stranger], on=pair.devices))
    with pytest.raises(ValueError, match="out must not share memory with arrays"):
        await ta.ask_across(AllReduce([first, second], out=[first, await second.copy()]))
    released = await pair.devices[1].put(np.ones(4))
    released.release()
    with pytest.raises(ta.StaleRefError, match="its memory was released"):
        await ta.ask_across(AllReduce([first, released]))
    with pytest.raises(ValueError, match="one shape and dtype"):
        await ta.ask_across(AllReduce([first, second[1:]]))
    assert await contents(pair.arrays) == [1.0, 2.0]


async def test_a_closed_device(pair: Pair, system: ta.System) -> None:
    async with system.open_device("cpu", options=INLINE) as third:
        array = await third.put(np.ones(4))
    with pytest.raises(ta.DeviceLostError, match="the device is closed"):
        await ta.ask_across(AllReduce([pair.arrays[0], array]))
    await pair.check_usable()


async def test_sync_completion_takes_no_part(pair: Pair, system: ta.System) -> None:
    options = attrs.evolve(INLINE, completion=ta.SyncCompletion())
    async with system.open_device("cpu", options=options) as third:
        with pytest.raises(ta.NotSupportedError, match="waits with SyncCompletion"):
            await ta.ask_across(PeerCopy(pair.arrays[0], third))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("how", ["missing", "refuses", "raises"])
async def test_a_part_that_is_refused(pair: Pair, part: int, how: str) -> None:
    hows = ["", ""]
    hows[part] = how
    operation = Round(pair.arrays, hows, forget=part if how == "missing" else None)
    expected = ta.ActorFailedError if how == "raises" else ta.NotSupportedError
    with pytest.raises(expected) as seen:
        await ta.ask_across(operation)
    if how == "missing":
        assert re.search(r"has no \S*BarePart", str(seen.value))
        # Nothing was launched, so that nothing is invalidated.
        assert await contents(pair.arrays) == [1.0, 2.0]
    await pair.check_usable()


async def test_a_launch_that_fails_on_one_device_leaves_the_other_as_it_was(pair: Pair) -> None:
    ta.testing.inject_fault(pair.devices[1], Round, fail=ta.LibraryError("no", library="x", code="y"))
    with pytest.raises(ta.LibraryError, match="no"):
        await ta.ask_across(Round(pair.arrays, ["", ""]))
    assert await contents(pair.arrays) == [1.0, 2.0]
    await pair.check_usable()


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("how", ["fails", "crashes"])
async def test_a_kernel_that_fails(pair: Pair, part: int, how: str) -> None:
    hows = ["", ""]
    hows[part] = how
    with pytest.raises(ta.LibraryError if how == "fails" else ta.ActorFailedError, match="on purpose"):
        await ta.ask_across(Round(pair.arrays, hows))
    for array in pair.arrays:
        with pytest.raises(ta.StaleRefError, match=r"spoiled by collective_library.Round"):
            await array.to_host()
    await pair.check_usable()


async def test_what_follows_a_failed_part_on_a_healthy_device_fails_too(pair: Pair) -> None:
    first, _ = pair.arrays
    await pair.check_usable()
    hold = ta.testing.inject_fault(pair.devices[1], Round, delay=0.05)
    async with trio.open_nursery() as nursery:

        async def spoiled() -> None:
            with pytest.raises(ta.LibraryError):
                await ta.ask_across(Round(pair.arrays, ["", "fails"]))

        nursery.start_soon(spoiled)
        await wait_all_tasks_blocked()
        # In flight behind the part of its device, which does nothing wrong.
        with pytest.raises(ta.InputFailedError):
            await pair.devices[0].submit(Double(first)).wait()
    assert hold.hit == 1
    await pair.check_usable()


async def test_a_failure_goes_on_to_all_that_follow_in_whatever_order_they_are_seen(pair: Pair) -> None:
    array, device = pair.arrays[0], pair.devices[0]
    # The libraries are open.
    await device.ask(OtherDouble(array))
    await device.ask(Double(array))
    barrier = collective.MEETINGS["fails late"] = collective.threading.Barrier(2)
    state = opened(device).dispatch
    assert isinstance(state, InlineDispatch)
    assert state.session is not None
    async with trio.open_nursery() as nursery:

        async def failing() -> None:
            with pytest.raises(ta.LibraryError):
                await ta.ask_across(OtherRound([array], ["fails late"]))

        nursery.start_soon(failing)
        await wait_all_tasks_blocked()
        doubled, copied = device.submit(Double(array)), device.submit(ta.devices.Copy(array, array.dtype))
        await wait_all_tasks_blocked()
        in_flight = [one for queue in state.session.engine.streams.all for one in queue.operations]
        assert len(in_flight) == 3
        barrier.wait()
        while not all(one.event.is_done for one in in_flight):
            # Without the loop: all ends are seen at once, that of the copy first.
            pass
        for following in (doubled, copied):
            with pytest.raises(ta.InputFailedError):
                await following.wait()


@pytest.mark.parametrize("part", [0, 1])
async def test_a_device_that_is_lost_while_its_part_runs(pair: Pair, part: int) -> None:
    ta.testing.inject_fault(pair.devices[part], Round, poison=True)
    with pytest.raises(ta.ContextLostError):
        await ta.ask_across(Round(pair.arrays, ["", ""]))
    with pytest.raises(ta.StaleRefError, match=r"spoiled by collective_library.Round"):
        await pair.arrays[1 - part].to_host()
    await pair.check_usable()
    assert [device.generation for device in pair.devices] == [1 + (part == 0), 1 + (part == 1)]


async def test_a_device_that_is_lost_while_the_other_waits_at_the_gate(pair: Pair) -> None:
    first, second = pair.arrays
    await pair.check_usable()
    ta.testing.inject_fault(pair.devices[1], Double, hang=True)

    async def spoiled() -> None:
        with pytest.raises(ta.ContextLostError) as seen:
            await ta.ask_across(AllReduce(pair.arrays))
        assert seen.value.generation == 1

    async with trio.open_nursery() as nursery:
        hung = pair.devices[1].submit(Double(second))
        nursery.start_soon(spoiled)
        await wait_all_tasks_blocked()
        # Behind its part, on the same stream.
        behind = pair.devices[0].submit(Double(first))
        await wait_all_tasks_blocked()
        assert not behind.is_done
        ta.testing.poison(pair.devices[1])
        with pytest.raises(ta.ContextLostError):
            await hung.wait()
        await behind.wait()
    assert await contents([first]) == [2.0]
    await pair.check_usable()


async def test_kernels_that_meet_hear_of_the_loss_of_one(pair: Pair) -> None:
    collective.MEETINGS["meets"] = collective.threading.Barrier(2)
    with pytest.raises(ta.LibraryError, match="on purpose"):
        await ta.ask_across(Round(pair.arrays, ["meets", "fails"]))
    await pair.check_usable()


async def test_only_the_device_that_is_stuck_is_blamed(system: ta.System) -> None:
    options = attrs.evolve(INLINE, stuck_after=0.2)
    async with AsyncExitStack() as stack:
        pair = await open_pair(stack, system, options, options)
        ta.testing.inject_fault(pair.devices[1], Double, hang=True)
        first, second = pair.arrays
        with trio.fail_after(30):
            hung = pair.devices[1].submit(Double(second))
            with pytest.raises(ta.ContextLostError):
                await ta.ask_across(AllReduce(pair.arrays))
            with pytest.raises(ta.CompletionTimeoutError):
                await hung.wait()
        assert await contents([first]) == [1.0]
        await pair.check_usable()
        assert [device.generation for device in pair.devices] == [1, 2]


async def test_a_device_that_is_closed_while_the_other_waits(pair: Pair, system: ta.System) -> None:
    third = await system.open_device("cpu", options=attrs.evolve(INLINE, close_grace=0.1))
    array = await third.put(np.ones(4))
    ta.testing.inject_fault(third, Double, hang=True)
    async with trio.open_nursery() as nursery:

        async def lost() -> None:
            with pytest.raises((ta.DeviceLostError, ta.ContextLostError)):
                await ta.ask_across(AllReduce([pair.arrays[0], array]))

        hung = third.submit(Double(array))
        nursery.start_soon(lost)
        await wait_all_tasks_blocked()
        await third.close()
        with pytest.raises((ta.DeviceLostError, ta.ContextLostError)):
            await hung.wait()
    await pair.check_usable()


async def test_retry_runs_it_again_where_it_has_no_arrays_of_the_lost_context(system: ta.System) -> None:
    options = attrs.evolve(INLINE, retry=1)
    async with AsyncExitStack() as stack:
        pair = await open_pair(stack, system, options, options)
        ta.testing.inject_fault(pair.devices[1], AllReduce, poison=True)
        sums = await ta.ask_across(AllReduce([np.ones(3), np.ones(3)], on=pair.devices))
        assert await contents(sums) == [2.0, 2.0]
        ta.testing.inject_fault(pair.devices[1], AllReduce, poison=True, count=2)
        with pytest.raises(ta.ContextLostError):
            await ta.ask_across(AllReduce([np.ones(3), np.ones(3)], on=pair.devices))


async def test_cancelled_before_it_is_launched(pair: Pair) -> None:
    # A lease holds the part of one device back, and so the other.
    first, second = pair.arrays
    await pair.check_usable()
    async with second.lease(write=True), trio.open_nursery() as nursery:
        nursery.start_soon(ta.ask_across, Round(pair.arrays, ["", ""]))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert await contents(pair.arrays) == [1.0, 2.0]
    await first.device.ask(Double(first))
    await pair.check_usable()


async def test_cancelled_while_all_its_parts_are_queued(pair: Pair) -> None:
    await pair.check_usable()
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            await ta.ask_across(Round(pair.arrays, ["", ""]))
        except trio.Cancelled:
            outcomes.append("cancelled")
            raise
        outcomes.append("done")

    async with pair.arrays[1].lease(write=True), trio.open_nursery() as nursery:
        # The library actors wait with the parts of the first.
        for _ in range(2):
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert outcomes == ["cancelled"] * 2
    assert await contents(pair.arrays) == [1.0, 2.0]
    await pair.check_usable()


async def test_cancelled_in_flight_it_is_waited_for(pair: Pair) -> None:
    ta.testing.inject_fault(pair.devices[1], Round, delay=0.4)
    with trio.move_on_after(0.2) as scope:
        # What is done in time returns.
        assert await ta.ask_across(Round(pair.arrays, ["", ""])) == [2, 2]
    assert scope.cancel_called
    assert await contents(pair.arrays) == [2.0, 3.0]


async def test_cancelled_in_flight_it_is_left_after_the_grace(pair: Pair) -> None:
    ta.testing.inject_fault(pair.devices[1], AllReduce, delay=0.3)
    before = [(await device.statistics()).memory.blocks for device in pair.devices]
    with ta.cancel_grace(0.0), trio.move_on_after(0.02) as scope:
        await ta.ask_across(AllReduce(pair.arrays))
    assert scope.cancelled_caught
    assert (await pair.devices[1].statistics()).in_flight == 1
    for device in pair.devices:
        await device.synchronize()
    # Its results are given back.
    assert [(await device.statistics()).memory.blocks for device in pair.devices] == before
    await pair.check_usable()


async def test_steps_that_hooks_see(pair: Pair) -> None:
    seen: list[tuple[int, str]] = []
    for number, device in enumerate(pair.devices):
        opened(device).state.hooks.append(
            lambda phase, launch, number=number: seen.append((number, phase.value))
        )
    await ta.ask_across(Round(pair.arrays, ["", ""]))
    phases = [phase.value for phase in Phase]
    for number in range(2):
        assert [phase for part, phase in seen if part == number] == phases
    seen.clear()
    ta.testing.inject_fault(pair.devices[1], Round, fail=ta.LibraryError("no", library="x", code="y"))
    with pytest.raises(ta.LibraryError):
        await ta.ask_across(Round(pair.arrays, ["", ""]))
    # Both were begun, and neither was launched.
    for number in range(2):
        assert [phase for part, phase in seen if part == number] == phases
