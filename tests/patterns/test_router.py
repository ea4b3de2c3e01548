"""Routing by load and by key, pools of actors, and refusals."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import trio
from hypothesis import given
from replica_models import named, statistics_of
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import Backoff, MailboxOptions, Overflow, Policy, handles
from trio_accel.patterns import (
    ByKey,
    ByLoad,
    GetStatistics,
    Hedge,
    NoReplicaError,
    Pool,
    ReplicaPool,
    Router,
    RouterStatistics,
    Submit,
    SubmitActor,
    TaskSubmitActor,
)

NAMES = ["alpha", "beta", "gamma", "delta"]


@attrs.frozen
class Slot:
    """A candidate without a model."""

    name: str
    in_flight: int = 0
    turn: int = 0


def place_of(key: str | bytes | int, names: list[str]) -> str:
    """The place of a key by rendezvous hashing: the highest hash of a name with the key."""
    tagged = {str: b"s", bytes: b"b", int: b"i"}[type(key)] + (
        key if isinstance(key, bytes) else str(key).encode()
    )

    def height(name: str) -> int:
        text = len(name.encode()).to_bytes(8, "big") + name.encode() + tagged
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")

    return max(names, key=height)


@given(st.one_of(st.text(), st.binary(), st.integers()), st.permutations(NAMES))
def test_a_key_has_one_place_in_any_order(key: Any, names: list[str]) -> None:
    by = ByKey(lambda item: item)
    assert by.choose(key, [Slot(name) for name in names]).name == place_of(key, NAMES)


def test_places_do_not_change_from_release_to_release() -> None:
    by = ByKey(lambda item: item)
    places = [
        by.choose(key, [Slot(name) for name in NAMES]).name for key in ("", "Ann", b"Ann", 0, 7, -1, "ü")
    ]
    assert places == ["gamma", "alpha", "gamma", "alpha", "beta", "gamma", "alpha"]


def test_keys_are_spread_evenly_and_only_keys_of_a_dead_worker_move() -> None:
    by = ByKey(str)
    slots = [Slot(name) for name in NAMES]
    before = [by.choose(number, slots).name for number in range(4000)]
    counts = Counter(before)
    assert scipy.stats.chisquare([counts[name] for name in NAMES]).pvalue > 1e-3
    after = [by.choose(number, slots[1:]).name for number in range(4000)]
    moved = [now for then, now in zip(before, after, strict=True) if then != now]
    assert len(moved) == counts["alpha"]
    assert scipy.stats.chisquare(list(Counter(moved).values())).pvalue > 1e-3


def test_keys_of_several_types_are_several_keys() -> None:
    many = [Slot(str(number)) for number in range(10_000)]
    by = ByKey(lambda item: item)
    assert len({by.choose(key, many).name for key in ("1", b"1", 1)}) == 3
    assert by.choose(True, many) == by.choose(1, many)  # equal keys, as in a dict


@given(loads=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_the_least_busy_of_equals_is_the_longest_waiting(loads: list[tuple[int, int]]) -> None:
    slots = [Slot(str(number), in_flight, turn) for number, (in_flight, turn) in enumerate(loads)]
    chosen = ByLoad().choose(None, slots)
    assert (chosen.in_flight, chosen.turn) == min(loads)


def spread(choices: int | None, seed: int) -> int:
    """The highest load when 1000 requests that do not end are spread over 100 replicas."""
    loads = {str(number): 0 for number in range(100)}
    by = ByLoad(choices=choices, random=random.Random(seed))
    for turn in range(1000):
        loads[by.choose(turn, [Slot(name, load) for name, load in loads.items()]).name] += 1
    return max(loads.values())


def test_the_power_of_two_choices() -> None:
    """One exceeds the mean of 10 by about sqrt(2 * 10 * ln 100) = 9.6; two by ln ln 100 / ln 2 = 2.2."""
    one, two, best = ([spread(choices, seed) for seed in range(4)] for choices in (1, 2, None))
    assert best == [10] * 4
    assert sum(two) / 4 == pytest.approx(10 + 2.2, abs=1.2)
    assert sum(one) / 4 == pytest.approx(10 + 9.6, abs=3.5)


async def test_each_gets_its_share(system: ta.System) -> None:
    router = await system.spawn(Router, [named(name) for name in NAMES])
    assert [await router.ask(Submit(number)) for number in range(8)] == NAMES * 2
    statistics: RouterStatistics = await statistics_of(router)
    assert [(each.name, each.begun, each.in_flight) for each in statistics.replicas] == [
        (str(number), 2, 0) for number in range(4)
    ]


async def test_by_load_a_slow_one_gets_less(system: ta.System, autojump_clock: MockClock) -> None:
    """Each has at most one request at a time, so each gets a share by its speed: 4:1."""
    router = await system.spawn(Router, {"slow": named("slow", 4.0), "fast": named("fast", 1.0)})
    results: Counter[str] = Counter()

    async def ask_all() -> None:
        while trio.current_time() < begin + 400:
            results[await router.ask(Submit(None))] += 1

    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_all)
        nursery.start_soon(ask_all)
    assert results["fast"] == pytest.approx(400, abs=8)
    assert results["slow"] == pytest.approx(100, abs=2)


class Logging(SubmitActor[tuple[str, int], str]):
    """Notes what it gets, in order."""

    def __init__(self, log: list[tuple[str, str, int]]) -> None:
        self.log = log

    async def call(self, item: tuple[str, int]) -> str:
        key, number = item
        await trio.sleep(0.01)
        if number == -1:
            raise OSError("a crash")
        self.log.append((self.context.path, key, number))
        return self.context.path


EMPTY: list[tuple[str, str, int]] = []
BY_FIRST = ByKey(lambda item: item[0])


async def test_requests_of_a_key_keep_their_order_at_one_member(
    system: ta.System, autojump_clock: MockClock
) -> None:
    log: list[tuple[str, str, int]] = []
    pool = await system.spawn(Pool, Logging, 4, log, by=BY_FIRST, name="pool")
    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(pool.ask, Submit((f"key {number % 7}", number)))
            await trio.lowlevel.checkpoint()
    for key in {key for _, key, _ in log}:
        assert {path for path, each, _ in log if each == key} == {f"test/pool/{place_of(key, list('0123'))}"}
        numbers = [number for _, each, number in log if each == key]
        assert numbers == sorted(numbers)
    assert len(log) == 200


@pytest.mark.parametrize("failover", [False, True])
async def test_keys_of_a_restarting_worker(
    system: ta.System, autojump_clock: MockClock, failover: bool
) -> None:
    slow = Policy(backoff=Backoff(initial=100.0, base=100.0, maximum=100.0, jitter=0.0))
    by = ByKey(lambda item: item[0], failover=failover)
    pool = await system.spawn(Pool, Logging, 2, EMPTY, by=by, member_policy=slow, name="pool")
    home = f"test/pool/{place_of('Ann', ['0', '1'])}"
    assert await pool.ask(Submit(("Ann", 1))) == home
    with pytest.raises(ta.ActorFailedError):
        await pool.ask(Submit(("Ann", -1)))
    begin = trio.current_time()
    path = await pool.ask(Submit(("Ann", 2)))
    if failover:
        assert path != home
        assert trio.current_time() - begin < 1
    else:
        assert path == home
        assert trio.current_time() - begin == pytest.approx(100, abs=1)


@attrs.frozen
class Add(ta.Request["Adder", int]):
    n: int


class Adder(ta.Actor):
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value, self.step = start, step

    @handles(Add)
    async def add(self, message: Add) -> int:
        self.value += message.n * self.step
        return self.value


async def test_a_pool_of_any_actors_takes_their_requests(system: ta.System) -> None:
    pool = await system.spawn(Pool, Adder, 2, 100, step=2, name="pool")
    assert [await pool.ask(Submit(Add(5))) for _ in range(4)] == [110, 110, 120, 120]
    children = [child.path for child in system.tree().find("test/pool").children]
    assert children == ["test/pool/0", "test/pool/1"]
    with pytest.raises(TypeError, match="'text' is not a message"):
        await pool.ask(Submit("text"))


@attrs.frozen
class GetOptions(ta.Request["Configured", Any]):
    """The options that an actor was made with."""


class Configured(ta.Actor):
    def __init__(self, **options: object) -> None:
        self.options = options

    @handles(GetOptions)
    async def send_options(self, _: GetOptions) -> Any:
        return self.options


async def test_a_pool_passes_any_option_on_unchanged(system: ta.System) -> None:
    """A pool also passes on names of its own positional parameters, and a NumPy scalar."""
    step = np.float32(2)
    options: dict[str, Any] = {
        "step": step,
        "size": 7,
        "kwargs": 1,
        "args": None,
        "timeout": "x",
        "actor_class": 3,
    }
    pool = await system.spawn(Pool, Configured, 1, **options, name="pool")
    found = await pool.ask(Submit(GetOptions()))
    assert found == options
    assert found["step"] is step
    spawn: Any = system.spawn
    with pytest.raises(TypeError, match=r"^Pool: member_policy must be a Policy or None, got 3$"):
        await spawn(Pool, Configured, 1, member_policy=3)
    with pytest.raises(TypeError, match=r"Adder: there is no option 'steps'; did you mean 'step'\?$"):
        await spawn(Pool, Adder, 1, 0, steps=2)


async def test_methods_of_addresses_are_models_of_actors_that_die(system: ta.System) -> None:
    adders = [await system.spawn(Adder, 0, name=name) for name in ("a", "b")]
    router = await system.spawn(Router, [adder.ask for adder in adders])
    assert await router.ask(Submit(Add(1))) == 1
    await adders[0].stop()
    assert [await router.ask(Submit(Add(1))) for _ in range(3)] == [1, 2, 3]
    await adders[1].stop()
    with pytest.raises(NoReplicaError, match=r"^all 2 replicas of test/.* have ended$"):
        await router.ask(Submit(Add(1)))


async def test_a_pool_drains_before_its_members_stop(system: ta.System, autojump_clock: MockClock) -> None:
    pool = await system.spawn(Pool, Logging, 2, EMPTY, by=BY_FIRST, name="pool")
    replies: list[str] = []
    async with trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            replies.append(await pool.ask(Submit((str(number), number))))

        for number in range(20):
            nursery.start_soon(ask, number)
        await wait_all_tasks_blocked()
        await pool.stop(drain=True)
    assert len(replies) == 20
    assert system.tree().children == ()


async def test_a_pool_that_restarts_has_new_members(system: ta.System) -> None:
    pool = await system.spawn(Pool, Adder, 1, 0, policy=Policy(backoff=Backoff(base=0.0)), name="pool")
    assert await pool.ask(Submit(Add(1))) == 1

    # More crashes than its supervisor, the pool, allows.
    for _ in range(4):
        with pytest.raises(ta.ActorFailedError):
            await pool.ask(Submit(Add("x")))  # type: ignore[arg-type]
    await wait_all_tasks_blocked()
    assert await pool.ask(Submit(Add(1))) == 1
    assert system.tree().find("test/pool").restarts == 1


async def test_a_request_refused_unexecuted_is_sent_to_the_next(
    system: ta.System, autojump_clock: MockClock
) -> None:
    mailbox = MailboxOptions(capacity=1, overflow=Overflow.REJECT)
    refs = [await system.spawn(Logging, EMPTY, name=name, mailbox=mailbox) for name in ("a", "b")]
    router = await system.spawn(Router, refs, by=ByKey(lambda item: item[0], failover=True))
    outcomes: list[object] = []

    async def ask(number: int) -> None:
        try:
            outcomes.append(await router.ask(Submit(("Ann", number))))
        except ta.MailboxFullError as error:
            outcomes.append(error.path)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(ask, number)
    # Each has room for two: a request in service, and a request in its mailbox.
    assert sorted(map(str, outcomes[:1])) != []
    assert Counter(map(str, outcomes))["test/a"] + Counter(map(str, outcomes))["test/b"] == 5
    statistics: RouterStatistics = await statistics_of(router)
    assert [replica.begun for replica in statistics.replicas] in ([5, 3], [3, 5])
    assert statistics.rerouted == 3
    assert statistics.in_flight == 0


async def test_a_key_without_failover_stays_with_its_refusing_worker(
    system: ta.System, autojump_clock: MockClock
) -> None:
    mailbox = MailboxOptions(capacity=1, overflow=Overflow.REJECT)
    names = ["a", "b"]
    refs = {name: await system.spawn(Logging, EMPTY, name=name, mailbox=mailbox) for name in names}
    router = await system.spawn(Router, refs, by=BY_FIRST)
    home = place_of("Ann", names)
    outcomes: list[str] = []

    async def ask(number: int) -> None:
        try:
            outcomes.append(await router.ask(Submit(("Ann", number))))
        except ta.MailboxFullError as error:
            outcomes.append(f"{error.path} is full")

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(ask, number)
    assert Counter(outcomes) == {f"test/{home}": 2, f"test/{home} is full": 3}
    await refs[home].stop()
    names.remove(home)
    assert await router.ask(Submit(("Ann", 5))) == f"test/{names[0]}"


async def test_a_refusal_inside_a_model_is_the_askers(system: ta.System) -> None:
    """The outer actor has begun: nobody knows what it has done."""
    ended = await system.spawn(Adder, 0)
    await ended.stop()
    calls: list[int] = []

    async def model(item: int) -> int:
        calls.append(item)
        return await ended.ask(Add(item))

    router = await system.spawn(Router, [model, model])
    with pytest.raises(ta.ActorStoppedError):
        await router.ask(Submit(1))
    assert calls == [1]


async def test_a_pool_of_pools_skips_a_pool_without_replicas(system: ta.System) -> None:
    ended = await system.spawn(Adder, 0)
    await ended.stop()
    empty = await system.spawn(Router, [ended.ask])
    full = await system.spawn(Router, [named("full")])
    router = await system.spawn(Router, [empty, full])
    assert [await router.ask(Submit(Add(1))) for _ in range(4)] == ["full"] * 4


# Bad input

# Type checkers would refuse it.
ROUTER: Any = Router
REPLICAS: Any = ReplicaPool
POOL: Any = Pool
BY_KEY: Any = ByKey
HEDGE: Any = Hedge


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (partial(ROUTER, []), ValueError, "there must be at least one replica"),
        (partial(ROUTER, {}), ValueError, "there must be at least one replica"),
        (partial(ROUTER, 5), TypeError, "replicas must be a sequence of models"),
        (partial(ROUTER, "ab"), TypeError, "model must be a function or a Ref"),
        (partial(ROUTER, [None]), TypeError, "model must be a function or a Ref"),
        (partial(ROUTER, {1: named("a")}), TypeError, "the name of a replica must be a str"),
        (partial(ROUTER, [named("a")], by="key"), TypeError, r"by must be ByLoad\(...\) or ByKey"),
        (partial(REPLICAS, [named("a")], choices=0), ValueError, "choices must be at least 1"),
        (partial(REPLICAS, [named("a")], hedge=1.0), TypeError, "hedge must be a Hedge"),
        (partial(POOL, Adder, 0), ValueError, "size must be at least 1"),
        (partial(POOL, Adder, 2.5), TypeError, "size must be an integer"),
        (partial(BY_KEY, "key"), TypeError, "key must be a function"),
        (partial(HEDGE, after=0), ValueError, "after must be a finite number above 0"),
        (partial(HEDGE, after=float("nan")), ValueError, "after must be a finite number above 0"),
        (partial(HEDGE, after=1.0, share=0.0), ValueError, "share must be a finite number above 0"),
        (partial(HEDGE, after=1.0, share=1.5), ValueError, "share must be a finite number above 0"),
        (partial(HEDGE, seconds=1.0), TypeError, "there is no option 'seconds'"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


async def test_members_that_cannot_be_made_fail_the_spawn(system: ta.System) -> None:
    with pytest.raises(TypeError, match="start"):
        await system.spawn(Pool, Adder, 2)
    with pytest.raises(TypeError, match="is not a subclass of Actor"):
        await system.spawn(POOL, named("a"), 2)
    assert system.tree().children == ()


async def test_an_invalid_key_fails_only_its_request(system: ta.System) -> None:
    router = await system.spawn(Router, [named("a"), named("b")], by=ByKey(lambda item: item))
    with pytest.raises(TypeError, match=r"a key must be a str, bytes or an int, got 1\.5"):
        await router.ask(Submit(1.5))
    assert await router.ask(Submit("x")) in {"a", "b"}
    statistics: RouterStatistics = await statistics_of(router)
    assert sum(replica.begun for replica in statistics.replicas) == 1


class Waiting(TaskSubmitActor[None, None]):
    async def answer(self, item: None) -> None:
        await trio.sleep_forever()


async def test_a_stop_without_a_drain_ends_all_requests(system: ta.System, autojump_clock: MockClock) -> None:
    waiting = await system.spawn(Waiting, name="waiting")
    pool = await system.spawn(ReplicaPool, [waiting], name="pool")
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ta.ActorFailedError):
                await pool.ask(Submit(None))

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        await pool.stop()
    assert waiting.is_running
    assert (await waiting.ask(GetStatistics())).cancelled == 1
