"""Stores of durable entities against a list and a dictionary, by a state machine."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from trio_accel.cluster import Entry, FencedError, Journal, StoreError

MakeStore = Callable[..., Any]


class Machine(RuleBasedStateMachine):
    """Two stores of one database, and their required contents."""

    IDS = 5
    names = itertools.count()

    def __init__(self, make: MakeStore) -> None:
        super().__init__()
        self.stores = [make(ids=self.IDS), make(ids=self.IDS)]
        for store in self.stores:
            trio.run(store.open)
        self.entity = f"entity {next(self.names)}"
        self.owner = 0
        self.entries: list[Entry] = []
        self.saved: tuple[int, bytes] | None = None
        self.ids = (f"id {number}" for number in itertools.count())

    def teardown(self) -> None:
        for store in self.stores:
            trio.run(store.aclose)

    @property
    def last(self) -> int:
        return self.saved[0] if self.saved else 0

    def expected(self) -> Journal:
        number = len(self.entries)
        known = self.entries[max(0, min(self.last, number - self.IDS)) :]
        replies = {one.id: one.reply for one in known}
        return Journal(number, self.saved, tuple(self.entries[self.last :]), replies)

    @rule(which=strategies.integers(0, 1), epoch=strategies.integers(1, 6))
    def take(self, which: int, epoch: int) -> None:
        if epoch < self.owner:
            with pytest.raises(FencedError):
                trio.run(self.stores[which].take, self.entity, epoch)
        else:
            self.owner = epoch
            assert trio.run(self.stores[which].take, self.entity, epoch) == self.expected()

    @precondition(lambda self: self.owner)
    @rule(
        which=strategies.integers(0, 1),
        data=strategies.binary(max_size=9),
        saved=strategies.none() | strategies.binary(max_size=9),
        steps=strategies.integers(1, 4),
    )
    def write(self, which: int, data: bytes, saved: bytes | None, steps: int) -> None:
        for _ in range(steps):
            one = Entry(len(self.entries) + 1, next(self.ids), data, data[::-1])
            trio.run(self.stores[which].write, self.entity, self.owner, one, saved)
            self.entries.append(one)
            if saved is not None:
                self.saved = (one.number, saved)

    @precondition(lambda self: self.owner and len(self.entries) > self.last)
    @rule(which=strategies.integers(0, 1), saved=strategies.binary(max_size=9))
    def save(self, which: int, saved: bytes) -> None:
        trio.run(self.stores[which].save, self.entity, self.owner, len(self.entries), saved)
        self.saved = (len(self.entries), saved)

    @rule(which=strategies.integers(0, 1), epoch=strategies.integers(1, 7))
    def check_and_save_as_another(self, which: int, epoch: int) -> None:
        if epoch == self.owner:
            trio.run(self.stores[which].check, self.entity, epoch)
        else:
            with pytest.raises(FencedError):
                trio.run(self.stores[which].check, self.entity, epoch)
            with pytest.raises(FencedError):
                trio.run(self.stores[which].save, self.entity, epoch, 99, b"saved")

    @rule(which=strategies.integers(0, 1), epoch=strategies.integers(1, 7))
    def write_as_another(self, which: int, epoch: int) -> None:
        if epoch != self.owner:
            with pytest.raises(FencedError):
                trio.run(
                    self.stores[which].write, self.entity, epoch, Entry(99, "id 99", b"m", b"r"), b"saved"
                )

    @precondition(lambda self: self.entries)
    @rule(which=strategies.integers(0, 1), data=strategies.data())
    def write_again(self, which: int, data: strategies.DataObject) -> None:
        known = data.draw(strategies.sampled_from(sorted(self.expected().replies)))
        one = Entry(len(self.entries) + 1, known, b"m", b"r")
        with pytest.raises(StoreError):
            trio.run(self.stores[which].write, self.entity, self.owner, one, b"")

    @rule(which=strategies.integers(0, 1))
    def open_again(self, which: int) -> None:
        trio.run(self.stores[which].aclose)
        self.stores[which] = pickle.loads(pickle.dumps(self.stores[which]))
        trio.run(self.stores[which].open)

    @invariant()
    def holds_the_required_entries(self) -> None:
        if self.owner:
            assert trio.run(self.stores[0].take, self.entity, self.owner) == self.expected()


def test_a_store_behaves_like_a_dictionary(make_store: MakeStore) -> None:
    run_state_machine_as_test(
        lambda: Machine(make_store), settings=settings(max_examples=20, stateful_step_count=20, deadline=None)
    )
