"""A continuous batcher in a hostile world, by seeds: each client has its exact text, or an error by name.

Steps and moves lose the device at any await, clients leave at any step of any task, some never read, some are
poison, and the batcher is drained, stopped or crashed meanwhile.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import attrs
import pytest
import trio
from continuous import crash
from torn_book import Asked, Book, MoveError, PoisonError, Sequence
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    ContinuousBatcher,
    ContinuousStatistics,
    GetStatistics,
    NoRoomError,
    Submit,
    open_parts,
)

Batcher: TypeAlias = ta.Ref[ContinuousBatcher[Asked, int]]
ENDED = (ta.ActorFailedError, ta.ActorStoppedError, ta.ActorRestartingError)
# Virtual seconds, until which all must have come to their ends.
LAST_LEAVES, LATEST = 400.0, 3000.0


@attrs.define(kw_only=True, eq=False)
class Client:
    """A client, and its outcome.

    Attributes:
        at: Its time of arrival.
        way: How it reads: ``"whole"``, ``"parts"``, ``"slowly"``, or ``"never"`` until it leaves.
        leaves: Seconds until it leaves.
        leaves_at: The moment of a move at which it leaves.
        buffer: The most parts that may wait for it.
    """

    asked: Asked
    at: float
    way: str
    leaves: float = math.inf
    leaves_at: str = ""
    buffer: int
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    end: str = ""
    error: Exception | None = None

    async def live(self, batcher: Batcher) -> None:
        # clock: a mock clock of the caller, or work of any duration
        await trio.sleep(self.at)
        text, got = self.asked.text, list[int]()
        self.scope.deadline = trio.current_time() + self.leaves
        with self.scope:
            try:
                await self.read(batcher, got)
            except Exception as error:  # noqa: BLE001  # looked at in the end
                self.error = error
        assert got == text[: len(got)]
        if self.error is not None:
            self.end = type(self.error).__name__
        elif self.scope.cancelled_caught:
            self.end = "left"
        else:
            assert got == text
            self.end = "answered"

    async def read(self, batcher: Batcher, got: list[int]) -> None:
        if self.way == "whole":
            got += await batcher.ask(Submit(self.asked))
            return
        async with open_parts(batcher, self.asked) as stream:
            if self.way == "never":
                # clock: a mock clock of the caller, or work of any duration
                await trio.sleep(LAST_LEAVES)
                assert len(stream.unread) <= self.buffer
                got += stream.unread
                self.scope.cancel()
                await trio.lowlevel.checkpoint()
            async for part in stream:
                got.append(part)
                if self.way == "slowly":
                    # clock: a mock clock of the caller, or work of any duration
                    await trio.sleep(1.7)


class CancelSome(trio.abc.Instrument):
    """Cancels a client before each of some task steps."""

    def __init__(self, chance: random.Random, clients: list[Client], rate: float) -> None:
        self.chance, self.clients, self.rate = chance, clients, rate

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.chance.random() < self.rate:
            self.chance.choice(self.clients).scope.cancel()


def clients_of(chance: random.Random, buffer: int) -> list[Client]:
    beginnings = [tuple(chance.randrange(9) for _ in range(24)) for _ in range(2)]
    found: list[Client] = []
    for number in range(chance.randint(3, 24)):
        prompt = chance.choice(beginnings)[: chance.choice([1, 4, 13, 24])]
        asked = Asked(
            number=number,
            prompt=(*prompt, *(chance.randrange(9) for _ in range(chance.choice([0, 1, 9])))),
            parts=chance.choice([1, 3, 20, 40, 60]),
            tenant=chance.choice("aab"),
            priority=chance.choice([0, 0, 0, 1, -1]),
            poisoned=chance.choice([*[None] * 17, 1, 3, -2]),
        )
        found.append(
            Client(
                asked=asked,
                at=chance.choice([0, 0, 1, 5, 20]) + number * 1e-4,
                way=chance.choice(["whole", "parts", "parts", "parts", "slowly", "never"]),
                leaves=chance.choice([math.inf] * 12 + [0.0, 0.7, 5.0, 30.0]),
                leaves_at=chance.choice([""] * 9 + ["leaves", "is away", "comes back"]),
                buffer=buffer,
            )
        )
    return found


def length_of(asked: Asked) -> int:
    return len(asked.prompt)


@contextmanager
def scheduled(seed: int) -> Generator[None]:
    """Have Trio's own choices follow from a seed."""
    module: Any = cast("Any", trio)._core._run
    was = module._r.getstate()
    module._r.seed(seed)
    try:
        yield
    finally:
        module._r.setstate(was)


