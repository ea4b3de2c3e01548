from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from chosen import SEARCHED
from command import Cli, Refused, Start, make_cli, make_refused, make_start

from benchmarks._command import run
from trio_accel.cli import main


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs ``python -m benchmarks`` in this process, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return make_cli(partial(main, run=run, name="benchmarks"), capsys)


@pytest.fixture
def refused(cli: Cli) -> Refused:
    """Runs it so that it must end with code 2 and one line on stderr; returns the line."""
    return make_refused(cli, "benchmarks")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts it in a process of its own, with warnings as errors."""
    environment = {
        **os.environ,
        "PYTHONPATH": SEARCHED,
        "PYTHONWARNINGS": "error",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return make_start(("-m", "benchmarks"), environment, tmp_path)
