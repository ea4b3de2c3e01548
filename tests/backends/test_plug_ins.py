"""Backends of other distributions, found by entry points: by the application, by workers, and by `info`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import SEARCHED

pytestmark = pytest.mark.no_device

PLUG_IN = """
from trio_accel.backends.cpu import CpuBackend

class Backend(CpuBackend):
    name = "{name}"
"""

# Asks inline and by a worker that dies twice.
USE = """
import os, signal, sys
import numpy as np, trio
import trio_accel as ta

async def main():
    async with ta.open_system("test") as system:
        for isolation in ("inline", "process"):
            options = ta.DeviceOptions(isolation=isolation)
            async with system.open_device("plugged", options=options) as device:
                x = await device.put(np.arange(6.0))
                for _ in range(2 * (isolation == "process")):
                    os.kill((await device.statistics()).pid, signal.SIGKILL)
                    with trio.fail_after(30):
                        while True:
                            try:
                                y = await (await ta.arrays.multiply(x, x)).to_host()
                                break
                            except ta.AccelError:
                                pass
                    assert y.tolist() == [0, 1, 4, 9, 16, 25]
                print(device.name, isolation, (await x.to_host()).sum(), "plug_in" in sys.modules)

trio.run(main)
"""


def install(
    folder: Path, name: str, source: str, *, value: str = "plug_in:Backend", title: str = "plug"
) -> None:
    """Make an installed distribution with one entry point."""
    about = folder / f"{title}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[trio_accel.backends]\n{name} = {value}\n")
    (folder / f"{value.partition(':')[0]}.py").write_text(source)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SEARCHED}", "OPENBLAS_NUM_THREADS": "1"}
    env.pop("TRIO_ACCEL_BACKEND", None)
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=50)


def printed(folder: Path, program: str) -> list[str]:
    done = run(folder, "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def told(folder: Path) -> dict[str, str | None]:
    """Return the output of `info` for each backend, and check that it is JSON."""
    done = run(folder, "-m", "trio_accel.cli", "info", "--json")
    assert done.returncode == 0, done.stderr
    return {backend["name"]: backend["problem"] for backend in json.loads(done.stdout)["backends"]}


REFUSED = """
from trio_accel.backends import list_devices, resolve
from trio_accel.backends.base import NotSupportedError
assert resolve("cpu")[0].name == "cpu"
assert "cpu:0" in [info.name for info in list_devices()]
try:
    resolve({name!r})
except (NotSupportedError, ValueError) as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU backend has worker processes on Linux only")
def test_a_plug_in_is_used_inline_and_by_a_worker(tmp_path: Path) -> None:
    install(tmp_path, "plugged", PLUG_IN.format(name="plugged"))
    assert printed(tmp_path, USE) == ["plugged:0 inline 15.0 True", "plugged:0 process 15.0 True"]


def test_a_plug_in_is_listed_last_and_named_by_info(tmp_path: Path) -> None:
    install(tmp_path, "plugged", PLUG_IN.format(name="plugged"))
    names = "from trio_accel import list_devices; print([info.name for info in list_devices()][-2:])"
    assert printed(tmp_path, names) == ["['cpu:0', 'plugged:0']"]
    assert told(tmp_path)["plugged"] is None


def test_nothing_of_a_plug_in_is_loaded_until_it_is_named(tmp_path: Path) -> None:
    install(tmp_path, "plugged", "raise SystemExit('loaded')")
    program = """
import sys, trio, trio_accel as ta
async def main():
    async with ta.open_system("test") as system, system.open_device() as device:
        print(device.info.backend)
    async with ta.open_system("test") as system, system.open_device("cpu") as device:
        print(device.name, "plug_in" in sys.modules)
trio.run(main)
"""
    assert printed(tmp_path, program)[-1] == "cpu:0 False"


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("broken", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("ended", "raise SystemExit(3)", "SystemExit: 3"),
        ("empty", "class Backend: pass", "'Backend' object has no attribute 'name'"),
        ("renamed", PLUG_IN.format(name="other"), "the backend has the name 'other'"),
        (
            "driverless",
            PLUG_IN.format(name="driverless")
            + "    def list_devices(self): return ()\n"
            + "    def unavailable_reason(self, index=None): return 'install the driver'\n"
            + "    def describe(self):\n"
            + "        from trio_accel.backends.base import BackendReport\n"
            + "        return BackendReport(name=self.name, problem='install the driver')\n",
            "install the driver",
        ),
        ("cpu", PLUG_IN.format(name="cpu"), "the package has a backend 'cpu' of its own"),
        ("Torch2", PLUG_IN.format(name="Torch2"), "'Torch2' is not a name of a backend"),
    ],
)
def test_a_plug_in_that_cannot_be_used(name: str, source: str, reason: str, tmp_path: Path) -> None:
    install(tmp_path, name, source)
    found = run(tmp_path, "-c", "from trio_accel.backends import describe; print(*describe(), sep='\\n')")
    assert found.stdout.splitlines()[-1].startswith(f"BackendReport(name={name!r}"), found.stderr
    assert reason in found.stdout.splitlines()[-1].replace("\\'", "'")
    if name == "cpu":
        return
    (text,) = printed(tmp_path, REFUSED.format(name=name))
    assert (reason if name != "Torch2" else "names no device; allowed: cuda") in text


def test_prints_of_a_plug_in_do_not_reach_the_output(tmp_path: Path) -> None:
    install(tmp_path, "printing", "print('hello')\n" + PLUG_IN.format(name="printing"))
    assert told(tmp_path)["printing"] is None


def test_two_plug_ins_of_one_name(tmp_path: Path) -> None:
    install(tmp_path, "twin", PLUG_IN.format(name="twin"), title="first")
    install(tmp_path, "twin", PLUG_IN.format(name="twin"), value="other:Backend", title="second")
    (text,) = printed(tmp_path, REFUSED.format(name="twin"))
    assert "two backends have the name 'twin': second (other:Backend) and first (plug_in:Backend)" in text
    assert "uninstall one of them; available: " in text


def test_a_plug_in_that_hangs(tmp_path: Path) -> None:
    install(tmp_path, "hanging", "import time; time.sleep(1000)")
    program = "from trio_accel.backends import _plug_ins; _plug_ins.SECONDS = 0.2\n"
    (text,) = printed(tmp_path, program + REFUSED.format(name="hanging"))
    assert "its import and search for devices take more than 0.2 s" in text


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU backend has worker processes on Linux only")
def test_a_registered_backend_has_workers(tmp_path: Path) -> None:
    (tmp_path / "plug_in.py").write_text(PLUG_IN.format(name="plugged"))
    program = "from trio_accel.backends import register; register('plugged', 'plug_in:Backend')\n"
    assert printed(tmp_path, program + USE)[-1] == "plugged:0 process 15.0 True"


def test_a_registered_name_that_a_plug_in_has(tmp_path: Path) -> None:
    install(tmp_path, "plugged", PLUG_IN.format(name="plugged"))
    program = """
from trio_accel.backends import register
register("plugged", "plug_in:Backend")
try:
    register("plugged", "elsewhere:Backend")
except ValueError as error:
    print(error)
"""
    assert printed(tmp_path, program) == ["name: there is a backend 'plugged' already, plug_in:Backend"]
