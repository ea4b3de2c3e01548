from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from chosen import SEARCHED
from command import Cli, Refused, Start, make_cli, make_refused, make_start

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

PROGRAM = "import sys; from _trio_accel import main; sys.exit(main())"  # as the script does


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command in this process, in a directory of its own."""
    from trio_accel.cli import main

    monkeypatch.chdir(tmp_path)
    return make_cli(main, capsys)


@pytest.fixture
def refused(cli: Cli) -> Refused:
    """Runs a command that must end with code 2 and one line on stderr; returns the line."""
    return make_refused(cli, "trio-accel")


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SEARCHED, "PYTHONWARNINGS": "error", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Start:
    """Starts a command in a process of its own, with warnings as errors."""
    return make_start(("-c", PROGRAM), environment, tmp_path)
