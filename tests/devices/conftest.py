"""Devices moved by hand."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
import trio

import trio_accel as ta

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

from manual_backend import ManualBackend

from trio_accel.backends.base import Isolation


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Tests of this folder that use it, or the `device`, run with both."""
    chosen: Isolation = request.param
    return chosen


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Generator[ManualBackend, None, None]:
    """A backend moved by hand, which every `open_device` opens."""
    backend = ManualBackend()
    backend.may_open.set()
    monkeypatch.setattr(
        "trio_accel.devices.front._system.candidates", lambda spec: ((backend, backend.info),)
    )
    monkeypatch.setattr(trio.to_thread, "run_sync", backend.run_sync)
    yield backend
    for device in backend.devices:
        assert device.is_closed
        if device.has_ended:
            assert all(library.is_closed for library in device.opened)


@pytest.fixture
async def manual(system: ta.System, backend: ManualBackend) -> AsyncGenerator[ta.Device, None]:
    """A device moved by hand, open, with cancelled callers that wait for 5 s; nothing is held at the end."""
    async with system.open_device(options=ta.DeviceOptions(cancel_grace=5.0)) as device:
        yield device
        for opened in backend.devices:
            opened.release()
