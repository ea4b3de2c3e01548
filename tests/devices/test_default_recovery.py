"""Recovery where the options leave it open: a context, or a library, that has served is in no crash loop."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND
from manual_backend import ManualBackend

import trio_accel as ta
from trio_accel.backends.base import Isolation

POISON = ta.ContextPoisonedError("the driver reports an illegal address")


async def serve(device: ta.Device) -> None:
    """One request that completes."""
    assert await (await device.put(np.array(5.0))).item() == 5.0


async def lose(device: ta.Device) -> None:
    """One request that loses the context."""
    ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=POISON)
    with pytest.raises(ta.ContextLostError):
        await device.ask(ta.linalg.Nrm2(np.ones(4)))


class Restarts(list[ta.ActorRestarted]):
    """Restarts of one system's actors."""

    def __init__(self, system: ta.System) -> None:
        super().__init__()
        system.subscribe(self.take, messages=False)

    def take(self, event: ta.Event) -> None:
        if isinstance(event, ta.ActorRestarted):
            self.append(event)

    @property
    def delays(self) -> list[float]:
        return [event.delay for event in self]


def about(delays: list[float]) -> object:
    # Each is varied by a tenth of itself.
    return pytest.approx(delays, rel=0.11)


async def test_losses_after_progress_never_end_the_device_and_wait_for_a_second_at_most(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    restarts = Restarts(system)
    async with system.open_device() as device:
        for _ in range(9):
            await serve(device)
            await lose(device)
        await serve(device)
        assert restarts.delays == about([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])
        assert max(restarts.delays) <= 1.0
        assert (await device.statistics()).losses == 9
        assert device.generation == 10
        # A context with some time of work is replaced at once.
        await trio.sleep(0.6)
        await lose(device)
        await serve(device)
        assert restarts.delays[-1] == 0.0


async def test_losses_without_progress_end_it_as_they_did(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    restarts = Restarts(system)
    device = await system.open_device()
    for _ in range(4):
        await lose(device)
    with pytest.raises(ta.DeviceLostError, match="allows 3 restarts within 60 s"):
        await serve(device)
    assert restarts.delays == about([0.0, 0.1, 0.2])


async def test_a_refused_request_is_not_progress(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    device = await system.open_device()
    refusal = ta.LibraryError("no", library="blas", code=7)
    for _ in range(4):
        ta.testing.inject_fault(device, ta.linalg.Dot, fail=refusal)
        with pytest.raises(ta.LibraryError):
            await device.ask(ta.linalg.Dot(np.ones(4), np.ones(4)))
        await lose(device)
    with pytest.raises(ta.DeviceLostError, match="allows 3 restarts within 60 s"):
        await serve(device)


async def test_an_explicit_intensity_counts_every_loss(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    restarts = Restarts(system)
    device = await system.open_device(options=ta.DeviceOptions(intensity=ta.Intensity(2, 60.0)))
    for _ in range(3):
        await serve(device)
        await lose(device)
    with pytest.raises(ta.DeviceLostError, match="allows 2 restarts within 60 s"):
        await serve(device)
    assert restarts.delays == about([0.0, 0.1])


async def test_an_explicit_back_off_holds_for_every_loss(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    backoff = ta.Backoff(initial=2.0, base=4.0, factor=3.0, jitter=0.0)
    restarts = Restarts(system)
    async with system.open_device(options=ta.DeviceOptions(backoff=backoff)) as device:
        for _ in range(5):
            await serve(device)
            await lose(device)
        await serve(device)
    assert restarts.delays == [2.0, 4.0, 12.0, 30.0, 30.0]


async def test_a_used_library_restarts_without_a_limit_and_without_a_lost_context(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    restarts = Restarts(system)
    async with system.open_device() as device:
        x = await device.put(np.ones(4))
        for _ in range(6):
            assert await (await ta.linalg.nrm2(x)).item() == 2.0
            ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("broken handle"))
            with pytest.raises(ta.ActorFailedError):
                await ta.linalg.nrm2(x)
        assert await (await ta.linalg.nrm2(x)).item() == 2.0
        assert device.generation == 1
    assert {event.path.rpartition("/")[2] for event in restarts} == {"blas"}
    assert restarts.delays == about([0.0, 0.1, 0.2, 0.4, 0.8, 1.0])


async def test_a_library_that_never_serves_takes_its_context_along(
    system: ta.System, backend: ManualBackend, autojump_clock: trio.testing.MockClock
) -> None:
    async with system.open_device() as device:
        ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("broken handle"), count=4)
        for _ in range(4):
            with pytest.raises(ta.ActorFailedError):
                await device.ask(ta.linalg.Nrm2(np.ones(4)))
        while device.generation == 1 or not device.state.availability.is_ready:
            await device.state.availability.wait_changed()
        await serve(device)
        assert device.generation == 2


async def test_an_operator_gets_each_loss_and_a_separate_report_of_many(
    system: ta.System,
    backend: ManualBackend,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "trio_accel.devices")
    async with system.open_device() as device:
        await serve(device)
        for _ in range(2):
            await lose(device)
        for _ in range(8):
            await serve(device)
            await lose(device)
        await serve(device)
    told = [record for record in caplog.records if record.name == "trio_accel.devices"]
    losses = [record.getMessage() for record in told if record.levelname == "WARNING"]
    assert len(losses) == 10
    assert losses[0].startswith(f"device {device.path} lost its context of generation 1: ")
    assert "the driver reports an illegal address" in losses[0]
    assert losses[0].endswith("; the next one starts at once")
    assert "generation 2, which had completed no request: " in losses[1]
    assert "the next one starts in 1.00 s" in losses[-1] or "the next one starts in 0.9" in losses[-1]
    (summary,) = [record.getMessage() for record in told if record.levelname == "ERROR"]
    assert summary.startswith(f"device {device.path} has lost 5 contexts within 60 s, 5 since it was opened")
    assert summary.endswith("; to have the device given up instead, set DeviceOptions.intensity")


async def test_an_operator_is_not_told_to_set_an_existing_setting(
    system: ta.System,
    backend: ManualBackend,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ta.DeviceOptions(intensity=ta.Intensity(9, 30.0))
    async with system.open_device(options=options) as device:
        for _ in range(5):
            await serve(device)
            await lose(device)
        await serve(device)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.endswith("given up instead, lower the 9 restarts within 30 s of DeviceOptions.intensity")


async def test_an_operator_is_not_told_to_have_a_device_given_up_that_already_is(
    system: ta.System,
    backend: ManualBackend,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ta.DeviceOptions(intensity=ta.Intensity(0, 30.0), on_failure="reopen")
    async with system.open_device(options=options) as device:
        for _ in range(5):
            await serve(device)
            await lose(device)
            while not device.is_ready:
                await device.state.availability.wait_changed()  # type: ignore[attr-defined]
    *losses, summary = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(losses) == 5
    assert all("; the device is given up; the next one starts in " in loss for loss in losses)
    assert summary.startswith(f"device {device.path} has lost 5 contexts within 60 s, 5 since it was opened")
    assert summary.endswith(": requests lose them, or the hardware does")


async def test_giving_up_is_reported(
    system: ta.System,
    backend: ManualBackend,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = await system.open_device(options=ta.DeviceOptions(intensity=ta.Intensity(0)))
    await serve(device)
    await lose(device)
    with pytest.raises(ta.DeviceLostError):
        await serve(device)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "trio_accel.devices"]
    assert told == f"device {device.path} is given up in generation 1; contexts lost since it was opened: 1"


@pytest.mark.parametrize("isolation", ["process"])
@pytest.mark.skipif(BACKEND != "cpu", reason="one backend is enough")
async def test_used_workers_are_replaced_without_a_limit(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, spares=1)
    restarts = Restarts(system)
    async with system.open_device(BACKEND, options=options) as device:
        kept = await device.put(np.arange(4.0))
        for _ in range(5):
            ta.testing.inject_fault(device, ta.linalg.Nrm2, kill=True)
            with pytest.raises(ta.ContextLostError):
                await ta.linalg.nrm2(kept)
            np.testing.assert_array_equal(await kept.to_host(), np.arange(4.0))
        assert (device.generation, (await device.statistics()).losses) == (6, 5)
    assert [event.has_progressed for event in restarts] == [True] * 5
    assert max(restarts.delays) <= 1.0


@pytest.mark.parametrize("isolation", ["process"])
@pytest.mark.skipif(BACKEND != "cpu", reason="one backend is enough")
async def test_workers_that_serve_nobody_are_not(system: ta.System, isolation: Isolation) -> None:
    device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    ta.testing.inject_fault(device, ta.linalg.Nrm2, kill=True, count=4)
    for _ in range(4):
        with pytest.raises(ta.ContextLostError):
            await device.ask(ta.linalg.Nrm2(np.ones(4)))
    with pytest.raises(ta.DeviceLostError, match="given up"):
        await serve(device)


@pytest.mark.parametrize("isolation", ["process", "inline"])
@pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning")
@pytest.mark.skipif(BACKEND != "cpu", reason="its loss is made by hand")
async def test_logs_distinguish_two_devices_of_one_name(
    system: ta.System, isolation: ta.Isolation, caplog: pytest.LogCaptureFixture
) -> None:
    """And report once where a lost context was raised: in the tree, without an additional traceback."""
    options = ta.DeviceOptions(isolation=isolation)
    await system.open_device("cpu", options=options)
    second = await system.open_device("cpu", options=options)
    x = await second.put(np.ones(3))
    ta.testing.poison(second)
    with pytest.raises(ta.ContextLostError):
        await x.to_host()
    while second.generation == 1 or not second.state.availability.is_ready:
        await second.state.availability.wait_changed()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "trio_accel.devices"]
    assert told.startswith(f"device {system.name}/cpu:0#2 lost its context of generation 1: ")
    crashes = [record for record in caplog.records if "crashed" in record.getMessage()]
    assert {record.exc_info for record in crashes} <= {None}
