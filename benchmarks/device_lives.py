"""What devices cost in the long run."""

from __future__ import annotations

from functools import partial

import trio

from ._harness import Benchmark, Figure, Goal, Isolation, Plan, Result
from ._statistics import Summary
from .actor_lives import run_child

__all__ = ["BENCHMARKS"]

_ISOLATIONS: tuple[Isolation, ...] = ("inline", "process")
_TEXT = "Growth of resident memory from operation 100 000 to 1 000 000, in a process of its own; no peer."


def _name(isolation: Isolation) -> str:
    return "devices.resident" if isolation == "inline" else f"devices.resident-{isolation}"


async def resident(isolation: Isolation, plan: Plan) -> tuple[Result, ...]:
    """Measure once: it takes minutes."""
    await trio.lowlevel.checkpoint()
    plan.watch(0, 1)
    figures = await run_child("operations", plan.count(100_000), plan.count(1_000_000), isolation)
    goal = Goal(figure=Figure.OURS, most=2.0)
    ours = Summary.of([figures["growth"] / 2**20])
    return (Result(name=_name(isolation), unit="MiB", ours=ours, goal=goal),)


BENCHMARKS = tuple(
    Benchmark(_name(isolation), partial(resident, isolation), isolation=isolation, text=_TEXT)
    for isolation in _ISOLATIONS
)
