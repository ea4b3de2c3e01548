from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

from chosen import SEARCHED
from surroundings import LIBRARIES, Machine, make_library

from trio_accel.backends.cuda.manifest import STAND_IN
from trio_accel.testing.stand_in import StandIn, build, is_available


@pytest.fixture
def only_cuda(backend: Any) -> None:
    """For tests that get every backend, and look into this one."""
    if backend.name != "cuda":
        pytest.skip("of what only the CUDA backend has")


@pytest.fixture(scope="session")
def stand_in() -> StandIn:
    """The stand-in for the driver and its libraries, built."""
    if not is_available():
        pytest.skip("the stand-in driver is compiled with gcc and g++, which are not here")
    return build()


@pytest.fixture(scope="session")
def made_libraries(stand_in: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each library of CUDA, which has its version and no other function."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in LIBRARIES:
        make_library(folder, name)
    return folder


@pytest.fixture
def forget_probes() -> Iterator[None]:
    """Let the backend ask again, now and after the test."""
    from trio_accel.backends.cuda import _installed, _probe

    for _ in range(2):
        _probe._answers.clear()
        _installed.installed.cache_clear()
        if _ == 0:
            yield


@pytest.fixture
def machine(
    stand_in: StandIn,
    made_libraries: Path,
    forget_probes: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Machine:
    """An empty folder for driver and libraries: child processes of this one look there first."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "LD_PRELOAD", STAND_IN):
        monkeypatch.delenv(name, raising=False)
    machine = Machine(folder, stand_in, made_libraries)
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    return machine


@pytest.fixture
def driverless(machine: Machine) -> Machine:
    """The same, if the system has no driver either: the loader looks there last."""
    program = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    if not subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=False).returncode:
        pytest.skip("there is a driver here")
    return machine


@pytest.fixture
def equipped(machine: Machine) -> Machine:
    """The same with a driver of CUDA 13.0 and all libraries."""
    machine.add_driver()
    machine.add()
    return machine


Variables = Callable[..., dict[str, str]]


@pytest.fixture
def variables(machine: Machine) -> Variables:
    """The environment of a program on that machine, with further variables."""
    return lambda **more: {**os.environ, **machine.environment(), **more}


@pytest.fixture
def run_on_stand_in(stand_in: StandIn, tmp_path: Path) -> Callable[..., str]:
    """Runs a program, given as text, in a process with the stand-in, and returns its output."""

    def run(program: str, **variables: str) -> str:
        own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**own, **stand_in.environment(), "PYTHONPATH": SEARCHED, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
