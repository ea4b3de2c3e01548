"""No entity has two homes that serve it at one time: random joins, leaves, losses, silence and late tables.

`fake_cluster` explains which parts are real.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar

import hypothesis
import pytest
import trio
from fake_cluster import AGENT, KEYS, NAMES, SILENCE, FakeNodes, Played, Process, Relay
from hypothesis import stateful, strategies

ENTITIES: Any = __import__("trio_accel.cluster._entities", fromlist=["Residents"])
TABLE: Any = __import__("trio_accel.cluster._table", fromlist=["Target"])

TARGETS = {key: TABLE.Target("fake_cluster:Watched", key) for key in range(50)}
# The most runs until a planted fault is found.
MOST = 600
A_NAME = strategies.sampled_from(NAMES)
A_KEY = strategies.sampled_from(KEYS)
A_TIME = strategies.sampled_from([0.05, 0.7, 5.0, 9.0])


class Homes(stateful.RuleBasedStateMachine):
    """Does to a cluster what may happen to it."""

    # Steps that the machine has taken in all its runs: a test sees that they are many.
    steps: ClassVar[int] = 0
    # The seconds until all begun work ends.
    quiet: ClassVar[float] = 60.0
    # Whether a run ends with a look at who answers, and not only at homes.
    is_whole: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.played = Played()
        self.table = self.played.made.table
        self.waited = 0

    @property
    def nodes(self) -> FakeNodes:
        return self.played.nodes

    def process(self, name: str) -> Process | None:
        """Return the serving process of a node; None if it has none."""
        process = self.nodes.processes.get(name)
        return None if process is None or process.serve is None or process.is_killed else process

    @stateful.initialize(seconds=strategies.sampled_from([1.0, 20.0]))
    def all_are_busy(self, seconds: float) -> None:
        self.ask_all(seconds)
        self.played.wait(0.1)

    @stateful.rule(key=A_KEY, seconds=strategies.sampled_from([0.1, 1.0, 20.0]))
    def ask(self, key: int, seconds: float) -> None:
        self.played.ask(key, seconds)

    @stateful.rule(seconds=strategies.sampled_from([1.0, 20.0]))
    def ask_all(self, seconds: float) -> None:
        for key in KEYS:
            self.played.ask(key, seconds)

    @stateful.rule(key=A_KEY)
    def ask_from_a_node(self, key: int) -> None:
        self.played.ask(key, 0.3, Relay)

    @stateful.rule(seconds=A_TIME)
    def wait(self, seconds: float) -> None:
        self.played.wait(seconds)

    @stateful.rule(name=A_NAME)
    def join_or_leave(self, name: str) -> None:
        if name in self.nodes.names:
            del self.nodes.names[name]
        else:
            self.nodes.names[name] = None
        self.played.call(self.nodes.change)

    @stateful.rule(name=A_NAME)
    def drain(self, name: str) -> None:
        self.played.drain(name)

    @stateful.rule(name=A_NAME)
    def kill(self, name: str) -> None:
        if process := self.process(name):
            self.played.call(process.kill)

    @stateful.rule(name=A_NAME, seconds=strategies.sampled_from([0.5, 4.0, 1000.0]))
    def tables_come_late(self, name: str, seconds: float) -> None:
        if process := self.process(name):
            process.late = seconds

    @stateful.rule(name=A_NAME)
    def nothing_reaches(self, name: str) -> None:
        # The host of a stopped process can end it.
        if (process := self.process(name)) and process.running.is_open:
            self.played.call(process.reach.close)

    @stateful.rule(name=A_NAME)
    def nothing_leaves(self, name: str) -> None:
        if process := self.process(name):
            self.played.call(process.leave.close)

    @stateful.rule(name=A_NAME)
    def stop(self, name: str) -> None:
        if (process := self.process(name)) and process.reach.is_open:
            self.played.call(process.running.close)

    @stateful.rule()
    def all_is_well_again(self) -> None:
        self.played.call(self.heal)

    def heal(self) -> None:
        for process in self.nodes.all:
            process.late = 0.0
            for gate in (process.running, process.leave, process.reach):
                gate.open()

    @stateful.invariant()
    def no_key_has_two_homes(self) -> None:
        type(self).steps += 1
        assert not self.played.homes.wrong
        assert not self.played.errors

    @stateful.invariant()
    def only_keys_of_those_who_come_or_go_move(self) -> None:
        before, self.table = self.table, self.played.made.table
        if self.table is before:
            return
        assert before.epoch < self.table.epoch
        gone, come = ({one.name for one in table.members} for table in (before, self.table))
        for target in TARGETS.values() if gone and come else ():
            old, new = before.home(target).name, self.table.home(target).name
            assert old == new or old not in come or new not in gone

    def teardown(self) -> None:
        try:
            # Agents that nothing reaches are given up before all is well.
            self.played.wait(SILENCE * 1.5)
            self.played.call(self.heal)
            # Every waiting request has its reply, and every entity with a home answers.
            self.played.wait(self.quiet)
            while self.is_whole and self.played.pending and self.played.made.members and self.waited < 10:
                self.waited += 1
                self.played.wait(self.quiet)
            self.no_key_has_two_homes()
            if not self.is_whole:
                return
            names, members = {*self.nodes.names}, {one.name for one in self.played.made.members}
            # A drained node stays out, unless it has left since then.
            assert names - self.played.drained <= members <= names
            if members:
                assert not self.played.pending
                served = self.played.homes.served
                for key in KEYS:
                    self.played.ask(key, 0.1)
                    self.played.ask(key, 0.1, Relay)
                self.played.wait(5.0)
                assert not self.played.pending
                assert self.played.homes.served == served + 2 * len(KEYS)
            self.no_key_has_two_homes()
        finally:
            self.played.stop()


def play(examples: int) -> None:
    """Have the machine try this many runs; the same ones each time."""
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=25,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    stateful.run_state_machine_as_test(Homes, settings=settings)  # type: ignore[no-untyped-call]


def test_no_entity_has_two_homes() -> None:
    before = Homes.steps
    play(60)
    assert Homes.steps - before > 600


async def do_nothing(self: Any, argument: Any) -> None:
    """Stand in for a method that an agent with a fault does not have."""


def without_the_fence(patch: pytest.MonkeyPatch) -> None:
    """An agent that serves what its table does not give it."""
    patch.setattr(ENTITIES.Residents, "_is_home", lambda self, target: True)


def without_a_hand_off(patch: pytest.MonkeyPatch) -> None:
    async def take(self: Any, table: Any, before: Any) -> None:
        self.router.update(table, before)

    patch.setattr(ENTITIES.Residents, "take", take)
    without_a_release(patch)


def without_a_release(patch: pytest.MonkeyPatch) -> None:
    """An agent that serves what it gains while others are still at it."""
    patch.setattr(ENTITIES.Residents, "release", do_nothing)


def as_if_all_had_the_table(patch: pytest.MonkeyPatch) -> None:
    """An agent that takes every table for the table of all agents."""
    update = TABLE.EntityRouter.update

    def settled(self: Any, table: Any, before: Any = None) -> None:
        update(self, table)

    patch.setattr(TABLE.EntityRouter, "update", settled)


def before_its_agent_has_the_table(patch: pytest.MonkeyPatch) -> None:
    """An agent that releases an entity by its old table, and serves it again."""
    patch.setattr(TABLE.EntityRouter, "wait_epoch", do_nothing)


def without_an_end_when_alone(patch: pytest.MonkeyPatch) -> None:
    """An agent that nothing reaches, and its continuing entities."""

    async def listen(self: Any) -> None:
        await trio.sleep_forever()

    patch.setattr(AGENT.Agent, "_listen_for_the_program", listen)


def with_a_grace_when_alone(patch: pytest.MonkeyPatch) -> None:
    """An agent that nothing reaches, and that lets what has begun finish."""
    end_all = ENTITIES.Residents.end_all

    async def late(self: Any, *, at_once: bool = False) -> None:
        await end_all(self)

    patch.setattr(ENTITIES.Residents, "end_all", late)


def with_the_end_after_the_table(patch: pytest.MonkeyPatch) -> None:
    """The program does not wait for the end of an agent."""
    end = FakeNodes.end

    async def early(self: FakeNodes, node: str) -> None:
        async def late(process: Process | None) -> None:
            # clock: a mock clock of the caller, or work of any duration
            await trio.sleep(3.0)
            if process is not None:
                process.kill()

        self._nursery.start_soon(late, self.processes.pop(node, None))
        await end(self, node)

    patch.setattr(FakeNodes, "end", early)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    without_the_fence,
    without_a_hand_off,
    without_a_release,
    as_if_all_had_the_table,
    before_its_agent_has_the_table,
    without_an_end_when_alone,
    with_a_grace_when_alone,
    with_the_end_after_the_table,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    # A second home is seen soon, and not when all is quiet.
    monkeypatch.setattr(Homes, "quiet", 8.0)
    monkeypatch.setattr(Homes, "is_whole", False)
    with pytest.raises(AssertionError, match=r"two at a time|an older one serves"):
        play(MOST)


@pytest.fixture
def played() -> Generator[Played, None, None]:
    made = Played()
    yield made
    made.stop()


def ask_all(played: Played, seconds: float) -> None:
    for key in KEYS:
        played.ask(key, seconds)


def test_a_join_and_a_drain(played: Played) -> None:
    ask_all(played, 1.0)
    played.wait(0.3)
    played.nodes.names["c"] = None
    played.call(played.nodes.change)
    played.wait(0.3)
    ask_all(played, 1.0)
    played.wait(5.0)
    ask_all(played, 1.0)
    played.wait(0.3)
    played.drain("c")
    played.wait(0.1)
    ask_all(played, 1.0)
    played.wait(9.0)
    assert not played.homes.wrong
    assert not played.pending
    assert played.homes.served == 4 * len(KEYS)


def test_entities_in_flight_ask_moving_entities(played: Played) -> None:
    """A hand-off waits for requests in flight, and these ask entities that it has moved."""
    # Some of them move together with the entity that they ask.
    keys = range(60)
    for key in keys:
        played.ask(key, 2.0)
        played.ask(key, 0.5, Relay)
    played.wait(0.3)
    start = played.made.epoch
    played.nodes.names["c"] = None
    played.call(played.nodes.change)
    # Before their grace is over.
    played.wait(4.5)
    assert played.made.epoch == start + 1
    played.wait(4.5)
    assert not played.pending
    assert played.homes.served == 2 * len(keys)
    assert not played.homes.wrong


def test_a_drain_is_cancelled_while_others_come(played: Played) -> None:
    """Agents may serve by the table of the drain, so the next table does not bring the node back."""
    ask_all(played, 3.0)
    played.wait(0.3)
    scope = trio.CancelScope()

    async def drain() -> None:
        with scope:
            await played.made.drain("b")

    played.call(played._nursery.start_soon, drain)
    played.wait(1.0)
    process = played.nodes.processes["b"]
    played.nodes.names["c"] = None
    played.call(played.nodes.change)
    played.wait(0.1)
    played.call(scope.cancel)
    played.wait(1.0)
    assert process.is_killed
    ask_all(played, 0.1)
    played.wait(20.0)
    assert not played.pending
    assert not played.homes.wrong


def test_a_hand_off_is_broken_off(played: Played) -> None:
    """A node comes, and leaves before others have given it its entities, which stay in their places."""
    ask_all(played, 2.0)
    played.wait(0.3)
    played.nodes.names["c"] = None
    played.call(played.nodes.change)
    played.wait(0.3)
    del played.nodes.names["c"]
    played.call(played.nodes.change)
    played.wait(5.0)
    ask_all(played, 0.1)
    played.wait(5.0)
    assert not played.pending
    assert not played.homes.wrong


def test_late_messages_are_not_signs_of_life(played: Played) -> None:
    """A host comes back with all frames sent to it: its agent serves none of them."""
    process = played.nodes.processes["b"]
    played.call(process.reach.close)
    for _ in range(8):
        ask_all(played, 20.0)
        played.wait(1.0)
    assert played.nodes.processes["b"] is not process
    played.call(process.reach.open)
    played.wait(300.0)
    assert not played.pending
    assert not played.homes.wrong


def test_a_node_that_leaves_slowly_comes_back(played: Played) -> None:
    """Its agent ends after changes that wait for others, and only then the next one begins."""
    nodes = played.nodes
    nodes.processes["b"].late = 1000.0
    nodes.names["c"] = None
    played.call(nodes.change)
    played.wait(0.1)
    nodes.processes["c"].late = 1000.0
    del nodes.names["a"]
    played.call(nodes.change)
    played.wait(5.0)
    nodes.names["a"] = None
    played.call(nodes.change)
    played.wait(60.0)
    assert [one.name for one in played.made.members] == ["a", "b", "c"]
    ask_all(played, 0.1)
    played.wait(5.0)
    assert played.homes.served == len(KEYS)
