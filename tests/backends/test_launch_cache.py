"""Which of the repeated launches are cached: a model, and what its bounds come to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_accel.backends.base.kit import launch_cache
from trio_accel.backends.base.kit.launch_cache import GraphCall, Key, LaunchCache

ROOM = 3
OWNERS = ("first", "second")
CALLS = [GraphCall(OWNERS[number % 2]) for number in range(4)]
KEYS: list[Key] = [(call, "stream", place) for call in CALLS for place in range(2)]


class Table(RuleBasedStateMachine):
    """A table beside a plain account of it: what was seen how often, what is alive, how far the work is."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        self.launched = 0
        self.seen: dict[Key, int] = {}
        self.alive: set[int] = set()
        self.made = 0
        self.table: LaunchCache[int] = LaunchCache(lambda _, last: self.done > last, self.alive.remove)
        self.table.most = ROOM

    @rule(key=st.sampled_from(KEYS))
    def launch(self, key: Key) -> None:
        entry = self.table.entries.get(key)
        if entry is not None:
            entry.last = self.launched
            self.launched += 1
            return
        before = dict(self.table.entries)
        last = {each: entry.last for each, entry in before.items()}
        self.seen[key] = self.seen.get(key, 0) + 1
        is_due = self.table.is_due(key) and self.table.has_room()
        gone = before.keys() - self.table.entries.keys()
        # One makes way for an entry at once, and only if the device has done with it.
        assert len(gone) <= is_due
        assert all(last[each] < self.done for each in gone)
        assert is_due == (self.seen[key] >= 3 and (len(before) < ROOM or bool(gone)))
        if is_due:
            self.made += 1
            self.alive.add(self.made)
            self.table.store(key, self.made, self.launched)
            self.launched += 1
            del self.seen[key]

    @precondition(lambda self: self.done < self.launched)
    @rule()
    def get_on(self) -> None:
        self.done += 1

    @rule(owner=st.sampled_from(OWNERS))
    def drop(self, owner: str) -> None:
        before = dict(self.table.entries)
        self.table.drop(owner)
        for key, entry in before.items():
            assert (key in self.table.entries) == (key[0].owner != owner or entry.last >= self.done)
        self.seen = {key: count for key, count in self.seen.items() if key[0].owner != owner}

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: Key) -> None:
        self.table.remove(key)
        assert key not in self.table.entries

    @invariant()
    def what_is_alive_is_cached(self) -> None:
        assert {entry.value for entry in self.table.entries.values()} == self.alive
        assert len(self.alive) <= ROOM

    def teardown(self) -> None:
        self.table.clear()
        assert not self.alive


TestTable = Table.TestCase


def table(room: int) -> tuple[LaunchCache[int], list[int]]:
    discarded: list[int] = []
    made: LaunchCache[int] = LaunchCache(lambda *_: True, discarded.append)
    made.most = room
    return made, discarded


def turn(cache: LaunchCache[int], keys: Iterable[Key]) -> int:
    """Launch each once; returns how many were cached before."""
    found = 0
    for number, key in enumerate(keys):
        entry: Any = cache.entries.get(key)
        if entry is not None:
            found += 1
            entry.last += 1
        elif cache.is_due(key) and cache.has_room():
            cache.store(key, number, 0)
    return found


def keys_of(count: int) -> list[Key]:
    call = GraphCall(None)
    return [(call, None, number) for number in range(count)]


@pytest.mark.parametrize("more", [1, 30, 500])
def test_more_in_turn_than_there_is_room_for_leave_those_that_are_cached(more: int) -> None:
    cache, discarded = table(128)
    keys = keys_of(128 + more)
    for _ in range(3):
        turn(cache, keys)
    assert [turn(cache, keys) for _ in range(30)] == [128] * 30
    assert not discarded


def test_others_take_the_place_of_what_is_not_used_any_more() -> None:
    cache, discarded = table(128)
    keys = keys_of(256)
    for _ in range(3):
        turn(cache, keys[:128])
    found = [turn(cache, keys[128:]) for _ in range(40)]
    # The last few misses move the hand slowly.
    assert found[-1] >= 120
    assert len(discarded) >= 120


def test_what_is_seen_once_is_not_kept_in_mind() -> None:
    cache, _ = table(4)
    for _ in range(5):
        turn(cache, keys_of(3000))
    assert not cache.entries
    assert len(cache._counts) <= launch_cache._MOST_COUNTED
