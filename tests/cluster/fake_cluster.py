"""A cluster without processes and network: agents are tasks, and time is Trio's mock clock.

The cluster, its agents and their entities are the real ones. The test decides on each delivery and its time.
"""

from __future__ import annotations

import contextvars
import itertools
import types
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import attrs
import outcome
import pytest
import trio
import trio.testing
from cluster_entities import Add

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links

AGENT: Any = __import__("trio_accel.cluster._agent", fromlist=["Agent"])

NAMES = ("a", "b", "c")
KEYS = range(6)
SILENCE, HAND_OFF = 6.0, 7.0
# How often who has lost a node asks.
TRIES = 3
# Seconds between two frames, and between the return of a host and the end of its agent.
GAP, REACHED = 0.01, 1.0
# More steps of the scheduler than any command has.
MOST_STEPS = 400_000

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("_process", default=None)


@attrs.define
class Homes:
    """Who serves what, as an observer outside of the cluster sees it."""

    serving: dict[int, str] = attrs.field(factory=dict[int, str])
    newest: dict[int, int] = attrs.field(factory=dict[int, int])
    wrong: list[str] = attrs.field(factory=list[str])
    births: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    served: int = 0

    def begin(self, key: int, birth: int, node: str) -> None:
        if key in self.serving:
            self.wrong.append(f"{key}: two at a time, on {node} and {self.serving[key]}")
        if birth < self.newest.get(key, 0):
            self.wrong.append(f"{key}: an older one serves again on {node}")
        self.newest[key], self.serving[key] = birth, node
        self.served += 1


class Watched(cluster.Entity):
    """Takes the seconds given in its message."""

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
            process: Process = self.home.system.process  # type: ignore[attr-defined]
            await process.sleep(message.x)
            if process.is_killed:
                raise RuntimeError("the process was killed")
        finally:
            self.homes.serving.pop(key, None)
        return message.x


class Relay(cluster.Entity):
    """Asks the `Watched` of its key, from its own node."""

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        return await self.home.cluster.entity(Watched, int(self.home.key)).ask(message)


class Gate:
    """A gate that lets frames through while it is open."""

    def __init__(self) -> None:
        self._opened: trio.Event | None = None
        self.closed_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened is None

    def close(self) -> None:
        if self._opened is None:
            self._opened, self.closed_at = trio.Event(), trio.current_time()

    def open(self) -> None:
        if self._opened is not None:
            self._opened.set()
        self._opened = None

    async def passed(self) -> None:
        while self._opened is not None:
            await self._opened.wait()


@attrs.define(eq=False)
class Process:
    """A process in the form of a task: its agent, and the links to it.

    Attributes:
        reach: Passes on the frames to it, as `leave` does for the frames from it.
        running: Closed while the process does nothing.
        late: Seconds that it takes for a table.
    """

    network: trio.Nursery
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    gone: trio.Event = attrs.field(factory=trio.Event)
    links: list[Line] = attrs.field(factory=list["Line"])
    reach: Gate = attrs.field(factory=Gate)
    leave: Gate = attrs.field(factory=Gate)
    running: Gate = attrs.field(factory=Gate)
    late: float = 0.0
    serve: Any = None
    nursery: Any = None
    is_killed: bool = False
    _sleeps: set[trio.CancelScope] = attrs.field(factory=set[trio.CancelScope])

    async def sleep(self, seconds: float) -> None:
        """Sleep as code of this process does."""
        with trio.CancelScope() as scope:
            self._sleeps.add(scope)
            try:
                await trio.sleep(seconds)
                await self.running.passed()
            finally:
                self._sleeps.discard(scope)

    def kill(self) -> None:
        self.is_killed = True
        for scope in [*self._sleeps]:
            scope.cancel()
        for line in self.links:
            line.end()
        self.running.open()
        self.scope.cancel()

    async def kill_when_reached(self) -> None:
        await self.reach.passed()
        await trio.sleep(REACHED)
        self.kill()


@attrs.frozen
class FakeAddress:
    process: Process = attrs.field(eq=False)

    async def connect(self, name: str, window: float, nursery: trio.Nursery, *_: object) -> Line:
        await trio.lowlevel.checkpoint()
        if self.process.is_killed or not self.process.reach.is_open:
            raise links.LinkLostError(f"node {name} cannot be reached", is_begun=False)
        return Line(_process.get(), self.process, name)


