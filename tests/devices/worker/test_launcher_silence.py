"""A silent launcher, a launcher that dies repeatedly or does not start: only its devices fail."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from isolated import options, replace_worker
from processes import children, launcher

import trio_accel as ta
from trio_accel.actors import ActorRestarted, SystemOptions
from trio_accel.devices.launcher import _link as _launcher_link
from trio_accel.devices.launcher._launcher import LauncherError, open_launcher

pytestmark = [pytest.mark.no_device, pytest.mark.own_launcher]

SLEEP = ("-c", "import signal; signal.pause()")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for a launcher are short."""
    monkeypatch.setattr(_launcher_link, "_SILENCE", 0.5)
    monkeypatch.setattr(_launcher_link, "_END", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_worker_dead", [False, True])
async def test_a_stopped_launcher_is_replaced_when_it_is_needed(
    system: ta.System, is_worker_dead: bool
) -> None:
    async with system.open_device("cpu", options=options()) as device:
        x = await device.put(np.arange(3.0))
        first = launcher()
        os.kill(first, signal.SIGSTOP)
        # A device that does not need it is none the worse.
        assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(5.0**0.5)
        assert launcher() == first
        if is_worker_dead:
            await replace_worker(device)
            assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(5.0**0.5)
        else:
            workshop = await open_launcher(system)
            await (await workshop.start_worker(("-c", ""))).wait()
        assert launcher() != first
        error = str(system.tree().find("test/launcher/process").last_error)
        assert error.endswith("gave no answer for 0.5 s and was killed by SIGKILL")


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_closing_does_not_wait_for_a_stopped_launcher() -> None:
    async with ta.open_system("short") as system:
        await system.open_device("cpu", options=options())
        os.kill(launcher(), signal.SIGSTOP)
    # Only a kill ends a stopped launcher, so a close that waited for it would not return.
    assert children() == set()


async def test_a_stopped_launcher_without_requests_may_stay(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launcher_link, "_SILENCE", 0.05)
    monkeypatch.setattr(_launcher_link, "_TICK", 0.01)
    async with system.open_device("cpu", options=options()) as device:
        first = launcher()
        os.kill(first, signal.SIGSTOP)
        # clock: a longer pause only makes it surer that `_SILENCE` has passed
        await trio.sleep(0.2)
        await device.put(np.ones(2))
        os.kill(first, signal.SIGCONT)
        assert launcher() == first
        assert device.generation == 1


async def test_imports_may_take_longer_than_an_answer(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slow_ahead.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    workshop = await open_launcher(system)
    first = launcher()
    monkeypatch.setattr(_launcher_link, "_SILENCE", 0.3)
    worker = await workshop.start_worker(
        ("-c", "import sys; sys.exit('slow_ahead' in sys.modules)"), (), ("slow_ahead",)
    )
    assert await worker.wait() == "exited with code 1"
    assert launcher() == first


async def test_deaths_of_the_launcher_end_no_system_and_wait_little() -> None:
    delays: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, ActorRestarted) and event.path.endswith("/launcher/process"):
            delays.append(event.delay)

    strict = SystemOptions(intensity=ta.Intensity(1, 60.0))
    async with ta.open_system("strict", options=strict) as system:
        workshop = await open_launcher(system)
        with system.subscribe(note):
            for _ in range(4):
                worker = await workshop.start_worker(SLEEP)
                os.kill(launcher(), signal.SIGKILL)
                assert await worker.wait() == "ended with its launcher"
            await workshop.start_worker(SLEEP)
    assert len(delays) == 4
    assert delays[0] == 0.0
    assert max(delays) <= 2.0


@pytest.mark.slow
async def test_a_launcher_that_does_not_start_fails_the_device_that_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = SystemOptions(intensity=ta.Intensity(0, 60.0))
    async with ta.open_system("strict", options=strict) as system:
        changes = options(intensity=ta.Intensity(2, 60.0))
        device = await system.open_device("cpu", options=changes)
        x = await device.put(np.arange(3.0))
        monkeypatch.setattr(sys, "executable", "/bin/false")
        process: Any = device.dispatch.process  # type: ignore[attr-defined]
        os.kill(launcher(), signal.SIGKILL)
        # It could still serve for a moment.
        await process.wait_dead()
        with trio.fail_after(60), pytest.raises(ta.DeviceLostError) as caught:
            await ta.linalg.nrm2(x)
        assert isinstance(caught.value.__cause__, LauncherError)
        assert "did not start" in str(caught.value)
        await device.close()
        monkeypatch.undo()
        # Others continue, and so does the launcher.
        async with system.open_device("cpu", options=options()) as other:
            y: Any = await other.put(np.ones(2))
            assert (await y.to_host()).tolist() == [1.0, 1.0]


async def test_an_order_is_refused_as_long_as_no_launcher_starts(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = await open_launcher(system)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        os.kill(launcher(), signal.SIGKILL)
        with pytest.raises(LauncherError, match="could not be started by '/nowhere/python'"):
            await workshop.start_worker(SLEEP)
    worker = await workshop.start_worker(("-c", ""))
    assert await worker.wait() == "exited with code 0"
