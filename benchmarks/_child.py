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
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np
import trio
import trio.testing

import trio_accel as ta

from ._peers import Channel
from ._processors import process_tree
from .actors import Add, Counter

__all__ = ["MEASUREMENTS", "resident"]

Measurement: TypeAlias = Callable[..., Awaitable[None]]

_ASKERS = 16
_PAGE = os.sysconf("SC_PAGE_SIZE")


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


async def operations(first: int, last: int, isolation: str) -> None:
    """Ask a device for `first` small operations, then on to `last`: bytes that all processes have grown."""
    options = ta.DeviceOptions(isolation="process" if isolation == "process" else "inline")
    async with ta.open_system("benchmark") as system, system.open_device("cpu", options=options) as device:
        x = await device.put(np.ones(16, np.float32))

        async def ask(count: int) -> None:
            for _ in range(count // 4):
                # Two that make an array, one that changes one, one that brings something back.
                y = await ta.linalg.matmul(x, x)
                await y.to_host()
                await x.copy()
                await ta.linalg.scal(1.0, x)

        async def ask_all(count: int) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(_ASKERS):
                    nursery.start_soon(ask, count // _ASKERS)
            await device.synchronize()

        await ask_all(first)
        before = _resident_of_all()
        await ask_all(last - first)
        _report(growth=_resident_of_all() - before)


def _resident_of_all() -> int:
    """Bytes of this process, and of those that it has started, in physical memory."""
    gc.collect()
    total = 0
    for process in process_tree():
        # One may have ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            statm = Path(f"/proc/{process}/statm").read_text(encoding="ascii")
            total += int(statm.split()[1]) * _PAGE
    return total


def _report_each(count: int, seconds: float, before: int) -> NoReturn:
    _report(seconds=seconds, bytes_each=(resident() - before) / count)


def _report(**figures: float) -> NoReturn:
    print(json.dumps(figures), flush=True)
    # Nothing is unwound: that is no part of the measurement, and the system takes everything back.
    os._exit(0)


MEASUREMENTS: dict[str, Measurement] = {
    "idle-actors": idle_actors,
    "idle-tasks": idle_tasks,
    "asks": asks,
    "operations": operations,
}

if __name__ == "__main__":
    arguments = [int(word) if word.isdecimal() else word for word in sys.argv[2:]]
    trio.run(MEASUREMENTS[sys.argv[1]], *arguments)
