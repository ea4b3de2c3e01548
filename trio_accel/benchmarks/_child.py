"""Measurements that need a process of their own: ``python -m ..._child NAME COUNT ...`` prints JSON.

Memory is that of the whole process, so nothing else may have used it before; and ten thousand
actors are not stopped one by one afterwards: the process just ends.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

import trio
import trio.testing

import trio_accel as ta

from ._peers import Channel
from .actors import Add, Counter

__all__ = ["MEASUREMENTS", "resident"]

Measurement: TypeAlias = Callable[..., Awaitable[None]]


def resident() -> int:
    """Bytes of this process in physical memory, after a garbage collection (Linux)."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup tells no resident memory")


async def idle_actors(count: int) -> None:
    """Spawn actors and leave them idle: seconds for all, bytes for each."""
    async with ta.open_system("benchmark") as system:
        await (await system.spawn(Counter)).ask(Add(1))
        before, start = resident(), time.perf_counter()
        for _ in range(count):
            await system.spawn(Counter)
        _report_each(count, time.perf_counter() - start, before)


async def idle_tasks(count: int) -> None:
    """Start tasks, each waiting at a memory channel of its own: seconds for all, bytes for each."""
    async with trio.open_nursery() as nursery:
        before, start = resident(), time.perf_counter()
        # As somebody who wants to send to them would.
        channels = [Channel() for _ in range(count)]
        for channel in channels:
            nursery.start_soon(channel.serve)
        await trio.testing.wait_all_tasks_blocked()
        _report_each(count, time.perf_counter() - start, before)


async def asks(first: int, last: int) -> None:
    """Ask `first` times, then on to `last` times: bytes that the process has grown in between."""
    async with ta.open_system("benchmark") as system:
        counter = await system.spawn(Counter)
        for _ in range(first):
            await counter.ask(Add(1))
        before = resident()
        for _ in range(last - first):
            await counter.ask(Add(1))
        _report(growth=resident() - before)


def _report_each(count: int, seconds: float, before: int) -> NoReturn:
    _report(seconds=seconds, bytes_each=(resident() - before) / count)


def _report(**figures: float) -> NoReturn:
    print(json.dumps(figures), flush=True)
    # Nothing is unwound: that is no part of the measurement, and the system takes everything back.
    os._exit(0)


MEASUREMENTS: dict[str, Measurement] = {"idle-actors": idle_actors, "idle-tasks": idle_tasks, "asks": asks}

if __name__ == "__main__":
    trio.run(MEASUREMENTS[sys.argv[1]], *map(int, sys.argv[2:]))
