"""A hostile world attacks each pattern: models that hang, restarts, crowds, and cancelled callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import outcome
import pytest
import trio
from cancel_at import cancelled_at_each_step
from every_pattern import PATTERNS, Model, Spawned
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors._ref import cell_behind
from trio_accel.patterns import GetStatistics, Submit

Spawn: TypeAlias = Callable[[ta.System, Model], Awaitable[Spawned]]
CROWD = 1000


async def quick(item: int) -> int:
    await trio.lowlevel.checkpoint()
    return item


class Gated:
    """A model that hangs until it may continue."""

    def __init__(self) -> None:
        self.may_go = trio.Event()
        self.begun = self.ended = 0

    async def __call__(self, item: int) -> int:
        self.begun += 1
        try:
            await self.may_go.wait()
        finally:
            self.ended += 1
        return item


class Crowd:
    """Callers in tasks, and their outcomes."""

    def __init__(self, nursery: trio.Nursery, spawned: Spawned, count: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        ref, item_of = spawned
        for number in range(count):
            nursery.start_soon(self._ask, ref, item_of(number % 20))

    async def _ask(self, ref: ta.Ref[Any], item: object) -> None:
        result = await outcome.acapture(ref.ask, Submit(item))
        if isinstance(result, outcome.Error):
            self.errors.append(result.error)
            self.outcomes[type(result.error).__name__] += 1
        else:
            self.outcomes["answered"] += 1


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_a_stop_next_to_hanging_models(
    spawn: Spawn, system: ta.System, autojump_clock: MockClock
) -> None:
    model = Gated()
    async with trio.open_nursery() as nursery:
        spawned = await spawn(system, model)
        crowd = Crowd(nursery, spawned, 8)
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        await spawned[0].stop()
    assert trio.current_time() == begun
    assert model.begun == model.ended > 0
    assert sum(crowd.outcomes.values()) == 8
    assert set(crowd.outcomes) <= {"ActorFailedError", "ActorStoppedError", "MailboxFullError"}
    assert crowd.outcomes["ActorFailedError"] > 0
    assert system.tree().find("test").children == ()


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_a_drain_next_to_hanging_models_ends_with_its_grace(
    spawn: Spawn, system: ta.System, autojump_clock: MockClock
) -> None:
    model = Gated()
    async with trio.open_nursery() as nursery:
        spawned = await spawn(system, model)
        crowd = Crowd(nursery, spawned, 8)
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        await spawned[0].stop(drain=True)
    assert trio.current_time() - begun == pytest.approx(ta.Policy().grace)
    assert model.begun == model.ended > 0
    assert sum(crowd.outcomes.values()) == 8
    assert crowd.outcomes["answered"] == 0


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_a_restart_in_the_middle(spawn: Spawn, system: ta.System, autojump_clock: MockClock) -> None:
    model = Gated()
    async with trio.open_nursery() as nursery:
        spawned = await spawn(system, model)
        ref, item_of = spawned
        crowd = Crowd(nursery, spawned, 8)
        await wait_all_tasks_blocked()
        incarnation = cell_behind(ref).incarnation
        assert incarnation is not None
        incarnation.crash(OSError("a bug"))
        await wait_all_tasks_blocked()
        assert sum(crowd.outcomes.values()) == 8
        assert crowd.outcomes["ActorFailedError"] > 0
        assert crowd.outcomes["answered"] == 0
        model.may_go.set()
        await ref.ask(Submit(item_of(1)))
        statistics = await ref.ask(GetStatistics())
    assert (statistics.answered, statistics.in_flight, statistics.failed) == (1, 0, 0)
    # Requests unseen by any model get an error about it.
    assert model.begun == model.ended


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_a_clock_that_jumps(spawn: Spawn, system: ta.System, mock_clock: MockClock) -> None:
    """As after a night of the machine: years pass at once, and nothing but time is lost."""
    model = Gated()
    async with trio.open_nursery() as nursery:
        spawned = await spawn(system, model)
        crowd = Crowd(nursery, spawned, 4)
        for _ in range(3):
            await wait_all_tasks_blocked()
            mock_clock.jump(1e8)
        await wait_all_tasks_blocked()
        model.may_go.set()
    assert set(crowd.outcomes) <= {"answered", "MailboxFullError"}
    assert crowd.outcomes["answered"] >= 3
    assert await spawned[0].ask(Submit(spawned[1](1))) is not None
    assert model.begun == model.ended


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_a_crowd(spawn: Spawn, system: ta.System, autojump_clock: MockClock) -> None:
    spawned = await spawn(system, quick)
    async with trio.open_nursery() as nursery:
        crowd = Crowd(nursery, spawned, CROWD)
    assert sum(crowd.outcomes.values()) == CROWD
    assert set(crowd.outcomes) <= {"answered", "MailboxFullError"}
    statistics = await spawned[0].ask(GetStatistics())
    assert statistics.in_flight == 0
    assert statistics.answered == crowd.outcomes["answered"] > 0


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_an_asker_is_cancelled_at_each_step(
    spawn: Spawn, system: ta.System, autojump_clock: MockClock
) -> None:
    ref, item_of = await spawn(system, quick)
    seen: Counter[str] = Counter()
    step = 0

    async def ask() -> None:
        await ref.ask(Submit(item_of(1)))
        seen["answered"] += 1

    async with aclosing(cancelled_at_each_step(ask)) as attempts:
        async for _ in attempts:
            step += 1
            statistics = await ref.ask(GetStatistics())
            assert statistics.in_flight == 0
            assert system.tree().find(ref.path).deferred == 0
    assert step > 3
    assert statistics.failed == 0
    assert statistics.answered >= seen["answered"]
    assert statistics.answered + statistics.cancelled <= step
    assert system.tree().find(ref.path).restarts == 0
    await ref.ask(Submit(item_of(2)))
