"""An application that counts its objects of killed launchers, or of closed devices.

A test cannot do so itself: pytest keeps what was logged, with the errors, and the fixtures keep workers.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta

OPTIONS = ta.DeviceOptions(isolation="process", backoff=ta.Backoff(initial=0.0, base=0.0), retry=3)
BEFORE, TIMES = 3, 8
# Bytes that count as one thing. Trio, CPython and the recorder keep less each time, up to a bound.
_PIECE = 8192
# Trio keeps scopes with dropped deadlines, up to a thousand, so these are not counted.
_OTHERS = {"builtins.coroutine", "builtins.async_generator", "trio.Event", "trio.Lock", "trio.Nursery"}


def kept() -> Counter[str]:
    """Objects of the package, and objects of tasks, by their classes; descriptors; Python's memory."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    found = Counter(name for name in names if name.startswith("trio_accel.") or name in _OTHERS)
    found["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    found["memory"] = tracemalloc.get_traced_memory()[0] // _PIECE
    return found


async def growth(once: Callable[[], Awaitable[None]]) -> dict[str, int]:
    """Find what is there once more, or nearly so, for each time."""
    for _ in range(BEFORE):
        await once()
    before = kept()
    for _ in range(TIMES):
        await once()
    # Messages on their way may be counted.
    return {name: count for name, count in (kept() - before).items() if count >= TIMES - 2}


async def of_launchers(system: ta.System) -> dict[str, int]:
    """Kill the launcher again and again."""
    device: Any = await system.open_device("cpu", options=OPTIONS)
    array, availability = await device.put(np.ones(3)), device.state.availability

    async def once() -> None:
        generation = device.generation
        (pid,) = [each.pid for each in system.tree().find(f"{system.name}/launcher").walk() if each.pid]
        os.kill(pid, signal.SIGKILL)
        while device.generation == generation or not availability.is_ready:
            await availability.wait_changed()
        assert await (await ta.arrays.sum(array)).item() == 3.0
        await wait_all_tasks_blocked()

    return await growth(once)


async def of_devices(system: ta.System) -> dict[str, int]:
    """Open and close devices."""

    async def once() -> None:
        async with system.open_device("cpu", options=OPTIONS) as device:
            await device.put(np.ones(3))

    return await growth(once)


async def main(what: str) -> None:
    """Print the growth."""
    logging.disable(logging.CRITICAL)
    tracemalloc.start()
    async with ta.open_system("s") as system:
        with ta.telemetry.record(system):
            grown = await {"launchers": of_launchers, "devices": of_devices}[what](system)
    print(json.dumps(grown))


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
