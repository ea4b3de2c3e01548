"""One small product at a time on a CUDA device, beside the bare call and what programs do without us."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import ml_dtypes
import trio

import trio_accel as ta

from ._cuda_stand import SIZE, matrix, on_cuda
from ._harness import Figure, Goal, Isolation, Result, alternate, per_call
from ._stand import Stand
from .rivals import RivalMissingError, open_rival

__all__ = ["BENCHMARKS", "PEERS"]

PEERS = (
    ("cupy-callback", "cupy", "callback"),
    ("cupy-thread", "cupy", "thread"),
    ("torch-event", "torch", "event"),
)
"""Row, rival and its way of waiting."""

_CALLS = 200
_FUSED, _MOST_FUSED = 256, 60.0
_MOST: dict[Isolation, float] = {"inline": 2.4, "process": 4.0}
_TORCH = "torch"


async def latency(stand: Stand) -> tuple[Result, ...]:
    """A float32 product of 512 with a fresh output; peer: the same binding, waited for by blocking.

    One row is a bfloat16 product of 256 with a bias and relu. Further rows have asyncio programs as peers:
    CuPy with a host function, CuPy with a thread that waits, and PyTorch with an event that is looked at in
    each pass.
    """
    name, calls = stand.name("cuda.latency"), stand.plan.count(_CALLS)
    a = await stand.device.put(matrix(SIZE))

    async def ours() -> float:
        return await per_call(lambda: ta.linalg.matmul(a, a), calls) * 1e6

    async with open_rival("bare") as rival:
        peer = partial(rival.measure, "blocking", work="gemm_f32", size=SIZE, calls=calls)
        pairs = await alternate(ours, lambda: _microseconds(peer), stand.plan)
    goal = Goal(figure=Figure.RATIO, most=_MOST[stand.isolation])
    rows = [Result.compare(name, pairs, unit="µs", goal=goal), await _fused(stand)]
    for ending, kind, way in PEERS:
        # Those that wait without looking all the time are to be beaten by who has no message to send, either.
        is_bound = stand.isolation == "inline" and kind != _TORCH
        bound = Goal(figure=Figure.RATIO, most=1.0) if is_bound else None
        rows.append(await _against(f"{name}-{ending}", (kind, way), ours, bound, stand))
    return tuple(rows)


async def _fused(stand: Stand) -> Result:
    calls = stand.plan.count(_CALLS)
    a = await stand.device.put(matrix(_FUSED, ml_dtypes.bfloat16))
    bias = await a[0].copy()

    async def ours() -> float:
        return await per_call(lambda: ta.linalg.fused_matmul(a, a, None, bias, "relu"), calls) * 1e6

    async with open_rival("bare") as rival:
        peer = partial(rival.measure, "blocking", work="fused_bf16", size=_FUSED, calls=calls)
        pairs = await alternate(ours, lambda: _microseconds(peer), stand.plan)
    goal = Goal(figure=Figure.OURS, most=_MOST_FUSED) if stand.isolation == "inline" else None
    return Result.compare(f"{stand.name('cuda.latency')}-fused", pairs, unit="µs", goal=goal)


async def _against(
    name: str, rival: tuple[str, str], ours: Callable[[], Awaitable[float]], goal: Goal | None, stand: Stand
) -> Result:
    kind, way = rival
    try:
        async with open_rival(kind) as opened:
            peer = partial(opened.measure, "latency", way=way, size=SIZE, calls=stand.plan.count(_CALLS))
            pairs = await alternate(ours, lambda: _microseconds(peer), stand.plan)
    except RivalMissingError as error:
        return Result(name=name, goal=goal, reason=str(error))
    return Result.compare(name, pairs, unit="µs", goal=goal)


async def _microseconds(measure: Callable[[], Awaitable[float]]) -> float:
    await trio.lowlevel.checkpoint()
    return await measure() * 1e6


BENCHMARKS = on_cuda("cuda.latency", latency)
