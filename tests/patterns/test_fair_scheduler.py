"""Fair shares of a model: the actor around the queue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from sfq_model import Arrival, order_of
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import FairScheduler, FairSubmit, GetStatistics, Submit, UnknownTenantError, Weights

Scheduler = ta.Ref[FairScheduler[Any, Any]]
who: ContextVar[str] = ContextVar("who")


@attrs.define
class Model:
    """Takes `cost` seconds for an item `(name, cost)`, and notes when it began."""

    begun: list[tuple[Any, float]] = attrs.field(factory=list[tuple[Any, float]])
    running: int = 0
    peak: int = 0

    async def __call__(self, item: tuple[Any, float]) -> Any:
        self.begun.append((item[0], trio.current_time()))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await trio.sleep(item[1])
        finally:
            self.running -= 1
        return item[0]

    @property
    def order(self) -> list[Any]:
        return [name for name, _ in self.begun]


@pytest.fixture
def model() -> Model:
    return Model()


async def ask(scheduler: Scheduler, name: object, tenant: object = "a", cost: float = 1.0) -> Any:
    return await scheduler.ask(FairSubmit((name, cost), tenant=tenant, cost=cost))


async def refused(scheduler: Scheduler, call: FairSubmit[Any] | Submit[Any]) -> Exception:
    try:
        await scheduler.ask(call)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is looked at
        return error
    raise AssertionError("it was not refused")


arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from("abc"), st.sampled_from([1.0, 2.0, 5.0])), max_size=40
)


@given(arrivals, st.fixed_dictionaries({flow: st.sampled_from([0.5, 1.0, 4.0]) for flow in "abc"}))
@settings(max_examples=100, deadline=None)
def test_order_and_times_match_an_independent_simulation(
    drawn: list[tuple[int, str, float]], weights: dict[str, float]
) -> None:
    # No arrival is at the same moment as the end of another request.
    arrivals = [
        Arrival(time + 2.0**-10 * (1 + number), flow, cost)
        for number, (time, flow, cost) in enumerate(sorted(drawn, key=lambda one: one[0]))
    ]

    async def main() -> list[tuple[int, float]]:
        model = Model()
        zero = trio.current_time()
        async with ta.open_system("test") as system, trio.open_nursery() as nursery:
            scheduler = await system.spawn(FairScheduler, model, max_in_flight=1, weights=weights)
            for number, arrival in enumerate(arrivals):
                await trio.sleep_until(zero + arrival.time)
                nursery.start_soon(ask, scheduler, number, arrival.flow, arrival.cost)
        return [(number, begun - zero) for number, begun in model.begun]

    served = trio.run(main, clock=MockClock(autojump_threshold=0))
    expected = order_of(arrivals, weights)
    assert [number for number, _ in served] == [number for number, _ in expected]
    assert [begun for _, begun in served] == pytest.approx([begun for _, begun in expected])


async def test_shares_are_in_proportion_to_the_weights(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(
        FairScheduler, model, max_in_flight=4, weights={"a": 3, "b": 1}, max_queued=2000
    )
    async with trio.open_nursery() as nursery:
        for _ in range(1500):
            nursery.start_soon(ask, scheduler, "a", "a")
            nursery.start_soon(ask, scheduler, "b", "b")
        await trio.sleep(250.5)
        counts = Counter(model.order[:1000])
        assert counts["a"] / counts["b"] == pytest.approx(3.0, rel=0.05)
        nursery.cancel_scope.cancel()
    assert model.peak == 4


async def test_a_cancelled_asker_leaves_the_queue_at_once(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=1, max_queued=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, scheduler, "first", "a", 10.0)
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        for _ in range(5):
            with trio.move_on_after(1) as scope:
                await ask(scheduler, "second", "a")
            assert scope.cancelled_caught
        assert trio.current_time() == begun + 5
        nursery.start_soon(ask, scheduler, "third", "a")
    assert model.order == ["first", "third"]
    statistics = await scheduler.ask(GetStatistics())
    assert (statistics.cancelled, statistics.answered, statistics.waiting) == (5, 2, 0)


async def test_a_cancelled_asker_of_a_running_request_ends_the_model(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=1)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(3):
            await ask(scheduler, "long", "a", 100.0)
        assert model.running == 0
        nursery.start_soon(ask, scheduler, "next")
    assert [begun for _, begun in model.begun] == [0.0, 3.0]


async def test_a_cancelled_model_with_tasks_is_counted_once(
    system: ta.System, autojump_clock: MockClock
) -> None:
    async def fails_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cannot be closed")

    async def in_tasks(item: object) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_at_the_end)
            nursery.start_soon(trio.sleep_forever)

    scheduler: Scheduler = await system.spawn(FairScheduler, in_tasks, name="fair")
    with pytest.RaisesGroup(ValueError), trio.move_on_after(1):
        await ask(scheduler, "first")
    statistics = await scheduler.ask(GetStatistics())
    assert (statistics.failed, statistics.cancelled, statistics.in_flight) == (1, 0, 0)
    assert system.tree().find("test/fair").restarts == 0


async def test_a_cancelled_one_is_not_charged_unless_it_ran(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(
        FairScheduler, model, max_in_flight=1, weights={"a": 1.0, "b": 1.0}, max_queued=200
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, scheduler, "b", "b", 5.0)
        await wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await ask(scheduler, "gone", "a", 1000.0)
        nursery.start_soon(ask, scheduler, "a", "a", 1.0)
        nursery.start_soon(ask, scheduler, "b again", "b", 1.0)
    assert model.order == ["b", "a", "b again"]
    assert (await scheduler.ask(GetStatistics())).cost_of == {"a": 1.0, "b": 6.0}


async def test_the_queue_of_a_tenant_is_bounded(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=1, max_queued=2)
    async with trio.open_nursery() as nursery:
        for name in ("runs", "waits", "waits too"):
            nursery.start_soon(ask, scheduler, name)
            await wait_all_tasks_blocked()
        error = await refused(scheduler, FairSubmit(("one more", 1.0), tenant="a"))
        assert isinstance(error, ta.MailboxFullError)
        assert "2 requests of tenant 'a'" in str(error)
        nursery.start_soon(ask, scheduler, "of another", "b")
    assert model.order == ["runs", "of another", "waits", "waits too"]
    assert (await scheduler.ask(GetStatistics())).refused == 1


async def test_each_request_of_a_flood_is_taken_or_refused_when_it_is_asked(
    system: ta.System, model: Model, autojump_clock: MockClock
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=1, max_queued=100)
    ends: list[type[object]] = []

    async def one_of_many() -> None:
        with trio.move_on_after(0.02):
            ends.append(type(await refused(scheduler, FairSubmit(("a", 1.0), tenant="a"))))

    async with trio.open_nursery() as nursery:
        for _ in range(2000):
            nursery.start_soon(one_of_many)
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        assert ends == [ta.MailboxFullError] * (2000 - 1 - 100)
        # Another tenant waits for the running request, and for nothing else.
        await ask(scheduler, "b", "b")
        assert model.order == ["a", "b"]
        assert trio.current_time() == pytest.approx(1.02)


async def flood(scheduler: Scheduler, clients: int, nursery: trio.Nursery) -> Counter[str]:
    """Start clients of one tenant that ask again as soon as they are refused; counts refusals."""
    count = Counter[str]()

    async def client() -> None:
        while True:
            try:
                await ask(scheduler, "a", "a", 0.1)
            except ta.MailboxFullError:
                count["refused"] += 1

    for _ in range(clients):
        nursery.start_soon(client)
    # All ask once, and those refused at once ask again.
    for _ in range(10):
        await trio.lowlevel.checkpoint()
    return count


async def test_clients_that_ask_again_and_again_leave_the_loop_to_others(
    system: ta.System, autojump_clock: MockClock, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=2)
    async with trio.open_nursery() as nursery:
        count = await flood(scheduler, 5000, nursery)
        assert count["refused"] == 4096
        # Clients that only share the loop run 5000 times in each of its turns; an ask takes several.
        for _ in range(10):
            before, begun = count["refused"], trio.current_time()
            await ask(scheduler, "b", "b", 0.1)
            seconds = trio.current_time() - begun
            # It waits only for a running request: at most twice as long as alone.
            assert seconds <= 2 * 0.1 + 1e-6
            assert count["refused"] - before <= 2000 * seconds + 20
        assert count["refused"] > 4096 + 1000
        seen = await scheduler.ask(GetStatistics())
        assert seen.requests == seen.waiting + seen.in_flight + seen.answered + seen.refused
        # Most clients wait for their refusals.
        assert 4800 < seen.refused - count["refused"] < 5000
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_waiting_refusals_belong_to_their_tenant(
    system: ta.System, autojump_clock: MockClock, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_queued=1)
    async with trio.open_nursery() as nursery:
        await flood(scheduler, 5000, nursery)
        # One runs at its turn, and the next one waits: then it is full.
        for name in ("runs", "waits"):
            nursery.start_soon(ask, scheduler, name, "b", 100.0)
            await trio.sleep(0.3)
        begun = trio.current_time()
        for _ in range(10):
            error = await refused(scheduler, FairSubmit(("b", 1.0), tenant="b"))
            assert isinstance(error, ta.MailboxFullError)
        # In its turn each time, and not after the other's requests, which take seconds.
        assert trio.current_time() - begun <= 10 * 0.02 + 1e-6
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_an_asker_that_waits_for_its_refusal_is_cancelled_at_once(
    system: ta.System, autojump_clock: MockClock, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model)
    async with trio.open_nursery() as nursery:
        await flood(scheduler, 5000, nursery)
        for _ in range(3):
            begun = trio.current_time()
            with trio.move_on_after(0.001) as scope:
                await ask(scheduler, "one of many", "a")
            assert scope.cancelled_caught
            assert trio.current_time() - begun == pytest.approx(0.001)
        nursery.cancel_scope.cancel()
    # Nothing of it is left: refusals are given at once again when the pace allows it.
    begun = trio.current_time()
    assert await ask(scheduler, "later", "a", 0.5) == "later"
    assert trio.current_time() - begun == pytest.approx(0.5)


async def leave_together(scheduler: Scheduler, left: Counter[str], nursery: trio.Nursery) -> int:
    """Start 3000 callers of a tenant and one caller of another, and wait until the deadlines of all pass.

    Returns:
        How many tasks there were before.
    """
    deadline = trio.current_time() + 0.02

    async def one_of_many(tenant: str) -> None:
        with trio.move_on_at(deadline):
            try:
                await ask(scheduler, "waits", tenant)
            except ta.MailboxFullError:
                await trio.sleep_forever()
        left[tenant] += 1

    nursery.start_soon(refused, scheduler, FairSubmit(("runs", 100.0), tenant="c"))
    await wait_all_tasks_blocked()
    for _ in range(3000):
        nursery.start_soon(one_of_many, "a")
    nursery.start_soon(one_of_many, "b")
    await wait_all_tasks_blocked()
    assert not left
    tasks = trio.lowlevel.current_statistics().tasks_living
    await trio.sleep_until(deadline)
    return tasks


@pytest.mark.parametrize("max_queued", [1, 5000])
async def test_of_askers_that_leave_together_a_few_go_in_each_turn_of_the_loop(
    system: ta.System,
    autojump_clock: MockClock,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    max_queued: int,
) -> None:
    # None is refused at once, so all wait: for their turns or for their refusals.
    monkeypatch.setattr("trio_accel.patterns._fair_scheduler._REFUSALS_AT_ONCE", 1)
    scheduler = await system.spawn(FairScheduler, model, max_queued=max_queued)
    left = Counter[str]()
    async with trio.open_nursery() as nursery:
        begun = trio.current_time()
        tasks = await leave_together(scheduler, left, nursery)
        turns = list[int]()
        for turn in range(200):
            before = left["a"]
            await trio.lowlevel.checkpoint()
            turns.append(left["a"] - before)
            # It does not wait for all requests of the other tenant.
            assert left["b"] or turn < 5
        assert max(turns) <= 64
        assert left == {"a": 3000, "b": 1}
        # The turns follow each other at once, and a waiting request has no task but its caller's.
        assert trio.current_time() == begun + 0.02
        # One task gives refusals.
        assert tasks - trio.lowlevel.current_statistics().tasks_living in {3001, 3002}
        seen = await scheduler.ask(GetStatistics())
        assert (seen.waiting, seen.in_flight) == (0, 1)
        assert seen.requests == 1 + seen.cancelled + seen.refused
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("drain", [False, True])
async def test_askers_that_leave_when_it_stops_all_go(
    system: ta.System, autojump_clock: MockClock, model: Model, drain: bool
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_queued=5000)
    left = Counter[str]()
    async with trio.open_nursery() as nursery:
        await leave_together(scheduler, left, nursery)
        nursery.start_soon(partial(scheduler.stop, drain=drain))
        await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        assert left == {"a": 3000, "b": 1}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("drain", "rest"), [(False, ta.ActorStoppedError), (True, ta.MailboxFullError)])
async def test_refusals_that_wait_are_given_when_it_stops(
    system: ta.System, autojump_clock: MockClock, model: Model, drain: bool, rest: type[Exception]
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_queued=1)
    ends: list[type[Exception]] = []

    async def one_of_many() -> None:
        ends.append(type(await refused(scheduler, FairSubmit(("a", 1.0), tenant="a"))))

    async with trio.open_nursery() as nursery:
        for _ in range(5000):
            nursery.start_soon(one_of_many)
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        assert ends == [ta.MailboxFullError] * 4096
        nursery.start_soon(partial(scheduler.stop, drain=drain))
        await trio.sleep(0.02)
        # Its last requests are a running one and a waiting one.
        assert Counter(ends[4096:])[rest] == 5000 - 4096 - (2 if drain else 1)
        nursery.cancel_scope.cancel()


async def test_unknown_tenants_have_the_default_weight_or_are_refused(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    strict = await system.spawn(
        FairScheduler, model, max_in_flight=1, weights=Weights({"a": 1.0}, default=None), name="strict"
    )
    error = await refused(strict, FairSubmit(("x", 1.0), tenant="who?"))
    assert isinstance(error, UnknownTenantError)
    assert isinstance(error, LookupError)
    assert "'who?' is missing in the weights" in str(error)
    assert await ask(strict, "known") == "known"
    weights = Weights({"a": 1.0}, default=4.0)
    open_to_all = await system.spawn(FairScheduler, model, max_in_flight=1, weights=weights, max_queued=100)
    model.begun.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask, open_to_all, "a", "a")
            nursery.start_soon(ask, open_to_all, "new", "new")
        await trio.sleep(99.5)
        assert Counter(model.order)["new"] == pytest.approx(80, abs=2)
        nursery.cancel_scope.cancel()


async def test_weights_are_set_while_it_runs(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    weights = Weights(default=1.0)
    scheduler = await system.spawn(
        FairScheduler, model, max_in_flight=1, weights=weights, max_queued=200, name="fair"
    )
    weights["a"] = 9.0
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask, scheduler, "a", "a")
            nursery.start_soon(ask, scheduler, "b", "b")
        await trio.sleep(49.5)
        assert Counter(model.order)["a"] == pytest.approx(45, abs=1)
        nursery.cancel_scope.cancel()


async def test_the_models_error_is_the_askers(system: ta.System, autojump_clock: MockClock) -> None:
    error = KeyError("bad item")

    async def fails(item: object) -> object:
        raise error

    scheduler = await system.spawn(FairScheduler, fails, max_in_flight=1, name="fair")
    for _ in range(3):
        assert await refused(scheduler, FairSubmit(1, tenant="a")) is error
    assert system.tree().find("test/fair").restarts == 0
    assert (await scheduler.ask(GetStatistics())).failed == 3


async def test_the_model_has_deadline_and_context_variables_of_its_asker(
    system: ta.System, autojump_clock: MockClock
) -> None:
    async def look(item: object) -> object:
        await trio.sleep(1)
        return who.get(), trio.current_effective_deadline()

    scheduler = await system.spawn(FairScheduler, look, max_in_flight=1)
    found: dict[str, object] = {}

    async def asker(name: str, deadline: float) -> None:
        who.set(name)
        with trio.CancelScope(deadline=deadline):
            found[name] = await scheduler.ask(FairSubmit(name, tenant=name))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asker, "ann", 50.0)
        nursery.start_soon(asker, "bob", math.inf)
    assert found == {"ann": ("ann", 50.0), "bob": ("bob", math.inf)}


def first_letter(item: tuple[str, float]) -> str:
    return item[0][0]


def seconds(item: tuple[str, float]) -> float:
    return item[1]


async def test_a_plain_call_is_served_with_the_values_of_its_item(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(
        FairScheduler,
        model,
        max_in_flight=1,
        weights=Weights({"a": 1.0}, default=None),
        tenant_of=first_letter,
        cost_of=seconds,
    )
    assert await scheduler.ask(Submit(("a1", 2.5))) == "a1"
    assert (await scheduler.ask(GetStatistics())).cost_of == {"a": 2.5}
    assert isinstance(await refused(scheduler, Submit(("b1", 1.0))), UnknownTenantError)
    assert isinstance(await refused(scheduler, Submit(("a1", math.nan))), ValueError)
    assert isinstance(await refused(scheduler, Submit((5, 1.0))), TypeError)


async def test_a_plain_call_without_more_is_of_the_tenant_none(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=1, weights={None: 2.0})
    assert await scheduler.ask(Submit(("x", 7.0))) == "x"
    assert (await scheduler.ask(GetStatistics())).cost_of == {None: 1.0}


async def test_schedulers_compose(autojump_clock: MockClock, system: ta.System, model: Model) -> None:
    inner = await system.spawn(FairScheduler, model, max_in_flight=1, name="inner")
    outer = await system.spawn(FairScheduler, inner, max_in_flight=8, name="outer")
    assert await ask(outer, "through both") == "through both"


async def test_a_drain_answers_all_accepted_requests(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(
        FairScheduler, model, max_in_flight=2, policy=ta.Policy(grace=1000.0), name="fair"
    )
    answers: list[object] = []

    async def asker(number: int) -> None:
        answers.append(await ask(scheduler, number))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(asker, number)
        await wait_all_tasks_blocked()
        await scheduler.stop(drain=True)
    assert sorted(map(str, answers)) == sorted(map(str, range(20)))


# Many, as tasks that end together do so in any order.
WAITING = tuple(f"waits {number}" for number in range(12))


async def ends(scheduler: Scheduler, end: Callable[[], Awaitable[None]]) -> dict[str, Exception]:
    """The outcomes of callers, one with a running request and others waiting, when the scheduler ends."""
    got: dict[str, Exception] = {}

    async def asker(name: str) -> None:
        got[name] = await refused(scheduler, FairSubmit((name, 100.0), tenant="a"))

    async with trio.open_nursery() as nursery:
        for name in ("runs", *WAITING):
            nursery.start_soon(asker, name)
            await wait_all_tasks_blocked()
        await end()
    return got


async def test_when_it_stops_waiting_requests_were_never_executed(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=1)
    got = await ends(scheduler, scheduler.stop)
    assert isinstance(got["runs"], ta.ActorFailedError)
    assert [type(got[name]) for name in WAITING] == [ta.ActorStoppedError] * len(WAITING)
    assert model.order == ["runs"]


@attrs.frozen
class Crash(ta.Request["Crashing", None]):
    """Crash."""


class Crashing(ta.Actor):
    @ta.handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise OSError("a crash")


async def refused_by(ref: ta.Ref[Crashing]) -> Exception:
    try:
        await ref.ask(Crash())
    except Exception as error:  # noqa: BLE001  # whatever it is, it is looked at
        return error
    raise AssertionError("it did not crash")


async def test_when_it_restarts_waiting_requests_were_never_executed(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    options = ta.SystemOptions(strategy=ta.Strategy.ONE_FOR_ALL)
    async with ta.open_system("test", options=options) as system:
        weights = Weights(default=None)
        scheduler = await system.spawn(FairScheduler, model, weights=weights, name="fair")
        weights["a"] = 2.0
        sibling = await system.spawn(Crashing, name="sibling")

        async def crash() -> None:
            assert isinstance(await refused_by(sibling), ta.ActorFailedError)

        got = await ends(scheduler, crash)
        assert isinstance(got["runs"], ta.ActorFailedError)
        assert [type(got[name]) for name in WAITING] == [ta.ActorRestartingError] * len(WAITING)
        assert model.order == ["runs"]
        assert await ask(scheduler, "after") == "after"
        assert system.tree().find("test/fair").restarts == 1


async def test_statistics_name_the_waiting_tenants(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    scheduler = await system.spawn(FairScheduler, model, max_in_flight=2, weights={"a": 2.0})
    async with trio.open_nursery() as nursery:
        for tenant in "aaabb":
            nursery.start_soon(ask, scheduler, tenant, tenant, 2.0)
            await wait_all_tasks_blocked()
        statistics = await scheduler.ask(GetStatistics())
        assert (statistics.waiting, statistics.in_flight, statistics.answered) == (3, 2, 0)
        assert statistics.waiting_of == {"a": 1, "b": 2}
        assert statistics.cost_of == {"a": 4.0}
        assert statistics.tenants == 2
    statistics = await scheduler.ask(GetStatistics())
    assert (statistics.waiting, statistics.in_flight, statistics.answered) == (0, 0, 5)
    assert (statistics.cost_of, statistics.cost_of_others) == ({"a": 6.0}, 4.0)


@pytest.mark.parametrize("cost", [0, -1.0, math.nan, math.inf, -math.inf, 1e10])
def test_bad_costs_are_refused_when_the_request_is_made(cost: float) -> None:
    with pytest.raises(ValueError, match="the cost of a request"):
        FairSubmit(1, tenant="a", cost=cost)


def test_an_invalid_cost_or_tenant_is_refused_when_the_request_is_made() -> None:
    with pytest.raises(TypeError, match="the cost of a request"):
        FairSubmit(1, tenant="a", cost="3")  # type: ignore[arg-type]  # what it is about
    with pytest.raises(TypeError, match="unhashable"):
        FairSubmit(1, tenant=[])  # type: ignore[arg-type]  # what it is about


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_in_flight": 0},
        {"max_in_flight": -1},
        {"max_in_flight": 1, "max_queued": 0},
        {"max_in_flight": 1, "max_tenants": 0},
        {"max_in_flight": 1, "weights": {"a": math.nan}},
        {"max_in_flight": 1, "weights": {"a": 0}},
    ],
)
async def test_bad_arguments_are_refused(
    autojump_clock: MockClock, system: ta.System, model: Model, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="must be"):
        await system.spawn(FairScheduler, model, **arguments)


async def test_costs_of_tenants_without_weights_are_counted_with_the_others(
    autojump_clock: MockClock, system: ta.System, model: Model
) -> None:
    weights = Weights()
    scheduler = await system.spawn(FairScheduler, model, weights=weights)
    weights["stays"] = 1.0
    await ask(scheduler, 0, "stays")
    for number in range(100):
        weights[number] = 1.0
        await ask(scheduler, number, number)
        del weights[number]
    weights["last"] = 1.0
    await ask(scheduler, 0, "last")
    statistics = await scheduler.ask(GetStatistics())
    assert (statistics.cost_of, statistics.cost_of_others) == ({"stays": 1.0, "last": 1.0}, 100.0)
