"""The continuous batcher against a simulation with known step times, and the rule of other servers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import trio
from continuous_model import Limits, Run, Step, Visit, even, first_come, seconds, simulate
from hypothesis import event, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    ContinuousBatcher,
    ContinuousStatistics,
    GetStatistics,
    Last,
    RunningSequence,
    StepResult,
    Submit,
    open_parts,
)

Sequence = RunningSequence[Visit, int]


class Recorder:
    """A step with the known duration, and callers that note their view."""

    def __init__(self) -> None:
        self.start = trio.current_time()
        self.run = Run()
        self.left: list[int] = []

    def now(self) -> float:
        return trio.current_time() - self.start

    async def step(self, batch: list[Sequence]) -> list[StepResult[int]]:
        chunks = tuple((sequence.item.number, sequence.chunk) for sequence in batch)
        self.run.steps.append(Step(self.now(), chunks))
        await trio.sleep(seconds(sum(chunk for _, chunk in chunks)))
        return [self._parts(sequence) for sequence in batch]

    def _parts(self, sequence: Sequence) -> StepResult[int]:
        if not sequence.gives_part:
            return []
        part = len(sequence.parts)
        return Last([part]) if part + 1 == sequence.item.parts else [part]

    def leave(self, sequence: Sequence) -> None:
        self.left.append(sequence.item.number)

    async def read(self, batcher: ta.Ref[ContinuousBatcher[Visit, int]], visit: Visit) -> None:
        await trio.sleep_until(self.start + visit.at)
        what, parts = "cancelled", list[int]()
        with trio.CancelScope(deadline=self.start + visit.leaves):
            async with open_parts(batcher, visit) as stream:
                async for part in stream:
                    self.run.firsts.setdefault(visit.number, self.now())
                    parts.append(part)
            assert stream.parts == tuple(parts) == tuple(range(visit.parts))
            what = "answered"
        assert visit.number not in self.run.ends
        self.run.ends[visit.number] = what, self.now()


def length_of(visit: Visit) -> int:
    return visit.length


def cost_of(visit: Visit) -> float:
    return visit.cost


def tenant_of(item: tuple[str, int]) -> str:
    return item[0]


def priority_of(item: tuple[str, int]) -> int:
    return item[1]


async def observe(visits: list[Visit], limits: Limits) -> tuple[Recorder, ContinuousStatistics]:
    has_cost = limits.most_cost < math.inf
    async with ta.open_system("simulation") as system:
        recorder = Recorder()
        batcher: ta.Ref[ContinuousBatcher[Visit, int]] = await system.spawn(
            ContinuousBatcher[Visit, int],
            recorder.step,
            length=length_of,
            cost=cost_of if has_cost else None,
            max_cost=limits.most_cost if has_cost else None,
            max_sequences=limits.sequences,
            max_positions=limits.positions,
            leave=recorder.leave,
        )
        async with trio.open_nursery() as nursery:
            for visit in visits:
                nursery.start_soon(recorder.read, batcher, visit)
        await trio.sleep(1)
        return recorder, await batcher.ask(GetStatistics())


def observed(visits: list[Visit], limits: Limits) -> tuple[Recorder, ContinuousStatistics]:
    return trio.run(observe, visits, limits, clock=MockClock(autojump_threshold=0))


def check_same(seen: Run, expected: Run) -> None:
    assert [step.chunks for step in seen.steps] == [step.chunks for step in expected.steps]
    assert [step.at for step in seen.steps] == pytest.approx([step.at for step in expected.steps])
    assert seen.firsts == pytest.approx(expected.firsts)
    assert {number: what for number, (what, _) in seen.ends.items()} == {
        number: what for number, (what, _) in expected.ends.items()
    }
    for number, (_, at) in expected.ends.items():
        assert seen.ends[number][1] == pytest.approx(at)


def _visits(rows: list[tuple[int, int, int, int, int]]) -> list[Visit]:
    at, visits = 0, list[Visit]()
    for number, (gap, length, parts, cost, leaves) in enumerate(rows):
        at += gap
        # Fractions that differ, so that nothing happens at the same time as a step ends.
        arrives = at / 200 + number * 0.00003177
        away = arrives + leaves / 50 + 0.00001371 if leaves < 30 else math.inf
        visits.append(Visit(number=number, at=arrives, length=length, parts=parts, cost=cost, leaves=away))
    return visits


ROW = st.tuples(
    st.sampled_from([0, 0, 0, 1, 2, 9]),
    st.sampled_from([1, 1, 2, 5, 17, 60, 200]),
    st.integers(1, 6),
    st.integers(0, 5),
    st.sampled_from([0, 1, 2, 5, 10, *[99] * 15]),
)
LIMITS = st.integers(1, 8).flatmap(
    lambda sequences: st.builds(
        Limits,
        sequences=st.just(sequences),
        positions=st.sampled_from([sequences, sequences + 3, 20, 64]),
        most_cost=st.sampled_from([5, 9, math.inf]),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    visits=st.integers(1, 25)
    .flatmap(lambda count: st.lists(ROW, min_size=count, max_size=count))
    .map(_visits),
    limits=LIMITS,
)
def test_steps_and_outcomes_match_the_simulation(visits: list[Visit], limits: Limits) -> None:
    recorder, statistics = observed(visits, limits)
    expected = simulate(visits, limits, even)
    check_same(recorder.run, expected)
    check_rules(visits, limits, recorder.run)
    # Given back once, whatever became of it.
    stepped = {number for step in recorder.run.steps for number, _ in step.chunks}
    assert sorted(recorder.left) == sorted(stepped)
    whats = [what for what, _ in expected.ends.values()]
    assert (statistics.answered, statistics.cancelled) == (whats.count("answered"), whats.count("cancelled"))
    assert (statistics.waiting, statistics.in_flight, statistics.cost) == (0, 0, 0)
    assert statistics.steps == len(expected.steps)
    event(f"longest batch: {max((len(step.chunks) for step in expected.steps), default=0)}")


def check_rules(visits: list[Visit], limits: Limits, run: Run) -> None:
    """Invariants, whatever the simulation says."""
    by_number = {visit.number: visit for visit in visits}
    begun: list[int] = []
    for step in run.steps:
        batch = [by_number[number] for number, _ in step.chunks]
        assert len(batch) <= limits.sequences
        assert sum(chunk for _, chunk in step.chunks) <= limits.positions
        assert sum(visit.cost for visit in batch) <= limits.most_cost
        # Nobody waits: each has a position in each step from its first one on.
        assert all(chunk > 0 for _, chunk in step.chunks)
        for number, _ in step.chunks:
            if number not in begun:
                begun.append(number)
    # Equals begin in the order of their arrival.
    assert begun == sorted(begun)
    for number in begun:
        steps = [index for index, step in enumerate(run.steps) if number in dict(step.chunks)]
        assert steps == list(range(steps[0], steps[-1] + 1))


def test_a_short_prompt_next_to_a_long_prompt_and_many_streams() -> None:
    """The first token arrives within three steps."""
    streams = [Visit(number=number, at=0, length=1, parts=400) for number in range(32)]
    long = Visit(number=32, at=0.1, length=4000, parts=3)
    short = Visit(number=33, at=0.2, length=200, parts=3)
    recorder, _ = observed([*streams, long, short], Limits())
    run = recorder.run
    ends = [step.at for step in run.steps]
    between = [at for at in ends if short.at <= at <= run.firsts[33]]
    assert 1 <= len(between) <= 3
    assert run.firsts[32] > run.firsts[33]
    # Streams lose no turn meanwhile.
    assert all(len(step.chunks) >= 32 for step in run.steps if 0.1 < step.at < run.firsts[32])


def p99(run: Run, visits: list[Visit]) -> float:
    return float(np.percentile([run.firsts[visit.number] - visit.at for visit in visits], 99))


def test_first_tokens_under_a_flood_of_long_prompts() -> None:
    """Against the rule of vLLM: the first prompt takes all."""
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(0.25, 120)) + np.arange(120) * 1e-5
    visits = [
        Visit(number=number, at=float(at), length=3000 if number % 3 == 0 else 30, parts=5)
        for number, at in enumerate(times)
    ]
    short = [visit for visit in visits if visit.length == 30]
    recorder, _ = observed(visits, Limits())
    ours, theirs = simulate(visits, Limits(), even), simulate(visits, Limits(), first_come)
    check_same(recorder.run, ours)
    longest_step = max(seconds(sum(chunk for _, chunk in step.chunks)) for step in recorder.run.steps)
    assert p99(recorder.run, short) <= 3 * longest_step
    assert p99(recorder.run, short) < p99(theirs, short) / 3
    # The whole loses nothing: the same work, no step more.
    assert len(ours.steps) <= len(theirs.steps) * 1.01
    assert all(what == "answered" for what, _ in recorder.run.ends.values())


def test_a_large_sequence_is_not_starved_by_small_ones() -> None:
    """A request that does not fit waits, and its successors wait for it."""
    small = [Visit(number=number, at=number * 0.03, length=1, parts=8, cost=1) for number in range(60)]
    large = Visit(number=60, at=0.1001, length=1, parts=2, cost=4)
    visits = sorted([*small, large], key=lambda visit: visit.at)
    recorder, _ = observed(visits, Limits(most_cost=4))
    check_same(recorder.run, simulate(visits, Limits(most_cost=4), even))
    begun = recorder.run.firsts
    behind = [visit for visit in small if visit.at > large.at]
    assert all(begun[visit.number] > begun[60] for visit in behind)
    assert all(step.chunks == ((60, 1),) for step in recorder.run.steps if 60 in dict(step.chunks))


async def first_steps(
    system: ta.System, weights: dict[str, float], *rounds: list[tuple[str, int]]
) -> list[tuple[str, int]]:
    """The order in which pairs of a tenant and a priority have their turns, one at a time."""
    order: list[tuple[str, int]] = []

    async def step(batch: list[RunningSequence[tuple[str, int], int]]) -> list[Last[int]]:
        await trio.sleep(1)
        order.extend(sequence.item for sequence in batch)
        return [Last()] * len(batch)

    batcher: ta.Ref[ContinuousBatcher[tuple[str, int], int]] = await system.spawn(
        ContinuousBatcher[tuple[str, int], int],
        step,
        tenant=tenant_of,
        priority=priority_of,
        weights=weights,
        max_sequences=1,
    )
    for asked in rounds:
        async with trio.open_nursery() as nursery:
            for item in asked:
                nursery.start_soon(batcher.ask, Submit(item))
                await trio.testing.wait_all_tasks_blocked()
    return order


async def test_tenants_share_by_their_weights(system: ta.System, autojump_clock: MockClock) -> None:
    asked = [("a", 0)] * 30 + [("b", 0)] * 30
    order = await first_steps(system, {"a": 1.0, "b": 3.0}, asked)
    tenants = [tenant for tenant, _ in order]
    # The first of all found an empty batcher. From then on, three to one while both wait.
    assert [tenants[1:41].count(tenant) for tenant in "ab"] == pytest.approx([10, 30], abs=1)
    assert sorted(order) == sorted(asked)


async def test_a_level_of_priority_has_four_times_the_share(
    system: ta.System, autojump_clock: MockClock
) -> None:
    asked = [("a", 0)] * 30 + [("a", 1)] * 40
    levels = [level for _, level in await first_steps(system, {}, asked)]
    assert [levels[1:51].count(level) for level in (0, 1)] == pytest.approx([10, 40], abs=1)
    # Neither level waits for ever: in each five, both have a turn.
    assert all({0, 1} <= {*levels[begin : begin + 6]} for begin in range(40))


async def test_use_without_competition_is_not_held_against_a_tenant(
    system: ta.System, autojump_clock: MockClock
) -> None:
    first, then = [("a", 0)] * 5, [("c", 0), ("a", 0), ("b", 0)]
    assert await first_steps(system, {}, first, then) == [*first, *then]
