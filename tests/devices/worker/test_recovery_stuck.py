"""Endless work, unresponsive workers, and cases to be taken for neither."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import slow_import
import slow_library
import trio
from chosen import BACKEND, NAME
from isolated import options, outcome, wait_in_flight
from processes import until
from recovery_load import FFT

import trio_accel as ta
from trio_accel.devices import ToHost


async def test_the_asker_of_stuck_work_learns_so_and_others_by_their_class(system: ta.System) -> None:
    found: dict[str, object] = {}

    async def ask(name: str, wait: Callable[..., Any], *arguments: Any) -> None:
        found[name] = await outcome(wait, *arguments)

    async with system.open_device(BACKEND, options=options(stuck_after=0.4, in_flight=2)) as device:
        x, y, z = [await device.put(np.ones(3)) for _ in range(3)]
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        async with trio.open_nursery() as nursery:
            for name, operation in {
                "stuck": ta.linalg.Scal(2.0, x),
                "behind it": ta.linalg.Scal(2.0, y),
                "not begun": ta.linalg.Scal(3.0, z),
                "uses it": ta.linalg.Nrm2(x),
            }.items():
                nursery.start_soon(ask, name, device.ask, operation)
                await trio.lowlevel.checkpoint()
        stuck, behind, failed = found["stuck"], found["behind it"], found["uses it"]
        assert type(stuck) is ta.CompletionTimeoutError
        assert (stuck.operation, stuck.device, stuck.generation) == ("linalg.Scal", NAME, 1)
        assert "stuck_after = 0.4 s" in str(stuck)
        assert type(behind) is ta.ContextLostError
        assert type(behind.__cause__) is ta.CompletionTimeoutError
        assert found["not begun"] is z
        assert (await z.to_host()).tolist() == [3.0] * 3
        assert type(failed) is ta.InputFailedError
        assert type(failed.__cause__) is ta.CompletionTimeoutError
        for ref in (x, y):
            with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
                await ref.to_host()
        assert device.generation == 2


async def test_waiting_for_another_stream_is_not_being_stuck(system: ta.System) -> None:
    """The copy waits for the hanging operation, on a stream older than its stream."""
    found: dict[str, object] = {}

    async def ask(name: str, wait: Callable[..., Any], *arguments: Any) -> None:
        found[name] = await outcome(wait, *arguments)

    async with system.open_device(BACKEND, options=options(stuck_after=0.4)) as device:
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        async with trio.open_nursery() as nursery:
            for name, operation in {"stuck": ta.linalg.Scal(2.0, x), "waits": ToHost(x)}.items():
                nursery.start_soon(ask, name, device.ask, operation)
                await trio.lowlevel.checkpoint()
        assert type(found["stuck"]) is ta.CompletionTimeoutError
        assert type(found["waits"]) is ta.ContextLostError


async def test_a_stuck_submitted_operation(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(stuck_after=0.3)) as device:
        # A kernel used for the first time is loaded at its launch, which waits for the hanging one.
        await device.ask(ta.fft.Fft(np.ones(4)))
        ta.testing.inject_fault(device, ta.linalg.Matmul, hang=True)
        pending = device.submit(ta.linalg.Matmul(np.eye(2), np.eye(2)))
        after = device.submit(ta.fft.Fft(np.ones(4)))
        with pytest.raises(ta.CompletionTimeoutError):
            await pending.wait()
        assert (await (await after.wait()).to_host()).tolist() == [4.0, 0.0, 0.0, 0.0]
        with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.matmul"):
            await pending.value.to_host()


async def test_a_launch_that_does_not_return_with_nothing_else_in_flight(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(stuck_after=0.3)) as device:
        x, other = await device.put(np.ones(3)), await device.put(np.ones(3))
        with trio.fail_after(60), pytest.raises(ta.CompletionTimeoutError) as caught:
            await device.ask(slow_library.Sleep(x, 600.0))
        assert "the worker's loop stood still with it" in str(caught.value)
        with pytest.raises(ta.StaleRefError, match=r"spoiled by .*Sleep"):
            await x.to_host()
        assert (await other.to_host()).tolist() == [1.0] * 3
        assert device.generation == 2


async def test_a_launch_that_fails_leaves_nothing_to_look_after(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(stuck_after=0.3)) as device:
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("injected"))
        with pytest.raises(ta.ActorFailedError):
            await ta.linalg.scal(2.0, x)
        # clock: a longer pause only makes it surer that `stuck_after` has passed
        await trio.sleep(1.2)
        assert device.generation == 1


async def test_a_worker_whose_loop_stands_still_after_stuck_work(system: ta.System) -> None:
    """As by a call of the driver that waits for endless work, so that the worker itself sees nothing."""
    # Opened with the device, because opening a library next to a hanging operation would take as long as it
    # does.
    opened = options(stuck_after=0.3, libraries=(FFT, slow_library.Sleep.library))
    async with system.open_device(BACKEND, options=opened) as device:
        x, other = await device.put(np.ones(3)), await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.fft.Fft, hang=True)
        pending = device.submit(ta.fft.Fft(np.ones(4)))
        await wait_in_flight(device, 1, FFT)
        still = device.submit(slow_library.Sleep(x, 600.0))
        with trio.fail_after(60), pytest.raises(ta.CompletionTimeoutError) as caught:
            await pending.wait()
        assert "the worker's loop stood still with it" in str(caught.value)
        assert caught.value.operation == "fft.Fft"
        with pytest.raises(ta.ContextLostError) as lost:
            await still.wait()
        assert "stood still for stuck_after = 0.3 s and was killed" in str(lost.value.__cause__)
        assert (await other.to_host()).tolist() == [1.0] * 3
        assert device.generation == 2


@pytest.mark.slow
async def test_a_long_enqueue_is_not_silence(system: ta.System) -> None:
    """The worker's loop is busy with it for longer than the heart may be silent."""
    async with system.open_device(BACKEND, options=options(heartbeat_timeout=1.0)) as device:
        ref = await device.put(np.ones(3))
        assert await device.ask(slow_library.Sleep(ref, 2.0)) is ref
        assert (await ref.to_host()).tolist() == [-1.0] * 3
        assert device.generation == 1


