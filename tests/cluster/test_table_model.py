"""No entity has two homes that serve it at one time: random joins, leaves, losses, silence and late tables.

The cluster, its agents and their entities are the real ones. Processes and the network are not: agents are
tasks, links hand requests over, and time is Trio's mock clock.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import attrs
import hypothesis
import pytest
import trio
import trio.testing
from cluster_entities import Add
from hypothesis import strategies

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links

NAMES = ("a", "b", "c")
KEYS = range(6)
SILENCE = 6.0


@attrs.define
class Homes:
    """Who serves what, as an observer outside of the cluster sees it."""

    serving: dict[int, object] = attrs.field(factory=dict[int, object])
    newest: dict[int, int] = attrs.field(factory=dict[int, int])
    wrong: list[str] = attrs.field(factory=list[str])
    births: Any = attrs.field(factory=lambda: itertools.count(1))
    served: int = 0

    def begin(self, key: int, birth: int, node: str) -> None:
        if key in self.serving:
            self.wrong.append(f"{key}: two at a time, on {node} and {self.serving[key]}")
        if birth < self.newest.get(key, 0):
            self.wrong.append(f"{key}: an older one serves again on {node}")
        self.newest[key], self.serving[key] = birth, node
        self.served += 1


class Watched(cluster.Entity):
    """Takes the seconds that its message says."""

    homes: ClassVar[Homes]

    def __init__(self, home: cluster.Home) -> None:
        super().__init__(home)
        self.birth = next(self.homes.births)

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        key = self.home.key
        assert isinstance(key, int)
        self.homes.begin(key, self.birth, self.home.node)
        try:
            await trio.sleep(message.x)
        finally:
            self.homes.serving.pop(key, None)
        return message.x


@attrs.define(eq=False)
class Process:
    """A process that is a task: its agent, and the links to it."""

    scope: trio.CancelScope
    gone: trio.Event
    links: list[Line] = attrs.field(factory=list["Line"])
    serve: Any = None
    # Seconds that a table takes on its way to it; infinite for a process that nothing reaches.
    late: float = 0.0

    def kill(self) -> None:
        for line in self.links:
            line.close()
        self.scope.cancel()


@attrs.frozen
class FakeAddress:
    process: Process = attrs.field(eq=False)

    async def connect(self, name: str, window: float, nursery: trio.Nursery) -> Line:
        await trio.lowlevel.checkpoint()
        if self.process.gone.is_set():
            raise links.LinkLostError(f"node {name} cannot be reached", is_begun=False)
        line = Line(self.process, name)
        self.process.links.append(line)
        return line


class Line:
    """A link without a network."""

    def __init__(self, process: Process, name: str) -> None:
        self._process, self._name, self.lost = process, name, trio.Event()
        self._scopes: set[trio.CancelScope] = set()

    async def ask(self, request: Any, *, at_once: bool = False) -> Any:
        if self.lost.is_set():
            raise links.LinkLostError(f"node {self._name} is gone", is_begun=False)
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self._process.late and request[0] != "ask":
                    await trio.sleep(self._process.late)
                return await self._process.serve(request)
            finally:
                self._scopes.discard(scope)
        raise links.LinkLostError(f"node {self._name} was lost", is_begun=True)

    def close(self) -> None:
        self.lost.set()
        for scope in [*self._scopes]:
            scope.cancel()


class NoDevices:
    """Devices would have threads, for which a mock clock does not wait."""

    def __init__(self, system: ta.System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    @asynccontextmanager
    async def open_devices(self, names: Any, options: Any) -> AsyncGenerator[NoDevices, None]:
        yield self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def place(self, key: object) -> None:
        pass


@asynccontextmanager
async def without_devices(name: str) -> AsyncGenerator[NoDevices, None]:
    async with ta.open_system(name) as system:
        yield NoDevices(system)


class FakeNodes:
    """Nodes whose agents are tasks."""

    is_one_host = True

    def __init__(self, nursery: trio.Nursery) -> None:
        self.names, self._changed = dict.fromkeys(NAMES[:2]), trio.Event()
        self._nursery, self.processes = nursery, dict[str, Process]()

    def change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def watch(self) -> AsyncGenerator[list[str], None]:
        while True:
            changed = self._changed
            yield [*self.names]
            await changed.wait()

    async def start(self, config: Any) -> Any:
        process = Process(trio.CancelScope(), trio.Event())
        self.processes[config.node] = process
        return await self._nursery.start(self._run, config, process)

    async def _run(self, config: Any, process: Process, task_status: trio.TaskStatus[Any]) -> None:
        agent = AGENT.Agent(config)
        process.serve = agent.serve

        def started(address: Any, devices: tuple[str, ...]) -> None:
            task_status.started(AGENT.Started(FakeAddress(process), devices, 0))

        try:
            with process.scope:
                await agent.run(started)
        finally:
            process.gone.set()

    async def end(self, node: str) -> None:
        process = self.processes.pop(node, None)
        if process is not None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.gone.wait()


AGENT: Any = __import__("trio_accel.cluster._agent", fromlist=["Agent"])
CLUSTER: Any = __import__("trio_accel.cluster._cluster", fromlist=["Cluster"])
ENTITIES: Any = __import__("trio_accel.cluster._entities", fromlist=["Residents"])

STEPS = strategies.one_of(
    strategies.tuples(
        strategies.just("ask"), strategies.sampled_from(KEYS), strategies.sampled_from([0.1, 1.0, 9.0])
    ),
    strategies.tuples(
        strategies.sampled_from(["join", "leave", "drain", "kill"]), strategies.sampled_from(NAMES)
    ),
    strategies.tuples(
        strategies.just("late"), strategies.sampled_from(NAMES), strategies.sampled_from([0.0, 0.5, 1000.0])
    ),
    strategies.tuples(strategies.just("wait"), strategies.sampled_from([0.0, 0.05, 0.7, 5.0, 20.0])),
)
SCRIPTS = strategies.lists(STEPS, min_size=3, max_size=14)


async def play(script: list[Any], homes: Homes) -> None:  # noqa: C901
    Watched.homes = homes
    options = cluster.ClusterOptions(
        devices=("cpu",),
        device=ta.DeviceOptions(isolation="inline"),
        heartbeat_timeout=SILENCE,
        hand_off=3.0,
        intensity=ta.Intensity(1000, 1.0),
        backoff=ta.Backoff(base=0.2),
    )
    async with trio.open_nursery() as outer, ta.open_system("model") as system:
        nodes = FakeNodes(outer)
        async with (
            cluster.open_cluster(system, nodes, options=options) as made,
            trio.open_nursery() as nursery,
        ):

            async def ask(key: int, seconds: float) -> None:
                with suppress(cluster.NodeLostError):
                    await made.entity(Watched, key).ask(Add(seconds))

            async def drain(name: str) -> None:
                with suppress(KeyError):  # it is no member
                    await made.drain(name)

            for what, *given in script:
                if what == "ask":
                    nursery.start_soon(ask, *given)
                elif what == "wait":
                    await trio.sleep(*given)
                elif what == "drain":
                    nursery.start_soon(drain, *given)
                elif what == "join" and given[0] not in nodes.names:
                    nodes.names[given[0]] = None
                    nodes.change()
                elif what == "leave" and given[0] in nodes.names:
                    del nodes.names[given[0]]
                    nodes.change()
                elif given[0] in nodes.processes:
                    process = nodes.processes[given[0]]
                    if what == "kill":
                        process.kill()
                    elif what == "late":
                        process.late = given[1]
            # All that is at home somewhere answers.
            await trio.sleep(60.0)
            if set(nodes.names) & {one.name for one in made.members}:
                with trio.fail_after(120.0):
                    for key in KEYS:
                        await ask(key, 0.1)
            nursery.cancel_scope.cancel(reason="the script has ended")
        outer.cancel_scope.cancel(reason="the script has ended")


def run(script: list[Any]) -> Homes:
    homes = Homes()
    with pytest.MonkeyPatch.context() as patch:

        async def listen(host: str, secret: bytes, serve: Any, nursery: trio.Nursery) -> None:
            await trio.lowlevel.checkpoint()

        patch.setattr(AGENT, "listen", listen)
        patch.setattr(AGENT, "open_system", without_devices)
        trio.run(play, script, homes, clock=trio.testing.MockClock(autojump_threshold=0.001))
    return homes


@hypothesis.settings(max_examples=40, derandomize=True, deadline=None, database=None)
@hypothesis.given(SCRIPTS)
def test_no_entity_has_two_homes(script: list[Any]) -> None:
    assert not run(script).wrong


def without_the_fence(patch: pytest.MonkeyPatch) -> None:
    """An agent that serves what its table does not give it."""
    patch.setattr(ENTITIES.Residents, "_is_home", lambda self, target: True)


def without_a_hand_off(patch: pytest.MonkeyPatch) -> None:
    async def take(self: Any, table: Any) -> None:
        self.router.update(table)

    patch.setattr(ENTITIES.Residents, "take", take)


def to_gainers_first(patch: pytest.MonkeyPatch) -> None:
    give = CLUSTER.Cluster._give

    async def late(self: Any, table: Any, members: Any) -> None:
        """Tell those that gain while those that lose are still at it."""
        for one in table.members:
            await give(self, table, [one] if one in self._links and one.epoch == table.epoch else [])
        self.update(table)
        await give(self, table, [one for one in members if one in self._links])

    patch.setattr(CLUSTER.Cluster, "_give", late)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [without_the_fence, without_a_hand_off, to_gainers_first]
# A key of which one is served for long while a node comes, and goes.
JOIN = [*[("ask", key, 1.0) for key in KEYS], ("wait", 0.3), ("join", "c"), ("wait", 0.3)]
JOIN += [*[("ask", key, 1.0) for key in KEYS], ("wait", 5.0)]
JOIN += [*[("ask", key, 1.0) for key in KEYS], ("wait", 0.3), ("drain", "c"), ("wait", 0.1)]
JOIN += [*[("ask", key, 1.0) for key in KEYS], ("wait", 9.0)]


def test_a_join_and_a_drain() -> None:
    homes = run(JOIN)
    assert not homes.wrong
    assert homes.served >= 5 * len(KEYS)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert run(JOIN).wrong