class Line:
    """A link without a network: frames arrive in order, while the ways of both ends are open.

    Args:
        source: Who has connected; None for the program.
        target: Who serves.
        name: Name of the target.
    """

    def __init__(self, source: Process | None, target: Process, name: str) -> None:
        self._source, self._target, self._name, self.lost = source, target, name, trio.Event()
        self._numbers = itertools.count()
        self._replies: dict[int, trio.Event] = {}
        self._outcomes: dict[int, outcome.Outcome[Any]] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self._there, frames = trio.open_memory_channel[Any](1000)
        self._back, replies = trio.open_memory_channel[Any](1000)
        target.network.start_soon(self._carry_there, frames)
        target.network.start_soon(self._carry_back, replies)
        for one in (source, target):
            if one is not None:
                one.links.append(self)

    wait_answered = links.Link.wait_answered

    async def ask(self, request: Any, *, at_once: bool = False) -> Any:
        if self.lost.is_set():
            raise links.LinkLostError(f"node {self._name} is gone", is_begun=False)
        number = next(self._numbers)
        replied = self._replies[number] = trio.Event()
        left = trio.current_effective_deadline() - trio.current_time()
        try:
            self._there.send_nowait((number, request, left))
            await replied.wait()
        except trio.Cancelled:
            self._there.send_nowait((number, None, 0.0))
            raise
        finally:
            self._replies.pop(number).set()
        found = self._outcomes.pop(number, None)
        if found is None:
            raise links.LinkLostError(f"node {self._name} was lost", is_begun=True)
        return found.unwrap()

    def close(self) -> None:
        """End it like its source: the target learns of it as of a frame."""
        self._lose()
        self._there.send_nowait(None)

    def end(self) -> None:
        """End it as the death of a process does."""
        self._back.send_nowait(None)
        self._there.send_nowait(None)

    def _lose(self) -> None:
        self.lost.set()
        for replied in self._replies.values():
            replied.set()

    async def _pass(self, sender: Process | None, receiver: Process | None) -> None:
        await trio.sleep(GAP)
        if sender is not None:
            await sender.leave.passed()
        if receiver is not None:
            await receiver.reach.passed()
            await receiver.running.passed()

    async def _carry_there(self, frames: trio.MemoryReceiveChannel[Any]) -> None:
        async for frame in frames:
            await self._pass(self._source, self._target)
            if self._target.is_killed:
                continue
            if frame is None:
                for scope in self._scopes.values():
                    scope.cancel()
                continue
            number, request, left = frame
            if request is None:
                if number in self._scopes:
                    self._scopes[number].cancel()
            else:
                scope = self._scopes[number] = trio.CancelScope(deadline=trio.current_time() + left)
                self._target.nursery.start_soon(self._answer, number, request, scope)

    async def _answer(self, number: int, request: Any, scope: trio.CancelScope) -> None:
        with scope:
            if request[0] == "table":
                await trio.sleep(self._target.late)
            try:
                made: outcome.Outcome[Any] = outcome.Value(await self._target.serve(request))
            except Exception as error:  # noqa: BLE001  # the asker gets it
                made = outcome.Error(error)
            self._back.send_nowait((number, made))
        del self._scopes[number]

    async def _carry_back(self, replies: trio.MemoryReceiveChannel[Any]) -> None:
        async for reply in replies:
            await self._target.running.passed()
            await self._pass(self._target, self._source)
            if reply is None:
                self._lose()
            elif reply[0] in self._replies:
                number, self._outcomes[reply[0]] = reply
                self._replies[number].set()


class NoDevices:
    """Devices would have threads, for which a mock clock does not wait."""

    def __init__(self, system: ta.System) -> None:
        self._system, self.process = system, _process.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    @asynccontextmanager
    async def open_devices(self, names: Any, options: Any) -> AsyncGenerator[NoDevices, None]:
        yield self

    def __iter__(self) -> Iterator[Any]:
        # A peer that sends its name, and takes no memory.
        return iter([types.SimpleNamespace(info=types.SimpleNamespace(name="none"), host_empty=bytes)])

    def place(self, key: object) -> None:
        pass


@asynccontextmanager
async def without_devices(name: str) -> AsyncGenerator[NoDevices, None]:
    async with ta.open_system(name) as system:
        yield NoDevices(system)


class TimeOfProcess:
    """The module `trio` for an agent in a process that may do nothing for a while."""

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)

    async def sleep(self, seconds: float) -> None:
        process = _process.get()
        assert process is not None
        await process.sleep(seconds)
        if process.is_killed:
            await trio.sleep_forever()  # until all its tasks have ended


