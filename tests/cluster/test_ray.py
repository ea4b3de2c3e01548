"""Nodes of Ray's, simulated on this host: Ray, its nodes and its head are killed."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import trio
import trio.testing
from cluster_entities import Account, Add, Counter, Echo, Fail, Where
from ray_host import NAMES, RayHost, left, ray_host

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links

pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")

from ray_calls import RayCalls  # it needs Ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # Ray's own: it warns of itself, and leaves files and processes to its collector.
    pytest.mark.filterwarnings("ignore"),
]

TRANSPORTS = ("stream", "ray")
KEYS = range(24)
INLINE = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Leave out the check of each test: Ray keeps connections, and has children. `host` looks at its end."""


@pytest.fixture(scope="module")
def host() -> Generator[RayHost, None, None]:
    with ray_host() as made:
        yield made


@asynccontextmanager
async def opened(host: RayHost, transport: Any, store: Any = None) -> AsyncGenerator[cluster.Cluster, None]:
    nodes = (RayCalls if transport == "ray" else cluster.RayNodes)(host.address)
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, nodes, store=store, options=INLINE) as made,
    ):
        assert names(made) == NAMES
        yield made


def names(made: cluster.Cluster) -> tuple[str, ...]:
    return tuple([member.name for member in made.members])


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not is_so():  # noqa: ASYNC110  # what Ray does tells no event
            await trio.sleep(0.02)


