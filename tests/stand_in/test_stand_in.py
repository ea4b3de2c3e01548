"""The stand-in CUDA driver does all that the tests of the CUDA backend rely on, by NVIDIA's own packages.

Each check is a function of a program next to this file, and runs in a process of its own: errors of a context
last as long as the process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_accel.testing.stand_in import StandIn, build

_FOLDER = Path(__file__).parent
_MEMORY = str(64 << 20)

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Succeed = Callable[..., str]


def _checks(program: str) -> list[str]:
    """The checks of a program that take no arguments."""
    return re.findall(r"^def (check_\w+)\(\)", (_FOLDER / program).read_text(), re.MULTILINE)


@pytest.mark.parametrize("check", _checks("check_driver.py"))
def test_driver(succeed: Succeed, check: str) -> None:
    succeed("check_driver.py", check)


@pytest.mark.parametrize("check", [each for each in _checks("check_memory.py") if "without" not in each])
def test_memory(succeed: Succeed, check: str) -> None:
    succeed("check_memory.py", check, STAND_IN_MEMORY=_MEMORY)


def test_memory_without_access_faults(run: Run) -> None:
    assert run("check_memory.py", "check_mappings_without_access").returncode == -signal.SIGSEGV


@pytest.mark.parametrize("check", _checks("check_core.py"))
def test_core(succeed: Succeed, check: str) -> None:
    succeed("check_core.py", check)


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ("fault_illegal_address", 700),
        ("fault_trap", 719),
        ("checked", 710),
        ("trapped", 719),
    ],
)
def test_failing_kernels(succeed: Succeed, kernel: str, code: int) -> None:
    succeed("check_core.py", "check_failing_kernels", kernel, str(code), STAND_IN_FAULT_DELAY="300")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "0 0 1"),
        ({"STAND_IN_DEVICES": "0"}, "100"),
        ({"STAND_IN_DEVICES": "4"}, "0 0 1 2 3"),
        ({"STAND_IN_INIT_ERROR": "803"}, "803"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "100"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "100"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "0 1"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "0 1 0"),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, "0 1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-57a4d14e-0000-4000-8000-000000000001"}, "0 1"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, "100"),
    ],
)
def test_devices(succeed: Succeed, variables: dict[str, str], expected: str) -> None:
    assert succeed("check_driver.py", "report_devices", **variables).strip() == expected


@pytest.mark.slow
def test_exclusive_devices_have_one_process(run: Run, stand_in: StandIn, tmp_path: Path) -> None:
    variables = {"STAND_IN_COMPUTE_MODE": "3", "STAND_IN_DIR": str(tmp_path)}
    program = [sys.executable, str(_FOLDER / "check_driver.py"), "report_exclusive"]
    pipe = subprocess.PIPE
    environment = {**stand_in.environment(), **variables}
    with subprocess.Popen(program, env=environment, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "0\n"
        assert run("check_driver.py", "report_exclusive", **variables).stdout == "46\n"
        other = {**variables, "CUDA_VISIBLE_DEVICES": "1"}
        assert run("check_driver.py", "report_exclusive", **other).stdout == "0\n"
        first.kill()
        first.wait()
    assert run("check_driver.py", "report_exclusive", **variables).stdout == "0\n"


def test_builds_are_kept(stand_in: StandIn) -> None:
    killed = stand_in.folder / "compile-killed"
    killed.mkdir()
    os.utime(killed, (0, 0))
    again = build(stand_in.folder.parent)
    assert again == stand_in
    assert all(library.exists() for library in again.libraries)
    assert not list(stand_in.folder.glob("compile-*"))
