"""Modules beside the tests of this folder can be imported by their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _three_ranks_reduce_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of the tests are small: two ranks reduce in one step, and three in two, as with large ones."""
    monkeypatch.setattr("trio_accel.collectives._world._SMALL", 0)
