"""A `ReplicaPool` against a model of it: random arrivals, ends, cancellations, crashes and deaths."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st
import trio
from hypothesis import given, settings
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import Backoff, Intensity, Message, Policy, SystemOptions, handles
from trio_accel.patterns import (
    GetStatistics,
    NoReplicaError,
    ReplicaPool,
    ReplicaPoolStatistics,
    Submit,
    TaskSubmitActor,
)

SIZE = 3
BACKOFF = 1000.0
# A restart happens when the clock jumps, and not before.
POLICY = Policy(backoff=Backoff(initial=BACKOFF, base=BACKOFF, maximum=BACKOFF, jitter=0.0), grace=1.0)


@attrs.frozen
class Crash(Message["Parking"]):
    """Crash the actor."""


@attrs.define(eq=False)
class World:
    """The replicas' work, as a test sees it.

    Attributes:
        serving: Items that each replica works on.
        ends: Lets an item end: with None, or an error.
    """

    serving: dict[str, set[int]] = attrs.Factory(dict[str, set[int]])
    ends: dict[int, trio.Event] = attrs.Factory(dict[int, trio.Event])
    errors: dict[int, Exception] = attrs.Factory(dict[int, Exception])


class Parking(TaskSubmitActor[int, str]):
    """A replica that holds each item until the test lets it go."""

    def __init__(self, world: World, number: str) -> None:
        self.world, self.number = world, number

    async def answer(self, item: int) -> str:
        serving = self.world.serving.setdefault(self.number, set())
        serving.add(item)
        end = self.world.ends[item] = trio.Event()
        try:
            await end.wait()
        finally:
            serving.remove(item)
        if item in self.world.errors:
            raise self.world.errors[item]
        return self.number

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise OSError("a crash")


@attrs.define(eq=False)
class Modelled:
    """A replica in the model."""

    name: str
    state: str = "up"
    items: set[int] = attrs.Factory(set[int])
    sent: int = 0
    turn: int = -1


class Model:
    """The rules, written again: the least busy of the working replicas, or else of the restarting ones."""

    def __init__(self) -> None:
        self.replicas = [Modelled(str(number)) for number in range(SIZE)]
        self.turns = 0
        self.outcomes: dict[int, object] = {}

    def send(self, item: int) -> Modelled | None:
        alive = [replica for replica in self.replicas if replica.state != "dead"]
        able = [replica for replica in alive if replica.state == "up"] or alive
        if not able:
            self.outcomes[item] = NoReplicaError
            return None
        chosen = min(able, key=lambda replica: (len(replica.items), replica.turn))
        self.turns += 1
        chosen.turn = self.turns
        chosen.sent += 1
        chosen.items.add(item)
        return chosen

    def holder(self, item: int) -> Modelled | None:
        return next((replica for replica in self.replicas if item in replica.items), None)

    def end(self, item: int, result: object) -> None:
        holder = self.holder(item)
        assert holder is not None
        holder.items.remove(item)
        self.outcomes[item] = result

    def fail_all(self, replica: Modelled) -> None:
        for item in tuple(replica.items):
            self.end(item, ta.ActorFailedError)


class Asker:
    """One ask in a task, and all its outcomes."""

    def __init__(self, nursery: trio.Nursery, ref: ta.Ref[Any], item: int) -> None:
        self.scope = trio.CancelScope()
        self.outcomes: list[object] = []
        nursery.start_soon(self._run, ref, item)

    async def _run(self, ref: ta.Ref[Any], item: int) -> None:
        with self.scope:
            try:
                self.outcomes.append(await ref.ask(Submit(item)))
            except trio.Cancelled:
                self.outcomes.append(trio.Cancelled)
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
                self.outcomes.append(error)


steps = st.one_of(
    st.just(("arrive", 0)),
    st.just(("arrive", 0)),
    st.tuples(st.sampled_from(["complete", "fail", "cancel"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["crash", "kill"]), st.integers(0, SIZE - 1)),
    st.just(("come back", 0)),
)


class Run:
    """A run of a script, on the pool and on its model."""

    def __init__(self, clock: MockClock) -> None:
        self.clock, self.model, self.world = clock, Model(), World()
        self.askers: dict[int, Asker] = {}

    async def run(self, script: list[tuple[str, int]]) -> None:
        options = SystemOptions(intensity=Intensity(10**6, 1.0))
        async with ta.open_system("s", options=options) as system, trio.open_nursery() as nursery:
            self.refs = [
                await system.spawn(Parking, self.world, str(number), name=str(number), policy=POLICY)
                for number in range(SIZE)
            ]
            self.pool = await system.spawn(ReplicaPool, self.refs, name="pool")
            self.nursery = nursery
            for what, which in script:
                await self.step(what, which)
                await self.compare()
            await self.step("come back", 0)
            for item in sorted(self.open):
                await self.step("complete", sorted(self.open).index(item))
            await self.compare()
            await self.pool.stop(drain=True)
        for item, asker in self.askers.items():
            [real] = asker.outcomes
            expected = self.model.outcomes[item]
            if isinstance(expected, type):
                assert real is expected or isinstance(real, expected), (item, real, expected)
            else:
                assert real == expected, (item, real, expected)

    @property
    def open(self) -> list[int]:
        """Items being served."""
        return [item for replica in self.model.replicas if replica.state == "up" for item in replica.items]

    async def step(self, what: str, which: int) -> None:
        model = self.model
        if what == "arrive":
            item = len(self.askers)
            self.askers[item] = Asker(self.nursery, self.pool, item)
            model.send(item)
        elif what in ("complete", "fail", "cancel"):
            # A request waiting for a restart can only be cancelled.
            items = sorted(
                self.open if what != "cancel" else [i for replica in model.replicas for i in replica.items]
            )
            if not items:
                return
            self.end(what, items[which % len(items)])
        elif what == "come back":
            self.clock.jump(BACKOFF)
            for replica in model.replicas:
                replica.state = "up" if replica.state == "restarting" else replica.state
        else:
            await self.hurt(what, model.replicas[which])
        await wait_all_tasks_blocked()

    def end(self, what: str, item: int) -> None:
        holder = self.model.holder(item)
        assert holder is not None
        if what == "cancel":
            self.askers[item].scope.cancel()
            self.model.end(item, trio.Cancelled)
            return
        error = KeyError(item)
        if what == "fail":
            self.world.errors[item] = error
        self.world.ends[item].set()
        self.model.end(item, error if what == "fail" else holder.name)

    async def hurt(self, what: str, replica: Modelled) -> None:
        model, ref = self.model, self.refs[int(replica.name)]
        if what == "crash" and replica.state == "up":
            await ref.tell(Crash())
            model.fail_all(replica)
            replica.state = "restarting"
        elif what == "kill" and replica.state != "dead":
            ref.cancel("a death")
            await wait_all_tasks_blocked()
            if replica.state == "up":
                model.fail_all(replica)
            waiting, replica.items = replica.items, set()
            replica.state = "dead"
            # They were not executed, so they are sent to others, in an unspecified order.
            for item in waiting:
                model.send(item)

    async def compare(self) -> None:
        statistics = await self.pool.ask(GetStatistics())
        assert isinstance(statistics, ReplicaPoolStatistics)
        for real, replica in zip(statistics.replicas, self.model.replicas, strict=True):
            assert real.name == replica.name
            assert real.in_flight == len(replica.items)
            assert real.begun == replica.sent
            assert real.is_dead == (replica.state == "dead")
            assert real.is_available == (replica.state == "up")
            if replica.state == "up":
                # The call that came here, of those passed on at once, is open.
                serving = self.world.serving.get(replica.name, set())
                assert len(serving) == len(replica.items)
                self.adopt(replica, serving)
        assert statistics.in_flight == sum(len(replica.items) for replica in self.model.replicas)

    def adopt(self, replica: Modelled, serving: set[int]) -> None:
        """Set the model's items of a replica to its actual items."""
        for item in serving - replica.items:
            other = self.model.holder(item)
            assert other is not None
            [mine] = sorted(replica.items - serving)[:1]
            other.items.remove(item)
            other.items.add(mine)
            replica.items.remove(mine)
            replica.items.add(item)