async def test_asks_by_both_transports_have_equal_replies(host: RayHost) -> None:
    array = np.arange(1 << 20, dtype=np.float64)  # 8 MiB
    replies = []
    for transport in TRANSPORTS:
        async with opened(host, transport) as made:
            ref = made.entity(Counter, "Ann")
            got = [await ref.ask(Add(1.5)), await ref.ask(Add(1.0)), await ref.ask(Echo({"a": (1, None)}))]
            back = await ref.ask(Echo(array))
            assert np.array_equal(back, array)
            assert back.flags.writeable
            empty = await ref.ask(Echo(np.zeros((0, 3))))
            with pytest.raises(ValueError, match="no such thing") as raised:
                await ref.ask(Fail(ValueError("no such thing")))
            assert raised.value.args == ("no such thing",)
            assert "in fail" in raised.value.__notes__[0]
            with pytest.raises(TypeError, match="cannot go to another node"):
                await ref.ask(Echo(lambda: 0))
            node, _, epoch = await ref.ask(Where())
            replies.append([*got, empty.shape, node, epoch])
    assert replies[0] == replies[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_deadlines_and_cancellation_cross(host: RayHost, transport: str) -> None:
    async with opened(host, transport) as made:
        ref = made.entity(Counter, "Ann")
        await ref.ask(Add(1.0))
        began = trio.current_time()
        with trio.move_on_after(0.3) as scope:
            await ref.ask(Echo(None, 30.0))
        assert scope.cancelled_caught
        assert trio.current_time() - began < 1.0
        # The entity serves one at a time, so it is free.
        with trio.fail_after(2.0):
            assert await ref.ask(Add(1.0)) == 2.0
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(ref.ask, Echo(None, 30.0))
                await trio.sleep(0.2)
                nursery.cancel_scope.cancel()
        with trio.fail_after(3.0):
            assert await ref.ask(Add(1.0)) == 3.0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_agent_is_reported_and_only_its_entities_move(host: RayHost, transport: str) -> None:
    async with opened(host, transport) as made:
        refs = [made.entity(Counter, key) for key in KEYS]
        before = []
        for ref in refs:
            await ref.ask(Add(1.0))
            before.append(await ref.ask(Where()))
        node, pid, _ = before[0]
        async with trio.open_nursery() as nursery:

            async def in_flight() -> None:
                with trio.fail_after(10), pytest.raises(cluster.NodeLostError) as raised:
                    await refs[0].ask(Echo(None, 60.0))
                assert raised.value.node == node

            nursery.start_soon(in_flight)
            await trio.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
        for ref, where in zip(refs, before, strict=True):
            with trio.fail_after(20):
                assert await ref.ask(Add(1.0)) == (1.0 if where[0] == node else 2.0)
        await until(lambda: names(made) == NAMES)
        for ref, where in zip(refs, before, strict=True):
            now = await ref.ask(Where())
            assert now[0] == where[0]
            assert (now[1] == where[1]) == (where[0] != node)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_node_comes_back_and_its_entities_too(host: RayHost, transport: str) -> None:
    async with opened(host, transport) as made:
        refs = [made.entity(Counter, key) for key in KEYS]
        before = []
        for ref in refs:
            await ref.ask(Add(1.0))
            before.append((await ref.ask(Where()))[0])
        host.remove("node-1")
        await until(lambda: names(made) == ("node-0", "node-2"))
        for ref, node in zip(refs, before, strict=True):
            with trio.fail_after(20):
                assert await ref.ask(Add(1.0)) == (1.0 if node == "node-1" else 2.0)
        host.add("node-1")
        await until(lambda: names(made) == NAMES)
        assert [(await ref.ask(Where()))[0] for ref in refs] == before


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_totals_are_exact_under_kills(
    host: RayHost, transport: str, make_postgres: Callable[..., Any]
) -> None:
    sums = dict.fromkeys(KEYS, 0.0)
    async with opened(host, transport, make_postgres()) as made:
        is_over = False

        async def add(keys: range) -> None:
            while not is_over:
                for key in keys:
                    with trio.fail_after(60):
                        await made.entity(Account, key).ask(Add(1.0))
                    sums[key] += 1.0

        async with trio.open_nursery() as nursery:
            for first in range(8):
                nursery.start_soon(add, range(first, len(KEYS), 8))
            for number in range(10):
                await trio.sleep(0.5)
                name = NAMES[number // 2 % 3]
                if number % 2:
                    host.remove(name)
                    await until(lambda name=name: name not in names(made))
                    host.add(name)
                else:
                    # An account would have the process in its journal, and not reply the same again.
                    os.kill((await made.replicas(Counter)[name].ask(Where()))[1], signal.SIGKILL)
                    await until(lambda name=name: name not in names(made))
                await until(lambda: names(made) == NAMES)
            is_over = True
        assert min(sums.values()) > 3
        for key, total in sums.items():
            assert await made.entity(Account, key).ask(Add(0.0)) == total


async def test_the_end_of_a_stopped_agent_is_waited_for(host: RayHost) -> None:
    nodes = cluster.RayNodes(host.address)
    watching = nodes.watch()
    assert [*await anext(watching)] == [*NAMES]
    options = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"))
    started = await nodes.start(cluster.AgentConfig("node-0", options, None, b"s" * 32))
    os.kill(started.pid, signal.SIGSTOP)
    await nodes.end("node-0")
    await until(lambda: not Path(f"/proc/{started.pid}").exists())
    with pytest.raises(cluster.NodeLostError, match="node nowhere does not start"):
        await nodes.start(cluster.AgentConfig("nowhere", options, None, b""))
    await nodes.end("nowhere")
    await watching.aclose()


async def test_an_agent_has_the_priority_of_the_program(host: RayHost) -> None:
    # By its default, Ray has its workers give way: on a machine with busy programs, an agent took a minute to
    # start.
    async with opened(host, "stream") as made:
        for name, ref in made.replicas(Counter).items():
            node, pid, _ = await ref.ask(Where())
            assert node == name
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"env_vars": {"RAY_worker_niceness": "0"}}),
        ({"env_vars": None}, {"env_vars": {"RAY_worker_niceness": "0"}}),
        (
            {"pip": ["scipy"], "env_vars": {"A": "b"}},
            {"pip": ["scipy"], "env_vars": {"RAY_worker_niceness": "0", "A": "b"}},
        ),
        ({"env_vars": {"RAY_worker_niceness": "5"}}, {"env_vars": {"RAY_worker_niceness": "5"}}),
    ],
)
def test_the_priority_belongs_to_the_environment_of_the_agents(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    before, options = copy.deepcopy(given), dict[str, Any]()

    class AskedError(Exception):
        pass

    class Remote:
        def options(self, **named: Any) -> Any:
            options.update(named)
            raise AskedError

    nodes = cluster.RayNodes(runtime_env=given)
    nodes._nodes = {"a": {"NodeID": "00" * 28, "Resources": {}}}
    monkeypatch.setattr(nodes._ray, "remote", lambda agent: Remote())
    with pytest.raises(cluster.NodeLostError) as raised:
        trio.run(nodes.start, cluster.AgentConfig("a", cluster.ClusterOptions(), None, b""))
    assert isinstance(raised.value.__cause__, AskedError)
    assert options["runtime_env"] == expected
    assert given == before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_its_head_a_program_ends(transport: str) -> None:
    here = Path(__file__).parent
    command = [sys.executable, str(here / "ray_without_a_head.py"), transport]
    path = os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path},
    )
    folder, *lines = done.stdout.splitlines()
    assert "killed" in lines
    assert done.returncode != 0, done.stdout
    # Some of Ray's own processes wait two minutes for their head.
    assert left(folder, of="RayAgent") == []


