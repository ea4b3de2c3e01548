"""Requests sent to a second replica if the first is slow."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import given, settings
from replica_models import Model, named, statistics_of
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import Hedge, ReplicaPool, ReplicaPoolStatistics, Submit, SubmitActor


async def busy(pool: ta.Ref[Any]) -> int:
    """How many tries the replicas work on."""
    statistics: ReplicaPoolStatistics = await statistics_of(pool)
    return sum(replica.in_flight for replica in statistics.replicas)


@given(first=st.floats(0.01, 3), second=st.floats(0.01, 3), after=st.floats(0.01, 3))
@settings(max_examples=80, deadline=None)
def test_a_hedged_request_takes_the_shorter_of_both(first: float, second: float, after: float) -> None:
    """The oracle: a reply before `after`, or else the earlier of the first, and of the second begun then."""

    async def main() -> None:
        async with ta.open_system("test") as system:
            models = [named("first", first), named("second", second)]
            pool = await system.spawn(ReplicaPool, models, hedge=Hedge(after=after), name="pool")
            begin = trio.current_time()
            result = await pool.ask(Submit(None))
            took = trio.current_time() - begin
            late = min(first, after + second)
            assert took == pytest.approx(first if first <= after else late)
            if abs(first - after) > 1e-6 and abs(first - after - second) > 1e-6:
                assert result == ("first" if first < after + second else "second")
                statistics: ReplicaPoolStatistics = await statistics_of(pool)
                assert statistics.hedged == (first > after)
                assert statistics.won == (first > after + second)
            await wait_all_tasks_blocked()
            assert await busy(pool) == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def failing(item: Any) -> Any:
    await trio.sleep(1.0)
    raise KeyError(item)


@pytest.mark.parametrize(
    ("models", "after", "expected", "seconds"),
    [
        ((failing, named("b", 1.0)), 0.5, "b", 1.5),
        ((named("a", 2.0), failing), 0.5, "a", 2.0),
        ((failing, failing), 0.5, KeyError, 1.5),
        ((failing, named("b", 1.0)), 2.0, KeyError, 1.0),
    ],
)
async def test_an_error_counts_only_if_nothing_better_arrives(
    system: ta.System, autojump_clock: MockClock, models: Any, after: float, expected: Any, seconds: float
) -> None:
    pool = await system.spawn(ReplicaPool, models, hedge=Hedge(after=after))
    begin = trio.current_time()
    if isinstance(expected, str):
        assert await pool.ask(Submit("item")) == expected
    else:
        with pytest.raises(expected):
            await pool.ask(Submit("item"))
    assert trio.current_time() - begin == pytest.approx(seconds)
    await wait_all_tasks_blocked()
    assert await busy(pool) == 0


async def test_hedges_are_a_share_of_the_requests(system: ta.System, autojump_clock: MockClock) -> None:
    pool = await system.spawn(
        ReplicaPool, [named("a", 2.0), named("b", 2.0)], hedge=Hedge(after=1.0, share=0.1)
    )
    for _ in range(100):
        await pool.ask(Submit(None))
    statistics: ReplicaPoolStatistics = await statistics_of(pool)
    # One in ten, and the initial one.
    assert statistics.hedged == 11
    assert sum(replica.begun for replica in statistics.replicas) == 111


async def test_nothing_is_hedged_if_no_other_works(system: ta.System, autojump_clock: MockClock) -> None:
    ended = await system.spawn(SubmitActor[Any, Any])
    pool = await system.spawn(ReplicaPool, [named("a", 2.0), ended], hedge=Hedge(after=1.0))
    await ended.stop()
    assert await pool.ask(Submit(None)) == "a"
    statistics: ReplicaPoolStatistics = await statistics_of(pool)
    assert statistics.hedged == 0
    assert [replica.begun for replica in statistics.replicas] == [1, 0]


async def test_the_loser_does_not_hold_up_the_reply(system: ta.System, autojump_clock: MockClock) -> None:
    async def stubborn(item: Any) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)
        return "late"

    pool = await system.spawn(ReplicaPool, [stubborn, named("b", 1.0)], hedge=Hedge(after=1.0))
    begin = trio.current_time()
    assert await pool.ask(Submit(None)) == "b"
    assert trio.current_time() - begin == pytest.approx(2.0)
    statistics: ReplicaPoolStatistics = await statistics_of(pool)
    assert [replica.in_flight for replica in statistics.replicas] == [1, 0]
    await trio.sleep(100)
    assert await busy(pool) == 0


@pytest.mark.parametrize("when", [0.5, 1.5])
async def test_cancelled_while_hedged(system: ta.System, autojump_clock: MockClock, when: float) -> None:
    cancelled: list[str] = []

    def slow(name: str) -> Model:
        async def model(item: Any) -> None:
            try:
                await trio.sleep_forever()
            finally:
                cancelled.append(name)

        return model

    pool = await system.spawn(ReplicaPool, [slow("a"), slow("b")], hedge=Hedge(after=1.0))
    with trio.move_on_after(when) as scope:
        await pool.ask(Submit(None))
    assert scope.cancelled_caught
    await wait_all_tasks_blocked()
    assert sorted(cancelled) == (["a"] if when < 1 else ["a", "b"])
    statistics: ReplicaPoolStatistics = await statistics_of(pool)
    assert (statistics.in_flight, statistics.cancelled, await busy(pool)) == (0, 1, 0)
    assert sum(replica.cancelled for replica in statistics.replicas) == len(cancelled)


async def test_tries_have_the_deadline_and_the_context_of_the_asker(
    system: ta.System, autojump_clock: MockClock
) -> None:
    seen: list[float] = []

    async def model(item: Any) -> None:
        seen.append(trio.current_effective_deadline())
        await trio.sleep(1.5)

    pool = await system.spawn(ReplicaPool, [model, model], hedge=Hedge(after=1.0))
    with trio.fail_after(10) as scope:
        await pool.ask(Submit(None))
    assert seen == [pytest.approx(scope.deadline)] * 2


async def test_a_try_that_fails_while_it_is_cancelled_ends_nothing(
    system: ta.System, autojump_clock: MockClock
) -> None:
    """A nursery of a model reports both, the cancellation and the error, in one group."""

    async def torn(item: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise OSError("it could not be tidied up")

    hedge = Hedge(after=1.0, share=1.0)
    pool = await system.spawn(ReplicaPool, [torn, named("b", 1.0)], hedge=hedge, name="pool")
    assert await pool.ask(Submit(None)) == "b"
    await wait_all_tasks_blocked()
    assert system.tree().find("test/pool").restarts == 0
    assert await busy(pool) == 0
    assert await pool.ask(Submit(None)) == "b"


async def test_a_drain_waits_for_hedged_requests(system: ta.System, autojump_clock: MockClock) -> None:
    pool = await system.spawn(ReplicaPool, [named("a", 5.0), named("b", 2.0)], hedge=Hedge(after=1.0))
    replies: list[str] = []

    async def ask() -> None:
        replies.append(await pool.ask(Submit(None)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        begin = trio.current_time()
        await pool.stop(drain=True)
        assert trio.current_time() - begin == pytest.approx(3.0)
    assert replies == ["b"]