@pytest.mark.slow
async def test_a_worker_that_holds_the_interpreter_gives_no_sign_of_life(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(heartbeat_timeout=1.0)) as device:
        ref = await device.put(np.ones(3))
        with trio.fail_after(60), pytest.raises(ta.ContextLostError) as caught:
            await device.ask(slow_library.Hold(ref, 1000))
        assert "gave no sign of life for 1 s" in str(caught.value.__cause__)
        await device.put(np.ones(3))
        assert device.generation == 2


@pytest.mark.parametrize("what", ["request", "load", "call"])
async def test_a_stopped_worker_is_replaced_after_stuck_after(system: ta.System, what: str) -> None:
    """Also if it has begun with nothing: its engine looks for nothing then, and its heart may be long."""
    async with system.open_device(BACKEND, options=options(stuck_after=0.4, spares=1)) as device:
        x = await device.put(np.eye(8))
        await device.ask(ta.linalg.Matmul(x, x))
        await until(lambda: device.dispatch.spares == 1)
        process = device.dispatch.process
        asking = {
            "request": partial(device.ask, ta.linalg.Matmul(x, x)),
            "load": partial(_load, device, x),
            "call": device.statistics,
        }[what]
        async with trio.open_nursery() as nursery:
            if what == "load":
                nursery.start_soon(asking)
                await device.statistics()
            process.send_signal(signal.SIGSTOP)
            start = trio.current_time()
            if what != "load":
                nursery.start_soon(asking)
            await until(lambda: process.is_dead, 60)
            took = trio.current_time() - start
        assert took > 0.4
        assert device.generation == 2


async def _load(device: ta.Device, x: ta.AccelRef) -> None:
    """Ask until the context is another one."""
    while device.generation == 1:
        with suppress(ta.ContextLostError, ta.CompletionTimeoutError):
            await device.ask(ta.linalg.Matmul(x, x))


async def test_an_idle_stopped_worker_is_not_replaced(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(stuck_after=0.5)) as device:
        process = device.dispatch.process
        process.send_signal(signal.SIGSTOP)
        # clock: a longer pause only makes it surer that `stuck_after` has passed
        await trio.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        ref = await device.put(np.arange(3.0))
        assert (await ref.to_host()).tolist() == [0.0, 1.0, 2.0]
        assert device.generation == 1


@pytest.mark.slow
@pytest.mark.parametrize("holds", ["", "interpreter"])
async def test_a_library_that_takes_long_to_open_is_not_stuck(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, holds: str
) -> None:
    """It is imported by the first request for it, which is not begun: the worker is busy, and runs."""
    monkeypatch.setenv("TRIO_ACCEL_TEST_HOLDS", holds)
    async with system.open_device(BACKEND, options=options(stuck_after=0.5)) as device:
        ref = await device.put(np.ones(3))
        # The engine looks after the copy, and could not continue looking while the interpreter is held.
        link = device.dispatch._sender.link
        await until(lambda: link.page.looks == 0)
        assert await device.ask(slow_import.Negate(ref)) is ref
        assert (await ref.to_host()).tolist() == [-1.0] * 3
        assert device.generation == 1


async def test_a_briefly_stopped_worker_continues(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(heartbeat_timeout=2.0)) as device:
        process = device.dispatch.process
        process.send_signal(signal.SIGSTOP)
        with trio.move_on_after(0.3):
            # Cancelled in the midst: within the grace the worker is back.
            await trio.sleep_forever()
        process.send_signal(signal.SIGCONT)
        ref = await device.put(np.arange(3.0))
        assert (await ref.to_host()).tolist() == [0.0, 1.0, 2.0]
        assert device.generation == 1
