"""The order of a fair queue, against the rules of the paper and its theorem."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sfq_model import Sfq

from trio_accel.patterns import Weights
from trio_accel.patterns._fair_queue import FairQueue, QueueFull

FLOWS = "abc"
weights_of_flows = st.fixed_dictionaries({flow: st.sampled_from([0.5, 1.0, 3.0, 10.0]) for flow in FLOWS})
costs = st.sampled_from([0.25, 1.0, 2.0, 7.0])


def queued_of(queue: FairQueue[Any], tenant: str) -> int:
    """How many requests of a tenant are queued."""
    return sum(entry.flow.tenant == tenant for entry in queue)


def queue_of(
    weights: dict[str, float],
    *,
    default: float | None = None,
    max_queued: int = 10_000,
    max_tenants: int = 100,
) -> FairQueue[int]:
    return FairQueue(Weights(weights, default=default), max_queued=max_queued, max_tenants=max_tenants)


class Server:
    """Takes from a queue whenever one of its places is free."""

    def __init__(self, queue: FairQueue[int], depth: int = 1) -> None:
        self.queue, self.depth = queue, depth
        self.order: list[int] = []
        self.running: list[int] = []
        self.waiting: dict[int, Any] = {}

    def put(self, number: int, flow: str, cost: float = 1.0) -> None:
        self.waiting[number] = self.queue.put(number, flow, cost, 1.0)
        self.work()

    def withdraw(self, number: int) -> None:
        self.queue.withdraw(self.waiting.pop(number))

    def complete(self, place: int = 0) -> None:
        if self.running:
            self.running.pop(place % len(self.running))
            self.queue.finish()
            self.work()

    def work(self) -> None:
        while len(self.running) < self.depth and (entry := self.queue.take()) is not None:
            del self.waiting[entry.value]
            self.running.append(entry.value)
            self.order.append(entry.value)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(FLOWS), costs),
        st.tuples(st.just("complete"), st.integers(0, 5), st.none()),
        st.tuples(st.just("withdraw"), st.integers(0, 50), st.none()),
    ),
    max_size=80,
)


@given(steps, weights_of_flows, st.integers(1, 4))
@settings(max_examples=400, deadline=None)
def test_the_order_matches_the_paper_and_withdrawn_requests_leave_no_trace(
    steps: Sequence[tuple[str, str | int, float | None]], weights: dict[str, float], depth: int
) -> None:
    server = Server(queue_of(weights), depth)
    withdrawn: set[int] = set()
    numbers = itertools.count()
    done: list[tuple[str, int, str, float]] = []
    for kind, what, cost in steps:
        if kind == "put":
            number = next(numbers)
            done.append(("put", number, str(what), cost or 0.0))
            server.put(number, str(what), cost or 0.0)
        elif kind == "complete":
            done.append(("complete", 0, "", 0.0))
            server.complete(int(what))
        elif server.waiting:
            number = sorted(server.waiting)[int(what) % len(server.waiting)]
            withdrawn.add(number)
            server.withdraw(number)
        assert server.queue.queued == len(server.waiting)
        assert [entry.value for entry in server.queue] == sorted(server.waiting)
    while server.running:
        done.append(("complete", 0, "", 0.0))
        server.complete()
    assert server.order == papers_order(done, weights, withdrawn, depth)


def papers_order(
    done: Sequence[tuple[str, int, str, float]], weights: dict[str, float], without: set[int], depth: int
) -> list[int]:
    model, order, running = Sfq(weights), list[int](), 0
    for kind, number, flow, cost in done:
        if kind == "put" and number not in without:
            model.arrive(number, flow, cost)
        elif kind == "complete":
            running = max(0, running - 1)
        while running < depth and (chosen := model.serve()) is not None:
            order.append(chosen)
            running += 1
        if not running:
            model.idle()
    return order


@given(
    st.lists(costs, min_size=1, max_size=60),
    st.lists(costs, min_size=1, max_size=60),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
)
@settings(max_examples=300, deadline=None)
def test_two_tenants_with_requests_waiting_differ_by_at_most_one_request_of_each(
    of_f: list[float], of_g: list[float], weight_f: float, weight_g: float
) -> None:
    """Theorem 1 of the paper, over every interval."""
    queue = queue_of({"f": weight_f, "g": weight_g})
    for cost in of_f:
        queue.put(1, "f", cost, 1.0)
    for cost in of_g:
        queue.put(-1, "g", cost, 1.0)
    # The excess of f over g, after each request; both are backlogged until one has nothing left.
    lead = [0.0]
    while queued_of(queue, "f") and queued_of(queue, "g"):
        entry = queue.take()
        assert entry is not None
        lead.append(lead[-1] + entry.value * entry.cost / (weight_f if entry.value > 0 else weight_g))
    bound = max(of_f) / weight_f + max(of_g) / weight_g
    assert max(lead) - min(lead) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0), (10.0, 1.0), (1.0, 7.0)])
@pytest.mark.parametrize("idle", [0, 300])
def test_shares_over_1000_requests(weights: tuple[float, float], idle: int) -> None:
    server = Server(queue_of({"a": weights[0], "b": weights[1]}))
    source = random.Random(4)
    spent: Counter[str] = Counter()
    numbers = itertools.count()
    flow_of: dict[int, tuple[str, float]] = {}

    def fill(flow: str) -> None:
        while queued_of(server.queue, flow) < 3:
            cost = source.choice([0.5, 1.0, 4.0])
            number = next(numbers)
            flow_of[number] = flow, cost
            server.put(number, flow, cost)

    for turn in range(idle + 1000):
        fill("a")
        if turn >= idle:
            fill("b")
        server.complete()
        if turn >= idle:
            flow, cost = flow_of[server.order[-1]]
            spent[flow] += cost  # type: ignore[assignment]  # costs are floats
    assert spent["a"] / spent["b"] == pytest.approx(weights[0] / weights[1], rel=0.05)


def test_who_returns_from_idle_takes_its_share_and_no_more() -> None:
    server = Server(queue_of({"a": 1.0, "b": 1.0}))
    for number in range(100):
        server.put(number, "a")
    for _ in range(50):
        server.complete()
    for number in range(1000, 1100):
        server.put(number, "b")
    before = len(server.order)
    for _ in range(20):
        server.complete()
    latest = server.order[before:]
    assert sum(number >= 1000 for number in latest) == 10


def test_equal_tags_are_served_in_order_of_arrival() -> None:
    flows = [f"tenant {number}" for number in range(50)]
    random.Random(7).shuffle(flows)
    server = Server(queue_of({}, default=1.0))
    for number, flow in enumerate(flows):
        server.put(number, flow)
    for _ in flows:
        server.complete()
    assert server.order == list(range(50))


def test_requests_of_one_tenant_keep_their_order() -> None:
    server = Server(queue_of({"a": 0.1}))
    for number in range(30):
        server.put(number, "a", 1.0 + number % 3)
    for _ in range(30):
        server.complete()
    assert server.order == list(range(30))


def test_a_new_weight_counts_from_the_next_request_on() -> None:
    weights = Weights({"a": 1.0, "b": 1.0})
    queue: FairQueue[str] = FairQueue(weights, max_queued=1000, max_tenants=10)
    for _ in range(900):
        queue.put("a", "a", 1.0, 1.0)
        queue.put("b", "b", 1.0, 1.0)

    def share(turns: int) -> float:
        taken = Counter(entry.value for _ in range(turns) if (entry := queue.take()))
        return taken["a"] / taken["b"]

    assert share(400) == pytest.approx(1.0, rel=0.05)
    weights["a"] = 3.0
    assert share(400) == pytest.approx(3.0, rel=0.05)
    del weights["a"]
    assert share(400) == pytest.approx(1.0, rel=0.05)


def test_a_request_keeps_the_weight_of_its_arrival() -> None:
    weights = Weights({"a": 2.0}, default=None)
    queue: FairQueue[str] = FairQueue(weights, max_queued=10, max_tenants=10)
    queue.put("a", "a", 1.0, 2.0)
    del weights["a"]
    entry = queue.take()
    assert entry is not None
    # Half a unit.
    assert entry.flow.finish == 2**127


def test_a_queue_is_bounded_for_each_tenant() -> None:
    queue = queue_of({"a": 1.0, "b": 1.0}, max_queued=2)
    first = queue.put(0, "a", 1.0, 1.0)
    queue.put(1, "a", 1.0, 1.0)
    with pytest.raises(QueueFull, match="2 requests of tenant 'a'"):
        queue.put(2, "a", 1.0, 1.0)
    queue.put(3, "b", 1.0, 1.0)
    queue.withdraw(first)
    queue.put(4, "a", 1.0, 1.0)
    assert [entry.value for entry in queue] == [1, 3, 4]


def test_waiting_tenants_are_bounded_except_tenants_with_their_own_weight() -> None:
    queue = queue_of({"gold": 1.0}, default=1.0, max_tenants=5)
    for number in range(5):
        queue.put(number, number, 1.0, 1.0)
    with pytest.raises(QueueFull, match="5 tenants are waiting"):
        queue.put(5, 5, 1.0, 1.0)
    queue.put(6, "gold", 1.0, 1.0)
    assert queue.take() is not None
    assert queue.take() is not None
    queue.put(7, 5, 1.0, 1.0)


def test_idle_tenants_are_forgotten_in_a_busy_period_that_never_ends() -> None:
    server = Server(queue_of({}, default=1.0, max_tenants=200))
    for number in range(20_000):
        server.put(number, f"key {number}")
        if number > 5:
            server.complete()
        assert server.queue.tenants <= 201
        assert len(server.queue._heads) <= 201  # pyright: ignore[reportPrivateUsage]
    assert server.order == list(range(19_995))


def test_withdrawn_requests_of_ever_new_tenants_leave_nothing_behind() -> None:
    server = Server(queue_of({}, default=1.0, max_tenants=200))
    server.put(0, "holds the server")
    for number in range(1, 10_000):
        server.put(number, f"key {number}")
        server.withdraw(number)
        assert server.queue.tenants <= 201
        assert len(server.queue._heads) <= 2  # pyright: ignore[reportPrivateUsage]
    assert server.queue.queued == 0


@pytest.mark.parametrize("value", [0, 0.0, -1, -math.inf, math.inf, math.nan, 1e-7, 1e7])
def test_bad_weights_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="the weight of 'a' must be a finite number"):
        Weights({"a": value})
    with pytest.raises(ValueError, match="the default weight"):
        Weights(default=value)
    weights = Weights({"a": 2.0})
    with pytest.raises(ValueError, match="the weight of 'a'"):
        weights["a"] = value
    assert weights["a"] == 2.0


def test_weights_are_joined_only_by_update() -> None:
    weights: Any = Weights({"a": 2.0}, default=None)
    other: Any = {"a": -1.0}
    for join in (operator.or_, operator.ior):
        with pytest.raises(TypeError):
            join(weights, other)
    with pytest.raises(TypeError):
        operator.or_(other, weights)
    assert dict(weights) == {"a": 2.0}


@pytest.mark.parametrize("value", ["3", None, True, 1j])
def test_invalid_weights_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        Weights({"a": value})  # type: ignore[dict-item]  # what it is about


def test_weights_are_a_mapping() -> None:
    weights = Weights({"a": 2}, default=None)
    weights["b"] = 3
    assert dict(weights) == {"a": 2.0, "b": 3.0}
    assert weights.of("c") is None
    assert Weights(default=0.5).of("c") == 0.5
    assert "'a': 2.0" in repr(weights)


def test_small_steps_are_not_lost_in_large_tags() -> None:
    """A request of 1e15 units was served before, in the same busy period; then a millionth is also a step."""
    queue = queue_of({"slow": 1e-6, "fast": 1e6, "plain": 1.0})
    for _ in range(2):
        queue.put(0, "slow", 1e9, 1.0)
        queue.take()
    for _ in range(5000):
        queue.put(1, "fast", 1.0, 1.0)
    for _ in range(4):
        queue.put(2, "plain", 0.001, 1.0)
    order = [entry.value for _ in range(3500) if (entry := queue.take()) is not None]
    # One plain request for each 1000 that weigh a million times as much and cost 1000 times.
    assert [place for place, value in enumerate(order) if value == 2] == [1, 1002, 2003, 3004]


@given(st.lists(st.sampled_from([1e-300, 1e-9, 1.0, 1e9]), min_size=1, max_size=5))
def test_the_cheapest_request_moves_its_tenant_on(costs: list[float]) -> None:
    """At any low cost: another tenant that arrived later has its turn after it."""
    queue = queue_of({"a": 1e6, "b": 1e-6})
    for _ in range(2):
        queue.put(0, "b", 1e9, 1.0)
        queue.take()
    for number, cost in enumerate(costs):
        queue.put(number, "a", cost, 1.0)
    queue.put(len(costs), "c", 1.0, 1.0)
    order = [entry.value for _ in costs if (entry := queue.take()) is not None]
    assert order[:2] == [0, len(costs)][: len(order)]
