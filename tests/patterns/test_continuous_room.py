"""Growing sequences of a continuous batcher: the order of setting aside and coming back, and the waits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio
from continuous import crash
from growing import Batcher, Cache, Part, Sequence, Visit, length_of, run
from hypothesis import event, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import ContinuousBatcher, ContinuousStatistics, GetStatistics, Submit


async def test_a_short_request_next_to_two_of_the_longest_answers(autojump_clock: MockClock) -> None:
    """Each long answer may need half of the cache."""
    long = [Visit(number=number, at=number * 0.1, parts=1020) for number in range(2)]
    short = [Visit(number=2 + each, at=50.5 + 65 * each, parts=5) for each in range(16)]
    cache = Cache(total=128, size=16, keep=2)
    await run(cache, [*long, *short])
    assert set(cache.ends.values()) == {"answered"}
    assert max(map(cache.steps_until_first, short)) <= 3
    # Only the second of the long ones was ever set aside.
    assert set(cache.aside) <= {1}


@pytest.mark.parametrize("recompute", [False, True])
async def test_the_youngest_of_the_lowest_priority_is_set_aside(
    autojump_clock: MockClock, recompute: bool
) -> None:
    priorities = [0, 1, 0, 1, 0]
    visits = [
        Visit(number=number, at=number * 0.01, length=8, parts=24, priority=priority)
        for number, priority in enumerate(priorities)
    ]
    cache = Cache(total=20, host=0 if recompute else 100, recompute=recompute)
    statistics = await run(cache, visits)
    assert set(cache.ends.values()) == {"answered"}
    assert cache.aside[:2] == [4, 2]
    assert {1, 3}.isdisjoint(cache.aside)
    assert statistics.set_aside >= 2
    assert sorted(cache.aside) == sorted(cache.back)


async def test_equals_come_back_in_the_order_of_their_arrival(autojump_clock: MockClock) -> None:
    visits = [Visit(number=number, at=number * 0.01, length=16, parts=30) for number in range(5)]
    cache = Cache(total=32)
    await run(cache, visits)
    assert set(cache.ends.values()) == {"answered"}
    assert 0 not in cache.aside
    assert list(cache.ends) == [0, 1, 2, 3, 4]
    assert cache.aside[:2] == [4, 3]


async def test_written_state_survives_and_is_not_computed_twice(autojump_clock: MockClock) -> None:
    visits = [Visit(number=number, length=16, parts=40) for number in range(4)]
    chunks = {}
    for recompute in (False, True):
        cache = Cache(total=32, host=0 if recompute else 100, recompute=recompute)
        seen = await run(cache, visits)
        assert seen.set_aside > 0
        chunks[recompute] = seen.steps
    assert chunks[False] <= chunks[True]


def p99(cache: Cache, visits: list[Visit]) -> float:
    return float(np.percentile([cache.firsts[visit.number] - visit.at for visit in visits], 99))


@pytest.mark.parametrize("recompute", [False, True])
async def test_first_tokens_under_a_flood_of_long_prompts(autojump_clock: MockClock, recompute: bool) -> None:
    """Prompts of a fifth of the cache, and short ones: each third is long, and more arrive than fit."""
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(4.0, 120)) + np.arange(120) * 1e-5
    visits = [
        Visit(
            number=number,
            at=float(at),
            length=250 if number % 3 == 0 else 9,
            parts=150 if number % 3 == 0 else 20,
        )
        for number, at in enumerate(times)
    ]
    cache = Cache(total=100, size=16, keep=4, moving=1.5, recompute=recompute, host=0 if recompute else 1e9)
    await run(cache, visits, max_positions=128)
    assert set(cache.ends.values()) == {"answered"}
    assert len(cache.aside) > 10
    short = [visit for visit in visits if visit.length == 9]
    assert p99(cache, short) <= 4 * cache.seconds
    # Nobody is set aside again and again.
    assert max(Counter(cache.aside).values()) <= 3


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("moving", [0.0, 0.9])
async def test_a_short_request_next_to_many_long_requests_of_another_tenant(
    autojump_clock: MockClock, ahead: int, moving: float
) -> None:
    """All places are taken, and all pages."""
    long = [Visit(number=n, at=n * 1e-4, length=40, parts=400, tenant="many") for n in range(64)]
    short = [Visit(number=64 + n, at=200.4 + 31.37 * n, length=9, parts=6, tenant="few") for n in range(5)]
    alone = Cache(total=1000, size=8, keep=4)
    await run(alone, short, steps_ahead=ahead, max_positions=64)
    assert set(map(alone.steps_until_first, short)) == {1}
    cache = Cache(total=1000, size=8, keep=4, moving=moving)
    await run(cache, [*long, *short], steps_ahead=ahead, max_sequences=32, max_positions=64)
    assert set(cache.ends.values()) == {"answered"}
    assert max(map(cache.steps_until_first, short)) <= 1 + 3
    assert set(cache.aside) <= set(range(64))


@pytest.mark.parametrize(("places", "weight"), [(2, 1.0), (4, 3.0), (7, 6.0), (12, 11.0), (11, 0.1)])
async def test_a_tenant_gets_its_place_if_equal_shares_are_left(
    autojump_clock: MockClock, places: int, weight: float
) -> None:
    """Its share equals the other tenant's then: rounded up or down, by sums of floats."""
    long = [Visit(number=n, at=n * 1e-4, parts=400, tenant="many") for n in range(3 * places)]
    short = [Visit(number=len(long), at=50.4, parts=100, tenant="few")]
    cache = Cache(total=1e6)
    seen = await run(cache, [*long, *short], max_sequences=places, weights={"many": weight})
    assert cache.steps_until_first(short[0]) <= 1 + 3
    # It keeps its place, and one sequence of the other tenant waits meanwhile.
    assert seen.set_aside <= 2