class FakeNodes:
    """Nodes with agents in the form of tasks.

    An agent that nothing reaches cannot be ended, as on a host that the network has lost. It is given up
    when it was silent for long enough.
    """

    is_one_host = True

    def __init__(self, nursery: trio.Nursery) -> None:
        self.names, self._changed = dict.fromkeys(NAMES[:2]), trio.Event()
        self._nursery, self.processes, self.all = nursery, dict[str, Process](), list[Process]()

    def change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def watch(self) -> AsyncGenerator[list[str], None]:
        while True:
            changed = self._changed
            yield [*self.names]
            await changed.wait()

    async def start(self, config: Any) -> Any:
        process = Process(self._nursery)
        self.processes[config.node] = process
        self.all.append(process)
        return await self._nursery.start(self._run, config, process)

    async def _run(self, config: Any, process: Process, task_status: trio.TaskStatus[Any]) -> None:
        _process.set(process)
        agent = AGENT.Agent(config)
        process.serve = agent.serve

        def started(address: Any, devices: tuple[str, ...]) -> None:
            task_status.started(AGENT.Started(FakeAddress(process), devices, 0))

        try:
            with process.scope:
                async with trio.open_nursery() as process.nursery:
                    await agent.run(started)
        finally:
            process.gone.set()

    async def end(self, node: str) -> None:
        process = self.processes.pop(node, None)
        if process is None:
            return
        with trio.move_on_at(process.reach.closed_at + SILENCE, shield=True) as scope:
            await process.reach.passed()
        if scope.cancelled_caught:
            self._nursery.start_soon(process.kill_when_reached)
            return
        process.kill()
        with trio.CancelScope(shield=True):
            await process.gone.wait()


class Played:
    """A cluster in a run of Trio's that continues only during a command of the test."""

    def __init__(self) -> None:
        self.homes, self.pending, self.errors = Homes(), 0, list[Exception]()
        self.drained: set[str] = set()
        Watched.homes = self.homes
        self._ready: deque[Callable[[], object]] = deque()
        self._commands: deque[Callable[[], Any]] = deque()
        self._end: outcome.Outcome[Any] | None = None
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(AGENT, "listen", self._listen)
        self._patch.setattr(AGENT, "open_system", without_devices)
        self._patch.setattr(AGENT, "trio", TimeOfProcess())
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._ready.append,
            done_callback=self._ended,
            host_uses_signal_set_wakeup_fd=True,
            clock=trio.testing.MockClock(autojump_threshold=0.0),
        )
        self.do(self._nothing)

    @staticmethod
    async def _listen(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    async def _nothing(self) -> None:
        """The first command is carried out when the cluster is there."""

    def _ended(self, end: outcome.Outcome[Any]) -> None:
        self._end = end

    async def _main(self) -> None:
        options = cluster.ClusterOptions(
            devices=("cpu",),
            device=ta.DeviceOptions(isolation="inline"),
            heartbeat_timeout=SILENCE,
            hand_off=HAND_OFF,
            intensity=ta.Intensity(1000, 1.0),
            backoff=ta.Backoff(base=0.2),
        )
        async with trio.open_nursery() as outer, ta.open_system("model") as system:
            self.nodes = FakeNodes(outer)
            async with (
                cluster.open_cluster(system, self.nodes, options=options) as self.made,
                trio.open_nursery() as self._nursery,
            ):
                while True:
                    # Time does not pass without a command: a runnable task is not idle.
                    while not self._commands:  # noqa: ASYNC110  # what changes is elsewhere
                        await trio.lowlevel.checkpoint()
                    command = self._commands[0]
                    if command == self.stop:
                        break
                    await command()
                    self._commands.popleft()
                self._nursery.cancel_scope.cancel(reason="the script has ended")
                for process in self.nodes.all:
                    process.kill()
            outer.cancel_scope.cancel(reason="the script has ended")

    def do(self, command: Callable[[], Any]) -> None:
        """Have the run execute a command, and stand still again."""
        self._commands.append(command)
        for _ in range(MOST_STEPS):
            if self._end is not None or not self._commands:
                break
            self._ready.popleft()()
        else:
            raise AssertionError("this does not end")
        if self._end is not None:
            end, self._end = self._end, outcome.Value(None)
            end.unwrap()

    def stop(self) -> None:
        """End the run."""
        try:
            self.do(self.stop)
        finally:
            self._patch.undo()

    def wait(self, seconds: float) -> None:
        async def wait() -> None:
            await trio.sleep(seconds)

        self.do(wait)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call something in the run."""

        async def call() -> None:
            function(*arguments)

        self.do(call)

    def ask(self, key: int, seconds: float, cls: Any = Watched) -> None:
        self.call(self._nursery.start_soon, self._ask, key, seconds, cls)

    async def _ask(self, key: int, seconds: float, cls: Any) -> None:
        self.pending += 1
        try:
            # A relay has another key than what it asks.
            made: Any = self.made.entity(cls, key if cls is Watched else str(key))
            for _ in range(TRIES):
                try:
                    assert await made.ask(Add(seconds)) == seconds
                    break
                except cluster.NodeLostError:
                    pass  # as a user would, it asks again
        except ta.ActorFailedError:
            pass  # it took longer than the grace of its policy
        except Exception as error:  # noqa: BLE001  # the test looks at it
            self.errors.append(error)
        finally:
            self.pending -= 1

    def drain(self, name: str) -> None:
        async def drain() -> None:
            try:
                await self.made.drain(name)
            except KeyError:
                return  # it is not a member
            self.drained.add(name)

        self.call(self._nursery.start_soon, drain)