@given(script=st.lists(steps, max_size=40))
@settings(max_examples=150, deadline=None)
def test_each_request_has_one_outcome_and_the_counts_match_the_model(
    script: list[tuple[str, int]],
) -> None:
    clock = MockClock()
    trio.run(Run(clock).run, script, clock=clock)


def test_the_model_sees_all_that_can_happen() -> None:
    """One long script through every state, so that none depends on chance."""
    script = [
        *[("arrive", 0)] * 7,
        ("complete", 3),
        ("fail", 0),
        ("cancel", 1),
        ("crash", 0),
        *[("arrive", 0)] * 2,
        ("crash", 1),
        ("crash", 2),
        *[("arrive", 0)] * 4,
        ("cancel", 2),
        ("kill", 0),
        ("come back", 0),
        ("complete", 0),
        ("crash", 1),
        ("kill", 2),
        *[("arrive", 0)] * 3,
        ("kill", 1),
        ("arrive", 0),
    ]
    clock = MockClock()
    run = Run(clock)
    trio.run(run.run, script, clock=clock)
    results = [asker.outcomes[0] for asker in run.askers.values()]
    kinds = {result if isinstance(result, type) else type(result) for result in results}
    assert kinds == {str, KeyError, trio.Cancelled, ta.ActorFailedError, NoReplicaError}
