"""What runs programs on the stand-in: each check is a function of one, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_FOLDER = Path(__file__).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _load_builder() -> ModuleType:
    """By its path, since its name is also that of an installed package."""
    spec = importlib.util.spec_from_file_location("stand_in_build", _FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """The module `build.py`."""
    return _load_builder()


@pytest.fixture(scope="session")
def stand_in(builder: ModuleType) -> Any:
    """The stand-in, built."""
    if not builder.is_available():
        pytest.skip("the stand-in driver is compiled with gcc and g++, which are not here")
    return builder.build()


@pytest.fixture
def run(stand_in: Any, tmp_path: Path) -> Run:
    """Runs a program of this folder on the stand-in, whatever devices this process sees."""

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
    """Runs a program that has to end well; gives what it printed."""

    def succeed(program: str, *arguments: str, **variables: str) -> str:
        done = run(program, *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return succeed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where a module names its program, `check` is each of the program's checks without arguments."""
    program = getattr(metafunc.module, "PROGRAM", None)
    if program is not None and "check" in metafunc.fixturenames:
        text = (_FOLDER / program).read_text(encoding="utf-8")
        metafunc.parametrize("check", re.findall(r"^def (check_\w+)\(\)", text, re.MULTILINE))
