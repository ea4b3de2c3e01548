"""Many small products at once on a CUDA device."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

import trio_accel as ta

from ._counted import Counted
from ._cuda_stand import SIZE, matrix, on_cuda
from ._harness import Figure, Goal, Isolation, Result, alternate
from ._stand import Stand
from .cuda_latency import PEERS
from .rivals import RivalMissingError, open_rival

__all__ = ["BENCHMARKS"]

_ASKERS = 64
# Of each: in a short time, whoever computes beside us on the host is as he was at its ends.
_CALLS = 20
_LEAST: dict[Isolation, float] = {"inline": 0.5, "process": 0.6}


async def throughput(stand: Stand) -> tuple[Result, ...]:
    """Products per second (float32, 512) of 64 askers; peer: the same binding, enqueued in a loop.

    Further rows have 64 tasks of asyncio programs as peers, which wait as those of the latency do.
    """
    name, calls = stand.name("cuda.throughput"), stand.plan.count(_CALLS)
    a = await stand.device.put(matrix(SIZE))

    async def ask(counted: Counted) -> None:
        while not counted.is_over:
            await ta.linalg.matmul(a, a)
            counted.count()

    async def ours() -> float:
        counted = Counted(_ASKERS, calls)
        async with trio.open_nursery() as nursery:
            for _ in range(_ASKERS):
                nursery.start_soon(ask, counted)
        return counted.rate

    async with open_rival("bare") as rival:
        peer = partial(rival.measure, "rate", work="gemm_f32", size=SIZE, calls=_ASKERS * calls)
        pairs = await alternate(ours, peer, stand.plan)
    goal = Goal(figure=Figure.RATIO, least=_LEAST[stand.isolation])
    rows = [Result.compare(name, pairs, unit="/s", goal=goal)]
    rows += [await _against(f"{name}-{ending}", kind, way, ours, stand) for ending, kind, way in PEERS]
    return tuple(rows)


async def _against(
    name: str, kind: str, way: str, ours: Callable[[], Awaitable[float]], stand: Stand
) -> Result:
    goal = Goal(figure=Figure.RATIO, least=1.0)
    calls = stand.plan.count(_CALLS)
    try:
        async with open_rival(kind) as rival:
            peer = partial(rival.measure, "rate", way=way, size=SIZE, calls=calls, tasks=_ASKERS)
            pairs = await alternate(ours, peer, stand.plan)
    except RivalMissingError as error:
        return Result(name=name, goal=goal, reason=str(error))
    return Result.compare(name, pairs, unit="/s", goal=goal)


BENCHMARKS = on_cuda("cuda.throughput", throughput)
