"""Pages that sequences of a continuous batcher write to, in a world where anything may fail at any await.

The next token follows from the contents of the pages. So a page that was lost, written by two sequences, or
read before it was written changes a text.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import attrs
import outcome
import trio

import trio_accel as ta
from trio_accel.patterns import Last, NoRoomError, RunningSequence, StepResult


class PoisonError(Exception):
    """A sequence that no step can have."""


class MoveError(Exception):
    """A sequence that cannot be set aside or brought back."""


@attrs.frozen(kw_only=True, eq=False)
class Asked:
    """A request.

    Attributes:
        number: Which of the requests.
        prompt: Its tokens.
        parts: How many tokens are made.
        poisoned: The part at which each step with the sequence fails; a negative one: its own result is an
            error.
    """

    number: int
    prompt: tuple[int, ...]
    parts: int
    tenant: str = "a"
    priority: int = 0
    poisoned: int | None = None

    @property
    def text(self) -> list[int]:
        """The text made in an undisturbed world."""
        tokens = list(self.prompt)
        for _ in range(self.parts):
            tokens.append(follower(tokens))
        return tokens[len(self.prompt) :]


def follower(tokens: Tokens[int]) -> int:
    """Return the token that follows some."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state


Sequence = RunningSequence[Asked, int]


def ignore(sequence: Sequence, what: str) -> None:
    """Do nothing."""


@attrs.define(eq=False)
class Table:
    """The pages of a sequence, or their contents while it is set aside."""

    pages: list[int]
    host: list[int] | None = None


