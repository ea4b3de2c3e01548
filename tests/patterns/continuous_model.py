"""The duties of a continuous batcher, as a simulation with known step times: none of its own code.

`even` is the batcher's rule for prompts, a position at a time. `first_come` is the rule of vLLM's scheduler
with chunked prefill, and the order of Orca: the earliest prompt takes all that others have left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

__all__ = ["Limits", "Run", "Step", "Visit", "even", "first_come", "seconds", "simulate"]


@attrs.frozen(kw_only=True)
class Limits:
    """The options of a batcher."""

    sequences: int = 64
    positions: int = 512
    most_cost: float = math.inf


@attrs.frozen(kw_only=True)
class Visit:
    """A request: its times of arrival and departure, its prompt, its parts, its cost."""

    number: int
    at: float
    length: int
    parts: int
    cost: float = 0.0
    leaves: float = math.inf


@attrs.frozen
class Step:
    """A step: its beginning, and the number of positions for each of its sequences."""

    at: float
    chunks: tuple[tuple[int, int], ...]


@attrs.define
class Run:
    """The view from outside: the steps, the times of first parts, and the end of each request."""

    steps: list[Step] = attrs.field(factory=list[Step])
    firsts: dict[int, float] = attrs.field(factory=dict[int, float])
    ends: dict[int, tuple[str, float]] = attrs.field(factory=dict[int, tuple[str, float]])


Rule = Callable[[int, Sequence[int]], list[int]]


def seconds(positions: int) -> float:
    """The duration of a step with this many positions."""
    return 0.0101 + 0.000103 * positions


def even(positions: int, wanted: Sequence[int]) -> list[int]:
    """Deal positions out one at a time, to each prompt that wants more, the earliest first."""
    dealt = [0] * len(wanted)
    while positions and dealt != list(wanted):
        for index, most in enumerate(wanted):
            if dealt[index] < most and positions:
                dealt[index] += 1
                positions -= 1
    return dealt


def first_come(positions: int, wanted: Sequence[int]) -> list[int]:
    """Give each prompt all that it wants, the earliest first."""
    dealt: list[int] = []
    for most in wanted:
        dealt.append(min(most, positions))
        positions -= dealt[-1]
    return dealt


def _chunks(running: list[Visit], done: dict[int, int], positions: int, rule: Rule) -> dict[int, int]:
    """Give each sequence after its prompt one position, and the prompts the rest."""
    prompts = [visit for visit in running if done[visit.number] < visit.length]
    wanted = [visit.length - done[visit.number] for visit in prompts]
    shares = rule(positions - (len(running) - len(prompts)), wanted)
    chunks = {visit.number: 1 for visit in running}
    chunks |= {visit.number: share for visit, share in zip(prompts, shares, strict=True)}
    return {number: chunk for number, chunk in chunks.items() if chunk}


def simulate(visits: Sequence[Visit], limits: Limits, rule: Rule) -> Run:
    """Run all visits, which are given in the order in which they come."""
    run, now = Run(), 0.0
    waiting, running = list(visits), list[Visit]()
    done = {visit.number: 0 for visit in visits}
    given = dict.fromkeys(done, 0)
    while waiting or running:
        for visit in [visit for visit in waiting if visit.leaves <= now]:
            waiting.remove(visit)
            run.ends[visit.number] = "cancelled", visit.leaves
        while waiting and waiting[0].at <= now and len(running) < limits.sequences:
            if sum(visit.cost for visit in [*running, waiting[0]]) > limits.most_cost:
                break
            running.append(waiting.pop(0))
        if not running:
            now = waiting[0].at if waiting else now
            continue
        chunks = _chunks(running, done, limits.positions, rule)
        batch = [visit for visit in running if visit.number in chunks]
        run.steps.append(Step(now, tuple((visit.number, chunks[visit.number]) for visit in batch)))
        # A step ends when nobody waits for it any longer.
        now = min(now + seconds(sum(chunks.values())), max(visit.leaves for visit in batch))
        for visit in batch:
            number = visit.number
            done[number] += chunks[number]
            if visit.leaves <= now:
                running.remove(visit)
                run.ends[number] = "cancelled", visit.leaves
            elif done[number] >= visit.length:
                given[number] += 1
                run.firsts.setdefault(number, now)
                if given[number] == visit.parts:
                    running.remove(visit)
                    run.ends[number] = "answered", now
    return run
