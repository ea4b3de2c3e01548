"""Fixtures for tests of compiled expressions."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# Modules import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

from both_executors import Executors

import trio_accel as ta
from trio_accel.backends.cpu.compiled import _compiler, _plans


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process without earlier compilations, with a disk cache of its own."""
    if _compiler.compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(_compiler, "_state", _compiler.State())
    monkeypatch.setenv("TRIO_ACCEL_CACHE_PATH", str(tmp_path / "cache"))
    _plans.forget()
    return tmp_path


@pytest.fixture
async def executors(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Executors]:
    """Both, with the disk cache of all tests."""
    if _compiler.compiler() is None:
        pytest.skip("there is no C++ compiler")
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("test") as system, system.open_device("cpu:0", options=options) as device:
        yield Executors(device, monkeypatch)
    _plans.forget()
