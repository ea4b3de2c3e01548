"""Batches: what a batcher adds to a hand-over, and what it gains on a device."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

from ._harness import Benchmark, Figure, Goal, Plan, Result, alternate, per_call
from ._peers import Channel
from ._stand import Stand, on_device

__all__ = ["BENCHMARKS"]

_ASKERS = 64
_WIDTH = 128
_WAIT = 0.002
# What a batcher may add to a hand-over between two tasks, in microseconds per request.
_MOST_ADDED = 15.0
# How many times more small products there are to be in batches than one by one.
_LEAST_GAIN = 1.5

Ask: TypeAlias = Callable[[], Awaitable[object]]


async def _echo(items: list[int]) -> list[int]:
    """The least that a model can do."""
    return items  # noqa: ASYNC910  # its cost is to be none


@asynccontextmanager
async def _pair() -> AsyncGenerator[tuple[Ask, Ask], None]:
    """A question that goes through a batcher, and one through a channel."""
    channel = Channel()
    async with ta.open_system("benchmark") as system, trio.open_nursery() as nursery:
        batcher = await system.spawn(ta.patterns.Batcher, _echo, max_size=_ASKERS, max_wait=_WAIT)
        nursery.start_soon(channel.serve)  # noqa: ASYNC113  # what is sent before it runs waits in the channel
        call = ta.patterns.Submit(1)
        yield partial(batcher.ask, call), partial(channel.ask, 1)
        nursery.cancel_scope.cancel(reason="measured")


async def _at_once(ask: Ask, calls: int, askers: int) -> float:
    """Seconds per call of several tasks that ask again and again."""
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(askers):
            nursery.start_soon(per_call, ask, calls)
    return (time.perf_counter() - start) / (askers * calls)


async def _added(name: str, plan: Plan, askers: int, calls: int, goal: Goal | None) -> tuple[Result, ...]:
    async def microseconds(ask: Ask) -> float:
        return 1e6 * await _at_once(ask, plan.count(calls), askers)

    async with _pair() as (ours, peer):
        pairs = await alternate(partial(microseconds, ours), partial(microseconds, peer), plan)
    return (Result.compare(name, pairs, unit="µs", goal=goal),)


async def batcher_64(plan: Plan) -> tuple[Result, ...]:
    """64 tasks ask through a batcher whose model does nothing; peer: each through a memory channel."""
    goal = Goal(figure=Figure.DIFFERENCE, most=_MOST_ADDED)
    return await _added("patterns.batcher-64", plan, _ASKERS, 50, goal)


async def batcher_lone(plan: Plan) -> tuple[Result, ...]:
    """One task asks through such a batcher, so that each batch has one request; peer: a memory channel."""
    return await _added("patterns.batcher-lone", plan, 1, 500, None)


async def batched(stand: Stand) -> tuple[Result, ...]:
    """Rows of 64 tasks times a matrix (float32, 128) in batches, from host to host; peer: one by one."""
    generator = np.random.default_rng(7)
    weights = await stand.device.put(generator.standard_normal((_WIDTH, _WIDTH), dtype=np.float32))
    row = generator.standard_normal(_WIDTH, dtype=np.float32)

    async def one_by_one() -> npt.NDArray[Any]:
        return await (await ta.linalg.matmul(row, weights)).to_host()

    model = ta.patterns.stacked(partial(_times, weights), stand.device, to_host=True)
    # Two batches at once: one is copied while the other is multiplied.
    batcher = await stand.device.system.spawn(
        ta.patterns.Batcher, model, max_size=_ASKERS // 2, max_wait=_WAIT, max_in_flight=2
    )
    call = ta.patterns.Submit(row)

    async def rate(ask: Ask) -> float:
        return 1 / await _at_once(ask, stand.plan.count(20), _ASKERS)

    ours = partial(rate, partial(batcher.ask, call))
    pairs = await alternate(ours, partial(rate, one_by_one), stand.plan)
    await batcher.stop()
    goal = Goal(figure=Figure.RATIO, least=_LEAST_GAIN)
    return (Result.compare(stand.name("patterns.batched"), pairs, unit="/s", goal=goal),)


async def _times(weights: ta.AccelRef, rows: ta.AccelRef) -> ta.AccelRef:
    return await ta.linalg.matmul(rows, weights)


BENCHMARKS = (
    Benchmark("patterns.batcher-64", batcher_64),
    Benchmark("patterns.batcher-lone", batcher_lone),
    *on_device("patterns.batched", batched),
)
