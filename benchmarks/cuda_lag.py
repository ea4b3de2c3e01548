"""How late the Trio loop is while a CUDA device works, plans, and is replaced."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable

import numpy as np
import trio

import trio_accel as ta

from ._cuda_stand import matrix, on_cuda, one_row, opened
from ._harness import Figure, Goal, Result
from ._stand import Stand
from ._statistics import percentile
from .loop_lag import lags

__all__ = ["BENCHMARKS"]

_TICKS = 1000
_SEVERAL = 5
_SECONDS = 1.0
_CALIBRATED, _LARGEST = 4096, 36_864
_BETWEEN_LOSSES = 0.5
_LOSSES = ta.Intensity(10_000, 60.0)
_GOAL = Goal(figure=Figure.OURS, most=2.0)

Work = Callable[[], Awaitable[object]]


async def lag(stand: Stand) -> tuple[Result, ...]:
    """How late a task is that wants to wake every 2 ms, 99th percentile; no peer.

    While products of a second run (float32); while plans of transforms are built, of another length each
    time; and, with a worker process, while that is lost again and again.
    """
    name, rows = stand.name("cuda.lag"), list[Result]()
    kernels = await _long_product(stand)
    rows.append(one_row(f"{name}-kernels", await _measure(kernels, stand), "ms", _GOAL))
    rows.append(one_row(f"{name}-plans", await _measure(_planner(stand.device), stand), "ms", _GOAL))
    if stand.isolation == "process":
        options = ta.DeviceOptions(
            isolation="process", intensity=_LOSSES, backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0)
        )
        async with opened(stand.plan, options) as device:
            rows.append(one_row(f"{name}-replaced", await _measure(_loser(device), stand), "ms", _GOAL))
    return tuple(rows)


async def _measure(work: Work, stand: Stand) -> list[float]:
    """The 99th percentiles of some measurements, while something is done all the time."""

    async def go_on() -> None:
        while True:
            await work()

    plan, found = stand.plan, list[float]()
    times = min(plan.pairs, _SEVERAL)
    await work()
    for number in range(times):
        plan.watch(number, times)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            found.append(percentile(await lags(plan.count(_TICKS)), 99))
            nursery.cancel_scope.cancel(reason="measured")
    return found


async def _long_product(stand: Stand) -> Work:
    """A product that takes about a second."""
    size = max(64, stand.plan.count(_CALIBRATED))
    a = await stand.device.put(matrix(size))
    await ta.linalg.matmul(a, a)
    start = time.perf_counter()
    await ta.linalg.matmul(a, a)
    seconds = time.perf_counter() - start
    wanted = round(size * (_SECONDS * stand.plan.scale / seconds) ** (1 / 3))
    large = await stand.device.put(matrix(min(_LARGEST, max(size, wanted)) // 16 * 16))
    out = await stand.device.empty(large.shape, large.dtype)
    return lambda: ta.linalg.matmul(large, large, out=out)


def _planner(device: ta.Device) -> Work:
    """A transform of another length each time."""
    lengths = itertools.cycle(range(1009, 9001, 2))

    async def plan() -> None:
        length = next(lengths)
        await device.ask(ta.fft.Fft(np.ones(length, np.complex64)))

    return plan


def _loser(device: ta.Device) -> Work:
    """A worker that is killed, and used when it is back."""

    async def lose() -> None:
        ta.testing.inject_fault(device, ta.linalg.Nrm2, kill=True)
        try:
            await device.ask(ta.linalg.Nrm2(np.ones(4)))
        except ta.ContextLostError:
            await device.ask(ta.linalg.Nrm2(np.ones(4)))
            await trio.sleep(_BETWEEN_LOSSES)

    return lose


BENCHMARKS = on_cuda("cuda.lag", lag)
