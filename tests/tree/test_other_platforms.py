"""Without CUDA's packages, and on another system than Linux: the CPU works inline, the rest explains why not.

Another system is made up from this one: its name, and the parts of Python's modules that only Linux has are
taken away before the package is imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# None of these has a wheel for macOS.
LINUX_ALONE = ("cuda-core", "cuda-bindings", "nvmath-python", "cuda-toolkit")

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cuda", "nvmath"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
# Imports of the package, before the system changes its name: they were installed for this one.
DARWIN = """
import asyncio, ctypes, fcntl, importlib, mmap, multiprocessing, os, platform, select, signal, socket
import subprocess
for name in (
    "attrs", "cyclopts", "ml_dtypes", "numpy.fft", "numpy.linalg", "numpy.random", "outcome", "resource",
    "rich.console", "rich.live", "rich.markup", "rich.progress", "rich.table", "scipy.fft",
    "scipy.linalg.blas", "scipy.sparse", "trio.testing",
):
    importlib.import_module(name)
sys.platform = "darwin"
for module, names in {
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open sched_getaffinity sched_setaffinity O_PATH "
        "eventfd EFD_CLOEXEC P_PIDFD posix_fadvise splice",
    signal: "pidfd_send_signal SIGPWR SIGSTKFLT SIGPOLL SIGRTMIN SIGRTMAX",
    socket: "MSG_CMSG_CLOEXEC MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SHRINK F_SEAL_SEAL F_SEAL_GROW F_SEAL_WRITE F_SETPIPE_SZ",
    mmap: "MAP_POPULATE",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
PROGRAM = """
import numpy as np
import trio
import trio_accel as ta

async def main():
    print([info.name for info in ta.list_devices()], [info.isolations for info in ta.list_devices()])
    async with ta.open_system("s") as system:
        async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
            a = await device.put(np.arange(4.0).reshape(2, 2))
            print((await (await ta.linalg.matmul(a, a)).to_host()).tolist())
            print(np.abs(await (await ta.fft.fft(a)).to_host()).tolist())
        async with system.open_device() as device:
            print(device.name)
        for spec, isolation in (("cuda", None), ("cpu", "process")):
            try:
                async with system.open_device(spec, options=ta.DeviceOptions(isolation=isolation)):
                    print(spec, isolation)
            except ta.NotSupportedError as error:
                print(error.message)

trio.run(main)
"""
INFO = """
from trio_accel.cli import main
sys.argv = ["trio-accel", "info"]
main()
"""


def run(*parts: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "".join(parts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_the_packages_of_cuda() -> None:
    devices, product, transform, best, cuda, cpu = run(BLOCKED, PROGRAM).splitlines()
    assert devices.startswith("['cpu:0']")
    assert product == "[[2.0, 3.0], [6.0, 11.0]]"
    assert transform == "[[1.0, 1.0], [5.0, 1.0]]"
    assert best == "cpu:0"
    assert cuda.startswith("'cuda': ")
    if sys.platform == "linux":
        assert cpu == "cpu process"


def test_on_another_system() -> None:
    devices, product, transform, best, cuda, cpu = run(BLOCKED, DARWIN, PROGRAM).splitlines()
    assert devices == "['cpu:0'] [('inline',)]"
    assert product == "[[2.0, 3.0], [6.0, 11.0]]"
    assert transform == "[[1.0, 1.0], [5.0, 1.0]]"
    assert best == "cpu:0"
    assert cuda == "'cuda': the CUDA backend runs on Linux, and this is darwin; available: cpu:0"
    assert cpu == (
        "isolation='process' is not there for this device; it has 'inline': worker processes need Linux, and "
        "this is darwin; open the device with isolation='inline'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("system", ["", DARWIN], ids=["here", "darwin"])
def test_info_on_another_system(system: str) -> None:
    printed = run(BLOCKED, system, INFO)
    assert "cpu:0" in printed
    assert not system or "runs on Linux, and this is darwin" in " ".join(printed.split())


def test_pip_is_asked_for_the_packages_of_cuda_only_on_linux() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    found = [line for line in named if re.match(rf"({'|'.join(LINUX_ALONE)})\b", line)]
    assert {re.split("[^a-z-]", line)[0] for line in found} == set(LINUX_ALONE)
    for line in found:
        assert line.partition(";")[2].strip() == "sys_platform == 'linux'", line
