"""Cancelling an ask: a queued one is withdrawn, a running one is awaited, within the grace."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from manual_backend import ManualBackend
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta


class Asker:
    """Runs one ask in a task of its own."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.outcome: object = None

    async def run(self, operation: object, device: ta.Device) -> None:
        with self.scope:
            try:
                self.outcome = await device.ask(operation)  # type: ignore[arg-type]  # of any operation
            except Exception as error:  # noqa: BLE001  # looked at by the test
                self.outcome = error
        if self.scope.cancelled_caught:
            self.outcome = "cancelled"


def start(nursery: trio.Nursery, device: ta.Device, operation: object) -> Asker:
    asker = Asker()
    nursery.start_soon(asker.run, operation, device)
    return asker


async def test_a_queued_ask_is_withdrawn(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    async with system.open_device(options=ta.DeviceOptions(in_flight=1)) as device:
        x = await device.put(np.ones(4))
        backend.device.is_held = True
        running = start(nursery, device, ta.linalg.Scal(2.0, x))
        await wait_all_tasks_blocked()
        waiting = start(nursery, device, ta.linalg.Dot(x, np.ones(4)))  # for the window
        await wait_all_tasks_blocked()
        queued = start(nursery, device, ta.linalg.Dot(x, np.ones(4)))  # in the mailbox
        await wait_all_tasks_blocked()
        used = backend.device.memory().used
        queued.scope.cancel()
        await wait_all_tasks_blocked()
        assert (queued.outcome, waiting.outcome, running.outcome) == ("cancelled", None, None)
        waiting.scope.cancel()
        await wait_all_tasks_blocked()
        assert (waiting.outcome, running.outcome) == ("cancelled", None)
        assert backend.device.memory().used == used == 32
        backend.device.release()
        await wait_all_tasks_blocked()
        assert running.outcome is x
        assert backend.device.enqueued == ["CopyFromHostSpec", "ScalSpec"]
        assert (await device.statistics()).memory.used == 32
        np.testing.assert_array_equal(await x.to_host(), np.full(4, 2.0))


async def test_a_running_ask_is_awaited_until_the_device_is_done(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.ones(4))
    backend.device.is_held = True
    asker = start(nursery, manual, ta.linalg.Matmul(x, np.ones((4, 2))))
    await wait_all_tasks_blocked()
    used = backend.device.memory().used
    asker.scope.cancel()
    await wait_all_tasks_blocked()
    assert asker.outcome is None
    assert backend.device.memory().used == used == 32 + 64 + 16
    backend.device.release()
    await wait_all_tasks_blocked()
    assert asker.outcome is not None
    asker.outcome = None
    await ta.linalg.scal(1.0, x)
    await manual.synchronize()
    # Long before the grace is over.
    assert backend.device.memory().used == 32
    assert not manual.dispatch.session.engine.alarms  # type: ignore[union-attr]


async def test_past_the_grace_the_asker_is_let_go_and_the_memory_is_not(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    x = await manual.put(np.ones(4))
    backend.device.is_held = True
    asker = start(nursery, manual, ta.linalg.Matmul(x, np.ones((4, 2))))
    await wait_all_tasks_blocked()
    asker.scope.cancel()
    await wait_all_tasks_blocked()
    mock_clock.jump(4.9)
    await wait_all_tasks_blocked()
    assert asker.outcome is None
    mock_clock.jump(0.2)
    await wait_all_tasks_blocked()
    assert asker.outcome == "cancelled"
    statistics = await manual.statistics()
    assert statistics.in_flight == 1
    assert statistics.memory.used == 32 + 64 + 16
    await manual.synchronize()  # waits for nothing that was given up
    backend.device.release()
    await ta.linalg.scal(1.0, x)
    await manual.synchronize()
    statistics = await manual.statistics()
    assert (statistics.in_flight, statistics.memory.used) == (0, 32)
    assert statistics.launched == statistics.completed == 3


async def test_each_asker_has_its_own_grace(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    x = await manual.put(np.ones(4))
    backend.device.is_held = True
    first = start(nursery, manual, ta.linalg.Scal(2.0, x))
    second = start(nursery, manual, ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    first.scope.cancel()
    await wait_all_tasks_blocked()
    mock_clock.jump(3.0)
    second.scope.cancel()
    await wait_all_tasks_blocked()
    mock_clock.jump(2.5)
    await wait_all_tasks_blocked()
    assert (first.outcome, second.outcome) == ("cancelled", None)
    mock_clock.jump(3.0)
    await wait_all_tasks_blocked()
    assert second.outcome == "cancelled"


async def test_no_grace_at_all(system: ta.System, backend: ManualBackend, nursery: trio.Nursery) -> None:
    async with system.open_device(options=ta.DeviceOptions(cancel_grace=0.0)) as device:
        x = await device.put(np.ones(4))
        backend.device.is_held = True
        asker = start(nursery, device, ta.linalg.Scal(2.0, x))
        await wait_all_tasks_blocked()
        asker.scope.cancel()
        await wait_all_tasks_blocked()
        assert asker.outcome == "cancelled"
        backend.device.release()


async def test_a_deadline_counts_like_a_cancellation(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    x = await manual.put(np.ones(4))
    backend.device.is_held = True
    asker = Asker()
    asker.scope.deadline = trio.current_time() + 1.0
    nursery.start_soon(asker.run, ta.linalg.Scal(2.0, x), manual)
    await wait_all_tasks_blocked()
    mock_clock.jump(1.5)
    await wait_all_tasks_blocked()
    assert asker.outcome is None
    backend.device.release()
    await wait_all_tasks_blocked()
    assert asker.outcome is x  # it has been computed, so it is delivered


async def test_an_ask_that_waits_for_the_context_is_withdrawn(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    backend.may_open = trio.Event()
    ta.testing.inject_fault(manual, ta.linalg.Matmul, fail=ta.ContextPoisonedError("gone"))
    with pytest.raises(ta.ContextPoisonedError):
        await manual.ask(ta.linalg.Matmul(np.eye(2), np.eye(2)))
    await wait_all_tasks_blocked()
    asker = start(nursery, manual, ta.linalg.Matmul(np.eye(2), np.eye(2)))
    other = start(nursery, manual, ta.linalg.Matmul(np.eye(2), np.full((2, 2), 3.0)))
    await wait_all_tasks_blocked()
    asker.scope.cancel()
    await wait_all_tasks_blocked()
    assert (asker.outcome, other.outcome) == ("cancelled", None)
    backend.may_open.set()
    await wait_all_tasks_blocked()
    assert isinstance(other.outcome, ta.AccelRef)
    np.testing.assert_array_equal(await other.outcome.to_host(), np.full((2, 2), 3.0))
    assert backend.device.enqueued.count("MatmulSpec") == 1
    assert manual.pending == 0


async def test_a_cancelled_program_leaves_with_its_devices(backend: ManualBackend) -> None:
    with trio.CancelScope() as scope:
        async with ta.open_system("test") as system, system.open_device() as device:
            x = await device.put(np.ones(4))
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ta.linalg.scal, 2.0, x)
                scope.cancel()
    assert scope.cancelled_caught
    assert backend.device.is_closed
