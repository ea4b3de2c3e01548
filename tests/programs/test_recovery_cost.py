"""The price of a recovery, measured and reported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta

IMPORT, MAKE = 1.2, 0.3
# A thread of Python refuses the module, so that each worker imports it.
SOURCE = f"""
import sys, threading, time
time.sleep({IMPORT})
def obstruct():
    pass
{{obstacle}}
# The test's own process is to have no such thread.
if "pytest" not in sys.modules:
    obstruct()
class Slow:
    def __init__(self, x):
        time.sleep({MAKE})
        self.x = x
    def sum(self):
        return float(self.x.sum())
"""
OBSTACLE = """
lock, has = threading.Lock(), threading.Event()
def hold():
    with lock:
        has.set()
        threading.Event().wait()
def obstruct():
    threading.Thread(target=hold, name="holder", daemon=True).start()
    has.wait()
"""


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  # other processes bring it about, and tell nobody
            await trio.sleep(0.01)


def slow_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, obstacle: str) -> Any:
    monkeypatch.syspath_prepend(folder)  # pyright: ignore[reportUnknownMemberType]
    (folder / f"{name}.py").write_text(SOURCE.format(obstacle=obstacle))
    return importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.own_launcher
async def test_an_import_in_each_worker_is_reported_with_its_seconds(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = slow_module(tmp_path, monkeypatch, "slow_price", OBSTACLE)
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    async with system.open_device("cpu", options=options) as device:
        began = time.perf_counter()
        program: Any = await ta.open_program(device, slow.Slow, np.arange(4.0))
        assert await program.ask("sum") == 6.0
        await until(lambda: program.recovery.programs[0].preloading != "pending")
        taken = time.perf_counter() - began
        cost = program.recovery
        (own,) = cost.programs
        assert (own.module, own.preloading) == ("slow_price", "refused")
        assert "holder" in (own.reason or "")
        assert "module slow_price is imported in each worker, because" in str(cost)
        # The load of the machine is in both figures, and in the clock.
        assert own.imports >= IMPORT
        assert own.makes >= MAKE
        assert own.imports + own.makes <= taken
        assert cost == device.recovery
        # Against the clock: a worker is killed, and the program is asked again.
        began = time.perf_counter()
        device.dispatch.process.kill()  # type: ignore[attr-defined]
        assert await program.ask("sum") == 6.0
        taken = time.perf_counter() - began
        # By now the cost belongs to this recovery, so the load of the machine is in both. A request finds the
        # worker's death, which is not part of the cost.
        assert IMPORT + MAKE <= (program.recovery.seconds or 0.0) <= taken
        shown = system.tree().find(device.path)
        assert shown.note == str(device.recovery)
        assert f", restart {device.recovery.seconds:.2f} s: worker and context " in str(system.tree())
        with ta.telemetry.record(system) as recorder:
            snapshot = recorder.snapshot()
            (row,) = snapshot.devices
            assert row.recovery_cost == device.recovery.seconds
            assert row.recovery_text == str(device.recovery)
            written = json.loads(snapshot.to_json())["devices"][0]
            assert (written["recovery_cost"], written["recovery_text"]) == (
                row.recovery_cost,
                row.recovery_text,
            )
        told = str(row.recovery_text)
        assert "module slow_price is imported in each worker, because" in told
        assert f"import of slow_price {device.recovery.programs[0].imports:.2f} s" in told
        await program.aclose()
        assert device.recovery.programs == ()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.own_launcher
async def test_preloaded_modules_cost_no_recovery_their_import(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = slow_module(tmp_path, monkeypatch, "quick_price", "")
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="process")) as device:
        program: Any = await ta.open_program(device, slow.Slow, np.arange(4.0))
        await until(lambda: program.recovery.programs[0].preloading == "fully")
        cost = program.recovery
        assert cost.programs[0].imports == 0.0
        assert cost.reason is None
        # Without the start of the worker, which a busy machine makes long.
        assert cost.context is not None
        assert cost.seconds is not None
        assert MAKE <= cost.seconds - cost.context < IMPORT


async def test_inline_the_module_stays_imported(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = slow_module(tmp_path, monkeypatch, "inline_price", OBSTACLE)
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
        began = time.perf_counter()
        program: Any = await ta.open_program(device, slow.Slow, np.arange(4.0))
        taken = time.perf_counter() - began
        cost = program.recovery
        assert (cost.programs[0].preloading, cost.programs[0].imports) == ("inline", 0.0)
        assert MAKE <= cost.programs[0].makes <= taken
        assert cost.context is not None
        assert cost.seconds == cost.context + cost.programs[0].makes
        assert cost.reason is None
        assert "import" not in str(cost)


FIRST = """
import numpy as np, trio, trio_accel as ta, first_price
async def main():
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    async with ta.open_system('first') as system, system.open_device("cpu", options=options) as device:
        program = await ta.open_program(device, first_price.Slow, np.arange(4.0))
        with trio.fail_after(30):
            while program.recovery.programs[0].preloading == "pending":
                await trio.sleep(0.01)
        device.dispatch.process.kill()
        assert await program.ask("sum") == 6.0
trio.run(main)
"""


@pytest.mark.slow
def test_a_first_program_without_a_log_configuration_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "first_price.py").write_text(SOURCE.format(obstacle=OBSTACLE))
    (tmp_path / "first.py").write_text(FIRST)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "first.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "imported ahead" in line]
    assert line.startswith("trio_accel.devices: module first_price is not imported ahead, so each worker")
    assert "takes up to 1." in line
    assert "s longer to start: " in line
    assert "holder" in line
