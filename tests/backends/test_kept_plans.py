"""The table of kept plans, against a model: states, bound, clock and counts."""

from __future__ import annotations

import itertools
from typing import get_args

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trio_accel.backends.base import KeptCounts
from trio_accel.backends.base.contract.errors import NoEdgeError
from trio_accel.backends.base.kit import kept_plans
from trio_accel.backends.base.kit.kept_plans import KeptPlan, KeptPlans, PlanState, PlanStep

BOUND = 4
KEYS = st.integers(0, 8)
STATES: tuple[PlanState, ...] = get_args(PlanState)
STEPS: tuple[PlanStep, ...] = get_args(PlanStep)


def test_each_state_is_reached_and_each_kept_one_ends() -> None:
    edges = KeptPlan.edges
    reached, more = set[str](), {"seen"}
    while more:
        state = more.pop()
        reached.add(state)
        more |= {edges[at, step] for at, step in edges if at == state} - reached
    assert reached == set(STATES)
    assert {step for _, step in edges} == set(STEPS)
    for state in set(STATES) - {"seen", "over"}:
        assert {edges[state, step] for step in ("evict", "forget", "close")} == {"over"}
    assert not any(state == "over" for state, _ in edges)


@pytest.mark.parametrize(
    ("state", "step"), [pair for pair in itertools.product(STATES, STEPS) if pair not in KeptPlan.edges]
)
def test_a_step_without_an_edge_is_an_error(state: PlanState, step: PlanStep) -> None:
    counts = KeptCounts()
    plan = KeptPlan[str](("key",), 7, counts)
    plan.state = state
    with pytest.raises(NoEdgeError, match=f"plan 7 is {state}: '{step}' does not lead on from there"):
        plan.move(step)
    assert (plan.state, counts) == (state, counts)
    assert attrs.astuple(counts) == (0,) * 7


def test_a_plan_seen_once_takes_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    table = KeptPlans[str](BOUND)
    plan = table.record(("hot",), "recording")
    for number in range(3000):
        assert table.see(("seen", number)) == 0
    assert dict(table.plans) == {("hot",): plan}
    assert [table.see(("again",)) for _ in range(4)] == [0, 1, 2, 3]
    monkeypatch.setattr(kept_plans, "_MAX_SEEN", 2)
    short = KeptPlans[str]()
    assert [short.see((key,)) for key in "abcaab"] == [0, 0, 0, 0, 1, 0]


def test_a_key_is_counted_from_the_start_after_its_plan() -> None:
    table = KeptPlans[str](BOUND)
    assert [table.see(("key",)) for _ in range(3)] == [0, 1, 2]
    table.end(table.record(("key",), "recording"))
    assert [table.see(("key",)) for _ in range(2)] == [0, 1]


def test_a_plan_in_use_outlasts_any_number_of_single_plans() -> None:
    table = KeptPlans[int](BOUND)
    hot = table.record(("hot",), 0)
    for number in range(100):
        hot.is_used = True
        table.record((number,), number)
        assert table.plans["hot",] is hot
        assert len(table.plans) <= BOUND
    assert table.counts.evicted == 100 + 1 - BOUND


class Table(RuleBasedStateMachine):
    """A table, and a model that knows which plans must and must not be there."""

    @initialize()
    def open(self) -> None:
        self.ended: list[int] = []
        self.table = KeptPlans[str](BOUND, on_end=lambda plan: self.ended.append(plan.number))
        self.numbers: set[int] = set()
        self.users: list[KeptPlan[str]] = []
        self.counts = KeptCounts()

    def _plan(self, key: int) -> KeptPlan[str] | None:
        return self.table.plans.get((key,))

    def _protected(self) -> set[int]:
        return {plan.number for plan in self.users if plan.state != "over"}

    @rule(key=KEYS, value=st.sampled_from(["recording", None]))
    def ask(self, key: int, value: str | None) -> None:
        plan, protected = self._plan(key), self._protected()
        if plan is not None:
            plan.is_used = True
            return
        was_full = len(self.table.plans) == BOUND
        made = self.table.keep(self.table.new((key,)), value)
        assert made.number not in self.numbers
        self.numbers.add(made.number)
        self.counts.recorded += value is not None
        self.counts.refused += value is None
        self.counts.evicted += was_full
        # If all are in flight, the new one makes way.
        assert (made.state == "over") == (len(protected) == BOUND)
        assert made.state == "over" or self._plan(key) is made

    @rule(key=KEYS)
    def keep_twice(self, key: int) -> None:
        plan = self._plan(key)
        if plan is not None:
            other = self.table.new(plan.key)
            self.numbers.add(other.number)
            assert self.table.keep(other, "another") is plan
            assert (other.state, other.value) == ("seen", None)

    @rule(key=KEYS)
    def begin(self, key: int) -> None:
        plan = self._plan(key)
        if plan is not None:
            plan.in_flight += 1
            self.users.append(plan)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        plan = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        plan.in_flight -= 1

    @rule(key=KEYS, step=st.sampled_from(STEPS))
    def step(self, key: int, step: PlanStep) -> None:
        plan = self._plan(key)
        if plan is None or KeptPlan.edges.get((plan.state, step), "over") == "over":
            return
        plan.binding = "binding"
        plan.move(step)
        if step in ("bind", "arm", "refuse"):
            name = {"bind": "bound", "arm": "armed", "refuse": "refused"}[step]
            setattr(self.counts, name, getattr(self.counts, name) + 1)
        self.counts.recorded += step == "join"
        assert plan.binding is None or step not in ("unbind", "refuse")

    @rule(key=KEYS)
    def forget(self, key: int) -> None:
        plan = self._plan(key)
        if plan is not None:
            self.table.end(plan)
            assert (plan.state, plan.binding, self._plan(key)) == ("over", None, None)

    @rule()
    def close(self) -> None:
        plans = list(self.table.plans.values())
        self.table.close()
        assert all(plan.state == "over" for plan in plans)
        assert not self.table.plans

    @invariant()
    def holds(self) -> None:
        plans = list(self.table.plans.values())
        assert len(plans) <= BOUND
        assert all(self.table.plans[plan.key] is plan for plan in plans)
        assert not {"seen", "over"} & {plan.state for plan in plans}
        assert attrs.astuple(self.table.counts) == attrs.astuple(self.counts)
        # Each ended once, except for existing plans.
        assert len(self.ended) == len(set(self.ended))
        assert not set(self.ended) & {plan.number for plan in plans}


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
