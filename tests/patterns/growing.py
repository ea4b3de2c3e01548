"""A cache that sequences of a continuous batcher take more of while they grow, with known step times.

It has no pages, but counts: for each sequence, its pages, and the written positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from typing import Any

import attrs
import trio

import trio_accel as ta
from trio_accel.patterns import (
    ContinuousBatcher,
    ContinuousStatistics,
    GetStatistics,
    Last,
    NoRoomError,
    RunningSequence,
    StepResult,
    open_parts,
)

Part = tuple[int, int]


@attrs.frozen(kw_only=True)
class Visit:
    """A request: its times of arrival and departure, its prompt, its parts, its owner, and its reader."""

    number: int
    at: float = 0.0
    length: int = 1
    parts: int = 1
    tenant: Hashable = None
    priority: int = 0
    leaves: float = math.inf
    pause: float = 0.0

    @property
    def all_parts(self) -> list[Part]:
        return [(self.number, place) for place in range(self.parts)]


Sequence = RunningSequence[Visit, Part]
Batcher = ta.Ref[ContinuousBatcher[Visit, Part]]


def length_of(visit: Visit) -> int:
    return visit.length


def tenant_of(visit: Visit) -> Hashable:
    return visit.tenant


def priority_of(visit: Visit) -> int:
    return visit.priority


@attrs.define(eq=False)
class Cache:
    """A `Room` and a step.

    Attributes:
        total: Its pages.
        size: Positions of a page.
        host: Pages that may be kept elsewhere.
        recompute: Whether a sequence for which there is none of these begins again.
        seconds: How long a step takes.
        moving: How long it takes to set a sequence aside, or to bring it back.
        keep: Pages that only newcomers get, as long as several sequences run.
        losses: Lost calls of steps and moves.
    """

    total: float
    size: int = 4
    host: float = math.inf
    recompute: bool = False
    seconds: float = 1.0
    moving: float = 0.0
    keep: int = 0
    losses: frozenset[int] = frozenset()
    calls: int = 0
    has: Counter[Sequence] = attrs.field(factory=Counter[Any])
    away: Counter[Sequence] = attrs.field(factory=Counter[Any])
    written: Counter[Sequence] = attrs.field(factory=Counter[Any])
    busy: Counter[Sequence] = attrs.field(factory=Counter[Any])
    left: list[int] = attrs.field(factory=list[Any])
    aside: list[int] = attrs.field(factory=list[Any])
    back: list[int] = attrs.field(factory=list[Any])
    firsts: dict[int, float] = attrs.field(factory=dict[Any, Any])
    ends: dict[int, str] = attrs.field(factory=dict[Any, Any])
    # The numbers of the sequences in each step, and when it began.
    steps: list[list[int]] = attrs.field(factory=list[Any])
    times: list[float] = attrs.field(factory=list[Any])
    start: float = attrs.field(factory=trio.current_time)

    @property
    def free(self) -> float:
        return self.total - self.has.total()

    @property
    def spare(self) -> float:
        return self.keep + (len(self.steps[-1]) if self.steps else 0)

    def now(self) -> float:
        return trio.current_time() - self.start

    def pages(self, positions: int) -> int:
        return -(-positions // self.size)

    def held(self, sequence: Sequence) -> float:
        return self.has[sequence]

    def demand(self, sequence: Sequence) -> float:
        wanted = self.away[sequence] if sequence in self.away else self.pages(sequence.length + 1)
        return max(wanted - self.has[sequence], 0)

    async def step(self, batch: list[Sequence]) -> list[StepResult[Part]]:
        self.take(batch)
        for sequence in batch:
            assert sequence not in self.away
            # All before was written, unless the step before lacked space.
            if self.written[sequence] < min(sequence.done + sequence.steps_ahead, self.end(sequence)):
                assert sequence.steps_ahead
                raise ta.NotExecutedError("the step before was not executed")
        for sequence in batch:
            self.written[sequence] = max(self.written[sequence], self.end(sequence))
            assert self.has[sequence] >= self.pages(self.written[sequence])
            self.busy[sequence] += 1
        self.steps.append([sequence.item.number for sequence in batch])
        self.times.append(self.now())
        results = [self.parts(sequence) for sequence in batch]
        try:
            await self.pass_time(self.seconds)
        finally:
            self.busy.subtract(batch)
        return results

    def take(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            more = self.pages(self.end(sequence)) - self.has[sequence]
            keep = self.keep if len(batch) > 1 and not sequence.is_prefilling else 0
            if more > 0 and more > self.free - keep:
                raise NoRoomError("no page is free")
            self.has[sequence] += max(more, 0)

    def end(self, sequence: Sequence) -> int:
        """Positions written after a step: a step called in advance may not know that there are no more."""
        visit = sequence.item
        return min(sequence.done + sequence.steps_ahead + sequence.chunk, visit.length + visit.parts - 1)

    def parts(self, sequence: Sequence) -> StepResult[Part]:
        if not sequence.gives_part:
            return []
        place = len(sequence.parts) + sequence.steps_ahead
        visit = sequence.item
        assert sequence.done + sequence.steps_ahead + sequence.chunk == visit.length + place
        assert sequence.parts == visit.all_parts[: len(sequence.parts)]
        return [] if place >= visit.parts else self.last((visit.number, place), place + 1 == visit.parts)

    def last(self, part: Part, is_last: bool) -> StepResult[Part]:
        return Last([part]) if is_last else [part]

    async def pass_time(self, seconds: float) -> None:
        self.calls += 1
        is_lost = self.calls in self.losses
        await trio.sleep(seconds)
        if is_lost:
            raise ta.ContextLostError("lost", device="cpu:0")

    async def set_aside(self, sequence: Sequence) -> None:
        self.check_idle(sequence)
        assert sequence not in self.away
        wanted = self.pages(sequence.done)
        keeps = wanted <= self.host - self.away.total()
        if not keeps and not self.recompute:
            raise NoRoomError("there is no room elsewhere")
        await self.move(sequence)
        if keeps:
            if wanted > self.host - self.away.total():
                raise NoRoomError("another one was sooner")
            self.away[sequence] = wanted
            self.written[sequence] = sequence.done
        else:
            sequence.begin_again(sequence.item.length + len(sequence.parts))
            self.written[sequence] = 0
        del self.has[sequence]
        self.aside.append(sequence.item.number)

    async def bring_back(self, sequence: Sequence) -> None:
        self.check_idle(sequence)
        assert not self.has[sequence]
        if sequence in self.away:
            if self.away[sequence] > self.free:
                raise NoRoomError("no page is free")
            self.has[sequence] = self.away[sequence]
            try:
                await self.move(sequence)
            except BaseException:
                del self.has[sequence]
                raise
            del self.away[sequence]
        self.back.append(sequence.item.number)

    async def move(self, sequence: Sequence) -> None:
        self.busy[sequence] += 1
        try:
            await self.pass_time(self.moving)
        finally:
            self.busy[sequence] -= 1

    def check_idle(self, sequence: Sequence) -> None:
        assert not self.busy[sequence]
        assert sequence.item.number not in self.left

    def leave(self, sequence: Sequence) -> None:
        self.check_idle(sequence)
        self.left.append(sequence.item.number)
        for counter in (self.has, self.away, self.written, self.busy):
            del counter[sequence]

    async def visit(self, batcher: Batcher, visit: Visit) -> None:
        """Ask for a sequence, and note its outcome."""
        await trio.sleep_until(self.start + visit.at)
        parts, end = list[Part](), "cancelled"
        with trio.CancelScope(deadline=trio.current_time() + visit.leaves):
            try:
                async with open_parts(batcher, visit) as stream:
                    async for part in stream:
                        self.firsts.setdefault(visit.number, self.now())
                        parts.append(part)
                        await trio.sleep(visit.pause)
                end = "answered"
            except NoRoomError:
                end = "no room"
        assert parts == visit.all_parts[: len(parts)]
        assert end != "answered" or len(parts) == visit.parts
        assert visit.number not in self.ends
        self.ends[visit.number] = end

    def steps_until_first(self, visit: Visit) -> int:
        """Count the steps that ran from its request to its first part, those included that ran already."""
        first = self.firsts[visit.number]
        return sum(visit.at - self.seconds < at < first - 1e-9 for at in self.times)


async def run(cache: Cache, visits: list[Visit], **options: Any) -> ContinuousStatistics:
    """Have all come and go, and check that nothing is left over."""
    async with ta.open_system("growing") as system:
        batcher: Batcher = await system.spawn(
            ContinuousBatcher[Visit, Part],
            cache.step,
            room=cache,
            length=length_of,
            leave=cache.leave,
            tenant=tenant_of,
            priority=priority_of,
            **options,
        )
        with trio.fail_after(1e6):
            async with trio.open_nursery() as nursery:
                for visit in visits:
                    nursery.start_soon(cache.visit, batcher, visit)
            await trio.sleep(10 * (cache.seconds + cache.moving) + 1)
        statistics: ContinuousStatistics = await batcher.ask(GetStatistics())
        assert (statistics.waiting, statistics.in_flight, statistics.aside, statistics.cost) == (0, 0, 0, 0)
        # A reader may leave meanwhile.
        assert statistics.set_aside <= len(cache.aside)
        assert system.tree().find(batcher.path).restarts == 0
        assert (cache.free, cache.away.total()) == (cache.total, 0)
        assert len(cache.ends) == len(visits)
        assert len(set(cache.left)) == len(cache.left)
    return statistics
