"""Operations of mixed shapes on a CUDA device, beside PyTorch and the bare library."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from ._cuda_stand import on_cuda
from ._harness import Figure, Goal, Isolation, Result, alternate, per_call
from ._mixed import mixed_works
from ._stand import Stand
from .rivals import RivalMissingError, open_rival

__all__ = ["BENCHMARKS"]

# Three times each shape.
_CALLS = 120
_MOST: dict[str, dict[Isolation, float]] = {
    "matmul": {"inline": 1.8, "process": 3.2},
    "rfft": {"inline": 2.8, "process": 5.0},
}
"""Of what PyTorch takes."""


async def mixed(stand: Stand) -> tuple[Result, ...]:
    """Products and transforms of 40 mixed float32 shapes, with fresh results; peer: PyTorch, by blocking.

    The rows of ``repeat`` are the product of one matrix of 512 again and again: what helps the mixed ones
    must not hurt it. Those that end in ``-bare`` have as peer the same binding, waited for by blocking: it
    writes to memory that is there, with plans that are made.
    """
    name, calls = stand.name("cuda.mixed"), stand.plan.count(_CALLS)
    rows: list[Result] = []
    for work, ask in (await mixed_works(stand.device)).items():
        most = _MOST.get(work)
        goal = None if most is None else Goal(figure=Figure.RATIO, most=most[stand.isolation])

        async def ours(ask: Callable[[], Awaitable[object]] = ask) -> float:
            return await per_call(ask, calls) * 1e6

        rows.append(await _against(f"{name}-{work}", "torch", work, ours, goal, stand))
        rows.append(await _against(f"{name}-{work}-bare", "bare", work, ours, None, stand))
    return tuple(rows)


async def _against(
    name: str, kind: str, work: str, ours: Callable[[], Awaitable[float]], goal: Goal | None, stand: Stand
) -> Result:
    try:
        async with open_rival(kind) as rival:
            measure = partial(rival.measure, "mixed", work=work, calls=stand.plan.count(_CALLS))

            async def peer() -> float:
                return await measure() * 1e6

            pairs = await alternate(ours, peer, stand.plan)
    except RivalMissingError as error:
        return Result(name=name, goal=goal, reason=str(error))
    return Result.compare(name, pairs, unit="µs", goal=goal)


BENCHMARKS = on_cuda("cuda.mixed", mixed)
