from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from chosen import SEARCHED

# Test folders are no packages: what several modules of this one share is imported by its own name.
sys.path.insert(0, str(Path(__file__).parent))

PROGRAM = "import sys; from _trio_accel import main; sys.exit(main())"  # as the script does


@attrs.frozen
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def data() -> Path:
    return Path(__file__).parent / "data"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command in this process, in a directory of its own."""
    from trio_accel.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def refused(cli: Cli) -> Callable[..., str]:
    """Runs a command that must end with code 2 and one line on stderr; returns the line."""

    def run(*arguments: object) -> str:
        done = cli(*arguments)
        assert done.code == 2, done
        assert done.out == ""
        assert done.err.startswith("trio-accel: ")
        assert done.err.count("\n") == 1
        return done.err.removeprefix("trio-accel: ").rstrip("\n")

    return run


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SEARCHED, "PYTHONWARNINGS": "error", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a command in a process of its own, with warnings as errors."""

    def run(*arguments: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [sys.executable, "-c", PROGRAM, *arguments],
            **{
                "cwd": tmp_path,
                "env": environment,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )

    return run
