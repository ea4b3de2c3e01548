"""Crashes: of a library actor, of the context, and of the device; the fate of every request."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from manual_backend import ManualBackend
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import FftSpec, MatmulSpec
from trio_accel.devices import Operation

AT_ONCE = ta.Backoff(base=0.0)
POISON = ta.ContextPoisonedError("the driver reports an illegal address")


@pytest.fixture
async def manual(system: ta.System, backend: ManualBackend) -> AsyncGenerator[ta.Device, None]:
    """A device that comes back without a back-off; of all restarts it allows three."""
    options = ta.DeviceOptions(backoff=AT_ONCE, intensity=ta.Intensity(3, 60.0))
    async with system.open_device(options=options) as device:
        yield device
        for opened in backend.devices:
            opened.release()


@attrs.define(eq=False)
class Fates:
    """The outcomes of concurrent asks."""

    device: ta.Device
    nursery: trio.Nursery
    outcomes: list[object] = attrs.field(factory=list)

    def ask(self, *operations: Operation[Any, Any]) -> None:
        for operation in operations:
            place = len(self.outcomes)
            self.outcomes.append(None)
            self.nursery.start_soon(self._run, place, operation)

    async def _run(self, place: int, operation: Operation[Any, Any]) -> None:
        try:
            outcome: object = await self.device.ask(operation)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            outcome = error
        assert self.outcomes[place] is None
        self.outcomes[place] = outcome

    def count(self) -> Counter[str]:
        return Counter(type(outcome).__name__ for outcome in self.outcomes)


@pytest.fixture
def fates(manual: ta.Device, nursery: trio.Nursery) -> Fates:
    return Fates(manual, nursery)


def node(system: ta.System, path: str) -> ta.ActorSnapshot:
    return system.tree().find(f"test/manual:0/{path}")


def product(value: float = 1.0) -> ta.linalg.Matmul:
    return ta.linalg.Matmul(np.eye(3), np.full((3, 2), float(value)))


async def poison(device: ta.Device) -> None:
    """Lose the context."""
    ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=POISON)
    with pytest.raises(ta.ContextPoisonedError):
        await device.ask(ta.linalg.Nrm2(np.ones(2)))


async def test_a_crash_under_load_costs_one_request(
    system: ta.System, manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    await manual.ask(ta.fft.Fft(np.ones(4, complex)))
    await manual.ask(product())
    ta.testing.inject_fault(manual, ta.linalg.Matmul, fail=RuntimeError("broken handle"))
    fates.ask(*(product(value) for value in range(10)), *(ta.fft.Fft(np.ones(4, complex)) for _ in range(5)))
    await wait_all_tasks_blocked()
    assert fates.count() == {"AccelRef": 14, "ActorFailedError": 1}
    for value, outcome in enumerate(fates.outcomes[:10]):
        if isinstance(outcome, ta.AccelRef):
            np.testing.assert_array_equal(await outcome.to_host(), np.full((3, 2), value))
        else:
            assert isinstance(outcome, ta.ActorFailedError)
            assert "linalg.matmul" in str(outcome)
            assert "broken handle" in str(outcome)
            assert isinstance(outcome.__cause__, RuntimeError)
    assert node(system, "context/blas").restarts == 1
    assert node(system, "context/fft").restarts == 0
    assert node(system, "context").restarts == 0
    assert manual.generation == 1


async def test_a_new_incarnation_has_a_new_stream_and_handle(
    manual: ta.Device, backend: ManualBackend
) -> None:
    await manual.ask(product())
    device = backend.device
    before, handle = device.stream("blas"), device.opened[-1]
    ta.testing.inject_fault(manual, ta.linalg.Matmul, fail=RuntimeError("broken handle"))
    with pytest.raises(ta.ActorFailedError):
        await manual.ask(product())
    await manual.ask(product())
    assert device.stream("blas") is not before
    assert before.is_closed
    assert handle.is_closed
    assert not device.opened[-1].is_closed


async def test_launched_work_outlives_the_restart(
    system: ta.System, manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    await manual.ask(product())
    device = backend.device
    before, handle = device.stream("blas"), device.opened[-1]
    device.is_held = True
    fates.ask(product(1.0), product(2.0))
    await wait_all_tasks_blocked()
    ta.testing.inject_fault(manual, ta.linalg.Matmul, fail=RuntimeError("broken handle"))
    fates.ask(product(3.0))
    await wait_all_tasks_blocked()
    assert fates.count() == {"NoneType": 2, "ActorFailedError": 1}
    assert node(system, "context/blas").restarts == 1
    assert before.is_closed
    assert not handle.is_closed  # work in flight uses it
    fates.ask(product(4.0))
    await wait_all_tasks_blocked()
    device.release()
    await wait_all_tasks_blocked()
    assert handle.is_closed
    for value, outcome in zip((1.0, 2.0, None, 4.0), fates.outcomes, strict=True):
        if value is not None:
            assert isinstance(outcome, ta.AccelRef)
            np.testing.assert_array_equal(await outcome.to_host(), np.full((3, 2), value))


async def test_a_device_that_closes_waits_for_work_of_earlier_incarnations(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    device = await system.open_device(options=ta.DeviceOptions(backoff=AT_ONCE))
    fates = Fates(device, nursery)
    await device.ask(product())
    backend.device.is_held = True
    fates.ask(product(5.0))
    await wait_all_tasks_blocked()
    ta.testing.inject_fault(device, ta.linalg.Matmul, fail=RuntimeError("broken handle"))
    with pytest.raises(ta.ActorFailedError):
        await device.ask(product())
    nursery.start_soon(device.close)
    await wait_all_tasks_blocked()
    assert fates.count() == {"NoneType": 1}
    backend.device.release()
    await wait_all_tasks_blocked()
    assert fates.count() == {"AccelRef": 1}
    assert backend.device.is_closed


async def test_an_error_on_the_stream_invalidates_arrays_updated_in_place(
    system: ta.System, manual: ta.Device, backend: ManualBackend
) -> None:
    x = await manual.put(np.ones(3))
    other = await manual.put(np.ones(3))
    backend.device.fail[linalg.scal.spec] = lambda: RuntimeError("the kernel broke")
    with pytest.raises(ta.ActorFailedError, match="the kernel broke"):
        await ta.linalg.scal(2.0, x)
    assert repr(x) == "<AccelRef float64 (3,) on manual:0, damaged by linalg.Scal>"
    with pytest.raises(ta.StaleRefError, match=r"linalg\.nrm2: x: .*spoiled by linalg\.scal.*make it again"):
        await ta.linalg.nrm2(x)
    await wait_all_tasks_blocked()
    assert node(system, "context/blas").restarts == 1
    assert await (await ta.linalg.dot(other, other)).item() == 3.0
    assert manual.generation == 1


async def test_a_refusal_on_the_stream_restarts_nothing(
    system: ta.System, manual: ta.Device, backend: ManualBackend
) -> None:
    backend.device.fail[MatmulSpec] = partial(ta.LibraryError, "singular", library="blas", code=3)
    with pytest.raises(ta.LibraryError, match="singular") as caught:
        await manual.ask(product())
    assert (caught.value.device, caught.value.operation) == ("manual:0", "linalg.Matmul")
    assert node(system, "context/blas").restarts == 0


async def test_work_on_failed_results_fails_too(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    x, apart = await manual.put(np.ones(4, complex)), await manual.put(np.ones(4, complex))
    await manual.ask(ta.fft.Fft(np.ones(4, complex)))
    await manual.ask(product())
    device = backend.device
    device.is_held = True
    device.fail[linalg.scal.spec] = partial(ta.LibraryError, "no", library="blas", code=1)
    fates.ask(ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    # On another stream, which waits for the first; and on the same.
    fates.ask(ta.fft.Fft(x), ta.linalg.Dot(x, x), ta.linalg.Dot(apart, apart))
    await wait_all_tasks_blocked()
    device.release()
    await wait_all_tasks_blocked()
    failed, transform, dot, fine = fates.outcomes
    assert isinstance(failed, ta.LibraryError)
    for outcome in (transform, dot):
        assert isinstance(outcome, ta.InputFailedError)
        assert "linalg.scal" in str(outcome)
        # The caller has a copy, so that an error others wait for does not keep the caller's frames.
        assert repr(outcome.__cause__) == repr(failed)
    assert isinstance(fine, ta.AccelRef)
    assert await fine.item() == 4.0


async def test_a_chain_of_failures_crosses_streams(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    x, y = await manual.put(np.ones(4, complex)), await manual.put(np.ones(4, complex))
    z = await manual.put(np.ones(4, complex))
    await manual.ask(ta.fft.Fft(np.ones(4, complex)))
    device = backend.device
    device.is_held = True
    device.fail[FftSpec] = partial(ta.LibraryError, "no", library="fft", code=1)
    for operation in (ta.fft.Fft(x, out=y), ta.linalg.Axpy(1.0, y, z), ta.fft.Ifft(z)):
        fates.ask(operation)
        await wait_all_tasks_blocked()
    device.release()
    await wait_all_tasks_blocked()
    assert [type(outcome) for outcome in fates.outcomes] == [
        ta.LibraryError,
        ta.InputFailedError,
        ta.LibraryError,  # its own
    ]
    with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.axpy"):
        await z.to_host()
    np.testing.assert_array_equal(await x.to_host(), np.ones(4))


async def test_a_queued_request_is_refused_an_array_invalidated_meanwhile(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    async with system.open_device(options=ta.DeviceOptions(in_flight=1, backoff=AT_ONCE)) as device:
        fates = Fates(device, nursery)
        x = await device.put(np.ones(3))
        backend.device.is_held = True
        backend.device.fail[linalg.scal.spec] = lambda: RuntimeError("the kernel broke")
        for operation in (ta.linalg.Scal(2.0, x), ta.linalg.Nrm2(x), ta.linalg.Dot(x, x)):
            fates.ask(operation)
            await wait_all_tasks_blocked()
        backend.device.release()
        await wait_all_tasks_blocked()
        assert [type(outcome) for outcome in fates.outcomes] == [
            ta.ActorFailedError,
            ta.InputFailedError,
            ta.InputFailedError,
        ]
        assert "the kernel broke" in str(fates.outcomes[1].__cause__)
        assert backend.device.enqueued == ["CopyFromHostSpec", "ScalSpec"]


async def test_too_many_crashes_of_a_library_cost_the_context(
    system: ta.System, manual: ta.Device, backend: ManualBackend
) -> None:
    x = await manual.put(np.ones(3))
    ta.testing.inject_fault(manual, ta.linalg.Scal, fail=RuntimeError("broken handle"), count=4)
    for _ in range(4):
        with pytest.raises((ta.ActorFailedError, ta.ContextPoisonedError)):
            await ta.linalg.scal(2.0, x)
    await wait_all_tasks_blocked()
    y = await manual.put(np.ones(3))
    assert manual.generation == y.generation == 2
    assert len(backend.devices) == 2
    assert backend.devices[0].is_closed
    with pytest.raises(
        ta.StaleRefError, match="x: its memory was lost with generation 1 of the device; make it again"
    ) as caught:
        await ta.linalg.scal(2.0, x)
    assert caught.value.generation == 2
    assert repr(x).endswith("lost with generation 1>")
    assert repr(y) == "<AccelRef float64 (3,) on manual:0>"
    assert node(system, "context").restarts == 1
    assert (await manual.statistics()).memory.used == 24


async def test_requests_after_the_last_crash_run_on_the_next_context(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    x = await manual.put(np.ones((3, 2)))
    await manual.ask(product())
    ta.testing.inject_fault(manual, ta.linalg.Matmul, fail=RuntimeError("broken handle"), count=4)
    fates.ask(*(product(value) for value in range(6)))
    fates.ask(*(ta.linalg.Matmul(np.eye(3), x) for _ in range(6)))
    await wait_all_tasks_blocked()
    assert manual.generation == 2
    # The order of their arrival is unknown: any four met the crashes.
    count = fates.count()
    assert count["ActorFailedError"] == 4
    assert count["AccelRef"] + count["StaleRefError"] == 8
    for value, outcome in enumerate(fates.outcomes[:6]):
        if isinstance(outcome, ta.AccelRef):
            assert outcome.generation == 2
            np.testing.assert_array_equal(await outcome.to_host(), np.full((3, 2), value))
        else:
            assert isinstance(outcome, ta.ActorFailedError)
    for outcome in fates.outcomes[6:]:
        assert isinstance(outcome, (ta.StaleRefError, ta.ActorFailedError))


async def test_work_in_flight_at_the_loss_is_reported_as_lost(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    x = await manual.put(np.ones(3))
    await manual.ask(product())
    backend.device.is_held = True
    fates.ask(ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    ta.testing.inject_fault(manual, ta.linalg.Matmul, fail=RuntimeError("broken handle"), count=4)
    fates.ask(*(product() for _ in range(4)))
    await wait_all_tasks_blocked()
    lost = fates.outcomes[0]
    # The device has poisoned nothing: a library broke.
    assert type(lost) is ta.ContextLostError
    assert (lost.operation, lost.generation) == ("linalg.Scal", 1)
    assert fates.count() == {"ContextLostError": 1, "ActorFailedError": 4}


@pytest.mark.slow
async def test_the_error_of_a_closing_device_gives_no_advice_to_continue(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    async with system.open_device(options=ta.DeviceOptions(cancel_grace=0.01)) as device:
        fates = Fates(device, nursery)
        await device.ask(product())
        backend.device.is_held = True
        fates.ask(product())
        await wait_all_tasks_blocked()
    await wait_all_tasks_blocked()
    (lost,) = fates.outcomes
    assert isinstance(lost, ta.DeviceLostError)
    assert lost.args[0] == "the device was closed while this operation was in flight"
    backend.device.release()


async def test_a_context_reported_as_lost_is_replaced(
    system: ta.System, manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    x = await manual.put(np.ones(3))
    await poison(manual)
    await wait_all_tasks_blocked()
    assert manual.generation == 2
    with pytest.raises(ta.StaleRefError, match="generation 1"):
        await x.to_host()
    ref = await manual.ask(product(7.0))
    np.testing.assert_array_equal(await ref.to_host(), np.full((3, 2), 7.0))
    assert node(system, "context").restarts == 1


async def test_a_context_that_a_kernel_loses_is_replaced(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    backend.device.fail[MatmulSpec] = partial(ta.ContextPoisonedError, "an illegal address")
    with pytest.raises(ta.ContextPoisonedError, match="an illegal address") as caught:
        await manual.ask(product())
    assert (caught.value.operation, caught.value.generation) == ("linalg.Matmul", 1)
    await manual.ask(product())
    assert manual.generation == 2


async def test_nothing_more_is_launched_on_a_lost_context(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    async with system.open_device(options=ta.DeviceOptions(in_flight=1, backoff=AT_ONCE)) as device:
        fates = Fates(device, nursery)
        await device.ask(product())
        first = backend.device
        first.is_held = True
        fates.ask(*(product(value) for value in range(3)))  # one runs, two wait
        await wait_all_tasks_blocked()
        ta.testing.inject_fault(device, ta.fft.Fft, fail=POISON)
        fates.ask(ta.fft.Fft(np.ones(4, complex)))
        await wait_all_tasks_blocked()
        first.release()
        await wait_all_tasks_blocked()
        assert first.enqueued.count("MatmulSpec") == 2  # the one at the start, and the one that ran
        assert backend.device.enqueued.count("MatmulSpec") == 2
        # Running requests end with the context; waiting requests run on the next.
        assert fates.count() == {"AccelRef": 2, "ContextPoisonedError": 2}


async def test_requests_wait_while_the_context_is_rebuilt(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    x = await manual.put(np.ones((3, 2)))
    backend.may_open = trio.Event()
    await poison(manual)
    await wait_all_tasks_blocked()
    assert "rebuilding" in repr(manual)
    fates.ask(product(3.0), ta.linalg.Matmul(np.eye(3), x))
    await wait_all_tasks_blocked()
    assert fates.count() == {"NoneType": 2}
    backend.may_open.set()
    await wait_all_tasks_blocked()
    ref, stale = fates.outcomes
    assert isinstance(ref, ta.AccelRef)
    assert isinstance(stale, ta.StaleRefError)
    np.testing.assert_array_equal(await ref.to_host(), np.full((3, 2), 3.0))
    assert "ready, generation 2" in repr(manual)


async def test_so_many_requests_may_wait_and_no_more(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    backend.may_open = trio.Event()
    await poison(manual)
    fates.ask(*(product() for _ in range(1025)))
    await wait_all_tasks_blocked()
    assert fates.count() == {"NoneType": 1024, "QueueFullError": 1}
    (full,) = (outcome for outcome in fates.outcomes if outcome is not None)
    assert "1024 requests wait" in str(full)
    backend.may_open.set()
    await wait_all_tasks_blocked()
    assert fates.count() == {"AccelRef": 1024, "QueueFullError": 1}


async def test_a_library_asked_for_while_the_context_is_lost(
    manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    fates.ask(ta.fft.Fft(np.ones(4, complex)), product(2.0), ta.linalg.Nrm2(np.ones(4)))
    await trio.lowlevel.checkpoint()
    assert manual.dispatch.session is not None
    manual.dispatch.session.context.crash(RuntimeError("gone"))
    await wait_all_tasks_blocked()
    assert fates.count() == {"AccelRef": 3}
    assert manual.generation == 2
    refs = [outcome for outcome in fates.outcomes if isinstance(outcome, ta.AccelRef)]
    assert {2} <= {ref.generation for ref in refs} <= {1, 2}
    for ref, expected in zip(refs, (np.fft.fft(np.ones(4)), np.full((3, 2), 2.0), 2.0), strict=True):
        if ref.generation == 2:
            np.testing.assert_array_equal(await ref.to_host(), expected)


async def test_a_context_that_a_library_finds_lost_is_replaced(
    system: ta.System, manual: ta.Device, backend: ManualBackend, fates: Fates
) -> None:
    """Who asked for the library hears of it; it was not begun, so that its array is as it was."""
    x = await manual.put(np.ones(2))
    backend.device.refuse_library = ta.ContextPoisonedError("an illegal address")
    fates.ask(ta.linalg.Nrm2(np.ones(4)), ta.linalg.Nrm2(np.ones(4)))
    await wait_all_tasks_blocked()
    assert fates.count() == {"ContextPoisonedError": 1, "AccelRef": 1}
    (lost,) = (outcome for outcome in fates.outcomes if isinstance(outcome, ta.ContextPoisonedError))
    assert "was lost while this operation waited for its library to be opened" in str(lost)
    assert (lost.device, lost.operation, lost.generation) == ("manual:0", "linalg.Nrm2", 1)
    assert "an illegal address" in str(lost.__cause__)
    assert manual.generation == 2
    assert node(system, "context").restarts == 1
    with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
        await x.to_host()


async def test_too_many_losses_end_the_device_for_all_at_once(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    options = ta.DeviceOptions(backoff=AT_ONCE, intensity=ta.Intensity(1, 60.0))
    device = await system.open_device(options=options)
    fates = Fates(device, nursery)
    x = await device.put(np.ones(2))
    await poison(device)
    await device.ask(product())
    backend.may_open = trio.Event()
    await poison(device)
    fates.ask(product(), product(), ta.linalg.Nrm2(x))
    await wait_all_tasks_blocked()
    assert fates.count() == {"DeviceLostError": 3}
    assert len({id(outcome) for outcome in fates.outcomes}) == 3
    for outcome in fates.outcomes:
        assert "the device was given up" in str(outcome)
        assert "1 restarts within 60 s" in str(outcome)
    with pytest.raises(ta.DeviceLostError):
        await device.put(np.ones(2))
    with pytest.raises(ta.DeviceLostError):
        await device.synchronize()
    await device.close()
    # The system lives, and opens another.
    backend.may_open.set()
    async with system.open_device() as other:
        assert await (await other.put(np.array(5.0))).item() == 5.0


async def test_a_context_that_cannot_be_rebuilt_ends_the_device(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    device = await system.open_device(options=ta.DeviceOptions(backoff=AT_ONCE))
    fates = Fates(device, nursery)
    backend.refuse_open = ta.DriverError("no device any longer", code=100)
    await poison(device)
    fates.ask(product())
    await wait_all_tasks_blocked()
    (outcome,) = fates.outcomes
    assert isinstance(outcome, ta.DeviceLostError)
    assert "no device any longer" in str(outcome)


async def test_waiting_for_a_lost_context_to_be_idle_ends(
    manual: ta.Device, backend: ManualBackend, fates: Fates, nursery: trio.Nursery
) -> None:
    await manual.ask(product())
    backend.device.is_held = True
    fates.ask(product())
    await wait_all_tasks_blocked()
    done = trio.Event()

    async def synchronize() -> None:
        await manual.synchronize()
        done.set()

    nursery.start_soon(synchronize)
    await wait_all_tasks_blocked()
    ta.testing.inject_fault(manual, ta.linalg.Nrm2, fail=RuntimeError("broken handle"), count=4)
    fates.ask(*(ta.linalg.Nrm2(np.ones(2)) for _ in range(4)))
    await wait_all_tasks_blocked()
    assert done.is_set()


async def test_restarts_leave_no_streams_behind(manual: ta.Device, backend: ManualBackend) -> None:
    x = await manual.put(np.ones(2))
    for _ in range(3):
        ta.testing.inject_fault(manual, ta.linalg.Nrm2, fail=RuntimeError("broken handle"))
        with pytest.raises(ta.ActorFailedError):
            await ta.linalg.nrm2(x)
        await ta.linalg.nrm2(x)
    assert manual.dispatch.session is not None
    engine = manual.dispatch.session.engine
    assert len(engine.streams.all) == 2
    assert len(engine._memory_in_use.uses[x.block.id].reads or ()) == 1
    assert [stream.is_closed for stream in backend.device.streams] == [False, True, True, True, False]


async def test_the_error_of_a_crash_keeps_no_array_alive(device: ta.Device) -> None:
    """It is shown in the tree for as long as the actor lives, with its frames."""
    x = await device.put(np.ones(1000))
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("crash"), count=2)
    with pytest.raises(ta.ActorFailedError) as caught:
        await ta.linalg.scal(2.0, x)
    cause = caught.value.__cause__
    del caught
    pending = device.submit(ta.linalg.Scal(2.0, await x.copy()))
    with pytest.raises(ta.ActorFailedError):
        await pending.wait()
    del x, pending
    gc.collect()
    statistics = await device.statistics()
    assert statistics.memory.blocks == 0
    assert cause is not None
