"""Cancelled callers of a device in a worker: withdrawn, awaited, or let go after the grace."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from cuts import Cut
from isolated import options, wait_in_flight
from processes import launcher, until
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.devices import ToHost


@asynccontextmanager
async def cancelled_in_flight(
    device: ta.Device, scope: trio.CancelScope
) -> AsyncGenerator[list[float], None]:
    """Cancel a scope when an operation of the BLAS is in flight; gives the time when it was."""
    cancelled_at: list[float] = []

    async def cancel() -> None:
        with trio.CancelScope(shield=True):
            await wait_in_flight(device, 1)
        cancelled_at.append(trio.current_time())
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel)
        yield cancelled_at


async def balanced(device: ta.Device, blocks: int) -> None:
    """Nothing is under way, and only this many arrays are there."""
    await device.synchronize()
    found = await device.statistics()
    assert (found.in_flight, device.pending, found.queues) == (0, 0, {})
    with trio.fail_after(60):
        # Memory open to a killed worker is kept until the worker is dead, and an array until no traceback
        # keeps it.
        while (await device.statistics()).memory.blocks != blocks:
            gc.collect()


# Backends whose device memory the application has mapped; for the others see `test_staged_copies`.
mapped = pytest.mark.skipif(BACKEND != "cpu", reason="the host cannot map the memory of this device")


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_loop_of_asks_ends_when_it_is_cancelled(system: ta.System, isolation: Any) -> None:
    """Each of them may be over by the time that the worker hears of the cancellation."""
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        host = np.ones(1 << 16)
        ended = trio.Event()

        async def ask() -> None:
            while not ended.is_set():
                ref = await device.put(host)
                await ref.to_host()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            # clock: any moment will do
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
            nursery.cancel_scope.shield = True
            try:
                await until(lambda: not nursery.child_tasks, 60.0)
            finally:
                ended.set()


async def test_a_cancelled_asker_gets_nothing_before_it_begins(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        ref = await device.put(np.ones(3))
        with trio.CancelScope() as scope:
            scope.cancel()
            await ta.linalg.scal(2.0, ref)
        assert scope.cancelled_caught
        assert (await ref.to_host()).tolist() == [1.0] * 3


async def test_a_queued_request_is_withdrawn_and_never_runs(system: ta.System) -> None:
    """One is with the worker, the others wait in the application."""
    async with system.open_device(BACKEND, options=options(in_flight=1)) as device:
        x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
        delay = ta.testing.inject_fault(device, ta.linalg.Scal, delay=1.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ta.linalg.scal, 2.0, x)
            await wait_in_flight(device, 1)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(ta.linalg.scal, 5.0, y)
                    inner.start_soon(ta.linalg.scal, 7.0, y)
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert scope.cancelled_caught
            # They have not waited for the request in the worker.
            assert len(nursery.child_tasks) == 1
        assert delay.hit == 1
        assert (await x.to_host()).tolist() == [2.0] * 3
        assert (await y.to_host()).tolist() == [1.0] * 3
        assert device.generation == 1
        await balanced(device, 2)


@mapped
async def test_a_request_that_waits_in_the_worker_is_withdrawn(system: ta.System) -> None:
    """It waits for an operation of another library that it depends on."""
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.ones(3))
        await ta.linalg.nrm2(x)
        async with x.lease(write=True) as array:
            with trio.move_on_after(0.1) as scope:
                await ta.linalg.scal(5.0, x)
            assert scope.cancelled_caught
            array[:] = 3.0
        assert (await x.to_host()).tolist() == [3.0] * 3
        assert device.generation == 1
        await balanced(device, 1)


async def test_a_running_operation_is_awaited_within_the_grace(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(cancel_grace=5.0)) as device:
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.3)
        start = trio.current_time()
        with trio.CancelScope() as scope:
            # It is complete before the caller gets the outcome, so the array is in a known state.
            async with cancelled_in_flight(device, scope):
                assert await ta.linalg.scal(2.0, x) is x
        assert trio.current_time() - start >= 0.3
        assert (await x.to_host()).tolist() == [2.0] * 3
        assert device.generation == 1


async def test_after_the_grace_the_asker_leaves_and_the_operation_continues(system: ta.System) -> None:
    """It keeps what it uses until it ends, and has its effect then; the worker serves all the while."""
    async with system.open_device(BACKEND, options=options(cancel_grace=0.1)) as device:
        x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
        process = device.dispatch.process
        ta.testing.inject_fault(device, ta.linalg.Axpy, delay=2.5)
        with trio.CancelScope() as scope:
            async with cancelled_in_flight(device, scope) as cancelled_at:
                await ta.linalg.axpy(2.0, x, y)
        assert scope.cancelled_caught
        assert trio.current_time() - cancelled_at[0] >= 0.1
        used = (await device.statistics()).memory.blocks
        del x
        found = await device.statistics()
        assert (found.in_flight, found.memory.blocks) == (1, used)
        # Work ordered after it, because it touches the same memory, has its result.
        assert (await y.to_host()).tolist() == [3.0] * 3
        assert device.generation == 1
        assert device.dispatch.process is process
        await balanced(device, 1)


@pytest.mark.alone
@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("is_host", [False, True], ids=["arrays", "host_arrays"])
async def test_a_deadline_holds_on_an_operation_that_hangs(
    system: ta.System, isolation: Any, is_host: bool
) -> None:
    chosen = ta.DeviceOptions(isolation=isolation, close_grace=0.2)
    async with system.open_device(BACKEND, options=chosen) as device:
        x, y = await device.put(np.eye(64)), await device.put(np.ones(3))
        operand = np.eye(64) if is_host else x
        await device.ask(ta.linalg.Matmul(operand, x))
        await device.ask(ta.fft.Fft(y))
        await device.synchronize()
        before = await device.statistics()
        ta.testing.inject_fault(device, ta.linalg.Matmul, hang=True)
        start = trio.current_time()
        with trio.move_on_after(0.2) as scope:
            await device.ask(ta.linalg.Matmul(operand, x))
        late = trio.current_time() - start - 0.2
        assert scope.cancelled_caught
        assert late < 0.05
        found = await device.statistics()
        assert found.in_flight == 1
        # The result, and the copy of the operand.
        assert found.memory.blocks == before.memory.blocks + 1 + is_host
        # The device continues, with the same context.
        assert (await (await device.ask(ta.fft.Fft(y))).to_host()).real.tolist() == [3.0, 0.0, 0.0]
        assert device.generation == 1
        start = trio.current_time()
    assert trio.current_time() - start < 2.5


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_abandoned_work_ends_by_stuck_after(system: ta.System, isolation: Any) -> None:
    async with system.open_device(
        BACKEND, options=options(isolation=isolation, stuck_after=0.3, cancel_grace=0.0)
    ) as device:
        x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        with trio.CancelScope() as scope:
            async with cancelled_in_flight(device, scope):
                await ta.linalg.scal(2.0, x)
        assert scope.cancelled_caught
        await until(lambda: device.generation == 2)
        if isolation == "process":
            with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
                await x.to_host()
            assert (await y.to_host()).tolist() == [1.0] * 3
        del x, y
        await balanced(device, 0)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_one_call_waits_for_its_begun_work(system: ta.System, isolation: Any) -> None:
    async with system.open_device(BACKEND, options=options(isolation=isolation)) as device:
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.3)
        # Whoever waited for the whole grace would wait until the test's own time limit.
        with trio.CancelScope() as scope, ta.cancel_grace(3000.0):
            async with cancelled_in_flight(device, scope):
                assert await ta.linalg.scal(2.0, x) is x
        assert (await x.to_host()).tolist() == [2.0] * 3


async def test_a_left_operation_that_the_worker_dies_with(system: ta.System) -> None:
    """Its targets are invalid, and nothing of it is kept."""
    async with system.open_device(BACKEND, options=options(retry=1)) as device:
        x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        with trio.CancelScope() as scope:
            async with cancelled_in_flight(device, scope):
                await ta.linalg.scal(2.0, x)
        assert scope.cancelled_caught
        with trio.move_on_after(0.05) as scope:
            # Queued after it, so that it is left as well.
            await device.ask(ta.linalg.Matmul(np.eye(2), np.eye(2)))
        assert scope.cancelled_caught
        device.dispatch.process.kill()
        await until(lambda: device.generation == 2)
        with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
            await x.to_host()
        assert (await y.to_host()).tolist() == [1.0] * 3
        del x
        await balanced(device, 1)


@mapped
async def test_to_move_on_in_a_loop_leaves_nothing(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.ones((64, 64)))
        large = np.ones(1 << 16)
        for number in range(60):
            with trio.move_on_after(number * 1e-4):
                await ta.linalg.matmul(x, x)
            with trio.move_on_after(number * 1e-4):
                await (await device.put(large)).to_host()
            with trio.move_on_after(number * 1e-4):
                async with x.lease(write=True):
                    await device.ask(ta.linalg.Matmul(np.eye(64), np.eye(64)))
        assert device.generation == 1
        await balanced(device, 1)


async def test_cancelled_while_the_worker_is_replaced(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(cancel_grace=0.0)) as device:
        x = await device.put(np.ones(3))
        # However soon the next worker would be there.
        os.kill(launcher(), signal.SIGSTOP)
        device.dispatch.process.kill()
        await wait_all_tasks_blocked()
        await until(lambda: device.dispatch.process is None)
        for _ in range(5):
            with trio.move_on_after(0.005) as scope:
                await ta.linalg.scal(5.0, x)
            assert scope.cancelled_caught
        if BACKEND == "cpu":
            with trio.move_on_after(0.005) as scope:
                async with x.lease():
                    pass
            assert scope.cancelled_caught
        with trio.move_on_after(0.005) as scope:
            await device.synchronize()
        assert scope.cancelled_caught
        os.kill(launcher(), signal.SIGCONT)
        assert (await x.to_host()).tolist() == [1.0] * 3
        assert device.generation == 2
        await balanced(device, 1)


@mapped
@pytest.mark.parametrize("is_read", [False, True], ids=["put", "to_host"])
async def test_cancelled_while_the_application_copies(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """The copy ends within the grace: the caller returns only when nobody uses its array."""
    async with system.open_device(BACKEND, options=options(cancel_grace=5.0)) as device:
        host = np.arange(1 << 16, dtype=float)
        ref = await device.put(host)
        cut = Cut(monkeypatch)
        out = np.zeros_like(host)
        is_over = False

        async def ask(scope: trio.CancelScope) -> None:
            nonlocal is_over
            with scope:
                await (ref.to_host(out=out) if is_read else device.put(host))
            is_over = True

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(ask, scope)
            await cut.wait_entered()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not is_over
            cut.leave.set()
        assert device.generation == 1
        if is_read:
            np.testing.assert_array_equal(out, host)
        np.testing.assert_array_equal(await ref.to_host(), host)
        await balanced(device, 1)


@mapped
@pytest.mark.parametrize("is_read", [False, True], ids=["put", "to_host"])
async def test_the_worker_dies_while_the_application_copies(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """The copy is cut; when the caller gets the loss, nothing touches its array."""
    async with system.open_device(BACKEND, options=options()) as device:
        host = np.arange(1 << 16, dtype=float)
        ref, other = await device.put(host), await device.put(host)
        cut = Cut(monkeypatch)
        out = np.zeros_like(host)
        found: list[BaseException] = []

        async def ask() -> None:
            with pytest.raises(ta.ContextLostError) as caught:
                await (ref.to_host(out=out) if is_read else device.put(host))
            assert not device.dispatch._copies._running
            found.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await cut.wait_entered()
            device.dispatch.process.kill()
        assert found[0].operation == ("devices.ToHost" if is_read else "devices.Put")
        cut.leave.set()
        np.testing.assert_array_equal(await ref.to_host(), host)
        np.testing.assert_array_equal(await other.to_host(), host)
        assert device.generation == 2
        await balanced(device, 2)


@mapped
async def test_past_the_grace_of_a_copy_nothing_uses_the_array(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system.open_device(BACKEND, options=options(cancel_grace=0.1)) as device:
        ref = await device.put(np.arange(1 << 16, dtype=float))
        out = np.zeros(1 << 16)
        cut = Cut(monkeypatch)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(device.ask, ToHost(ref, out))
                await cut.wait_entered()
                scope.cancel()
        assert scope.cancelled_caught
        assert not device.dispatch._copies._running
        cut.leave.set()
        assert (await ref.to_host())[-1] == (1 << 16) - 1
        assert device.generation == 1
        await balanced(device, 1)


@mapped
async def test_a_lease_is_cancelled_in_its_turn(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.ones(3))
        async with x.lease(write=True):
            for _ in range(3):
                with trio.move_on_after(0.02) as scope:
                    async with x.lease():
                        raise AssertionError("it is not its turn")
                assert scope.cancelled_caught
        async with x.lease() as array:
            assert array.tolist() == [1.0] * 3
        await balanced(device, 1)


@pytest.mark.parametrize(("finish", "grace"), [(1000.0, 1.0), (0.5, 1000.0)])
async def test_a_closing_device_lets_running_work_finish_within_its_grace(
    system: ta.System, finish: float, grace: float
) -> None:
    device = await system.open_device(BACKEND, options=options(close_grace=grace))
    x = await device.put(np.ones(3))
    ta.testing.inject_fault(device, ta.linalg.Scal, delay=finish)
    found: list[object] = []

    async def ask(wait: Callable[..., Any], *arguments: Any) -> None:
        try:
            found.append(await wait(*arguments))
        except ta.AccelError as error:
            found.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, device.ask, ta.linalg.Scal(2.0, x))
        await wait_in_flight(device, 1)
        await device.close()
    # Whoever waited for the longer of both would wait until the test's own time limit.
    if finish < grace:
        assert found == [x]
    else:
        assert [type(outcome) for outcome in found] == [ta.DeviceLostError]
