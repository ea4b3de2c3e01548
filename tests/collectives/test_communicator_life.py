"""The life of a communicator against a fake of its ranks, by a mock clock: losses, lateness, giving up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import CollectiveLibrary, ContextLostError, LibraryError
from trio_accel.backends.base.contract.ops import CloseCommunicatorSpec, CollectiveSpec, OpenCommunicatorSpec
from trio_accel.collectives import (
    WorldBrokenError,
    _communicators,  # pyright: ignore[reportPrivateUsage]
)
from trio_accel.devices import Pending

SIZE = 3
RANKS = st.integers(0, SIZE - 1)
VENDOR = CollectiveLibrary(
    title="fake", package="none", missing="", actor="a:A", control="a:C", reductions={}
)
PARTS = {rank: _communicators.RankShare("all_gather", ta.DType.int32, shape=(4,)) for rank in range(SIZE)}


@attrs.frozen
class Plan:
    """A `Pending`'s knowledge of its operation."""

    reply: object
    finish: Callable[[], object] | None = None

    def result(self) -> object:
        return self.reply


@attrs.define(eq=False)
class Rank:
    """One device, with a worker that dies, arrives late, or does not answer."""

    fake: Fake
    rank: int
    generation: int = 1
    is_ready: bool = True
    is_late: bool = False
    # Whether its operations end later than their communicator.
    is_slow: bool = False
    is_mute: bool = False
    has: set[int] = attrs.field(factory=set[int])
    given_up: set[int] = attrs.field(factory=set[int])
    waiting: list[tuple[Any, Pending[Any]]] = attrs.field(factory=list["tuple[Any, Pending[Any]]"])

    @property
    def name(self) -> str:
        return f"fake:{self.rank}"

    def submit(self, operation: Any) -> Pending[Any]:
        planner = cast("Any", FakePlanner())
        spec = operation.plan(planner).spec
        pending = Pending("fake", Plan(b"name"))
        self.waiting.append((spec, pending))
        self.fake.serve()
        return pending

    def end(self, spec: object, error: Exception | None = None) -> None:
        """Answer one operation."""
        for one in [one for one in self.waiting if one[0] is spec]:
            self.waiting.remove(one)
            one[1].settle(error)

    def serve(self) -> list[Any]:
        """Give up on request, answer operations without a partner, and report the state."""
        for spec in [spec for spec, _ in self.waiting if isinstance(spec, CloseCommunicatorSpec)]:
            self.has.discard(spec.number)
            self.given_up.add(spec.number)
            self.end(spec)
        for spec in [spec for spec, _ in self.waiting]:
            if not isinstance(spec, (OpenCommunicatorSpec, CollectiveSpec)):
                self.end(spec)
            elif spec.number in self.given_up:
                if not self.is_slow:
                    self.refuse(spec, "ABORTED")
            elif isinstance(spec, CollectiveSpec) and spec.number not in self.has:
                self.refuse(spec, "NO_COMMUNICATOR")
        return [] if self.is_late else [spec for spec, _ in self.waiting]

    def refuse(self, spec: Any, code: str) -> None:
        self.end(spec, LibraryError(code, library="fake", code=code))

    def die(self, *, is_rebuilt: bool, have_begun: bool) -> None:
        """Lose the worker: begun operations fail; the others wait for the next worker."""
        self.generation += is_rebuilt
        self.is_ready, self.is_mute = is_rebuilt, False
        self.has.clear()
        if have_begun:
            for spec, _ in list(self.waiting):
                self.end(spec, ContextLostError("dead", device=self.name))


class FakePlanner:
    """Plans without a device: no block is taken."""

    def status(self, count: int) -> npt.NDArray[np.int32]:
        return np.zeros(count, np.int32)

    def output(self, shape: object, dtype: object, out: None) -> Any:
        return attrs.make_class("Out", {"spec": attrs.field(default=None)})()


