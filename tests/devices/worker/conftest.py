"""No test of this folder leaves a process behind."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

import processes


@pytest.fixture(autouse=True)
def no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Fail a test that leaves a process that it started, however far removed."""
    with processes.none_left(monkeypatch):
        yield
