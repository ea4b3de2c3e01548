"""Records each device that is opened, from its start to its close."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pkgutil import resolve_name
from typing import Any
from weakref import WeakKeyDictionary

from trio_accel import replay


def record_devices(journal: Callable[[], replay.RecordingJournal | None], **options: Any) -> None:
    """Have all devices of this process recorded, for good.

    Args:
        journal: Called with each opened device; returns its journal, or None.
        options: Options of `trio_accel.replay.record`.
    """
    cls: Any = resolve_name("trio_accel.devices.front._device:OpenDevice")
    start, close = cls.start, cls.close
    opened: WeakKeyDictionary[Any, AbstractAsyncContextManager[Any]] = WeakKeyDictionary()

    async def started(device: Any, parent: Any) -> None:
        await start(device, parent)
        if (kept := journal()) is not None:
            recording = opened[device] = replay.record(device, kept, **options)
            await recording.__aenter__()

    async def closed(device: Any) -> None:
        # Work in flight ends by that.
        await close(device)
        if (recording := opened.pop(device, None)) is not None:
            await recording.__aexit__(None, None, None)

    cls.start = started
    cls.close = closed