class Fake:
    """A vendor's library: ranks of one communicator meet when all are there, and wait for ever otherwise."""

    def __init__(self) -> None:
        self.ranks = [Rank(self, rank) for rank in range(SIZE)]

    def serve(self) -> None:
        meeting: defaultdict[tuple[type, int], dict[int, Any]] = defaultdict(dict)
        for rank in self.ranks:
            if rank.is_ready and not rank.is_mute:
                for spec in rank.serve():
                    meeting[type(spec), spec.number][rank.rank] = spec
        for (kind, number), specs in meeting.items():
            if len(specs) == SIZE:
                for rank, spec in specs.items():
                    if kind is OpenCommunicatorSpec:
                        self.ranks[rank].has.add(number)
                    self.ranks[rank].end(spec)

    def waits(self) -> set[int]:
        """Numbers of the communicators that something waits by."""
        return {spec.number for rank in self.ranks for spec, _ in rank.waiting if hasattr(spec, "number")}


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions of `devices` need open devices; the fake's ranks answer without being looked for."""

    @asynccontextmanager
    async def exclusive(devices: object) -> AsyncGenerator[None, None]:
        await trio.lowlevel.checkpoint()
        yield

    async def poll_answers(devices: object, goes_on: object) -> None:
        await trio.lowlevel.checkpoint()

    place = "trio_accel.collectives._communicators"
    monkeypatch.setattr(f"{place}.exclusive", exclusive)
    monkeypatch.setattr(f"{place}.poll_answers", poll_answers)


