"""`Cache` against a model of it: calls with equal keys, ends, failures, cancellations, losses of time."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import trio
from hypothesis import given, settings
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_accel.agents import Cache, HitStatistics

pytestmark = pytest.mark.no_device

MOST, MOST_BYTES, TTL = 3, 100, 10.0


@attrs.frozen(eq=False)
class Item:
    """An item of a call; items are distinct, and have equal keys."""

    key: int


@attrs.frozen(eq=False)
class Value:
    """A result with its number of bytes."""

    nbytes: int


class Loader:
    """The model of the cache under test: each computation waits until the test ends it."""

    def __init__(self) -> None:
        self.ends: dict[Item, trio.Event] = {}
        self.results: dict[Item, Value | Exception] = {}

    async def __call__(self, item: Item) -> Value:
        assert item not in self.ends
        end = self.ends[item] = trio.Event()
        try:
            await end.wait()
        finally:
            del self.ends[item]
        result = self.results[item]
        if isinstance(result, Exception):
            raise result
        return result

    def end(self, item: Item, result: Value | Exception) -> None:
        self.results[item] = result
        self.ends[item].set()


class Asker:
    """One call in a task, and its outcome."""

    def __init__(self, nursery: trio.Nursery, cache: Cache[Item, Value], item: Item) -> None:
        self.item, self.scope, self.outcome = item, trio.CancelScope(), list[object]()
        nursery.start_soon(self._run, cache)

    async def _run(self, cache: Cache[Item, Value]) -> None:
        with self.scope:
            try:
                self.outcome.append(await cache(self.item))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
                self.outcome.append(error)
        if self.scope.cancelled_caught:
            self.outcome.append("cancelled")


@attrs.define(eq=False)
class Flight:
    """A computation in the model. Waiting items have an order in the cache that a burst does not show."""

    computes: Item
    waiting: list[Item] = attrs.Factory(list[Item])
    is_wanted: bool = True


class Model:
    """The rules, written again with lists: the most recently used value is the last one."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Value, float]] = []
        self.flights: list[Flight] = []
        self.outcomes: dict[Item, object] = {}
        self.hits = self.shared = self.computed = self.evicted = 0

    def flight(self, key: int) -> Flight | None:
        return next((one for one in self.flights if one.is_wanted and one.computes.key == key), None)

    def ask(self, item: Item, now: float) -> None:
        for entry in [entry for entry in self.kept if entry[0] == item.key]:
            self.kept.remove(entry)
            if now < entry[2]:
                self.kept.append(entry)
                self.hits += 1
                self.outcomes[item] = entry[1]
                return
        if flight := self.flight(item.key):
            self.shared += 1
            flight.waiting.append(item)
        else:
            self.computed += 1
            self.flights.append(Flight(item))

    def end(self, item: Item, result: Value | Exception, now: float) -> None:
        [flight] = [one for one in self.flights if one.computes is item]
        self.flights.remove(flight)
        for each in (item, *flight.waiting):
            self.outcomes[each] = result
        if isinstance(result, Value) and flight.is_wanted and result.nbytes <= MOST_BYTES:
            self.kept.append((item.key, result, now + TTL))
            while len(self.kept) > MOST or self.nbytes > MOST_BYTES:
                self.kept.pop(0)
                self.evicted += 1

    def cancel(self, item: Item, heirs: set[Item]) -> None:
        """Take a call away; `heirs` are the items that the loader has now, one of which may be new."""
        self.outcomes[item] = "cancelled"
        for flight in self.flights:
            if item in flight.waiting:
                flight.waiting.remove(item)
            elif flight.computes is item:
                if not flight.waiting:
                    self.flights.remove(flight)
                    return
                [heir] = heirs & set(flight.waiting)
                flight.waiting.remove(heir)
                flight.computes = heir
                self.computed += 1

    def forget(self, key: int) -> None:
        self.kept = [entry for entry in self.kept if entry[0] != key]
        if flight := self.flight(key):
            flight.is_wanted = False

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for _, value, _ in self.kept)

    def statistics(self) -> HitStatistics:
        return HitStatistics(
            hits=self.hits,
            shared=self.shared,
            computed=self.computed,
            evicted=self.evicted,
            entries=len(self.kept),
            nbytes=self.nbytes,
        )


KEYS = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("ask"), KEYS, st.integers(1, 4)),
    st.tuples(st.just("ask"), KEYS, st.just(1)),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from([0, 1, 30, 40, 100, 101])),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from([1, 30])),
    st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("forget"), KEYS, st.just(0)),
    st.tuples(st.just("pass"), st.just(0), st.sampled_from([4, 10])),
)


async def play(steps: list[tuple[str, int, int]], clock: MockClock) -> None:
    loader, model = Loader(), Model()
    cache = Cache(loader, max_entries=MOST, max_bytes=MOST_BYTES, key=lambda item: item.key, ttl=TTL)
    askers: list[Asker] = []
    async with trio.open_nursery() as nursery:
        for name, number, size in steps:
            now = trio.current_time()
            running = sorted(loader.ends, key=[one.item for one in askers].index)
            open_askers = [one for one in askers if not one.outcome]
            if name == "ask":
                items = [Item(number) for _ in range(size)]
                askers += [Asker(nursery, cache, item) for item in items]
                before = set(loader.ends)
                await wait_all_tasks_blocked()
                # The first of a burst is the one in the loader; Trio chooses it.
                items.sort(key=lambda item: item not in set(loader.ends) - before)
                for item in items:
                    model.ask(item, now)
            elif name in ("end", "fail") and running:
                item = running[number % len(running)]
                result = Value(size) if name == "end" else OSError(f"{number}")
                loader.end(item, result)
                model.end(item, result, now)
            elif name == "cancel" and open_askers:
                asker = open_askers[number % len(open_askers)]
                asker.scope.cancel()
                await wait_all_tasks_blocked()
                model.cancel(asker.item, set(loader.ends))
            elif name == "forget":
                cache.forget(Item(number))
                model.forget(number)
            elif name == "pass":
                clock.jump(size)
            await wait_all_tasks_blocked()
            assert cache.statistics() == model.statistics()
            assert model.nbytes <= MOST_BYTES
            assert set(loader.ends) == {flight.computes for flight in model.flights}
            for asker in askers:
                check(asker, model.outcomes.get(asker.item))
        nursery.cancel_scope.cancel()


def check(asker: Asker, expected: Any) -> None:
    if expected is None:
        assert not asker.outcome
        return
    [found] = asker.outcome
    if isinstance(expected, OSError):
        assert isinstance(found, OSError)
        assert found.args == expected.args
    else:
        assert found is expected or found == expected == "cancelled"


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=40))
def test_it_behaves_like_its_model(steps: list[tuple[str, int, int]]) -> None:
    clock = MockClock()
    trio.run(play, steps, clock, clock=clock)
