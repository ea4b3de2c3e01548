"""The batcher against a discrete-event simulation: random arrivals, cancellations, failures, slow models."""

from __future__ import annotations

import math

import pytest
import trio
from batch_oracle import Launched, Rules, Seen, Visit, service, simulate
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import Batcher, BatcherStatistics, GetStatistics, Submit


class BadError(Exception):
    """The model's error for a batch with a bad request."""


class Recorder:
    """A model that notes its calls, and the callers that note their outcomes."""

    def __init__(self) -> None:
        self.start = trio.current_time()
        self.launches: list[Launched] = []
        # When a call of the model began and ended, in whatever way.
        self.busy: list[tuple[float, float]] = []
        self.outcomes: dict[int, list[tuple[str, float]]] = {}

    def now(self) -> float:
        return trio.current_time() - self.start

    async def model(self, visits: list[Visit]) -> list[int]:
        begun = self.now()
        self.launches.append(Launched(begun, tuple(visit.number for visit in visits)))
        try:
            await trio.sleep(service([visit.work for visit in visits]))
        finally:
            self.busy.append((begun, self.now()))
        if any(visit.is_bad for visit in visits):
            raise BadError([visit.number for visit in visits])
        return [visit.number * 10 for visit in visits]

    async def ask(self, batcher: ta.Ref[Batcher[Visit, int]], visit: Visit) -> None:
        await trio.sleep_until(self.start + visit.at)
        what = "cancelled"
        with trio.CancelScope(deadline=self.start + visit.leaves):
            try:
                assert await batcher.ask(Submit(visit)) == visit.number * 10
                what = "replied"
            except BadError:
                what = "failed"
        self.outcomes.setdefault(visit.number, []).append((what, self.now()))


def key_of(visit: Visit) -> int:
    return visit.key


def cost_of(visit: Visit) -> int:
    return visit.cost


async def observe(visits: list[Visit], rules: Rules) -> tuple[Recorder, BatcherStatistics]:
    async with ta.open_system("simulation") as system:
        recorder = Recorder()
        batcher = await system.spawn(
            Batcher,
            recorder.model,
            max_size=rules.size,
            max_wait=rules.wait,
            max_in_flight=rules.slots,
            adaptive=rules.adaptive,
            bucket=key_of,
            cost=cost_of,
            max_cost=rules.most_cost,
            splits=rules.splits,
            name="batcher",
        )
        async with trio.open_nursery() as nursery:
            for visit in visits:
                nursery.start_soon(recorder.ask, batcher, visit)
        return recorder, await batcher.ask(GetStatistics())


def _visit(number: int, at: int, key: int, cost: int, work: int, is_bad: bool, leaves: int) -> Visit:
    # Fractions that differ, so that hardly anything happens at one time.
    arrival = at + 0.00137 * number
    return Visit(
        number=number,
        at=arrival,
        key=key,
        cost=cost,
        work=work + 0.0211 * (number + 1),
        is_bad=is_bad,
        leaves=arrival + leaves + 0.57 if leaves < 40 else math.inf,
    )


def _visits(rows: list[tuple[int, int, int, int, bool, int]]) -> list[Visit]:
    at, visits = 0, list[Visit]()
    for number, (gap, key, cost, work, is_bad, leaves) in enumerate(rows):
        at += gap
        visits.append(_visit(number, at, key, cost, work, is_bad, leaves))
    return visits