@attrs.define(eq=False)
class Call:
    """One collective that a task waits for."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    outcomes: list[object] = attrs.field(factory=list[object])

    async def run(self, joint: _communicators.Communicator) -> None:
        with self.scope:
            try:
                self.outcomes.append(await joint.run(PARTS))
            except (_communicators.RanksFailedError, WorldBrokenError) as error:
                self.outcomes.append(error)
        if self.scope.cancelled_caught:
            self.outcomes.append("cancelled")


def new(fake: Fake) -> _communicators.Communicator:
    return _communicators.Communicator(VENDOR, cast("Any", fake.ranks))


class Life(RuleBasedStateMachine):
    """The events of a world's ranks, in any order, and the required view of its callers.

    It runs in a thread next to Trio's, which continues between two rules until all tasks wait.
    """

    clock: MockClock
    nursery: trio.Nursery

    @initialize()
    def begin(self) -> None:
        self.fake = Fake()
        self.joint = new(self.fake)
        self.calls: list[Call] = []
        self.closing = trio.Event()
        self.is_closing = False
        self.quiet()

    def teardown(self) -> None:
        trio.from_thread.run(self.recover)

    def quiet(self) -> None:
        """No rank is lost, or may be taken for it, since the last call began."""
        self.is_quiet = True

    def trouble(self) -> None:
        self.is_quiet = False

    def goes_on(self) -> None:
        trio.from_thread.run(self.settled)

    async def settled(self) -> None:
        self.fake.serve()
        await wait_all_tasks_blocked()

    @property
    def running(self) -> Call | None:
        return next((call for call in self.calls if not call.outcomes), None)

    @precondition(lambda self: self.running is None)
    @rule()
    def call(self) -> None:
        self.quiet()
        self.calls.append(Call())
        trio.from_thread.run_sync(self.nursery.start_soon, self.calls[-1].run, self.joint)
        self.goes_on()

    @rule(rank=RANKS, is_rebuilt=st.booleans(), have_begun=st.booleans())
    def lose(self, rank: int, is_rebuilt: bool, have_begun: bool) -> None:
        self.trouble()
        one = self.fake.ranks[rank]
        trio.from_thread.run_sync(partial(one.die, is_rebuilt=is_rebuilt, have_begun=have_begun))
        self.goes_on()

    @rule(rank=RANKS)
    def rebuild(self, rank: int) -> None:
        one = self.fake.ranks[rank]
        if not one.is_ready:
            one.generation += 1
            one.is_ready = True
            self.goes_on()

    @rule(rank=RANKS)
    def come_late(self, rank: int) -> None:
        self.fake.ranks[rank].is_late = True

    @rule(rank=RANKS)
    def come(self, rank: int) -> None:
        self.fake.ranks[rank].is_late = False
        self.goes_on()

    @rule(rank=RANKS)
    def stop(self, rank: int) -> None:
        """It does not answer, which the device's own watch has not seen."""
        self.fake.ranks[rank].is_mute = True

    @rule(rank=RANKS)
    def fail(self, rank: int) -> None:
        """The library fails on a rank."""
        one = self.fake.ranks[rank]
        specs = [spec for spec, _ in one.waiting if isinstance(spec, CollectiveSpec)]
        if specs:
            self.trouble()
            trio.from_thread.run_sync(one.refuse, specs[0], "REFUSED")
            self.goes_on()

    @precondition(lambda self: self.running is not None)
    @rule()
    def cancel(self) -> None:
        call = self.running
        assert call is not None
        trio.from_thread.run_sync(call.scope.cancel)
        self.goes_on()
        if self.joint.life.stage != "doubted":
            # The wait for a cause is short, and the next opening is of another caller.
            assert call.outcomes or self.joint.life.stage in ("leaving", "closed")

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.7, 6.0, 59.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        before, call, stage = self.joint.number, self.running, self.joint.life.stage
        is_in_time = trio.from_thread.run_sync(trio.current_time) + seconds < self.joint.life.until
        trio.from_thread.run(self.jump, seconds)
        if (
            call is not None
            and self.is_quiet
            and is_in_time
            and stage in ("opening", "connecting", "calling")
        ):
            # A late rank is late, and not dead.
            assert self.joint.number == before
            assert not call.outcomes

    async def jump(self, seconds: float) -> None:
        self.clock.jump(seconds)
        await self.settled()

    @precondition(lambda self: not self.is_closing)
    @rule()
    def close(self) -> None:
        self.is_closing = True
        self.last_number = self.joint.number
        self.trouble()

        async def close() -> None:
            await self.joint.close()
            self.closing.set()

        trio.from_thread.run_sync(self.nursery.start_soon, close)
        self.goes_on()

    @invariant()
    def nobody_waits_longer_than_the_bound(self) -> None:
        trio.from_thread.run(self.look)

    async def look(self) -> None:
        life = self.joint.life
        if life.stage in ("opening", "connecting", "doubted"):
            assert trio.current_time() < life.until
        for call in self.calls:
            assert len(call.outcomes) <= 1
            for made in call.outcomes:
                assert (
                    isinstance(made, (_communicators.RanksFailedError, WorldBrokenError))
                    or made == "cancelled"
                    or (made == dict.fromkeys(range(SIZE), b"name"))
                )
                assert self.is_closing or not isinstance(made, WorldBrokenError)
        if self.is_closing:
            assert life.stage == "closed"
            assert self.joint.number == self.last_number

    async def recover(self) -> None:
        """All ranks come back: nobody waits, and the next collective opens again."""
        for rank in self.fake.ranks:
            rank.generation += not rank.is_ready
            rank.is_ready, rank.is_late, rank.is_mute = True, False, False
        for _ in range(20):
            await self.jump(10.0)
        assert all(len(call.outcomes) == 1 for call in self.calls)
        if not self.is_closing:
            number, has_all = self.joint.number, self.joint.life.stage == "open"
            last = Call()
            await last.run(self.joint)
            assert last.outcomes == [dict.fromkeys(range(SIZE), b"name")]
            assert has_all or self.joint.number > number
            await self.joint.close()
        else:
            assert self.closing.is_set()
        await self.settled()
        assert not self.fake.waits()
        # An opened communicator was given up, if the worker that opened it lives.
        assert not any(rank.has for rank in self.fake.ranks)


async def _run_machine() -> None:
    Life.clock = cast("MockClock", trio.lowlevel.current_clock())
    async with trio.open_nursery() as nursery:
        Life.nursery = nursery
        await trio.to_thread.run_sync(
            partial(
                run_state_machine_as_test,
                Life,
                settings=settings(
                    max_examples=60,
                    stateful_step_count=25,
                    deadline=None,
                    suppress_health_check=[HealthCheck.too_slow],
                ),
            )
        )