async def test_tenants_have_shares_of_the_places(autojump_clock: MockClock) -> None:
    """Three to one by their weights, once both have asked for more than there is."""
    visits = [Visit(number=n, at=n * 1e-4, parts=200, tenant="a") for n in range(40)]
    visits += [Visit(number=40 + n, at=20.3 + n * 1e-4, parts=200, tenant="b") for n in range(40)]
    cache = Cache(total=1e6)
    seen = await run(cache, visits, max_sequences=16, weights={"a": 1.0, "b": 3.0})
    for step, at in zip(cache.steps, cache.times, strict=True):
        assert len(step) <= 16
        if 30 < at < 150:
            assert 3 <= sum(number < 40 for number in step) <= 5
    # As many were set aside as the second tenant takes places; and then nobody takes them in turns.
    assert seen.set_aside <= 16


async def test_a_reader_that_does_not_read_gives_its_room_first(autojump_clock: MockClock) -> None:
    idle = Visit(number=0, length=40, parts=30, pause=500.0)
    rest = [Visit(number=number, at=number, length=16, parts=24) for number in (1, 2)]
    cache = Cache(total=22)
    await run(cache, [idle, *rest], buffer=2)
    assert set(cache.ends.values()) == {"answered"}
    assert set(cache.aside) == {0}
    # The others were done long before it continued.
    assert list(cache.ends) == [1, 2, 0]


async def test_a_low_priority_is_not_starved_by_a_flood_of_a_higher_one(autojump_clock: MockClock) -> None:
    """More come than the cache has room for. The low one needs nearly all of it, and has its turn at last."""
    low = Visit(number=0, length=8, parts=60, priority=-1)
    flood = [Visit(number=1 + n, at=5.3 + 2.1 * n, length=12, parts=8) for n in range(1400)]
    cache = Cache(total=20)
    await run(cache, [low, *flood], max_sequences=8)
    assert set(cache.ends.values()) == {"answered"}
    # 1000 arrivals later, no other is before it.
    ended = list(cache.ends).index(0)
    assert 900 < ended < 1200
    assert cache.aside.count(0) < 100


