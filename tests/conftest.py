"""What all tests share: a system, a device, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncGenerator, Generator

import pytest

import trio_accel as ta
from trio_accel.actors._cell import Cell
from trio_accel.backends.base import ChunkKeeper
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cpu._device import CpuDevice

# Trio keeps the threads of `to_thread.run_sync` for a while, to use them again.
_CACHED = "Trio thread "
_JOIN = 2.0


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Fail a test that leaves a thread, an open device, a block of memory or a live actor."""
    # What is alive by now is no business of this test, and need not be looked through again.
    gc.freeze()
    threads = set(threading.enumerate())
    opened: list[CpuDevice] = []
    open_device = CpuBackend.open_device

    def remember(
        self: CpuBackend, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> CpuDevice:
        device = open_device(self, index, memory_limit=memory_limit, keeper=keeper)
        opened.append(device)
        return device

    monkeypatch.setattr(CpuBackend, "open_device", remember)
    yield
    for thread in set(threading.enumerate()) - threads:
        if not thread.name.startswith(_CACHED):
            # A stream that is closed may need a moment to end.
            thread.join(_JOIN)
            assert not thread.is_alive(), f"thread {thread.name!r} is alive"
    for device in opened:
        assert device._is_closed, f"device {device.info.name} is open"
        assert device.memory().blocks == 0, f"device {device.info.name} holds {device.memory()}"
    opened.clear()
    gc.collect()
    # `type`, not `isinstance`: proxies among the objects must not be woken.
    alive = [item.path for item in gc.get_objects() if type(item) is Cell and item.terminated is None]
    assert not alive, f"actors are alive: {alive}"


@pytest.fixture
async def system() -> AsyncGenerator[ta.System, None]:
    """An open system."""
    async with ta.open_system("test") as system:
        yield system


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    """The CPU device, open."""
    async with system.open_device("cpu") as device:
        yield device
