"""How programs with an asyncio loop are measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

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

    async def some() -> None:
        for _ in range(calls):
            await call()

    async def run() -> float:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(some())
        return calls * tasks / (time.perf_counter() - start)

    return asyncio.run(run())
