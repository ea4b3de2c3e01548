"""What it costs to learn of completions, where launches come one after the other."""

from __future__ import annotations

from functools import partial

import attrs
import trio

from ._cuda_stand import SIZE, hog_interpreter
from ._harness import Benchmark, Figure, Goal, Plan, Result, alternate
from .rivals import open_rival

__all__ = ["BENCHMARKS"]

_LAUNCHES = 1000
_NAME = "cuda.engine"


async def engine(plan: Plan) -> tuple[Result, ...]:
    """1000 launches per second with words and callbacks, in a process like a worker's; peer: without both.

    The launches are validated products of 512 in float32. The stream writes a word behind each, and a
    callback is armed whenever the one before has come. A second row is taken while a thread of this process
    holds the interpreter's lock whenever it can.
    """
    goal = Goal(figure=Figure.RATIO, least=0.8)
    async with open_rival("engine") as rival:
        calls = plan.count(_LAUNCHES)
        rate = partial(rival.measure, "rate", size=SIZE, calls=calls)
        ours, peer = partial(rate, words=1, callbacks=1), partial(rate, words=0, callbacks=0)
        idle = await alternate(ours, peer, plan)
        async with trio.open_nursery() as nursery:
            await nursery.start(hog_interpreter)
            # Whoever looked at the processors would wait for the same lock.
            hogged = await alternate(ours, peer, attrs.evolve(plan, patience=0.0))
            nursery.cancel_scope.cancel(reason="measured")
    return (
        Result.compare(_NAME, idle, unit="/s", goal=goal),
        Result.compare(f"{_NAME}-hog", hogged, unit="/s", goal=goal),
    )


BENCHMARKS = (Benchmark(_NAME, engine),)