@attrs.define(eq=False)
class Book:
    """A `Room` and a step.

    Attributes:
        random: Decides what fails.
        count: Pages.
        size: Tokens of a page.
        host: Pages of which there may be copies elsewhere.
        recompute: Whether a sequence for which there is none of these begins again.
        losses: The part of the awaits at which the device is lost.
        breaks: The part of the moves that fail for good.
        is_ordered: Whether steps run in advance, so they must write in the order of their calls.
    """

    random: random.Random
    count: int
    size: int = 4
    host: float = math.inf
    recompute: bool = False
    losses: float = 0.0
    breaks: float = 0.0
    is_ordered: bool = False
    contents: dict[tuple[int, int], int] = attrs.field(factory=dict[Any, int])
    users: dict[int, set[Sequence]] = attrs.field(factory=dict[Any, Any], init=False)
    spilled: int = 0
    shared: int = 0
    # Tokens on the device which the step before has made, by the position that they are written to.
    made: dict[tuple[Sequence, int], int] = attrs.field(factory=dict[Any, int])
    busy: Counter[Sequence] = attrs.field(factory=Counter[Any])
    seen: set[Sequence] = attrs.field(factory=set[Any])
    left: set[Sequence] = attrs.field(factory=set[Any])
    broken: set[int] = attrs.field(factory=set[int])
    tally: Counter[str] = attrs.field(factory=Counter[str])
    on_move: Callable[[Sequence, str], object] = ignore
    _order: trio.StrictFIFOLock = attrs.field(factory=trio.StrictFIFOLock, init=False)

    def __attrs_post_init__(self) -> None:
        self.users = {page: set() for page in range(self.count)}

    # The room.

    @property
    def total(self) -> float:
        return self.count

    @property
    def free(self) -> float:
        return sum(not users for users in self.users.values())

    @property
    def spare(self) -> float:
        return 1 + self.count // 16

    def held(self, sequence: Sequence) -> float:
        table: Table | None = sequence.state
        return 0 if table is None else sum(len(self.users[page]) == 1 for page in table.pages)

    def demand(self, sequence: Sequence) -> float:
        most = max(sequence.length, sequence.done) // self.size + 1
        table: Table | None = sequence.state
        return max(most - (len(table.pages) if table is not None else 0), 0)

    async def set_aside(self, sequence: Sequence) -> None:
        self.must_be_idle(sequence)
        table: Table | None = sequence.state
        self.on_move(sequence, "leaves")
        await self.move(sequence)
        if table is None:
            return
        assert table.host is None
        pages = -(-sequence.done // self.size)
        if pages <= self.host - self.spilled:
            table.host = self.read(sequence, sequence.done)
            self.spilled += pages
        elif self.recompute:
            sequence.begin_again(len(sequence.item.prompt) + len(sequence.parts))
            sequence.state = None
        else:
            raise NoRoomError("there is no room elsewhere")
        self.give_back(sequence, table)
        self.tally["set aside"] += 1
        self.on_move(sequence, "is away")

    async def bring_back(self, sequence: Sequence) -> None:
        self.must_be_idle(sequence)
        table: Table | None = sequence.state
        self.on_move(sequence, "comes back")
        if table is None:
            return
        assert table.host is not None
        assert not table.pages
        pages = self.take(sequence, -(-len(table.host) // self.size))
        try:
            await self.move(sequence)
            self.may_lose_room()
        except BaseException:
            self.drop(sequence, pages)
            raise
        table.pages = pages
        for position, token in enumerate(table.host):
            self.write(sequence, position, token)
        self.spilled -= len(pages)
        table.host = None

    def may_lose_room(self) -> None:
        if self.random.random() < self.breaks:
            raise NoRoomError("another one was sooner")

    async def move(self, sequence: Sequence) -> None:
        self.busy[sequence] += 1
        try:
            for _ in range(self.random.randrange(3)):
                await self.pause()
            if self.random.random() < self.breaks:
                self.broken.add(sequence.item.number)
                raise MoveError(f"{sequence.item.number} cannot be moved")
        finally:
            self.busy[sequence] -= 1

    # The step.

    async def step(self, batch: list[Sequence]) -> list[StepResult[int]]:
        assert len(set(batch)) == len(batch)
        places = [
            (one, one.done + one.steps_ahead, one.chunk, one.steps_ahead, list(one.parts)) for one in batch
        ]
        self.seen.update(batch)
        for one in batch:
            assert one not in self.left
            assert one.state is None or one.state.host is None
        self.busy.update(batch)
        try:
            # Steps called in advance have to be handed over in their order.
            async with self._order:
                self.reserve(batch)
                await self.pause()
                return await self.compute(places)
        finally:
            self.busy.subtract(batch)

    def reserve(self, batch: list[Sequence]) -> None:
        """Have pages for all; as a step without pages changes nothing."""
        more = {one: self.missing(one) for one in batch}
        spare = 1 if len(batch) > 1 and not any(one.is_prefilling for one in batch) else 0
        if (wanted := sum(more.values())) and wanted > self.free - spare:
            self.tally["no room"] += 1
            raise NoRoomError("no page is free")
        for one, count in more.items():
            if one.state is None:
                found = self.beginning(one)
                self.shared += len(found)
                for page in found:
                    self.users[page].add(one)
                one.state = Table(found)
                count = max(count - len(found), 0)  # noqa: PLW2901
            one.state.pages += self.take(one, count)

    def missing(self, one: Sequence) -> int:
        end = min(one.done + one.steps_ahead + one.chunk, len(one.item.prompt) + one.item.parts)
        return max(-(-end // self.size) - (len(one.state.pages) if one.state else 0), 0)

    def beginning(self, one: Sequence) -> list[int]:
        """Return the full pages of a sequence with a common prefix in its tenant."""
        item, most = one.item, (one.length - 1) // self.size
        mine = [*item.prompt, *one.parts]
        for other in self.seen - self.left - {one}:
            table: Table | None = other.state
            if table is None or table.host is not None or other.item.tenant != item.tenant:
                continue
            its = [*other.item.prompt, *other.parts][: other.done]
            same = next((n for n, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), None)
            full = min(len(its) if same is None else same, len(mine)) // self.size
            if found := table.pages[: min(full, most)]:
                return found
        return []

    async def compute(self, places: list[Any]) -> list[StepResult[int]]:
        results: list[StepResult[int]] = []
        for one, start, chunk, ahead, parts in places:
            item: Asked = one.item
            await self.pause()
            is_poison = item.poisoned is not None and len(parts) + ahead >= abs(item.poisoned) - 1
            if is_poison and item.poisoned and item.poisoned > 0:
                raise PoisonError(f"{item.number} is poison")
            tokens = [*item.prompt, *parts]
            last = len(item.prompt) + item.parts
            for position in range(start, min(start + chunk, last)):
                if position >= len(tokens):
                    if (one, position) not in self.made:
                        raise ta.NotExecutedError("the step before was not executed")
                    token = self.made[one, position]
                else:
                    token = tokens[position]
                self.write(one, position, token)
                if position % 7 == 3:
                    await self.pause()
            end = start + chunk
            if is_poison:
                results.append(outcome.Error(PoisonError(f"{item.number} is poison")))
            elif end < one.length or end >= last:
                results.append([])
            else:
                token = follower(self.read(one, end))
                self.made[one, end] = token
                results.append(Last([token]) if end + 1 == last else [token])
        await self.pause()
        return results

    async def pause(self) -> None:
        """Wait somewhere, where the device may be lost."""
        if self.random.random() < 0.5:
            # clock: any moment will do
            await trio.sleep(self.random.choice([0, 0, 0.01, 0.3]))
        else:
            await trio.lowlevel.checkpoint()
        if self.random.random() < self.losses:
            self.tally["lost"] += 1
            raise self.random.choice(
                [
                    ta.ContextLostError("lost", device="cpu:0"),
                    ta.NotExecutedError("not executed"),
                    ta.ActorRestartingError("restarts", path="model"),
                    ta.MailboxFullError("full", path="model"),
                ]
            )

    # Pages.

    def write(self, one: Sequence, position: int, token: int) -> None:
        page = one.state.pages[position // self.size]
        where = page, position % self.size
        if self.users[page] == {one}:
            self.contents[where] = token
        # A shared page has what would be written.
        assert one in self.users[page]
        assert self.contents.get(where) == token

    def read(self, one: Sequence, length: int) -> list[int]:
        table: Table = one.state
        assert all(one in self.users[page] for page in table.pages)
        return [
            self.contents[table.pages[position // self.size], position % self.size]
            for position in range(length)
        ]

    def take(self, one: Sequence, count: int) -> list[int]:
        free = [page for page, users in self.users.items() if not users]
        if count > len(free):
            raise NoRoomError("no page is free")
        taken = self.random.sample(free, count)
        for page in taken:
            self.users[page].add(one)
            for place in range(self.size):
                self.contents.pop((page, place), None)
        return taken

    def drop(self, one: Sequence, pages: list[int]) -> None:
        for page in pages:
            self.users[page].remove(one)

    def give_back(self, sequence: Sequence, table: Table) -> None:
        self.drop(sequence, table.pages)
        table.pages = []

    def must_be_idle(self, sequence: Sequence) -> None:
        assert not self.busy[sequence]
        assert sequence not in self.left

    def leave(self, sequence: Sequence) -> None:
        self.must_be_idle(sequence)
        assert sequence in self.seen
        self.left.add(sequence)
        table: Table | None = sequence.state
        if table is not None:
            self.spilled -= -(-len(table.host) // self.size) if table.host is not None else 0
            self.give_back(sequence, table)
        for key in [key for key in self.made if key[0] is sequence]:
            del self.made[key]