# They come in bursts, so that batches are full, and large and small ones alternate.
# They come in bursts, so that batches are full, and the usual gap is short and long.
ROW = st.tuples(
    st.sampled_from([0, 0, 0, 0, 1, 1, 2, 5, 40]),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(1, 5),
    st.sampled_from([0, 0, 1, 6]),
    st.sampled_from([False] * 9 + [True]),
    st.sampled_from([0, 1, 2, 5, 30, *[99] * 12]),
)
# Lists of one length are long as often as short.
VISITS = st.integers(1, 50).flatmap(lambda count: st.lists(ROW, min_size=count, max_size=count)).map(_visits)
RULES = st.builds(
    Rules,
    size=st.sampled_from([1, 2, 3, 5, 8, 13]),
    wait=st.sampled_from([0.0, 0.7071, 3.1415, 11.31, 27.19]),
    slots=st.integers(1, 3),
    adaptive=st.booleans(),
    most_cost=st.sampled_from([5, 12, 1000, 1000]),
    splits=st.integers(0, 2),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(VISITS, RULES)
def test_batches_and_outcomes_match_the_simulation(visits: list[Visit], rules: Rules) -> None:
    expected, closest = simulate(visits, rules)
    assume(closest > 1e-6)
    recorder, statistics = trio.run(observe, visits, rules, clock=MockClock(autojump_threshold=0))
    check_rules(visits, rules, recorder)
    got = Seen(tuple(recorder.launches), {number: seen[0] for number, seen in recorder.outcomes.items()})
    assert [launch.numbers for launch in got.launches] == [launch.numbers for launch in expected.launches]
    assert [launch.at for launch in got.launches] == pytest.approx(
        [launch.at for launch in expected.launches], abs=1e-6
    )
    assert {number: what for number, (what, _) in got.outcomes.items()} == {
        number: what for number, (what, _) in expected.outcomes.items()
    }
    for number, (_, at) in expected.outcomes.items():
        assert got.outcomes[number][1] == pytest.approx(at, abs=1e-6)
    whats = [what for what, _ in expected.outcomes.values()]
    assert (statistics.answered, statistics.failed, statistics.cancelled) == tuple(
        whats.count(what) for what in ("replied", "failed", "cancelled")
    )
    assert statistics.requests == len(visits)
    assert statistics.launches == len(expected.launches)
    assert (statistics.waiting, statistics.in_flight, statistics.batches_running) == (0, 0, 0)
    event(f"calls of the model beyond batches: {min(statistics.launches - statistics.batches, 5)}")
    event(f"largest batch: {max((len(launch.numbers) for launch in expected.launches), default=0)}")


def check_rules(visits: list[Visit], rules: Rules, recorder: Recorder) -> None:
    """Invariants, whatever the simulation says."""
    by_number = {visit.number: visit for visit in visits}
    assert {number: len(seen) for number, seen in recorder.outcomes.items()} == dict.fromkeys(by_number, 1)
    first: dict[int, float] = {}
    for launch in recorder.launches:
        batch = [by_number[number] for number in launch.numbers]
        assert 0 < len(batch) <= rules.size
        assert sum(visit.cost for visit in batch) <= rules.most_cost
        assert len({visit.key for visit in batch}) == 1
        for visit in batch:
            first.setdefault(visit.number, launch.at)
    for visit in visits:
        # None is later than its wait, unless the maximum of batches runs the whole time.
        late = first.get(visit.number, recorder.outcomes[visit.number][0][1])
        moment = visit.at + rules.wait + 1e-6
        ends = [end for _, end in recorder.busy if moment < end < late - 1e-6]
        for time in (moment, *(end + 1e-6 for end in ends)):
            if time < late - 1e-6:
                assert sum(begin <= time < end for begin, end in recorder.busy) == rules.slots


def test_a_lone_request_is_no_later_than_its_wait_and_one_launch() -> None:
    rules = Rules(size=4, wait=2.0, slots=1, adaptive=True, most_cost=1000, splits=1)
    visits = [_visit(0, 0, 0, 1, 20, False, 99), _visit(1, 5, 0, 1, 1, False, 99)]
    recorder, _ = trio.run(observe, visits, rules, clock=MockClock(autojump_threshold=0))
    one, other = recorder.launches
    end_of_one = one.at + service([visits[0].work])
    assert other.at == pytest.approx(end_of_one, abs=1e-6)
    assert other.at <= visits[1].at + rules.wait + service([visits[0].work])
