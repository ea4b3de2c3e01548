"""No test of this folder leaves a process behind."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

# Test folders are no packages: what several modules of this one share is imported by its own name.
sys.path.insert(0, str(Path(__file__).parent))

import processes

_DYING = 2.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures times, and is to run on a machine that is idle")


@pytest.fixture(autouse=True)
def no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Fail a test that leaves a process that it started, however far removed."""
    mark = uuid.uuid4().hex
    # Handed down to every process that is started from here, and by those.
    monkeypatch.setenv("TRIO_ACCEL_TEST_MARK", mark)
    zombies = processes.children()
    yield
    deadline = time.monotonic() + _DYING
    while (left := processes.marked(mark)) and time.monotonic() < deadline:
        # One that was killed and is nobody's child here takes a moment.
        time.sleep(0.005)
    assert not left, f"processes are alive: {[processes.command(pid) for pid in left]}"
    left = processes.children() - zombies
    assert not left, f"processes were not reaped: {left}"
