"""Views of a system keep no closed device, also while nobody looks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import trio.testing

import trio_accel as ta
from trio_accel.actors._cell import Cell
from trio_accel.telemetry import record, timeline

Shown = Callable[[ta.System, Path], AbstractAsyncContextManager[object] | AbstractContextManager[object]]
WAYS: dict[str, Shown] = {
    "record": lambda system, folder: record(system),
    "dashboard": lambda system, folder: ta.open_dashboard(system),
    "timeline": lambda system, folder: timeline(system, folder / "trace.json"),
}


def live_cells(path: str) -> int:
    """Cells of actors at this path, or below, that something keeps."""
    gc.collect()
    return sum(isinstance(each, Cell) and each.path.startswith(path) for each in gc.get_objects())


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_closed_device_is_kept_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, isolation: ta.Isolation
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if way == "dashboard":
        pytest.importorskip("hypercorn")
    async with ta.open_system("s") as system, AsyncExitStack() as stack:
        shown = WAYS[way](system, tmp_path)
        if isinstance(shown, AbstractAsyncContextManager):
            await stack.enter_async_context(shown)
        else:
            stack.enter_context(shown)

        async def once() -> weakref.ref[ta.Device]:
            async with system.open_device("cpu", options=ta.DeviceOptions(isolation=isolation)) as device:
                await device.put(np.ones(3))
                return weakref.ref(device)

        closed = [await once() for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked()
        assert live_cells("s/cpu") == 0
        assert [each() for each in closed] == [None] * 3
