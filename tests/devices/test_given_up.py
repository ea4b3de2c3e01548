"""When a device is given up: not while it is idle, and not for good where it is to be opened again."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from manual_backend import ManualBackend
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta

POISON = ta.ContextPoisonedError("the driver reports an illegal address")
# Without waits before a restart, on a stopped clock.
AT_ONCE = ta.Backoff(initial=0.0, base=0.0)
WORKER = ta.DeviceOptions(isolation="process", backoff=AT_ONCE)
needs_worker = pytest.mark.skipif(BACKEND != "cpu", reason="one backend is enough")


async def lose(device: ta.Device) -> None:
    """One request that loses the context."""
    ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=POISON)
    with pytest.raises(ta.ContextLostError):
        await device.ask(ta.linalg.Nrm2(np.ones(4)))


async def change(device: Any) -> None:
    """Wait until it has a context, or refuses requests."""
    availability = device.state.availability
    while not (availability.is_ready or availability.is_shut):
        await availability.wait_changed()


async def kill(device: Any) -> None:
    """Kill the worker, and wait for the consequence."""
    generation, availability = device.generation, device.state.availability
    os.kill(device.dispatch.process.pid, signal.SIGKILL)
    while availability.is_ready and device.generation == generation:
        await availability.wait_changed()
    await change(device)


async def live(device: Any, clock: MockClock, seconds: float) -> None:
    """Let time pass once the worker is whole."""
    while device.dispatch._pool not in device.dispatch._alarms:
        # Each is sent to the worker and back, and does not count as a request.
        await device.statistics()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


@needs_worker
async def test_an_idle_healthy_worker_may_be_killed_without_a_limit(
    system: ta.System, mock_clock: MockClock
) -> None:
    async with system.open_device("cpu", options=WORKER) as device:
        kept = await device.put(np.arange(4.0))
        for _ in range(10):
            await live(device, mock_clock, 1.0)
            await kill(device)
        assert (await kept.to_host()).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert (device.generation, device.losses) == (11, 10)


@needs_worker
async def test_a_worker_that_dies_sooner_counts(system: ta.System, mock_clock: MockClock) -> None:
    device = await system.open_device("cpu", options=WORKER)
    for _ in range(4):
        assert device.is_ready
        await live(device, mock_clock, 0.9)
        await kill(device)
    with pytest.raises(ta.DeviceLostError, match="allows 3 restarts within 60 s") as caught:
        await device.put(1.0)
    assert caught.value.retry_after is None


@needs_worker
async def test_an_explicit_intensity_counts_idle_losses_too(system: ta.System, mock_clock: MockClock) -> None:
    options = ta.DeviceOptions(isolation="process", backoff=AT_ONCE, intensity=ta.Intensity(1, 60.0))
    device = await system.open_device("cpu", options=options)
    for _ in range(2):
        await live(device, mock_clock, 1.0)
        await kill(device)
    assert device.is_ended


async def test_a_context_inline_counts_as_working_after_a_second_too(
    system: ta.System, backend: ManualBackend, autojump_clock: MockClock
) -> None:
    async with system.open_device() as device:
        for _ in range(10):
            await trio.sleep(1.1)
            await lose(device)
        assert await (await device.put(5.0)).item() == 5.0


async def give_up(device: ta.Device) -> ta.DeviceLostError:
    """Lose one context more than allowed, and return the error of a caller then."""
    while device.outage is None:
        await lose(device)
        with trio.move_on_after(1.0):
            await change(device)
    with pytest.raises(ta.DeviceLostError) as caught:
        await device.put(1.0)
    return caught.value


async def reopened(device: Any) -> float:
    """Wait until it has a context; returns the seconds."""
    began = trio.current_time()
    while not device.is_ready:
        await device.state.availability.wait_changed()
    return trio.current_time() - began


async def test_a_device_waiting_to_reopen_refuses_until_then_and_serves(
    system: ta.System, backend: ManualBackend, autojump_clock: MockClock
) -> None:
    options = ta.DeviceOptions(on_failure="reopen")
    async with system.open_device(options=options) as device:
        error = await give_up(device)
        assert error.retry_after == pytest.approx(1.0, rel=0.11)
        assert "was given up: ContextPoisonedError: the driver reports an illegal address" in error.message
        assert "it is opened again in" in error.message
        assert isinstance(error.__cause__, ta.ContextPoisonedError)
        assert not device.is_ready
        assert not device.is_ended
        with pytest.raises(ta.DeviceLostError, match="opened again"):
            device.submit(ta.linalg.Nrm2(np.ones(4)))
        with pytest.raises(ta.DeviceLostError, match="opened again"):
            await device.statistics()
        assert await reopened(device) == pytest.approx(error.retry_after, abs=0.01)
        assert device.outage is None
        assert await (await device.put(5.0)).item() == 5.0


async def test_pauses_grow_to_a_minute_until_a_context_makes_progress(
    system: ta.System, backend: ManualBackend, autojump_clock: MockClock
) -> None:
    async with system.open_device(options=ta.DeviceOptions(on_failure="reopen")) as device:
        pauses: list[float] = []
        for _ in range(8):
            await give_up(device)
            pauses.append(await reopened(device))
        assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], rel=0.11)
        assert max(pauses) <= 60.0 + 1e-9
        await (await device.put(5.0)).item()
        losses = device.losses
        await give_up(device)
        assert device.losses == losses + 5
        assert await reopened(device) == pytest.approx(1.0, rel=0.11)


async def test_the_pause_may_be_chosen(
    system: ta.System, backend: ManualBackend, autojump_clock: MockClock
) -> None:
    intensity = ta.Intensity(0, pause=ta.Backoff(initial=7.0, base=9.0, jitter=0.0))
    options = ta.DeviceOptions(on_failure="reopen", intensity=intensity)
    async with system.open_device(options=options) as device:
        waits: list[float] = []
        for _ in range(2):
            assert (await give_up(device)).retry_after == pytest.approx(7.0 + 2.0 * len(waits))
            waits.append(await reopened(device))
        assert waits == pytest.approx([7.0, 9.0])
    device = await system.open_device(options=ta.DeviceOptions(intensity=intensity))
    await give_up(device)
    assert device.is_ended


async def test_it_is_seen_while_it_is_given_up(
    system: ta.System,
    backend: ManualBackend,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    restarts: list[ta.ActorRestarted] = []

    def take(event: ta.Event) -> None:
        if isinstance(event, ta.ActorRestarted):
            restarts.append(event)

    system.subscribe(take, messages=False)
    options = ta.DeviceOptions(on_failure="reopen")
    with ta.telemetry.record(system) as recorder:
        device = await system.open_device(options=options)
        await give_up(device)
        assert [row.state for row in recorder.snapshot().devices] == ["given up"]
        assert [event.is_paused for event in restarts] == [False] * 3 + [True]
        (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "lost its context of generation 4, which had completed no request: " in told.getMessage()
        assert "; the device is given up; the next one starts in" in told.getMessage()
        assert "given up for now" in repr(device)
        assert "was given up" in str(system.tree().find(device.path).note)
        await reopened(device)
        assert [row.state for row in recorder.snapshot().devices] == ["running"]
        assert "was given up" not in str(system.tree().find(device.path).note)


async def test_closing_it_meanwhile_waits_for_nothing(
    system: ta.System, backend: ManualBackend, autojump_clock: MockClock
) -> None:
    async with system.open_device(options=ta.DeviceOptions(on_failure="reopen")) as device:
        await give_up(device)
        began = trio.current_time()
    assert trio.current_time() == began
    with pytest.raises(ta.DeviceLostError, match="is closed"):
        await device.put(1.0)
    assert device.outage is not None
    assert "is closed" in device.outage.message


@needs_worker
async def test_arrays_of_workers_outlive_the_pause_and_waiting_requests_are_refused(
    system: ta.System, mock_clock: MockClock
) -> None:
    options = ta.DeviceOptions(
        isolation="process", backoff=AT_ONCE, on_failure="reopen", intensity=ta.Intensity(0)
    )
    async with system.open_device("cpu", options=options) as device:
        kept = await device.put(np.arange(4.0))
        async with kept.lease(write=True) as view, trio.open_nursery() as nursery:
            refused: list[ta.DeviceLostError] = []

            async def wait() -> None:
                # Queued after the lease.
                with pytest.raises(ta.DeviceLostError, match="opened again") as caught:
                    await kept.to_host()
                refused.append(caught.value)

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            await kill(device)
            assert not device.is_ready
            with pytest.raises(ta.DeviceLostError, match="opened again"):
                async with kept.lease():
                    pass
            view[0] = 9.0
        assert len(refused) == 1
        mock_clock.jump(1.2)
        await reopened(device)
        assert (await kept.to_host()).tolist() == [9.0, 1.0, 2.0, 3.0]


@needs_worker
async def test_groups_and_worlds_report_it_and_continue_with_it(
    system: ta.System, mock_clock: MockClock
) -> None:
    options = ta.DeviceOptions(
        isolation="process", backoff=AT_ONCE, on_failure="reopen", intensity=ta.Intensity(0)
    )
    async with system.open_devices(["cpu", "cpu"], options=options) as group, ta.open_world(group) as world:
        arrays = [await device.put(np.full(3, 1.0 + n)) for n, device in enumerate(group)]
        resting, other = group
        await kill(resting)
        assert group.place() is other
        with pytest.raises(ta.AccelError) as caught:
            await world.all_reduce(arrays)
        assert "was given up" in f"{caught.value} {caught.value.__cause__}"
        mock_clock.jump(1.2)
        await reopened(resting)
        sums = await world.all_reduce(arrays)
        assert [(await each.to_host()).tolist() for each in sums] == [[3.0] * 3] * 2


def test_on_failure_has_two_choices() -> None:
    with pytest.raises(ValueError, match="on_failure must be 'end' or 'reopen'"):
        ta.DeviceOptions(on_failure="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pause must be a Backoff"):
        ta.Intensity(pause=1.0)  # type: ignore[arg-type]
