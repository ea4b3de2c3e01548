"""What the patterns count, against what their askers see."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.actors import MailboxFullError
from trio_accel.patterns import (
    Batcher,
    Call,
    Cascade,
    Deployment,
    FairScheduler,
    Generate,
    GetStatistics,
    Hedge,
    HotSwap,
    MoeRouter,
    ReplicaPool,
    Router,
    Score,
    SpeculativeDecoder,
    Stage,
)

Model: TypeAlias = Callable[[int], Awaitable[int]]
Spawned: TypeAlias = tuple[ta.Ref[Any], Callable[[int], object]]
OF_A_CALL = ("in_flight", "answered", "failed", "cancelled")


@attrs.frozen
class Visit:
    """One asker: when it comes, how long the model takes for it and how that ends, when it leaves."""

    comes: float
    takes: float
    ends: str
    leaves: float


async def torn() -> None:
    """Be cancelled, and fail over it."""
    try:
        await trio.sleep_forever()
    finally:
        raise OSError("it could not be tidied up")


class World:
    """The visits of one run, the model that serves them, and what became of them."""

    def __init__(self, visits: list[Visit]) -> None:
        self.visits = visits
        self.outcomes: list[str] = []

    async def model(self, number: int) -> int:
        visit = self.visits[number]
        async with trio.open_nursery() as nursery:
            if visit.ends == "is torn":
                nursery.start_soon(torn)
            await trio.sleep(visit.takes)
            if visit.ends == "fails":
                raise LookupError(number)
            nursery.cancel_scope.cancel(reason="served")
        return number

    async def visit(self, number: int, ref: ta.Ref[Any], item: object) -> None:
        visit = self.visits[number]
        await trio.sleep(visit.comes)
        with trio.move_on_after(visit.leaves):
            try:
                await ref.ask(Call(item))
                self.outcomes.append("answered")
            except trio.Cancelled:
                self.outcomes.append("cancelled")
                raise
            except MailboxFullError:
                self.outcomes.append("refused")
            except Exception:  # noqa: BLE001  # whatever it is, it is the outcome
                self.outcomes.append("failed")


async def batcher(system: ta.System, model: Model) -> Spawned:
    async def of_many(items: list[int]) -> list[int]:
        return [await model(item) for item in items]

    return await system.spawn(
        Batcher, of_many, max_size=3, max_wait=0.3, capacity=4, overflow=ta.Overflow.REJECT
    ), int


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

    return await system.spawn(HotSwap, Deployment(opening)), int


async def decoder(system: ta.System, model: Model) -> Spawned:
    async def verifier(score: Score) -> Any:
        await model(score.tokens[0])
        return np.full((score.count, 20), 0.05)

    async def draft(score: Score) -> Any:
        await trio.lowlevel.checkpoint()
        return np.full((score.count, 20), 0.05)

    ref = await system.spawn(SpeculativeDecoder, draft, verifier, lookahead=2)
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


PATTERNS = [batcher, fair, hedged, pool, router, cascade, swapped, decoder, experts]


def check_law(statistics: Any) -> None:
    """Each call that was begun is in flight, or has ended in one way."""
    ended = sum(operator.attrgetter(*OF_A_CALL)(statistics))
    if hasattr(statistics, "requests"):
        assert statistics.requests == ended + statistics.waiting + statistics.refused, statistics
    else:
        assert statistics.begun == ended, statistics
    for part in (*getattr(statistics, "replicas", ()), *getattr(statistics, "stages", ())):
        check_law(part)


async def observe(world: World, spawn: Callable[[ta.System, Model], Awaitable[Spawned]]) -> Any:
    """Have all visits, look at the counters meanwhile, and return them at the end."""
    async with ta.open_system("test") as system:
        ref, item_of = await spawn(system, world.model)

        async def look() -> None:
            while True:
                check_law(await ref.ask(GetStatistics()))
                await trio.sleep(0.25)

        async with trio.open_nursery() as looking:
            looking.start_soon(look)
            async with trio.open_nursery() as visitors:
                for number in range(len(world.visits)):
                    visitors.start_soon(world.visit, number, ref, item_of(number))
            # The second try of a hedged request unwinds by itself.
            await trio.testing.wait_all_tasks_blocked()
            looking.cancel_scope.cancel(reason="all have left")
        return await ref.ask(GetStatistics())


TENTHS = st.integers(0, 10).map(lambda tenths: tenths / 10)
VISITS = st.lists(
    st.builds(
        Visit,
        comes=TENTHS,
        takes=TENTHS,
        ends=st.sampled_from(["returns", "fails", "is torn"]),
        leaves=st.integers(1, 15).map(lambda tenths: tenths / 10),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("spawn", PATTERNS)
@settings(max_examples=80, deadline=None)
@given(visits=VISITS)
def test_they_add_up_to_what_the_askers_see(
    spawn: Callable[[ta.System, Model], Awaitable[Spawned]], visits: list[Visit]
) -> None:
    world = World(visits)
    statistics = trio.run(observe, world, spawn, clock=MockClock(autojump_threshold=0))
    check_law(statistics)
    seen = Counter(world.outcomes)
    assert statistics.in_flight == 0
    assert {name: getattr(statistics, name) for name in OF_A_CALL[1:]} == {
        name: seen[name] for name in OF_A_CALL[1:]
    }
    assert getattr(statistics, "refused", 0) == seen["refused"]
    assert sum(seen.values()) == len(visits)