async def test_a_single_sequence_outgrows_all_pages(autojump_clock: MockClock) -> None:
    visits = [Visit(number=0, length=8, parts=99), Visit(number=1, at=10.1, length=8, parts=28)]
    cache = Cache(total=10)
    await run(cache, visits)
    assert cache.ends == {0: "no room", 1: "answered"}
    assert cache.firsts[0] == 1
    assert 1 in cache.aside


async def test_a_sequence_that_cannot_be_kept_waits_in_its_place(autojump_clock: MockClock) -> None:
    """Nothing is computed again: sequences that need no page continue, and make room by their ends."""
    visits = [Visit(number=number, at=number * 0.1, length=14, parts=10 + 6 * number) for number in range(3)]
    cache = Cache(total=18, host=0)
    seen = await run(cache, visits)
    assert set(cache.ends.values()) == {"answered"}
    assert (cache.aside, seen.set_aside) == ([], 0)


async def test_the_last_sequence_ends_if_nothing_can_be_kept_and_all_need_room(
    autojump_clock: MockClock,
) -> None:
    visits = [Visit(number=number, at=number * 0.01, length=8, parts=24) for number in range(3)]
    cache = Cache(total=18, host=0)
    seen = await run(cache, visits)
    assert cache.ends[0] == "answered"
    assert seen.failed == [*cache.ends.values()].count("no room") > 0
    assert seen.set_aside == 0


async def test_room_takes_the_place_of_cost(system: ta.System) -> None:
    cache = Cache(total=4)
    with pytest.raises(ValueError, match="room takes the place of cost: give one of them"):
        await system.spawn(
            ContinuousBatcher[Visit, Part], cache.step, room=cache, cost=length_of, max_cost=3.0
        )


async def test_a_prompt_that_can_never_fit_is_refused(system: ta.System, autojump_clock: MockClock) -> None:
    cache = Cache(total=4)
    batcher: Batcher = await system.spawn(
        ContinuousBatcher[Visit, Part], cache.step, room=cache, length=length_of, leave=cache.leave
    )
    for length in (16, 1000):
        with pytest.raises(ValueError, match=r"the item wants \d+ to begin, and there are 4 in all"):
            await batcher.ask(Submit(Visit(number=0, length=length)))
    assert await batcher.ask(Submit(Visit(number=0, length=15))) == ((0, 0),)
    assert cache.calls == 1


async def test_a_drain_brings_back_sequences_set_aside(system: ta.System, autojump_clock: MockClock) -> None:
    cache = Cache(total=12)
    batcher: Batcher = await system.spawn(
        ContinuousBatcher[Visit, Part],
        cache.step,
        room=cache,
        length=length_of,
        leave=cache.leave,
        policy=ta.Policy(grace=1000.0),
    )
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(cache.visit, batcher, Visit(number=number, length=8, parts=20))
        await trio.sleep(12.5)
        seen: ContinuousStatistics = await batcher.ask(GetStatistics())
        assert (seen.aside, seen.in_flight) == (len(cache.away), 3)
        assert seen.aside > 0
        found = {(one.name, *one.labels): one.value for one in system.tree().find(batcher.path).readings}
        assert found["sequences", ("state", "set_aside")] == seen.aside
        assert found["sequences", ("state", "running")] == 3 - seen.aside
        assert found["sequences_set_aside",] == seen.set_aside == len(cache.aside)
        assert found["sequence_cost",] == cache.total - cache.free
        await batcher.stop(drain=True)
    assert cache.ends == dict.fromkeys(range(3), "answered")
    assert (cache.free, cache.away.total()) == (12, 0)


