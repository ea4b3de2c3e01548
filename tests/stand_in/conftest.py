"""Runs programs on the stand-in: each check is a function of one, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_accel.testing.stand_in import StandIn, build, is_available

_FOLDER = Path(__file__).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def stand_in() -> StandIn:
    """The stand-in, built."""
    if not is_available():
        pytest.skip("the stand-in driver is compiled with gcc and g++, which are not here")
    return build()


@pytest.fixture
def run(stand_in: StandIn, tmp_path: Path) -> Run:
    """Runs a program of this folder on the stand-in, with any devices visible to this process."""

    def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.run(
            [sys.executable, str(_FOLDER / program), *arguments],
            env={**own, **stand_in.environment(), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return run


@pytest.fixture
def succeed(run: Run) -> Callable[..., str]:
    """Runs a program, which has to end without an error, and returns its output."""

    def succeed(program: str, *arguments: str, **variables: str) -> str:
        done = run(program, *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return succeed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """If a module names its program, `check` is each of the program's checks without arguments."""
    program = getattr(metafunc.module, "PROGRAM", None)
    if program is not None and "check" in metafunc.fixturenames:
        text = (_FOLDER / program).read_text(encoding="utf-8")
        metafunc.parametrize("check", re.findall(r"^def (check_\w+)\(\)", text, re.MULTILINE))
