"""How soon each strategy learns of completions on a CUDA device: the table that decides the default."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import trio

import trio_accel as ta
from trio_accel.devices import CompletionStrategy

from ._cuda_stand import SIZE, Summaries, hog_interpreter, matrix, on_cuda, opened
from ._harness import Result
from ._peers import hog_loop
from ._stand import Stand
from ._statistics import percentile

__all__ = ["BENCHMARKS"]

_CALLS = {"idle": 200, "busy": 20, "hog": 40}


async def completion(stand: Stand) -> tuple[Result, ...]:
    """A float32 product of 512 by each completion strategy, p50 and p99: idle, busy and hogged.

    The busy loop computes for 1 ms whenever it comes round; the hog is a thread that wants the interpreter's
    lock all the time. The strategies are measured in turns; no peer.
    """
    summaries = Summaries("µs")
    strategies: dict[str, CompletionStrategy] = {
        "adaptive": ta.AdaptiveCompletion(),
        "callback": ta.HostCallbackCompletion(),
        "polled": ta.PolledCompletion(),
        "sync": ta.SyncCompletion(),
    }
    async with AsyncExitStack() as stack:
        operands: dict[str, ta.AccelRef] = {}
        for name, strategy in strategies.items():
            options = ta.DeviceOptions(isolation=stand.isolation, completion=strategy)
            device = await stack.enter_async_context(opened(stand.plan, options))
            operands[name] = await device.put(matrix(SIZE))
        for condition in _CALLS:
            await _measure(condition, operands, stand, summaries)
    return summaries.rows()


async def _measure(
    condition: str, operands: dict[str, ta.AccelRef], stand: Stand, summaries: Summaries
) -> None:
    plan, calls = stand.plan, max(2, stand.plan.count(_CALLS[condition]))
    base = stand.name("cuda.completion")
    async with trio.open_nursery() as nursery:
        if condition == "busy":
            nursery.start_soon(hog_loop)
        elif condition == "hog":
            await nursery.start(hog_interpreter)
        for number in range(-plan.warmups, plan.pairs):
            plan.watch(max(0, number), plan.pairs)
            for name, a in operands.items():
                took = await _latencies(a, calls)
                if number >= 0:
                    for percent in (50, 99):
                        row = f"{base}-{name}-{condition}-p{percent}"
                        summaries.add(row, percentile(took, percent) * 1e6)
        nursery.cancel_scope.cancel(reason="measured")


async def _latencies(a: ta.AccelRef, calls: int) -> list[float]:
    await trio.lowlevel.checkpoint()
    took: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        await ta.linalg.matmul(a, a)
        took.append(time.perf_counter() - start)
    return took


BENCHMARKS = on_cuda("cuda.completion", completion)
