"""The duties of a batcher, as a discrete-event simulation: slow, plain, none of the batcher's own code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence

import attrs

__all__ = ["Launched", "Rules", "Seen", "Visit", "simulate"]


@attrs.frozen(kw_only=True)
class Rules:
    """The options of a batcher."""

    size: int
    wait: float
    slots: int
    adaptive: bool
    most_cost: float
    splits: int


@attrs.frozen(kw_only=True)
class Visit:
    """A request: its time of arrival, and its kind."""

    number: int
    at: float
    key: int
    cost: int
    work: float
    is_bad: bool
    leaves: float


@attrs.frozen
class Launched:
    """A call of the model: when, with which requests."""

    at: float
    numbers: tuple[int, ...]


@attrs.frozen
class Seen:
    """The view from outside: the calls of the model, and the outcome of each request."""

    launches: tuple[Launched, ...]
    outcomes: dict[int, tuple[str, float]]


Steps = Generator[list[Visit], bool, None]


class Simulation:
    """The state between two events."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now = 0.0
        self.waiting: list[Visit] = []
        self.launches: list[Launched] = []
        self.outcomes: dict[int, tuple[str, float]] = {}
        # Batches that run: their steps, the requests of the step, of the whole batch, and the step's end.
        self.running: list[tuple[Steps, list[Visit], list[Visit], float]] = []
        self.size_before = 1
        # The times of events: two events at one time are unordered.
        self.times: list[float] = []

    def arrive(self, visit: Visit) -> None:
        if visit.cost > self.rules.most_cost:
            raise AssertionError("the oracle knows no request that fits into no batch")
        self.waiting.append(visit)

    def leave(self, visit: Visit) -> None:
        if visit.number in self.outcomes:
            return
        self.outcomes[visit.number] = ("cancelled", self.now)
        self.waiting = [other for other in self.waiting if other is not visit]
        self.running = [
            batch for batch in self.running if any(one.number not in self.outcomes for one in batch[2])
        ]

    def due(self, key: int) -> float:
        """When the batch of a key is to be launched if a slot is free."""
        rules = self.rules
        queue = [visit for visit in self.waiting if visit.key == key]
        if len(queue) >= rules.size or sum(visit.cost for visit in queue) >= rules.most_cost:
            return self.now
        if rules.adaptive and not self.running and len(queue) >= self.size_before:
            return self.now
        return queue[0].at + rules.wait

    def next_due(self) -> float:
        if len(self.running) >= self.rules.slots:
            return math.inf
        return min((self.due(visit.key) for visit in self.waiting), default=math.inf)

    def launch_due_batches(self) -> None:
        while len(self.running) < self.rules.slots:
            ready = [visit for visit in self.waiting if self.due(visit.key) <= self.now]
            if not ready:
                return
            # Requests are in order of arrival, so the first one belongs to the batch that began first.
            key = ready[0].key
            batch: list[Visit] = []
            for visit in (visit for visit in self.waiting if visit.key == key):
                fits = sum(one.cost for one in batch) + visit.cost <= self.rules.most_cost
                if len(batch) == self.rules.size or not fits:
                    break
                batch.append(visit)
            self.waiting = [visit for visit in self.waiting if visit not in batch]
            self.size_before = len(batch)
            steps = self.steps_of(batch)
            self.begin(steps, next(steps), batch)

    def begin(self, steps: Steps, part: list[Visit], batch: list[Visit]) -> None:
        self.launches.append(Launched(self.now, tuple(visit.number for visit in part)))
        end = self.now + service([visit.work for visit in part])
        self.running.append((steps, part, batch, end))

    def finish(self, steps: Steps, part: list[Visit], batch: list[Visit], end: float) -> None:
        self.running.remove((steps, part, batch, end))
        works = not any(visit.is_bad for visit in part)
        if works:
            self.settle(part, "replied")
        try:
            following = steps.send(works)
        except StopIteration:
            return
        self.begin(steps, following, batch)

    def settle(self, part: list[Visit], what: str) -> None:
        for visit in part:
            self.outcomes.setdefault(visit.number, (what, self.now))

    def here(self, part: Sequence[Visit]) -> list[Visit]:
        return [visit for visit in part if visit.number not in self.outcomes]

    def steps_of(self, batch: list[Visit]) -> Steps:
        """The calls of the model that a batch takes; sent to it: whether the last one succeeded."""
        if (yield batch):
            return
        suspects, has_worked = [batch], False
        for depth in range(100):
            bad: list[list[Visit]] = []
            for suspect in suspects:
                if len(suspect) == 1 or not (has_worked or depth < self.rules.splits):
                    self.settle(suspect, "failed")
                    continue
                for half in (suspect[: len(suspect) // 2], suspect[len(suspect) // 2 :]):
                    if here := self.here(half):
                        if (yield here):
                            has_worked = True
                        else:
                            bad.append(here)
            suspects = bad
            if not suspects:
                return


def service(works: list[float]) -> float:
    """Seconds that the model takes for a call."""
    return 0.313 + sum(works)


def simulate(visits: Sequence[Visit], rules: Rules) -> tuple[Seen, float]:
    """Return the duties of a batcher, and the smallest distance of two events without an order."""
    state = Simulation(rules)
    coming = sorted(visits, key=lambda visit: visit.at)
    leaving = sorted((visit for visit in visits if visit.leaves < math.inf), key=lambda visit: visit.leaves)
    while coming or state.waiting or state.running:
        arrival = coming[0].at if coming else math.inf
        leave = leaving[0].leaves if leaving else math.inf
        end = min((batch[3] for batch in state.running), default=math.inf)
        state.now = max(state.now, min(arrival, leave, end, state.next_due()))
        state.times += [time for time in (arrival, leave, end, state.next_due()) if time < math.inf]
        if state.now == arrival:
            state.arrive(coming.pop(0))
        elif state.now == leave:
            state.leave(leaving.pop(0))
        elif state.now == end:
            state.finish(*min(state.running, key=lambda batch: batch[3]))
        state.launch_due_batches()
    times = sorted(set(state.times))
    closest = min((b - a for a, b in itertools.pairwise(times)), default=math.inf)
    return Seen(tuple(state.launches), state.outcomes), closest
