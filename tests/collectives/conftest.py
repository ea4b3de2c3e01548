"""Modules next to the tests of this folder can be imported by their names."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chosen import BACKEND, IS_STAND_IN
from fakes import fake_libraries

if IS_STAND_IN:
    sys.path.insert(0, str(Path(__file__).parent / "stand_in"))

# By which way worlds are tested: with "library", the CPU backend has a fake of NCCL.
WAYS = ("mapped", "library")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str, None, None]:
    """The transport of worlds, given by a parameter."""
    way: str = getattr(request, "param", "mapped")
    if way == "library" and (BACKEND == "cpu" or IS_STAND_IN):
        with fake_libraries(monkeypatch):
            yield "auto"
    else:
        yield "auto" if way == "library" else "mapped"


@pytest.fixture(autouse=True)
def _three_ranks_reduce_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of the tests are small: two ranks reduce in one step, and three in two, as with large ones."""
    monkeypatch.setattr("trio_accel.collectives._world._LOCAL_REDUCTION_BYTES", 0)
