"""The choice of captured launches: a model, and the results of its bounds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_accel.backends.base import KeptCounts
from trio_accel.backends.base.kit.captured_calls import CapturedLaunches, GraphCall, Key

ROOM = 3
OWNERS = ("first", "second")
CALLS = [GraphCall(OWNERS[number % 2]) for number in range(4)]
KEYS: list[Key] = [(call, "stream", place) for call in CALLS for place in range(2)]


class Table(RuleBasedStateMachine):
    """A table next to a plain account of it: the count of each call, the live plans, the progress of work."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        self.launched = 0
        self.seen: dict[Key, int] = {}
        self.alive: set[int] = set()
        self.made = 0
        self.table = CapturedLaunches(
            KeptCounts(), self.alive.remove, ROOM, lambda plan: self.done > plan.last
        )

    @rule(key=st.sampled_from(KEYS))
    def launch(self, key: Key) -> None:
        plan = self.table.plans.get(key)
        if plan is not None:
            plan.last, plan.is_used = self.launched, True
            self.launched += 1
            return
        before = dict(self.table.plans)
        last = {each: plan.last for each, plan in before.items()}
        self.seen[key] = self.seen.get(key, 0) + 1
        is_due = self.table.is_due(key)
        assert is_due == (self.seen[key] >= 3 and not key[0].is_refused(key))
        is_due = is_due and self.table.has_room()
        gone = before.keys() - self.table.plans.keys()
        # One makes way for a plan at once, and only if the device has done with it.
        assert len(gone) <= is_due
        assert all(last[each] < self.done for each in gone)
        assert not is_due or len(before) < ROOM or gone
        if is_due:
            self.made += 1
            self.alive.add(self.made)
            plan = self.table.record(key, self.made, "arm")
            assert plan.state == "armed"
            del self.seen[key]
            plan.last = self.launched
            self.launched += 1

    @rule(key=st.sampled_from(KEYS))
    def capture_without_asking(self, key: Key) -> None:
        """Threads that ask for room at the same time exceed it by none, and leak no captured launch."""
        self.made += 1
        if key not in self.table.plans:
            self.alive.add(self.made)
            plan = self.table.record(key, self.made, "arm")
            if plan.state == "armed":
                self.seen.pop(key, None)
            plan.last = self.launched
            self.launched += 1
            assert (plan.state == "over") == (self.made not in self.alive)

    @precondition(lambda self: self.done < self.launched)
    @rule()
    def get_on(self) -> None:
        self.done += 1

    @rule(call=st.sampled_from(CALLS))
    def refuse(self, call: GraphCall) -> None:
        call.refuse((call, "stream", 0))

    @rule(owner=st.sampled_from(OWNERS))
    def drop(self, owner: str) -> None:
        before = dict(self.table.plans)
        self.table.drop(lambda plan: plan.key[0].owner == owner)
        for key, plan in before.items():
            assert (key in self.table.plans) == (key[0].owner != owner or plan.last >= self.done)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: Key) -> None:
        plan = self.table.plans.get(key)
        if plan is not None:
            self.table.end(plan)
            # Another thread may do the same at that time.
            self.table.end(plan)
        assert key not in self.table.plans

    @invariant()
    def live_plans_are_captured(self) -> None:
        assert {plan.value for plan in self.table.plans.values()} == self.alive
        assert len(self.alive) <= ROOM

    def teardown(self) -> None:
        self.table.close()
        assert not self.alive
        for call in CALLS:
            call._refused.clear()


TestTable = Table.TestCase


def table(room: int) -> tuple[CapturedLaunches, list[int]]:
    discarded: list[int] = []
    return CapturedLaunches(KeptCounts(), discarded.append, room), discarded


def turn(captured: CapturedLaunches, keys: Iterable[Key]) -> int:
    """Launch each once; returns how many were captured before."""
    found = 0
    for number, key in enumerate(keys):
        plan = captured.plans.get(key)
        if plan is not None:
            found += 1
            plan.is_used = True
        elif captured.is_due(key) and captured.has_room():
            # Whoever captures a launch launches it at once.
            captured.record(key, number, "arm").is_used = True
    return found


def keys_of(count: int) -> list[Key]:
    call = GraphCall(None)
    return [(call, None, number) for number in range(count)]


@pytest.mark.parametrize("more", [1, 30, 500])
def test_more_calls_in_turn_than_entries_leave_the_captured_calls(more: int) -> None:
    captured, discarded = table(128)
    keys = keys_of(128 + more)
    for _ in range(3):
        turn(captured, keys)
    assert [turn(captured, keys) for _ in range(30)] == [128] * 30
    assert not discarded


def test_other_calls_replace_unused_entries() -> None:
    captured, discarded = table(128)
    keys = keys_of(256)
    for _ in range(3):
        turn(captured, keys[:128])
    found = [turn(captured, keys[128:]) for _ in range(40)]
    # The last few misses move the hand slowly.
    assert found[-1] >= 120
    assert len(discarded) >= 120


def test_a_call_seen_once_takes_no_entry() -> None:
    captured, _ = table(4)
    for _ in range(5):
        turn(captured, keys_of(3000))
    assert not captured.plans
    assert captured.counts.unplanned == 15_000
