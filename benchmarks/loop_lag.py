"""How late the Trio loop is while the device works."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import scipy.fft
import trio

import trio_accel as ta

from ._harness import Figure, Goal, Result, alternate
from ._stand import Stand, on_device
from ._statistics import percentile

__all__ = ["BENCHMARKS", "lags"]

_SIZE = 5120
_SIGNALS, _SAMPLES = 8, 2**23


async def lags(ticks: int, interval: float = 0.002) -> list[float]:
    """Sleep again and again, and note by how many milliseconds each awakening is late."""
    await trio.lowlevel.checkpoint()
    late: list[float] = []
    for _ in range(ticks):
        due = time.perf_counter() + interval
        await trio.sleep(interval)
        late.append((time.perf_counter() - due) * 1e3)
    return late


async def _p99(ticks: int) -> float:
    return percentile(await lags(ticks), 99)


async def _beside_device(ticks: int, *operations: Callable[[], Awaitable[object]]) -> float:
    async def work(operation: Callable[[], Awaitable[object]]) -> None:
        while True:
            await operation()

    async with trio.open_nursery() as nursery:
        for operation in operations:
            nursery.start_soon(work, operation)
        result = await _p99(ticks)
        nursery.cancel_scope.cancel(reason="measured")
    return result


async def _beside_threads(ticks: int, *functions: Callable[[], object]) -> float:
    is_over = False

    def work(function: Callable[[], object]) -> None:
        while not is_over:
            function()

    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(trio.to_thread.run_sync, work, function)
        result = await _p99(ticks)
        is_over = True
    return result


async def loop_lag(stand: Stand) -> tuple[Result, ...]:
    """How late a ticking task is while two streams work, 99th percentile; peer: bare calls in threads.

    The task wants to wake every 2 ms. One stream (or thread) multiplies float32 matrices, the other
    transforms float32 samples, all the time; each operation takes about a second.
    """
    plan, device = stand.plan, stand.device
    ticks = plan.count(500)
    generator = np.random.default_rng(0)
    size = round(_SIZE * plan.scale ** (1 / 3))
    host_matrix = generator.standard_normal((size, size), dtype=np.float32)
    shape = (plan.count(_SIGNALS), plan.count(_SAMPLES) if plan.is_quick else _SAMPLES)
    host_signals = generator.standard_normal(shape, dtype=np.float32)
    matrix, signals = await device.put(host_matrix), await device.put(host_signals)
    ours = partial(
        _beside_device, ticks, lambda: ta.linalg.matmul(matrix, matrix), lambda: ta.fft.rfft(signals)
    )
    peer = partial(
        _beside_threads,
        ticks,
        lambda: np.matmul(host_matrix, host_matrix),
        lambda: scipy.fft.rfft(host_signals),
    )
    pairs = await alternate(ours, peer, plan)
    goal = Goal(figure=Figure.OURS, most=5.0)
    return (Result.compare(stand.name("devices.loop-lag"), pairs, unit="ms", goal=goal),)


BENCHMARKS = on_device("devices.loop-lag", loop_lag)
