"""Cancelling an ask: a queued one is withdrawn, a running one is awaited, within the grace."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import trio
from manual_backend import ManualBackend
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import HostUse
from trio_accel.devices import Empty, Put, ToHost

BLAS = "trio_accel.linalg:BlasActor"


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
    alarms = manual.dispatch.session.engine.alarms  # type: ignore[union-attr]
    # One reports that the context has been whole for a second.
    before = len(alarms)
    backend.device.is_held = True
    asker = start(nursery, manual, ta.linalg.Matmul(x, np.ones((4, 2))))
    await wait_all_tasks_blocked()
    used = backend.device.memory().used
    asker.scope.cancel()
    await wait_all_tasks_blocked()
    assert asker.outcome is None
    assert len(alarms) == before + 1
    assert backend.device.memory().used == used == 32 + 64 + 16
    backend.device.release()
    await wait_all_tasks_blocked()
    assert asker.outcome is not None
    asker.outcome = None
    await ta.linalg.scal(1.0, x)
    await manual.synchronize()
    # Long before the grace is over.
    assert backend.device.memory().used == 32
    assert len(alarms) == before


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


async def test_without_a_grace_the_asker_leaves_at_once_and_the_operation_continues(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    async with system.open_device(options=ta.DeviceOptions(in_flight=1)) as device:
        x, y = await device.put(np.ones(4)), await device.put(np.ones(4))
        backend.device.is_held = True
        asker = start(nursery, device, ta.linalg.Scal(2.0, x))
        await wait_all_tasks_blocked()
        asker.scope.cancel()
        await wait_all_tasks_blocked()
        assert asker.outcome == "cancelled"
        assert device.generation == 1
        # It has its place in the window until it ends.
        following = start(nursery, device, ta.linalg.Scal(3.0, y))
        await wait_all_tasks_blocked()
        statistics = await device.statistics()
        assert (statistics.in_flight, statistics.queues[BLAS].waiting) == (1, 1)
        # It is part of the launched work.
        is_over = trio.Event()

        async def synchronize() -> None:
            await device.synchronize()
            is_over.set()

        nursery.start_soon(synchronize)
        await wait_all_tasks_blocked()
        assert not is_over.is_set()
        backend.device.release()
        await is_over.wait()
        await wait_all_tasks_blocked()
        assert following.outcome is y
        np.testing.assert_array_equal(await x.to_host(), np.full(4, 2.0))


async def test_an_abandoned_request_is_ordered_and_released_as_usual(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.ones((4, 4)))
    backend.device.is_held = True
    with ta.cancel_grace(0.0):
        product = start(nursery, manual, ta.linalg.Matmul(x, x))
        scaled = start(nursery, manual, ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    product.scope.cancel()
    scaled.scope.cancel()
    await wait_all_tasks_blocked()
    assert (product.outcome, scaled.outcome) == ("cancelled", "cancelled")
    # A program that drops everything leaves what the device uses, and no later array takes that place.
    assert backend.device.memory().used == 2 * 128
    reading = start(nursery, manual, ToHost(x))
    other = start(nursery, manual, Empty((4, 4), ta.DType.float64, 7.0))
    await wait_all_tasks_blocked()
    assert backend.device.memory().used == 3 * 128
    backend.device.release()
    await wait_all_tasks_blocked()
    np.testing.assert_array_equal(reading.outcome, np.full((4, 4), 2.0))
    assert isinstance(other.outcome, ta.AccelRef)
    np.testing.assert_array_equal(await other.outcome.to_host(), np.full((4, 4), 7.0))
    product.outcome = scaled.outcome = reading.outcome = other.outcome = None
    await ta.linalg.scal(1.0, x)
    await manual.synchronize()
    assert backend.device.memory().used == 128


async def test_an_array_that_a_left_operation_was_changing_is_spoiled_if_it_fails(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.ones(4))
    backend.device.is_held = True
    backend.device.fail[linalg.scal.spec] = lambda: ta.LibraryError("refused late")
    with ta.cancel_grace(0.0):
        asker = start(nursery, manual, ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    asker.scope.cancel()
    await wait_all_tasks_blocked()
    assert asker.outcome == "cancelled"
    backend.device.release()
    await manual.synchronize()
    with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
        await x.to_host()


@pytest.mark.parametrize("chosen", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("is_observed", [False, True], ids=["direct", "by_mailbox"])
async def test_one_call_chooses_its_own_grace(
    manual: ta.Device,
    system: ta.System,
    backend: ManualBackend,
    nursery: trio.Nursery,
    mock_clock: MockClock,
    chosen: float,
    is_observed: bool,
) -> None:
    subscription = system.subscribe(lambda event: None) if is_observed else None
    x = await manual.put(np.ones(4))
    backend.device.is_held = True
    with ta.cancel_grace(chosen):
        asker = start(nursery, manual, ta.linalg.Scal(2.0, x))
        with ta.cancel_grace(2.0):
            inner = start(nursery, manual, ta.linalg.Scal(2.0, x))
    other = start(nursery, manual, ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    for each in (asker, inner, other):
        each.scope.cancel()
    await wait_all_tasks_blocked()
    ends = sorted([(chosen, asker), (2.0, inner), (5.0, other)], key=lambda end: end[0])
    for seconds, ending in ends:
        mock_clock.jump(max(0.0, seconds - 0.1 - trio.current_time()))
        await wait_all_tasks_blocked()
        assert seconds < 0.1 or ending.outcome is None
        mock_clock.jump(0.2)
        await wait_all_tasks_blocked()
        assert ending.outcome == "cancelled"
    backend.device.release()
    await manual.synchronize()
    if subscription is not None:
        subscription.close()


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", None, True])
def test_a_grace_is_checked(seconds: object) -> None:
    with pytest.raises(ValueError, match="cancel_grace: seconds must be a number of at least 0"):
        ta.cancel_grace(seconds).__enter__()  # type: ignore[arg-type]


class TestHostArrays:
    """A cancelled caller may change and free its arrays, because the device no longer uses them."""

    async def test_a_pending_copy_to_the_program_does_not_take_place(
        self, manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
    ) -> None:
        x, out = await manual.put(np.ones(4)), np.zeros(4)
        backend.device.is_held = True
        with ta.cancel_grace(0.0):
            asker = start(nursery, manual, ToHost(x, out))
        await wait_all_tasks_blocked()
        asker.scope.cancel()
        await wait_all_tasks_blocked()
        assert asker.outcome == "cancelled"
        backend.device.release()
        await manual.synchronize()
        np.testing.assert_array_equal(out, np.zeros(4))
        np.testing.assert_array_equal(await x.to_host(), np.ones(4))

    async def test_a_pending_copy_from_the_program_does_not_take_place(
        self, manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
    ) -> None:
        host = np.ones(1 << 17)
        backend.device.is_held = True
        with ta.cancel_grace(0.0):
            put = start(nursery, manual, Put(host))
            product = start(nursery, manual, ta.linalg.Dot(host, host))
        await wait_all_tasks_blocked()
        put.scope.cancel()
        product.scope.cancel()
        await wait_all_tasks_blocked()
        assert (put.outcome, product.outcome) == ("cancelled", "cancelled")
        backend.device.release()
        await manual.synchronize()
        assert backend.device.memory().used == 0

    @pytest.mark.parametrize("count", [4, 1 << 17], ids=["small", "large"])
    async def test_an_update_in_place_gets_the_operand_unchanged(
        self, manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery, count: int
    ) -> None:
        """A small operand is copied aside; with a large one the caller waits until it is copied."""
        x, host = await manual.put(np.ones(count)), np.full(count, 2.0)
        backend.device.is_held = True
        with ta.cancel_grace(0.0):
            asker = start(nursery, manual, ta.linalg.Axpy(3.0, host, x))
        await wait_all_tasks_blocked()
        asker.scope.cancel()
        await wait_all_tasks_blocked()
        if count == 4:
            assert asker.outcome == "cancelled"
            host[:] = np.nan
            backend.device.release()
        else:
            assert asker.outcome is None
            backend.device.release()
        await manual.synchronize()
        np.testing.assert_array_equal(await x.to_host(), np.full(count, 7.0))

    async def test_a_begun_copy_is_awaited(self, system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
        """A copy of the CPU backend, with its stream in a thread."""
        entered, leave = threading.Event(), threading.Event()
        copy_of = HostUse.begin

        def begin(use: HostUse) -> object:
            array = copy_of(use)
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                assert leave.wait(10)
            return array

        async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
            x = await device.put(np.ones(4))
            monkeypatch.setattr(HostUse, "begin", begin)
            async with trio.open_nursery() as nursery:
                out = np.zeros(4)
                asker = start(nursery, device, ToHost(x, out))
                await trio.to_thread.run_sync(entered.wait)
                asker.scope.cancel()
                await wait_all_tasks_blocked()
                assert asker.outcome is None
                leave.set()
            np.testing.assert_array_equal(out, np.ones(4))


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
    with pytest.raises(ta.ContextLostError):
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