def test_under_all_faults_each_call_has_one_outcome_and_nobody_waits_on() -> None:
    trio.run(_run_machine, clock=MockClock())


async def test_a_communicator_closed_while_it_opens_asks_for_nothing_more(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    fake, call = Fake(), Call()
    joint, (first, second, _) = new(fake), fake.ranks
    first.is_mute = True
    nursery.start_soon(call.run, joint)
    await wait_all_tasks_blocked()
    second.is_mute = True
    nursery.start_soon(joint.close)
    await wait_all_tasks_blocked()
    # Communicators that this rank should give up are lost with its worker.
    second.die(is_rebuilt=True, have_begun=True)
    first.is_mute = False
    fake.serve()
    await trio.sleep(100)
    assert isinstance(call.outcomes[0], WorldBrokenError)
    assert fake.waits() == set()


def test_every_edge_leads_on_and_every_stage_ends() -> None:
    life = new(Fake()).life
    edges = life.edges
    stages = {stage for stage, _ in edges} | {*edges.values()}
    assert {stage for stage, step in edges if step == "close"} == stages
    # The stages without a bound are work that others wait for.
    assert stages - {*life.bounds} == {"none", "open", "calling"}
    with pytest.raises(RuntimeError, match="the communicator is none: 'done'") as caught:
        life.move("done")
    assert caught.typename == "NoEdgeError"


async def test_a_world_closed_while_it_opens_leaves_no_communicator(
    autojump_clock: MockClock,
) -> None:
    fake = Fake()
    joint, call = new(fake), Call()
    fake.ranks[1].is_late = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.run, joint)
        await trio.sleep(1.0)
        assert joint.life.stage == "opening"
        await joint.close()
    assert isinstance(call.outcomes[0], WorldBrokenError)
    assert not fake.waits()
    assert not any(rank.has for rank in fake.ranks)


async def test_a_rank_that_arrives_in_time_is_waited_for(autojump_clock: MockClock) -> None:
    fake = Fake()
    joint, begun = new(fake), trio.current_time()
    for seconds, is_opened in ((59.0, False), (59.0, True), (3600.0, True)):
        call = Call()
        fake.ranks[2].is_late = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run, joint)
            await trio.sleep(seconds)
            assert not call.outcomes
            if not is_opened:
                assert joint.life.stage == "opening"
            fake.ranks[2].is_late = False
            fake.serve()
        assert call.outcomes == [dict.fromkeys(range(SIZE), b"name")]
    assert trio.current_time() - begun == pytest.approx(59 + 59 + 3600)


async def test_the_next_opening_waits_for_operations_that_outlast_their_communicator(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    fake, first, second = Fake(), Call(), Call()
    joint, slow = new(fake), fake.ranks[1]
    slow.is_late = slow.is_slow = True
    nursery.start_soon(first.run, joint)
    await wait_all_tasks_blocked()
    number = joint.number
    first.scope.cancel()
    await wait_all_tasks_blocked()
    assert first.outcomes == ["cancelled"]
    nursery.start_soon(second.run, joint)
    await wait_all_tasks_blocked()
    assert (fake.waits(), joint.number) == ({number}, number)
    slow.is_late = slow.is_slow = False
    fake.serve()
    await wait_all_tasks_blocked()
    assert joint.number > number
    assert second.outcomes == [dict.fromkeys(range(SIZE), b"name")]


async def test_a_rank_that_does_not_arrive_in_time_is_named(autojump_clock: MockClock) -> None:
    fake = Fake()
    joint, call, begun = new(fake), Call(), trio.current_time()
    fake.ranks[2].is_mute = True
    await call.run(joint)
    (error,) = call.outcomes
    assert isinstance(error, _communicators.RanksFailedError)
    assert error.is_refusal
    assert "ranks [2] have not met within 60 s" in str(error)
    assert trio.current_time() - begun == pytest.approx(60)