async def test_a_store_for_one_host_is_refused(host: RayHost, tmp_path: Path) -> None:
    nodes, store = cluster.RayNodes(host.address), cluster.SqliteStore(tmp_path / "store.db")
    async with ta.open_system("program") as system:
        with pytest.raises(ValueError, match="for one host"):
            async with cluster.open_cluster(system, nodes, store=store):
                pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ta.NotSupportedError, match=r"\[ray\]"):
        cluster.RayNodes()


def test_a_returning_node_waits_for_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = cluster.RayNodes()

    def node(name: str, number: str, **given: Any) -> dict[str, Any]:
        return {"NodeName": name, "NodeID": number, "Alive": True, "Resources": {"CPU": 1.0}, **given}

    found = [node("b", "1"), node("a", "2"), node("c", "3", Alive=False), node("head", "4", Resources={})]
    monkeypatch.setattr(nodes._ray, "is_initialized", lambda: True)
    monkeypatch.setattr(nodes._ray, "nodes", lambda: found)
    nodes._nodes = nodes._poll()
    assert [*nodes._nodes] == ["a", "b"]
    found.append(node("a", "5"))
    nodes._nodes = nodes._poll()
    assert nodes._nodes["a"]["NodeID"] == "2"
    assert caplog.text.count("several nodes are named a, and one of them has an agent") == 1
    found[1]["Alive"] = False
    assert nodes._poll()["a"]["NodeID"] == "5"


@pytest.mark.parametrize(
    ("error", "seconds"), [(ConnectionRefusedError(), 0.0), (OSError(113, "no route"), 10.0)]
)
def test_a_host_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: OSError, seconds: float
) -> None:
    class Socket:
        async def connect(self, address: object) -> None:
            await trio.lowlevel.checkpoint()
            raise error

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    nodes = cluster.RayNodes()
    monkeypatch.setattr(nodes._ray, "kill", lambda actor: None)
    monkeypatch.setattr(trio.socket, "socket", Socket)
    address = links.Address("nowhere", 1, b"")
    config = cluster.AgentConfig("a", cluster.ClusterOptions(heartbeat_timeout=15.0), None, b"")
    nodes._actors["a"] = "an actor"
    nodes._started["a"] = cluster.Started(address, (), 0), config

    async def end() -> float:
        began = trio.current_time()
        await nodes.end("a")
        return trio.current_time() - began

    took = trio.run(end, clock=trio.testing.MockClock(autojump_threshold=0.01))
    assert seconds <= took < seconds + 1.0


async def test_agents_take_one_of_the_ports_that_they_may(host: RayHost) -> None:
    with socket.create_server(("", 0)) as taken:
        first = taken.getsockname()[1]
        nodes = cluster.RayNodes(host.address, ports=range(first, first + 20))
        async with (
            ta.open_system("program") as system,
            cluster.open_cluster(system, nodes, options=INLINE) as made,
        ):
            assert await made.entity(Counter, "a").ask(Add(1.0)) == 1.0
            ports = [member.address.port for member in made.members]
            assert len({*ports}) == len(NAMES)
            assert {*ports} <= {*range(first + 1, first + 20)}
