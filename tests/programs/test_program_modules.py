"""Modules of programs with imports that no forked process should make."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.testing import inject_fault

pytestmark = pytest.mark.own_launcher
X = np.arange(6.0)
# Parts of a driver, enough for a process to be taken for one that has initialised CUDA.
DRIVER = """
static int is_initialised;
int cuInit(unsigned flags) { is_initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return is_initialised ? 0 : 3; }
"""
MODULE = """
import os
with open({log!r}, "a") as log:
    print(os.getpid(), file=log)
if os.getpid() != {program}:
    {does}
class Late:
    def __init__(self, x):
        self.x = x
    def shape(self):
        return list(self.x.shape)
"""


async def driver(folder: Path) -> str:
    """Code that initialises CUDA, or imitates it if the tests have no driver."""
    if BACKEND == "cuda":
        return "from cuda.bindings import driver; assert not int(driver.cuInit(0)[0])"
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc to make a driver with")
    made = folder / "libcuda.so.1"
    await trio.run_process([gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)], stdin=DRIVER.encode())
    return f"import ctypes; ctypes.CDLL({str(made)!r}).cuInit(0)"


# Its action, and the launcher's reason to do without it; None if the launcher imports it for its forks.
DOES = {
    "initialises CUDA": ("", "initialises CUDA"),
    "starts a thread": ("import threading; threading.Thread(target=print, daemon=True).start()", None),
    "keeps a thread": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "thread",
    ),
    "prints": ("print('at the import', flush=True)", None),
    "closes its output": ("os.closerange(0, 3)", "closed a file that is not its own"),
}


@pytest.mark.parametrize("what", DOES)
async def test_a_module_that_does_something_at_its_import(
    system: ta.System,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    code, reason = DOES[what]
    module = _written(tmp_path, monkeypatch, code or await driver(tmp_path))
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))

    def told() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "at_import is not imported ahead" in message]

    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(X)
        async with ta.open_program(device, module.Late, x) as program:
            if reason is not None:
                with trio.fail_after(60):
                    while not told():  # noqa: ASYNC110  # nobody else is told
                        await trio.sleep(0.01)
            for generation in (1, 2, 3):
                assert await program.ask("shape") == [6]
                assert device.generation == generation
                inject_fault(device, "at_import.Late.shape", kill=True)
                assert await program.ask("shape") == [6]
            np.testing.assert_array_equal(await x.to_host(), X)
    assert all(reason is not None and reason in message for message in told())


@pytest.mark.slow
async def test_a_module_with_an_endless_import_is_abandoned(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _written(tmp_path, monkeypatch, "import time; time.sleep(3600)")
    options = ta.DeviceOptions(isolation="process", close_grace=0.2, backoff=ta.Backoff(base=0.0))
    with trio.fail_after(60):
        async with system.open_device(BACKEND, options=options) as device:
            x = await device.put(X)
            with trio.move_on_after(0.5) as scope:
                await ta.open_program(device, module.Late, x)
            assert scope.cancelled_caught
            # The others continue while a thread imports it.
            np.testing.assert_array_equal(await (await ta.linalg.scal(2.0, x)).to_host(), X * 2)
            assert device.generation == 1


@pytest.mark.slow
@pytest.mark.parametrize("retry", [0, 1])
async def test_a_module_that_ends_the_process_at_import_costs_two_contexts(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry: int
) -> None:
    module = _written(tmp_path, monkeypatch, "os._exit(3)")
    options = ta.DeviceOptions(isolation="process", retry=retry, backoff=ta.Backoff(base=0.0))
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(X)
        with trio.fail_after(60), pytest.raises(ta.ContextLostError, match="waited for its library"):
            await ta.open_program(device, module.Late, x)
        np.testing.assert_array_equal(await x.to_host(), X)
        # No later worker makes it.
        assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(np.linalg.norm(X))
        assert device.generation == 3
        inject_fault(device, ta.linalg.Nrm2, kill=True)
        with suppress(ta.ContextLostError):
            await ta.linalg.nrm2(x)
        assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(np.linalg.norm(X))
        assert device.generation == 4


@pytest.mark.slow
async def test_a_module_forks_at_import(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _written(tmp_path, monkeypatch, "(os.fork() or os._exit(0))")
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    async with (
        system.open_device(BACKEND, options=options) as device,
        ta.open_program(device, module.Late, X) as program,
    ):
        assert await program.ask("shape") == [6]
        inject_fault(device, "at_import.Late.shape", kill=True)
        assert await program.ask("shape") == [6]
        assert device.generation == 2


def _written(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> Any:
    """A module that does something at its import in other processes than this one."""
    text = MODULE.format(log=str(folder / "log"), program=os.getpid(), does=does)
    (folder / "at_import.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "at_import", raising=False)
    return importlib.import_module("at_import")