@pytest.mark.parametrize("way", ["stop", "crash"])
async def test_an_end_in_the_middle_gives_back_sequences_set_aside(
    system: ta.System, autojump_clock: MockClock, way: str
) -> None:
    cache, ends = Cache(total=12, moving=0.6), list[object]()
    batcher: Batcher = await system.spawn(
        ContinuousBatcher[Visit, Part], cache.step, room=cache, length=length_of, leave=cache.leave
    )

    async def ask(number: int) -> None:
        try:
            await batcher.ask(Submit(Visit(number=number, length=8, parts=20)))
        except ta.ActorError as error:
            ends.append(type(error))

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, number)
        while not cache.aside:  # noqa: ASYNC110  # nobody tells of it
            await trio.sleep(0.1)
        await (batcher.stop() if way == "stop" else crashed(batcher))
    assert ends == [ta.ActorFailedError] * 4 or len(ends) == 4
    assert sorted(cache.left) == sorted({number for step in cache.steps for number in step})
    assert (cache.free, cache.away.total()) == (12, 0)


async def crashed(batcher: Any) -> None:
    crash(batcher)
    await trio.sleep(1)


class Failing(Cache):
    """A cache that cannot set a sequence aside, or bring it back."""

    async def set_aside(self, sequence: Sequence) -> None:
        if sequence.item.number == 2:
            raise OSError("a bug")
        await super().set_aside(sequence)

    async def bring_back(self, sequence: Sequence) -> None:
        if sequence.item.number == 1:
            raise LookupError("a bug")
        await super().bring_back(sequence)


async def test_only_an_unmovable_sequence_fails(system: ta.System, autojump_clock: MockClock) -> None:
    cache, ends = Failing(total=12), dict[int, object]()
    batcher: Batcher = await system.spawn(
        ContinuousBatcher[Visit, Part], cache.step, room=cache, length=length_of, leave=cache.leave
    )

    async def ask(number: int) -> None:
        try:
            ends[number] = await batcher.ask(Submit(Visit(number=number, length=8, parts=20)))
        except (OSError, LookupError) as error:
            ends[number] = type(error)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
    assert ends == {0: tuple(Visit(number=0, parts=20).all_parts), 1: LookupError, 2: OSError}
    assert (cache.free, cache.away.total()) == (12, 0)
    assert sorted(cache.left) == [0, 1, 2]


TENTHS = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def visits_of(draw: st.DrawFn) -> list[Visit]:
    return [
        Visit(
            number=number,
            at=draw(TENTHS) + number * 0.00013,
            length=draw(st.sampled_from([1, 1, 3, 10, 30, 45])),
            parts=draw(st.sampled_from([1, 2, 5, 20, 50])),
            tenant=draw(st.sampled_from("aab")),
            priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
            leaves=draw(st.sampled_from([math.inf, math.inf, math.inf, 0.5, 1.5, 3.33, 7.77])),
            pause=draw(st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.9])),
        )
        for number in range(draw(st.integers(1, 14)))
    ]


@settings(max_examples=300, deadline=None)
@given(
    visits=visits_of(),
    losses=st.frozensets(st.integers(1, 90), max_size=8),
    ahead=st.integers(0, 2),
    total=st.sampled_from([24, 25, 40]),
    host=st.sampled_from([0, 6, 30, 1000]),
    recompute=st.booleans(),
    moving=st.sampled_from([0.0, 0.03, 0.25]),
    keep=st.integers(0, 2),
)
def test_no_part_is_lost_or_given_twice_and_nobody_waits_for_ever(
    visits: list[Visit],
    losses: frozenset[int],
    ahead: int,
    total: int,
    host: int,
    recompute: bool,
    moving: float,
    keep: int,
) -> None:
    async def main() -> None:
        cache = Cache(
            total=total,
            host=host,
            recompute=recompute,
            seconds=0.1,
            moving=moving,
            keep=keep,
            losses=losses,
        )
        seen = await run(cache, visits, steps_ahead=ahead, max_sequences=6, max_positions=12, buffer=2)
        # Each fits alone. So all come to their ends, unless nothing can be set aside.
        if recompute or host == 1000:
            assert "no room" not in cache.ends.values()
        assert seen.failed >= [*cache.ends.values()].count("no room")
        event(f"set aside: {min(len(cache.aside), 5)}")
        event(f"ends: {sorted({*cache.ends.values()})}")

    trio.run(main, clock=MockClock(autojump_threshold=0))
