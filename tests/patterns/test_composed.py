"""Limits, fair shares and batches in front of one model that loses its device now and then."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    Batcher,
    CircuitBreaker,
    FairScheduler,
    FairSubmit,
    GetStatistics,
    RateLimit,
    RateLimitError,
    RetryBudget,
    retry,
)

Item = tuple[str, int]


class Doubler:
    """Takes 0.1 s for a batch, and loses its device in every seventh."""

    def __init__(self) -> None:
        self.batches = 0

    async def __call__(self, items: list[Item]) -> list[int]:
        self.batches += 1
        await trio.sleep(0.1)
        if self.batches % 7 == 0:
            raise ta.ContextPoisonedError("the context was lost")
        return [2 * number for _, number in items]


async def check_shares(fair: ta.Ref[FairScheduler[Any, Any]]) -> None:
    # The first ones were taken when the others had not come yet.
    await trio.sleep(1.05)
    early = (await fair.ask(GetStatistics())).cost_of
    await trio.sleep(6.0)
    later = (await fair.ask(GetStatistics())).cost_of
    gold, bronze = (later[tenant] - early[tenant] for tenant in ("gold", "bronze"))
    assert bronze > 50
    assert gold / bronze == pytest.approx(3.0, rel=0.05)


async def test_each_request_has_one_outcome_and_each_tenant_its_share(
    autojump_clock: MockClock, system: ta.System
) -> None:
    model = Doubler()
    budget = RetryBudget(share=0.5, minimum=10.0)
    batcher: ta.Ref[Batcher[Item, int]] = await system.spawn(Batcher, model, max_size=8, splits=0)
    steady = retry(CircuitBreaker(share=1.0, calls=50).wrap(batcher), budget=budget, may_run_twice=True)
    fair: ta.Ref[FairScheduler[Any, Any]] = await system.spawn(
        FairScheduler, steady, max_in_flight=16, weights={"gold": 3.0, "bronze": 1.0}, max_queued=1000
    )
    limit = RateLimit(1000.0, burst=1000.0)
    source = random.Random(5)
    outcomes: Counter[str] = Counter()

    async def fairly(item: Item) -> object:
        result: object = await fair.ask(FairSubmit(item, tenant=item[0]))
        return result

    limited = limit.wrap(fairly, key=lambda item: item[0], wait=False)

    async def client(tenant: str, number: int, patience: float) -> None:
        outcome = "cancelled"
        with trio.move_on_after(patience):
            try:
                assert await limited((tenant, number)) == 2 * number
                outcome = "answered"
            except ta.ContextLostError:
                outcome = "lost"
            except RateLimitError:
                outcome = "refused"
        outcomes[outcome] += 1

    async with trio.open_nursery() as nursery:
        for number in range(1010):
            for tenant in ("gold", "bronze"):
                patience = source.uniform(0.0, 5.0) if source.random() < 0.2 else 1000.0
                nursery.start_soon(client, tenant, number, patience)
        await check_shares(fair)
    assert outcomes.total() == 2020
    assert outcomes["refused"] == 20
    assert min(outcomes["answered"], outcomes["cancelled"]) > 100
    assert budget.denied == 0
    assert outcomes["lost"] < 20
    for ref in (batcher, fair):
        statistics = await ref.ask(GetStatistics())
        assert getattr(statistics, "queued", 0) == getattr(statistics, "waiting", 0) == 0
    assert (await fair.ask(GetStatistics())).in_flight == 0
