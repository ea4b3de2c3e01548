"""Streams of a continuous batcher in random schedules: each has its own parts, none twice, none missing."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import attrs
import outcome
import trio
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

BUFFER, MOST_PARTS, MOST_COST = 2, 3, 7


@attrs.frozen(kw_only=True)
class Visit:
    """A request: its arrival, its patience, its way of reading, and its failure, if any.

    Attributes:
        sizes: The number of parts in each step after its prompt.
        pause: Seconds between two reads; None if nobody reads before the end.
        fails_in: In which of these steps it fails; past the last one if never.
        how: Whether it is refused, has an error in its place, or no list of parts.
    """

    number: int
    at: float
    length: int
    cost: int
    sizes: list[int]
    pause: float | None
    leaves: float
    fails_in: int
    how: str

    def parts(self, steps: int) -> list[tuple[int, int]]:
        """The parts of its first steps."""
        return [(self.number, place) for place in range(sum(self.sizes[:steps]))]

    @property
    def all_parts(self) -> list[tuple[int, int]]:
        return self.parts(min(self.fails_in, len(self.sizes)))

    @property
    def fails(self) -> bool:
        return self.fails_in < len(self.sizes)


Part = tuple[int, int]
Sequence = RunningSequence[Visit, Part]
LOSSES = (
    ta.ContextLostError("lost", device="cpu:0"),
    ta.ActorRestartingError("restarts", path="demo/model"),
    ta.QueueFullError("full", device="cpu:0"),
)


class World:
    """A step that is sometimes lost, and readers that check their parts."""

    def __init__(self, losses: set[int], ahead: int) -> None:
        self.losses = losses
        self.ahead = ahead
        self.calls = 0
        self.start = trio.current_time()
        self.ends: dict[int, str] = {}
        self.left: Counter[int] = Counter()
        self.stepped: set[int] = set()
        self.running = 0

    async def step(self, batch: list[Sequence]) -> list[Any]:
        assert self.running <= self.ahead
        assert all(sequence.steps_ahead <= self.ahead for sequence in batch)
        self.running += 1
        try:
            self.calls += 1
            call = self.calls
            numbers = {sequence.item.number for sequence in batch}
            assert not numbers & {*self.left}
            self.stepped |= numbers
            assert sum(sequence.item.cost for sequence in batch) <= MOST_COST
            # Later on, steps before this one have given their parts.
            results = [self._result(sequence) for sequence in batch]
            bad = [sequence.item.number for sequence in batch if self._is_bad(sequence, "refused")]
            await trio.sleep(0.1)
            if call in self.losses:
                raise LOSSES[call % len(LOSSES)]
            if bad:
                raise ta.programs.Refused(f"bad: {bad}")
            return results
        finally:
            self.running -= 1

    def _is_bad(self, sequence: Sequence, how: str) -> bool:
        visit = sequence.item
        step = sequence.done + sequence.steps_ahead - visit.length + sequence.chunk
        return visit.how == how and step == visit.fails_in

    def _result(self, sequence: Sequence) -> StepResult[Part] | None:
        visit = sequence.item
        step = sequence.done + sequence.steps_ahead - visit.length + sequence.chunk
        assert sequence.gives_part == (step >= 0)
        if step < 0:
            assert not sequence.steps_ahead
            return ()
        assert sequence.parts == visit.parts(step - sequence.steps_ahead)
        if self._is_bad(sequence, "error"):
            return outcome.Error(LookupError("bad"))
        if self._is_bad(sequence, "none"):
            return None
        parts = visit.parts(step + 1)[len(visit.parts(step)) :]
        return Last(parts) if step + 1 == len(visit.sizes) else parts

    def leave(self, sequence: Sequence) -> None:
        self.left[sequence.item.number] += 1

    async def visit(self, batcher: ta.Ref[ContinuousBatcher[Visit, Part]], visit: Visit) -> None:
        await trio.sleep_until(self.start + visit.at)
        parts = list[Part]()
        end = "cancelled"
        with trio.CancelScope(deadline=trio.current_time() + visit.leaves):
            try:
                if visit.pause is None:
                    parts += await batcher.ask(Submit(visit))
                else:
                    await self._read(batcher, visit, visit.pause, parts)
                end = "answered"
            except (ta.programs.Refused, LookupError, ta.patterns.ModelOutputError):
                end = "failed"
        assert parts == visit.all_parts[: len(parts)]
        if end == "answered":
            assert not visit.fails
            assert parts == visit.all_parts
        if end == "failed":
            assert visit.fails
            # An error follows all parts before it.
            assert parts == (visit.all_parts if visit.pause is not None else [])
        assert visit.number not in self.ends
        self.ends[visit.number] = end

    async def _read(
        self, batcher: ta.Ref[ContinuousBatcher[Visit, Part]], visit: Visit, pause: float, parts: list[Part]
    ) -> None:
        async with open_parts(batcher, visit) as stream:
            async for part in stream:
                assert len(stream.unread) < BUFFER + MOST_PARTS * (1 + self.ahead)
                parts.append(part)
                await trio.sleep(pause)
        assert stream.parts == tuple(parts)


def length_of(visit: Visit) -> int:
    return visit.length


def cost_of(visit: Visit) -> float:
    return visit.cost


def tenant_of(visit: Visit) -> int:
    return visit.number % 2


def priority_of(visit: Visit) -> int:
    return visit.number % 3 - 1


async def observe(visits: list[Visit], losses: set[int], ahead: int) -> tuple[World, ContinuousStatistics]:
    async with ta.open_system("test") as system:
        world = World(losses, ahead)
        batcher: ta.Ref[ContinuousBatcher[Visit, Part]] = await system.spawn(
            ContinuousBatcher[Visit, Part],
            world.step,
            length=length_of,
            cost=cost_of,
            max_cost=MOST_COST,
            tenant=tenant_of,
            priority=priority_of,
            max_sequences=4,
            max_positions=6,
            buffer=BUFFER,
            steps_ahead=ahead,
            leave=world.leave,
        )
        async with trio.open_nursery() as nursery:
            for visit in visits:
                nursery.start_soon(world.visit, batcher, visit)
        # A step without callers unwinds on its own, or was called in advance and comes to its end.
        await trio.sleep(0.11)
        statistics: ContinuousStatistics = await batcher.ask(GetStatistics())
        assert system.tree().find(batcher.path).restarts == 0
        return world, statistics


TENTHS = st.integers(0, 30).map(lambda tenths: tenths / 10)


@st.composite
def visits_of(draw: st.DrawFn) -> list[Visit]:
    return [
        Visit(
            number=number,
            at=draw(TENTHS) + number * 0.00013,
            length=draw(st.sampled_from([1, 1, 3, 10, 40])),
            cost=draw(st.integers(0, MOST_COST)),
            sizes=draw(st.lists(st.integers(0, MOST_PARTS), min_size=1, max_size=8)),
            pause=draw(st.sampled_from([None, 0.0, 0.0, 0.05, 0.7])),
            leaves=draw(st.sampled_from([math.inf, math.inf, math.inf, 0.5, 1.5, 3.33])),
            fails_in=draw(st.sampled_from([99, 99, 99, 0, 1, 2, 4])),
            how=draw(st.sampled_from(["refused", "error", "none"])),
        )
        for number in range(draw(st.integers(1, 12)))
    ]


@settings(max_examples=150, deadline=None)
@given(visits=visits_of(), losses=st.sets(st.integers(1, 60), max_size=8), ahead=st.integers(0, 2))
def test_each_stream_has_its_own_parts(visits: list[Visit], losses: set[int], ahead: int) -> None:
    world, statistics = trio.run(observe, visits, losses, ahead, clock=MockClock(autojump_threshold=0))
    assert len(world.ends) == len(visits)
    # Given back once, if a step may have seen it.
    assert world.left == Counter(world.stepped)
    ends = Counter(world.ends.values())
    seen = (statistics.answered, statistics.failed, statistics.cancelled)
    # A reader may leave after the end of its sequence, with parts unread.
    assert sum(seen) == len(visits) == statistics.requests
    assert seen[0] >= ends["answered"]
    assert seen[1] >= ends["failed"]
    assert (statistics.cost, statistics.waiting, statistics.in_flight, statistics.refused) == (0, 0, 0, 0)
    assert statistics.steps == world.calls
    assert statistics.repeated <= len(losses)
    event(f"repeated: {statistics.repeated}")
    event(f"ends: {sorted(ends)}")
