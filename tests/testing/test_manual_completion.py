"""Completions that the test lets go."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND

import trio_accel as ta
from trio_accel.testing import ManualCompletion


@pytest.fixture
def manual() -> ManualCompletion:
    return ManualCompletion(is_holding=False)


@pytest.fixture
async def held(system: ta.System, manual: ManualCompletion) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(
        isolation="inline", completion=manual, cancel_grace=0.05, close_grace=0.05, in_flight=2
    )
    async with system.open_device(BACKEND, options=options) as device:
        yield device
        manual.pass_all()


async def test_operations_stay_in_flight_until_they_are_let_go(
    held: ta.Device, manual: ManualCompletion, nursery: trio.Nursery
) -> None:
    x = await held.put(np.arange(3.0))
    manual.hold()
    norm: list[float] = []

    async def ask() -> None:
        norm.append(await (await ta.linalg.nrm2(x)).item())

    nursery.start_soon(ask)
    await manual.wait_held()
    assert (manual.held, manual.operations) == (1, ("linalg.Nrm2",))
    assert (await held.statistics()).in_flight == 1
    await trio.testing.wait_all_tasks_blocked()
    assert not norm
    manual.release()
    assert manual.held == 0
    await manual.wait_held()
    assert manual.operations == ("devices.ToHost",)
    manual.release()
    with trio.fail_after(60):
        while not norm:
            await trio.testing.wait_all_tasks_blocked()
    assert norm == [pytest.approx(5**0.5, rel=1e-12)]


async def test_exactly_so_many_are_let_go_in_the_order_of_launch_also_across_libraries(
    held: ta.Device, manual: ManualCompletion
) -> None:
    x = await held.put(np.eye(3))
    manual.hold()
    first = held.submit(ta.linalg.Scal(2.0, x))
    await manual.wait_held()
    second = held.submit(ta.fft.Fft(x))
    await manual.wait_held(2)
    third = held.submit(ta.linalg.Nrm2(np.ones(4)))
    await manual.wait_held(3)
    assert manual.operations == ("linalg.Scal", "fft.Fft", "linalg.Nrm2")
    manual.release(2)
    await second.wait()
    assert first.is_done
    # The device is done with it, and other completions were noticed; this one was not.
    await trio.testing.wait_all_tasks_blocked()
    assert not third.is_done
    assert manual.held == 1
    manual.release_all()
    assert await third.wait() is third.value


async def test_back_pressure(held: ta.Device, manual: ManualCompletion) -> None:
    x = await held.put(np.ones(3))
    manual.hold()
    for _ in range(2):
        held.submit(ta.linalg.Scal(2.0, x))
    with pytest.raises(ta.QueueFullError):
        held.submit(ta.linalg.Scal(2.0, x))
    await manual.wait_held(2)
    manual.pass_all()
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 4.0))


async def test_a_cancelled_asker_waits_for_its_grace(
    system: ta.System, manual: ManualCompletion, nursery: trio.Nursery
) -> None:
    options = ta.DeviceOptions(isolation="inline", completion=manual, cancel_grace=30.0)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(3))
        manual.hold()
        scope = trio.CancelScope()
        over = trio.Event()

        async def ask() -> None:
            with scope:
                await ta.linalg.scal(2.0, x)
            over.set()

        nursery.start_soon(ask)
        await manual.wait_held()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not over.is_set()
        manual.release()
        with trio.fail_after(60):
            await over.wait()
        manual.pass_all()


async def test_past_the_grace_the_asker_is_let_go_and_the_operation_is_not(
    held: ta.Device, manual: ManualCompletion, nursery: trio.Nursery
) -> None:
    x = await held.put(np.ones(3))
    # By then the library is open, which takes as long as it takes.
    await ta.linalg.scal(1.0, x)
    manual.hold()
    over = trio.Event()
    scope = trio.CancelScope()

    async def ask() -> None:
        with scope:
            await ta.linalg.scal(2.0, x)
        over.set()

    nursery.start_soon(ask)
    await manual.wait_held()
    scope.cancel()
    with trio.fail_after(60):
        await over.wait()
    assert scope.cancelled_caught
    assert manual.operations == ("linalg.Scal",)
    assert (await held.statistics()).in_flight == 1
    manual.pass_all()
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 2.0))


async def test_held_work_counts_as_hung(
    mock_clock: trio.testing.MockClock, system: ta.System, manual: ManualCompletion
) -> None:
    """The clock stands still except for the held operation: others take as long as they take."""
    options = ta.DeviceOptions(
        isolation="inline", completion=manual, stuck_after=1.0, cancel_grace=0.05, close_grace=0.05
    )
    async with system.open_device(BACKEND, options=options) as device:
        await ta.linalg.nrm2(await device.put(np.ones(3)))
        manual.hold()
        launched = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(be_hung, device)
            await manual.wait_held()
            while manual.held:
                mock_clock.jump(0.05)
                await trio.testing.wait_all_tasks_blocked()
            assert 1.0 < trio.current_time() - launched < 1.2
        await device.synchronize()
        assert (manual.held, device.generation) == (0, 2)
        manual.pass_all()
        await ta.linalg.nrm2(await device.put(np.ones(3)))


async def be_hung(device: ta.Device) -> None:
    with pytest.raises(ta.CompletionTimeoutError):
        await device.put(np.ones(3))


async def test_a_lost_context_ends_held_work(held: ta.Device, manual: ManualCompletion) -> None:
    manual.hold()
    pending = held.submit(ta.linalg.Nrm2(np.ones(3)))
    await manual.wait_held()
    ta.testing.poison(held)
    with pytest.raises(ta.ContextLostError):
        await pending.wait()
    await held.synchronize()
    assert (manual.held, held.generation) == (0, 2)
    again = held.submit(ta.linalg.Nrm2(np.ones(4)))
    await manual.wait_held()
    manual.release()
    value = await again.wait()
    manual.pass_all()
    assert await value.item() == 2.0


async def test_a_device_that_closes_waits_for_its_grace_only(
    system: ta.System, manual: ManualCompletion
) -> None:
    options = ta.DeviceOptions(isolation="inline", completion=manual, cancel_grace=0.05, close_grace=0.05)
    device = await system.open_device(BACKEND, options=options)
    x = await device.put(np.ones(3))
    manual.hold()
    pending = device.submit(ta.linalg.Scal(2.0, x))
    await manual.wait_held()
    with trio.fail_after(60):
        await device.close()
    with pytest.raises(ta.AccelError):
        await pending.wait()
    assert manual.held == 0


async def test_so_many_are_not_held(held: ta.Device, manual: ManualCompletion) -> None:
    for count in (1, -1, True, 1.0):
        with pytest.raises(ValueError, match=f"release: count must be from 0 to the 0 held, got {count}"):
            manual.release(count)  # type: ignore[arg-type]
    manual.release_all()
    assert repr(manual) == "<ManualCompletion, 0 held>"


async def test_a_worker_process_cannot_have_it(system: ta.System, manual: ManualCompletion) -> None:
    options = ta.DeviceOptions(isolation="process", completion=manual)
    with pytest.raises(ta.NotSupportedError, match=r"the test moves it by hand.*isolation='inline'"):
        await system.open_device(BACKEND, options=options)
    with pytest.raises(TypeError, match="in its own process"):
        pickle.dumps(manual)


def test_it_holds_engines_only(manual: ManualCompletion) -> None:
    with pytest.raises(TypeError, match="operations of an engine"):
        manual.open(lambda: None)
