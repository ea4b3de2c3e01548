"""Pages against a plain model: lists of tokens, and numbers on a device that follow from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from cancel_at import CancelAt
from chosen import BACKEND
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import trio_accel as ta
from trio_accel.patterns import Pages, PagesFullError, PageTable
from trio_accel.testing import FaultInjection, inject_fault

COUNT, SIZE, HOST = 7, 2, 4
# Few, so that beginnings are equal.
TOKENS = st.lists(st.integers(0, 1), max_size=7)
TENANTS = st.sampled_from(["a", "a", "a", "b"])
WHICH = st.integers(0, 99)


def numbers(tokens: Sequence[int]) -> list[int]:
    """The written values of each token: they follow from all tokens up to it."""
    made, state = list[int](), 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
        made.append(state)
    return made


@attrs.define(eq=False)
class One:
    """A table, and the model's knowledge of it."""

    table: PageTable
    tokens: list[int]
    tenant: str
    is_spilled: bool = False

    @property
    def filled(self) -> int:
        return -(-len(self.tokens) // SIZE)


class Life(RuleBasedStateMachine):
    """The events of tables, in any order. It runs in a thread next to Trio's."""

    arrays: tuple[ta.AccelRef, ...]
    shares: bool
    # A device with a worker that may be killed; None for none.
    mortal: ta.Device | None = None
    # Lost calls, in all examples.
    losses = 0

    @initialize()
    def begin(self) -> None:
        self.pages = Pages(self.arrays, SIZE, host=HOST, share=self.shares)
        self.ones: list[One] = []

    def teardown(self) -> None:
        trio.from_thread.run(self.end)

    async def end(self) -> None:
        for one in self.ones:
            one.table.close()
            one.table.close()
        assert (self.pages.used, self.pages.free) == (0, COUNT)
        assert self.pages.statistics().spilled == 0
        # None is lost.
        with self.pages.open() as table:
            await table.reserve(COUNT * SIZE)
            assert sorted(table.pages) == list(range(COUNT))
        assert self.pages.used == 0

    def one(self, which: int) -> One:
        return self.ones[which % len(self.ones)]

    def users(self, page: int) -> int:
        return sum(page in one.table.pages for one in self.ones)

    def wanted(self, one: One, length: int) -> int | None:
        """The number of pages for a reservation; None if it depends on what is known."""
        if one.is_spilled:
            return None
        more, place = max(-(-length // SIZE) - len(one.table.pages), 0), len(one.tokens) // SIZE
        is_shared = place < len(one.table.pages) and self.users(one.table.pages[place]) > 1
        return more + (is_shared and length > len(one.tokens))

    @precondition(lambda self: len(self.ones) < 5)
    @rule(tokens=TOKENS, tenant=TENANTS)
    def open(self, tokens: list[int], tenant: str) -> None:
        wanted, used = self.pages.demand(tokens, tenant=tenant), self.pages.used
        table = self.pages.open(tokens, tenant=tenant)
        # The pages that it has found without users, and the missing pages.
        assert wanted == self.pages.used - used + len(tokens) // SIZE + 1 - len(table.pages)
        assert table.length % SIZE == 0
        assert table.length < max(len(tokens), 1)
        assert len(table.pages) * SIZE == table.length
        # The pages of open tables are known for sure.
        sure = 0
        for one in self.ones:
            if not one.is_spilled and self.shares and one.tenant == tenant:
                full = one.tokens[: len(one.tokens) // SIZE * SIZE]
                same = [mine == its for mine, its in zip(tokens, full, strict=False)]
                sure = max(sure, [*same, False].index(False) // SIZE)
        least = min(sure, max(len(tokens) - 1, 0) // SIZE) * SIZE
        assert table.length >= least if self.shares else table.length == 0
        self.ones.append(One(table, tokens[: table.length], tenant))

    @precondition(lambda self: self.ones)
    @rule(which=WHICH, more=TOKENS)
    def write(self, which: int, more: list[int]) -> None:
        one = self.one(which)
        if len(one.tokens) + len(more) <= COUNT * SIZE and self.has_room(one, len(more)):
            trio.from_thread.run(self.step, one, more)
            trio.from_thread.run_sync(one.table.wrote, more)
            one.tokens += more

    async def step(self, one: One, more: list[int]) -> None:
        for place, number in list(enumerate(numbers(one.tokens + more)))[len(one.tokens) :]:
            page = one.table.pages[place // SIZE]
            assert self.users(page) == 1
            for array in self.arrays:
                await array[page, place % SIZE].assign(number)

    @precondition(lambda self: self.ones)
    @rule(which=WHICH, ahead=st.integers(0, 5))
    def reserve(self, which: int, ahead: int) -> None:
        self.has_room(self.one(which), ahead)

    def has_room(self, one: One, ahead: int) -> bool:
        length = min(len(one.tokens) + ahead, COUNT * SIZE)
        before, free, wanted = one.table.pages, self.pages.free, self.wanted(one, length)
        full: tuple[int, int] | None = None
        try:
            trio.from_thread.run(one.table.reserve, length)
        except PagesFullError as error:
            full = error.requested, error.free
        if full is not None:
            assert (one.table.pages, self.pages.free) == (before, free)
            assert full[0] > full[1]
            assert wanted is None or full == (wanted, free)
            assert one.table.is_spilled == one.is_spilled
            return False
        assert wanted is None or wanted == free - self.pages.free
        one.is_spilled = False
        assert one.table.room >= length
        return True

    @precondition(lambda self: self.ones)
    @rule(which=WHICH, ahead=st.integers(0, 5), step=st.integers(1, 30))
    def leave(self, which: int, ahead: int, step: int) -> None:
        """The task that reserves is cancelled somewhere."""
        one = self.one(which)
        trio.from_thread.run(self.cancelled, partial(one.table.reserve, len(one.tokens) + ahead), step)
        one.is_spilled = one.table.is_spilled

    @precondition(lambda self: self.ones)
    @rule(which=WHICH, step=st.integers(1, 30))
    def leave_a_spill(self, which: int, step: int) -> None:
        one = self.one(which)
        trio.from_thread.run(self.cancelled, one.table.spill, step)
        one.is_spilled = one.table.is_spilled

    async def cancelled(self, call: Callable[[], Awaitable[None]], step: int) -> None:
        with trio.CancelScope() as scope:
            instrument = CancelAt(scope, step)
            trio.lowlevel.add_instrument(instrument)
            try:
                await call()
            except (PagesFullError, ValueError):
                await trio.lowlevel.checkpoint()
            finally:
                trio.lowlevel.remove_instrument(instrument)

    @precondition(lambda self: self.mortal is not None and self.ones)
    @rule(
        which=WHICH, ahead=st.integers(0, 5), after=st.integers(0, 2), what=st.sampled_from(["room", "spill"])
    )
    def lose(self, which: int, ahead: int, after: int, what: str) -> None:
        """The worker is killed while pages are copied, and the call is made again."""
        one = self.one(which)
        if not one.tokens and len(one.table.pages) * SIZE < COUNT:
            self.write(which, [1, 0, 1])
        if what == "room":
            trio.from_thread.run(self.lost, one.table.spill)
        before = one.table.pages, one.table.is_spilled, self.pages.used
        call = one.table.spill if what == "spill" else partial(one.table.reserve, len(one.tokens) + ahead)
        operation = "devices.ToHost" if what == "spill" else "devices.Assign"
        plans = [self.plan(operation, delay=0.0) for _ in range(after)] + [self.plan(operation, kill=True)]
        is_lost = trio.from_thread.run(self.lost, call)
        assert is_lost == plans[-1].hit
        Life.losses += is_lost
        for plan in plans:
            trio.from_thread.run_sync(plan.remove)
        if is_lost:
            assert (one.table.pages, one.table.is_spilled, self.pages.used) == before
            trio.from_thread.run(self.lost, call)
        one.is_spilled = one.table.is_spilled

    def plan(self, operation: str, **what: Any) -> FaultInjection:
        assert self.mortal is not None
        return trio.from_thread.run_sync(partial(inject_fault, self.mortal, operation, **what))

    async def lost(self, call: Callable[[], Awaitable[None]]) -> bool:
        try:
            await call()
        except ta.ContextLostError:
            return True
        except (PagesFullError, ValueError):
            await trio.lowlevel.checkpoint()
        return False

    @precondition(lambda self: 0 < len(self.ones) < 5)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        one = self.one(which)
        if one.is_spilled:
            with pytest.raises(ValueError, match="spilled"):
                one.table.fork()
            # Whether a cancelled spill came about is a matter of time on a GPU. The next events are not.
            self.ones.append(One(self.pages.open([], tenant="a"), [], "a"))
        else:
            self.ones.append(One(one.table.fork(), list(one.tokens), one.tenant))

    @precondition(lambda self: self.ones)
    @rule(which=WHICH)
    def spill(self, which: int) -> None:
        one, free, used = self.one(which), HOST - self.pages.statistics().spilled, self.pages.used
        raised: PagesFullError | None = None
        own = one.table.exclusive_pages
        try:
            trio.from_thread.run(one.table.spill)
        except PagesFullError as error:
            raised = error
        if raised is None or one.is_spilled:
            assert (raised, one.table.pages) == (None, ())
            assert self.pages.used == used - own
            one.is_spilled = True
        else:
            assert (raised.requested, raised.free) == (one.filled, free)
            assert free < one.filled

    @precondition(lambda self: self.ones)
    @rule(which=WHICH)
    def close(self, which: int) -> None:
        one = self.one(which)
        self.ones.remove(one)
        one.table.close()

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "pages"):
            return
        now = self.pages.statistics()
        assert now.used + now.free == now.count == COUNT
        assert now.used == len({page for one in self.ones for page in one.table.pages})
        assert 0 <= now.cached <= now.free
        assert now.spilled == sum(one.filled for one in self.ones if one.is_spilled) <= HOST
        for one in self.ones:
            assert (one.table.length, one.table.is_spilled) == (len(one.tokens), one.is_spilled)
            assert len(set(one.table.pages)) == len(one.table.pages)
            # A page has the same position in all its tables, after equal tokens.
            for other in self.ones:
                for page in set(one.table.pages) & set(other.table.pages):
                    assert one.tenant == other.tenant
                    place = one.table.pages.index(page)
                    assert other.table.pages.index(page) == place
                    both = min(len(one.tokens), len(other.tokens), (place + 1) * SIZE)
                    assert one.tokens[:both] == other.tokens[:both]
                    assert both > place * SIZE or one is other

    @invariant()
    def contents_are_right(self) -> None:
        if hasattr(self, "pages"):
            trio.from_thread.run(self.look)

    async def look(self) -> None:
        if self.mortal is not None:
            # The target of a lost copy is invalid, until somebody writes over it.
            await self.pages.heal()
        whole = [await array.to_host() for array in self.arrays]
        for one in self.ones:
            if not one.is_spilled:
                for array in whole:
                    rows = array[list(one.table.pages)].reshape(-1, *array.shape[2:])[: len(one.tokens)]
                    first = rows.reshape(len(rows), int(np.prod(rows.shape[1:])))
                    np.testing.assert_array_equal(first.T, [numbers(one.tokens)] * first.shape[1])


@pytest.mark.parametrize("shares", [True, False])
def test_any_order(shares: bool) -> None:
    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND) as device:
            Life.arrays = (
                await device.zeros((COUNT, SIZE, 3)),
                await device.zeros((COUNT, SIZE), "int64"),
            )
            Life.shares, Life.mortal = shares, None
            wide = settings(max_examples=60 if shares else 15, stateful_step_count=30, deadline=None)
            await trio.to_thread.run_sync(partial(run_state_machine_as_test, Life, settings=wide))

    trio.run(main)


@pytest.mark.skipif(BACKEND != "cpu", reason="it kills worker processes, one after the other")
def test_any_order_with_losses() -> None:
    options = ta.DeviceOptions(
        isolation="process",
        retry=0,
        intensity=ta.Intensity(10_000, 60.0),
        backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    )

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device("cpu", options=options) as device:
            Life.arrays = (
                await device.zeros((COUNT, SIZE, 3)),
                await device.zeros((COUNT, SIZE), "int64"),
            )
            Life.shares, Life.mortal, Life.losses = True, device, 0
            # The number of examples is large, because the rule that kills is one of many, and drawn by
            # chance.
            wide = settings(max_examples=40, stateful_step_count=20, deadline=None)
            await trio.to_thread.run_sync(partial(run_state_machine_as_test, Life, settings=wide))
            # Each lost call has cost one context, and no other call has.
            assert device.generation == 1 + Life.losses
            assert Life.losses > 3

    trio.run(main)
