"""Each pattern around one model of integers, so that a test holds for all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.patterns import (
    Batcher,
    Cascade,
    ContinuousBatcher,
    Deployment,
    FairScheduler,
    Generate,
    Hedge,
    HotSwap,
    Last,
    MoeRouter,
    Pipeline,
    PipelineStage,
    ReplicaPool,
    Router,
    RunningSequence,
    Score,
    SpeculativeStep,
    Stage,
)

Model: TypeAlias = Callable[[int], Awaitable[int]]
Spawned: TypeAlias = tuple[ta.Ref[Any], Callable[[int], object]]
"""A pattern, and what makes an item for it of a number."""


async def torn() -> None:
    """Be cancelled, and fail over it."""
    try:
        await trio.sleep_forever()
    finally:
        raise OSError("it could not be tidied up")


async def batcher(system: ta.System, model: Model) -> Spawned:
    async def of_many(items: list[int]) -> list[int]:
        return [await model(item) for item in items]

    return await system.spawn(Batcher, of_many, max_size=3, max_wait=0.3, capacity=4), int


async def continuous(system: ta.System, model: Model) -> Spawned:
    async def step(batch: list[RunningSequence[int, int]]) -> list[Last[int]]:
        return [Last([await model(sequence.item)]) for sequence in batch]

    return await system.spawn(ContinuousBatcher[int, int], step, max_sequences=3, capacity=4), int


async def fair(system: ta.System, model: Model) -> Spawned:
    return await system.spawn(FairScheduler, model, max_in_flight=2, max_queued=2), int


async def hedged(system: ta.System, model: Model) -> Spawned:
    return await system.spawn(ReplicaPool, [model] * 3, hedge=Hedge(after=0.3, share=1.0)), int


async def pool(system: ta.System, model: Model) -> Spawned:
    return await system.spawn(ReplicaPool, [model] * 2), int


async def router(system: ta.System, model: Model) -> Spawned:
    return await system.spawn(Router, [model] * 2), int


async def cascade(system: ta.System, model: Model) -> Spawned:
    first = Stage("first", model, confidence=lambda result: result % 2, falls_through=(ExceptionGroup,))
    return await system.spawn(Cascade, [attrs.evolve(first, threshold=0.5), Stage("last", model)]), int


async def swapped(system: ta.System, model: Model) -> Spawned:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[Model, None]:
        yield model

    return await system.spawn(HotSwap[int, int], Deployment[int, int](opening)), int


async def texts(system: ta.System, model: Model) -> Spawned:
    def even(scores: list[Score]) -> list[Any]:
        return [np.full((score.count, 20), 0.05) for score in scores]

    async def verifier(scores: list[Score]) -> Any:
        for score in scores:
            await model(score.tokens[0])
        return even(scores)

    async def draft(scores: list[Score]) -> Any:
        await trio.lowlevel.checkpoint()
        return even(scores)

    step = SpeculativeStep(verifier, draft, lookahead=2)
    ref = await system.spawn(ContinuousBatcher[Generate, int], step, max_sequences=3, capacity=4)
    return ref, lambda number: Generate((number,), max_tokens=2, seed=number)


async def experts(system: ta.System, model: Model) -> Spawned:
    async def gate(tokens: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return np.zeros((len(tokens), 2))

    async def expert(tokens: Any) -> Any:
        await model(int(tokens[0, 0]))
        return tokens

    ref = await system.spawn(MoeRouter, gate, [expert] * 2, top_k=1, on_failure="raise")
    return ref, lambda number: np.full((1, 1), float(number))


async def pipeline(system: ta.System, model: Model) -> Spawned:
    async def last(number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number

    return await system.spawn(Pipeline, PipelineStage(model, workers=2, capacity=2), last), int


PATTERNS = [batcher, continuous, fair, hedged, pool, router, cascade, swapped, texts, experts, pipeline]
