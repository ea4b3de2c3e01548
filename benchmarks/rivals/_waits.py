"""How programs with an asyncio loop are measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from .._counted import Counted

__all__ = ["measure_latency", "measure_rate"]

Call = Callable[[], Awaitable[object]]


def measure_latency(call: Call, calls: int) -> float:
    """Seconds that one call takes, one after the other."""

    async def run() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            await call()
        return (time.perf_counter() - start) / calls

    return asyncio.run(run())


def measure_rate(call: Call, calls: int, tasks: int) -> float:
    """Calls per second of so many tasks."""
    counted = Counted(tasks, calls)

    async def some() -> None:
        while not counted.is_over:
            await call()
            counted.count()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(some())

    asyncio.run(run())
    return counted.rate
