"""Long tests for the hardware: they run on request, and leave nothing behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

# Test folders are not packages, so modules import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parents[1] / "devices" / "worker"))
sys.path.insert(0, str(Path(__file__).parent))

import driver
import processes
import scale
from chosen import BACKEND

FOLDER = Path(__file__).parent
_SETTLE = 10.0
# Memory kept by the driver: of this process, once it had a device inline, 102 MiB (H200, driver 580).
_KEPT = 128 << 20


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures times, and is to run on a machine that is idle")
    # Other folders may have imported them by now.
    shared = ("recovery_load", "test_recovery_soak", "witnesses")
    pytest.register_assert_rewrite(*[name for name in shared if name not in sys.modules])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if FOLDER in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    if BACKEND == "cpu" and not scale.IS_CHOSEN:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


@pytest.fixture(autouse=True)
def nothing_left_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Fail a test that leaves a process, however far removed, or memory of the device."""
    before = driver.free_memory()
    with processes.none_left(monkeypatch):
        yield
    deadline = time.monotonic() + _SETTLE
    while (after := driver.free_memory()) < before - _KEPT and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after >= before - _KEPT, f"{(before - after) / 2**20:.0f} MiB of device memory are gone"
