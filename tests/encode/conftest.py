from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from chosen import ROOT, SEARCHED
from command import Cli, Refused, Start, make_cli, make_refused, make_start

FOLDER = ROOT / "examples" / "encode"

# The modules of a program in a folder import one another by their own names, and so do those of its tests.
sys.path[:0] = [str(Path(__file__).parent), str(FOLDER)]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs the program in this process, in a directory of its own."""
    from encode import run

    monkeypatch.chdir(tmp_path)
    return make_cli(run, capsys)


@pytest.fixture
def refused(cli: Cli) -> Refused:
    """Runs it so that it must end with code 2 and one line on stderr; returns the line."""
    return make_refused(cli, "encode")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts it in a process of its own, with warnings as errors."""
    environment = {
        **os.environ,
        "PYTHONPATH": SEARCHED,
        "PYTHONWARNINGS": "error",
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return make_start((str(FOLDER / "encode.py"),), environment, tmp_path)
