"""What waiting for a device costs the program that waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import trio

import trio_accel as ta

from ._harness import Figure, Goal, Result
from ._stand import Stand, on_device
from ._statistics import Summary

__all__ = ["BENCHMARKS"]

# Of an operation of one second.
_MOST_MILLISECONDS = 50.0
_SEVERAL = 5
_LARGEST = 8192


async def waiting_cpu(stand: Stand) -> tuple[Result, ...]:
    """Processor time that waiting takes during one product of about a second; no peer.

    In a worker process it is the time of this whole process. Inline that would contain the product
    itself, which the processor computes in threads of the same process: there it is the time of the
    thread that runs the loop.
    """
    plan, device = stand.plan, stand.device
    clock: Callable[[], float] = time.process_time if stand.isolation == "process" else time.thread_time
    size = await _size_for(device, plan.scale)
    host = np.ones((size, size), np.float32)
    matrix = await device.put(host)
    out = await device.put(host)
    spent: list[float] = []
    times = min(plan.pairs, _SEVERAL)
    for number in range(plan.warmups + times):
        plan.watch(max(0, number - plan.warmups), times)
        start = clock()
        await ta.linalg.matmul(matrix, matrix, out=out)
        spent.append((clock() - start) * 1e3)
    # The bound is for one second and shrinks with a shorter plan, so that its verdict means the same.
    goal = Goal(figure=Figure.OURS, most=_MOST_MILLISECONDS * plan.scale)
    ours = Summary.of(spent[plan.warmups :])
    return (Result(name=stand.name("devices.waiting-cpu"), unit="ms", ours=ours, goal=goal),)


async def _size_for(device: ta.Device, seconds: float) -> int:
    """The size of square matrices whose product takes about so long."""
    size = 1024
    matrix = await device.put(np.ones((size, size), np.float32))
    taken: list[float] = []
    for _ in range(5):
        start = trio.current_time()
        await ta.linalg.matmul(matrix, matrix)
        taken.append(trio.current_time() - start)
    wanted: float = size * (seconds / min(taken)) ** (1 / 3)
    return min(_LARGEST, max(size // 4, round(wanted)))


BENCHMARKS = on_device("devices.waiting-cpu", waiting_cpu)
