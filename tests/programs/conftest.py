"""Programs run on the CPU backend in these tests, inline and in worker processes."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

# Test folders are not packages, so modules of this folder import their shared code by its own name.
sys.path.insert(0, str(Path(__file__).parent))

from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Tests of this folder run with both."""
    chosen: Isolation = request.param
    return chosen


@pytest.fixture
def options(isolation: Isolation) -> ta.DeviceOptions:
    """Options of the `device`."""
    return ta.DeviceOptions(isolation=isolation)


@pytest.fixture
async def device(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[ta.Device, None]:
    """The device that programs run on, open."""
    async with system.open_device("cpu", options=options) as device:
        yield device


@pytest.fixture
async def any_device(system: ta.System, options: ta.DeviceOptions) -> AsyncGenerator[ta.Device, None]:
    """The same of the chosen backend, for programs that compute nothing themselves."""
    async with system.open_device(BACKEND, options=options) as device:
        yield device