class Attack:
    """One seed: a book, its clients, and what happens to the batcher."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.ahead = chance.choice([0, 0, 1, 2])
        buffer = chance.choice([1, 2, 16])
        self.clients = clients_of(chance, buffer)
        self.keeps_all = chance.random() < 0.7
        self.book = Book(
            random=random.Random(seed + 1),
            count=chance.choice([25, 26, 40]),
            host=math.inf if self.keeps_all else chance.choice([0, 5, 20]),
            recompute=self.keeps_all and chance.random() < 0.5,
            losses=chance.choice([0.0, 0.01, 0.05]),
            breaks=chance.choice([0.0, 0.0, 0.2]),
        )
        if self.book.recompute:
            self.book.host = chance.choice([0, 8])
        self.book.on_move = self.moved
        # The end of the batcher, and its time.
        self.end = chance.choice(["", "", "", "", "drain", "drain", "stop", "crash"])
        self.end_at = chance.choice([0.5, 3.0, 12.0, 25.0])
        self.options: dict[str, Any] = {
            "weights": chance.choice([None, {"a": 3.0, "b": 1.0}]),
            "max_sequences": chance.choice([2, 6, 20]),
            "max_positions": chance.choice([20, 64]),
            "buffer": buffer,
            "steps_ahead": self.ahead,
            # Each poison is found.
            "splits": 6,
        }
        self.statistics: ContinuousStatistics | None = None

    def moved(self, sequence: Sequence, what: str) -> None:
        client = self.clients[sequence.item.number]
        if client.leaves_at == what:
            client.scope.cancel()

    async def run(self) -> None:
        rate = self.chance.choice([0.0, 0.0, 0.0002, 0.002])
        instrument = CancelSome(random.Random(self.chance.random()), self.clients, rate)
        async with ta.open_system("attack") as system:
            batcher: Batcher = await system.spawn(
                ContinuousBatcher[Asked, int],
                self.book.step,
                room=self.book,
                length=length_of,
                leave=self.book.leave,
                tenant=tenant_of,
                priority=priority_of,
                policy=ta.Policy(grace=2 * LATEST),
                **self.options,
            )
            await trio.testing.wait_all_tasks_blocked()
            tasks = trio.lowlevel.current_statistics().tasks_living
            trio.lowlevel.add_instrument(instrument)
            try:
                with trio.fail_after(LATEST):
                    async with trio.open_nursery() as nursery:
                        for client in self.clients:
                            nursery.start_soon(client.live, batcher)
                        if self.end:
                            nursery.start_soon(self.strike, batcher)
            finally:
                trio.lowlevel.remove_instrument(instrument)
            # Moves that run come to their ends.
            await trio.sleep(LATEST)
            if self.end in {"", "crash"}:
                self.statistics = await batcher.ask(GetStatistics())
                assert trio.lowlevel.current_statistics().tasks_living == tasks

    async def strike(self, batcher: Batcher) -> None:
        await trio.sleep(self.end_at)
        if self.end == "crash":
            crash(cast("Any", batcher))
        else:
            await batcher.stop(drain=self.end == "drain")

    def check(self) -> None:
        book, open_ = self.book, self.end in {"", "crash"}
        assert (book.free, book.spilled, +book.busy) == (book.count, 0, Counter())
        assert book.left == book.seen
        if self.statistics is not None:
            seen = self.statistics
            assert (seen.waiting, seen.in_flight, seen.aside, seen.cost) == (0, 0, 0, 0)
        for client in self.clients:
            may = {"answered", "left"}
            if client.asked.poisoned is not None:
                may.add(PoisonError.__name__)
                assert client.end != "answered" or client.asked.parts < abs(client.asked.poisoned)
            if client.asked.number in book.broken:
                may.add(MoveError.__name__)
            if self.end:
                may |= {kind.__name__ for kind in ENDED}
            if not self.keeps_all:
                may.add(NoRoomError.__name__)
            if client.end not in may:
                raise AssertionError((client.asked.number, client.end, may)) from client.error
            assert client.end != "left" or client.way == "never" or client.scope.cancel_called
        if open_ and not self.end:
            ends = {client.end for client in self.clients}
            assert not ends & {kind.__name__ for kind in ENDED}


def tenant_of(asked: Asked) -> str:
    return asked.tenant


def priority_of(asked: Asked) -> int:
    return asked.priority


def attacked(seed: int) -> Attack:
    attack = Attack(seed)
    with scheduled(seed):
        trio.run(attack.run, clock=MockClock(autojump_threshold=0))
    attack.check()
    return attack


def attack_all(seeds: range) -> Counter[str]:
    """Attack by each seed; return what has happened in all."""
    happened = Counter[str]()
    for seed in seeds:
        try:
            attack = attacked(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        happened.update(client.end for client in attack.clients)
        happened += attack.book.tally
        happened["shared"] += attack.book.shared
    return happened


def test_some_attacks() -> None:
    happened = attack_all(range(60))
    # All of it did happen.
    wanted = ["answered", "left", "PoisonError", "MoveError", "NoRoomError", "ActorFailedError"]
    wanted += ["lost", "set aside", "no room", "shared"]
    assert {name for name in wanted if not happened[name]} == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_many_attacks(part: int) -> None:
    attack_all(range(1000 + 500 * part, 1500 + 500 * part))
