"""Entities of a cluster: at home on one node each, and what happens when nodes come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND, NAME
from cluster_entities import Account, Add, Counter, Echo, Fail, Note, Where, until

import trio_accel as ta
from trio_accel import cluster, patterns

INLINE = ta.DeviceOptions(isolation="inline")
KEYS = [f"key {number}" for number in range(24)]


@asynccontextmanager
async def opened(
    nodes: cluster.LocalNodes | int, **options: Any
) -> AsyncGenerator[tuple[cluster.Cluster, cluster.LocalNodes], None]:
    nodes = cluster.LocalNodes(nodes) if isinstance(nodes, int) else nodes
    chosen = cluster.ClusterOptions(device=INLINE, backoff=ta.Backoff(base=0.05), **options)
    with trio.fail_after(60):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, nodes, options=chosen) as made,
        ):
            yield made, nodes


async def homes(made: cluster.Cluster) -> dict[str, tuple[str, int, int]]:
    """Ask all for where they are."""
    return {key: await made.entity(Counter, key).ask(Where()) for key in KEYS}


def names(found: dict[str, tuple[str, int, int]]) -> dict[str, str]:
    return {key: node for key, (node, _, _) in found.items()}


async def add_to_all(made: cluster.Cluster) -> dict[str, float]:
    return {key: await made.entity(Counter, key).ask(Add(1.0)) for key in KEYS}


async def test_each_key_has_one_home() -> None:
    async with opened(3) as (made, nodes):
        assert [one.name for one in made.members] == ["node-0", "node-1", "node-2"]
        assert "node-0, node-1, node-2" in repr(made)
        found = await homes(made)
        assert {*names(found).values()} == {"node-0", "node-1", "node-2"}
        assert {key: nodes.pid(node) for key, (node, _, _) in found.items()} == {
            key: pid for key, (_, pid, _) in found.items()
        }
        for total in (1.0, 2.0):
            assert {*(await add_to_all(made)).values()} == {total}
        # Keys of several types with the same text are different entities.
        keys: list[Any] = ["x", b"x", 1, "b'x'", "'x'"]
        for number, key in enumerate(keys):
            assert await made.entity(Counter, key).ask(Add(float(number))) == float(number)
        # One on each node, for a pool.
        replicas = made.replicas(Counter)
        for node, ref in replicas.items():
            assert (await ref.ask(Where()))[:2] == (node, nodes.pid(node))
            assert await ref.ask(Add(7.0)) == 7.0
        async with ta.open_system("pools") as system:
            pool = await system.spawn(patterns.ReplicaPool, replicas)
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(pool.ask, patterns.Submit(Add(1.0)))
        assert sum([await ref.ask(Add(0.0)) for ref in replicas.values()]) == 33.0
        # A told message is in the mailbox before the next ask.
        ref = made.entity(Counter, "told")
        for _ in range(5):
            await ref.tell(Note(2.0))
        assert await ref.ask(Add(0.0)) == 10.0
        assert ref.is_available
        assert f"on {(await ref.ask(Where()))[0]}" in repr(ref)


async def test_deadlines_cancellation_and_back_pressure() -> None:
    async with opened(1, window=4, heartbeat_timeout=3.0) as (made, _):
        ref = made.entity(Counter, "a")
        await ref.ask(Add(1.0))
        with trio.move_on_after(0.3) as scope:
            await ref.ask(Echo(None, 1000.0))
        assert scope.cancelled_caught
        # It is free again, and continues in its place.
        assert await ref.ask(Add(1.0)) == 2.0
        others = [made.entity(Counter, number) for number in range(8)]
        for other in others:
            await other.ask(Add(0.0))
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(other.ask, Echo(None, 1000.0))
            # Four wait for the node, and four for these, longer than a node may be silent.
            # clock: a busy node is not silent for three seconds
            await trio.sleep(4.0)
            assert len(made.members) == 1
            nursery.cancel_scope.cancel(reason="enough")
        assert await ref.ask(Add(1.0)) == 3.0
        assert made.members[0].epoch == 1


async def test_errors_are_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(1) as (made, _):
        ref = made.entity(Counter, "a")
        with pytest.raises(cluster.NodeLostError, match="of mine") as caught:
            await ref.ask(Fail(cluster.NodeLostError("of mine", node="x", epoch=7)))
        assert (caught.value.node, caught.value.epoch) == ("x", 7)
        assert "on node node-0" in caught.value.__notes__[0]
        assert "cluster_entities.py" in caught.value.__notes__[0]
        with pytest.raises(OSError, match="no file") as other:
            await ref.ask(Fail(FileNotFoundError(2, "no file", "name")))
        assert (other.value.errno, other.value.filename) == (2, "name")
        assert await ref.ask(Add(1.0)) == 1.0
        # A message that cannot be sent to another node is refused before it is sent.
        here = type("Here", (Counter,), {"__module__": "__main__"})
        with pytest.raises(ValueError, match="put the class into a module"):
            made.entity(here, "a")
        with pytest.raises(TypeError, match="Here is a class of the started program"):
            await ref.ask(Echo(here))
        with pytest.raises(TypeError, match="must be a subclass of Entity"):
            made.entity(Add, "a")
        for key in (1.5, None, True, ("a",)):
            with pytest.raises(TypeError, match="key must be"):
                made.entity(Counter, key)  # type: ignore[arg-type]
        async with (
            ta.open_system("devices") as system,
            system.open_device("cpu", options=INLINE) as device,
        ):
            array = await device.put(np.zeros(3))
            with pytest.raises(TypeError, match="to_host"):
                await ref.ask(Echo(array))
            with pytest.raises(TypeError):
                await ref.ask(Echo(device))
        gone = type("Gone", (Counter,), {"__module__": "no.such_module"})
        with pytest.raises(ImportError, match=r"node node-0 has no no\.such_module:Gone"):
            await made.entity(gone, "a").ask(Add(1.0))
        gone = type("Gone", (Counter,), {"__module__": "cluster_entities"})
        with pytest.raises(ImportError, match="node node-0 has no cluster_entities:Gone"):
            await made.entity(gone, "a").ask(Add(1.0))
        with pytest.raises(TypeError, match="needs a cluster with a store"):
            await made.entity(Account, "a").ask(Add(1.0))
        monkeypatch.setattr("trio_accel.cluster._frames.MOST_BYTES", 1000)
        with pytest.raises(ValueError, match="is too large: at most 1000"):
            await ref.ask(Echo(bytes(2000)))
        assert await ref.ask(Add(1.0)) == 2.0


async def test_a_killed_agent_moves_only_its_keys(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(3) as (made, nodes):
        before = await homes(made)
        await add_to_all(made)
        mine = [key for key in KEYS if before[key][0] == "node-1"]
        assert mine
        failed = list[cluster.NodeLostError]()

        async def ask(key: str) -> None:
            try:
                await made.entity(Counter, key).ask(Echo(None, 1000.0))
            except cluster.NodeLostError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for key in mine:
                nursery.start_soon(ask, key)
            await trio.testing.wait_all_tasks_blocked()
            # They follow the others on the link of their node, so they have begun.
            await made.replicas(Counter)["node-1"].ask(Add(0.0))
            os.kill(nodes.pid("node-1"), signal.SIGKILL)
        assert [error.node for error in failed] == ["node-1"] * len(mine)
        assert "it may have been executed" in str(failed[0])
        totals = await add_to_all(made)
        assert totals == {key: 1.0 if key in mine else 2.0 for key in KEYS}
        # Its agent is started again, and every key is where it was.
        await until(lambda: len(made.members) == 3)
        assert names(await homes(made)) == names(before)
        assert nodes.pid("node-1") != before[mine[0]][1]
        assert {key: total for key, total in (await add_to_all(made)).items() if key not in mine} == {
            key: 3.0 for key in KEYS if key not in mine
        }


async def test_nodes_leave_and_come() -> None:
    async with opened(2, hand_off=20.0) as (made, nodes):
        tables = list[tuple[int, list[str]]]()

        async def watch() -> None:
            async for table in made.watch():
                tables.append((table.epoch, [one.name for one in table.members]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            before = await homes(made)
            await add_to_all(made)
            nodes.add("node-2")
            await until(lambda: len(made.members) == 3)
            after = await homes(made)
            moved = [key for key in KEYS if after[key][0] != before[key][0]]
            assert {after[key][0] for key in moved} == {"node-2"}
            # Work begun on a drained node ends there.
            replies = dict[str, Any]()

            async def ask(key: str) -> None:
                replies[key] = await made.entity(Counter, key).ask(Echo(np.full(1 << 18, 7.0), 0.5))

            async with trio.open_nursery() as asks:
                for key in KEYS:
                    asks.start_soon(ask, key)
                await trio.testing.wait_all_tasks_blocked()
                await made.replicas(Counter)["node-2"].ask(Add(0.0))
                await made.drain("node-2")
                assert [one.name for one in made.members] == ["node-0", "node-1"]
            assert all((reply == 7.0).all() for reply in replies.values())
            assert len(replies) == len(KEYS)
            assert names(await homes(made)) == names(before)
            with pytest.raises(KeyError, match="node-2"):
                await made.drain("node-2")
            with pytest.raises(KeyError):
                nodes.pid("node-2")
            # Only moved entities began again.
            assert await add_to_all(made) == {key: 1.0 if key in moved else 2.0 for key in KEYS}
            nodes.remove("node-2")
            nodes.remove("node-0")
            await until(lambda: len(made.members) == 1)
            assert {*names(await homes(made)).values()} == {"node-1"}
            nodes.add("node-2")
            await until(lambda: len(made.members) == 2)
            nursery.cancel_scope.cancel(reason="enough was seen")
        epochs = [epoch for epoch, _ in tables]
        assert epochs == sorted({*epochs})
        assert [found for _, found in tables][:3] == [
            ["node-0", "node-1"],
            ["node-0", "node-1", "node-2"],
            ["node-0", "node-1"],
        ]


async def test_large_requests_that_wait_for_their_link_while_a_node_is_drained() -> None:
    async with opened(2, hand_off=20.0) as (made, _):
        replies = dict[str, Any]()

        async def ask(key: str) -> None:
            replies[key] = await made.entity(Counter, key).ask(Echo(np.full(1 << 20, 7.0)))

        await homes(made)
        async with trio.open_nursery() as asks:
            for key in KEYS:
                asks.start_soon(ask, key)
            await trio.testing.wait_all_tasks_blocked()
            await made.drain("node-1")
        assert len(replies) == len(KEYS)
        assert all((reply == 7.0).all() for reply in replies.values())


async def test_a_stopped_agent_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(2, heartbeat_timeout=1.0) as (made, nodes):
        before = await homes(made)
        mine = [key for key in KEYS if before[key][0] == "node-1"]
        stopped = nodes.pid("node-1")
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(cluster.NodeLostError, match="node-1"):
            await made.entity(Counter, mine[0]).ask(Add(1.0))
        assert await made.entity(Counter, mine[0]).ask(Add(1.0)) == 1.0
        # Its process was ended before its keys were elsewhere.
        assert not _is_alive(stopped)
    assert "gave no sign of life for 1 s" in caplog.text


async def test_a_hand_off_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(1, hand_off=0.5) as (made, nodes):
        caught = list[Exception]()

        async def ask(key: str) -> None:
            try:
                await made.entity(Counter, key).ask(Echo(None, 1000.0))
            except cluster.NodeLostError as error:
                caught.append(error)

        [before] = made.members
        async with trio.open_nursery() as nursery:
            for key in KEYS:
                nursery.start_soon(ask, key)
            await trio.testing.wait_all_tasks_blocked()
            # It follows the others on their link, which a busy machine may need long to read.
            await made.entity(Counter, "behind").ask(Add(1.0))
            nodes.add("node-9")
        assert len(caught) == len(KEYS)
        await until(lambda: len(made.members) == 2 and before not in made.members)
        assert {*names(await homes(made)).values()} == {"node-0", "node-9"}
        assert {*(await add_to_all(made)).values()} == {1.0}
    assert "node node-0 has not ended its hand-off" in caplog.text


async def test_without_a_node_asks_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trio_accel.cluster._table._LOG_AFTER_SECONDS", 0.1)
    async with opened(1) as (made, nodes):
        ref, alone = made.entity(Counter, "a"), made.replicas(Counter)["node-0"]
        nodes.remove("node-0")
        await until(lambda: not made.members)
        assert not ref.is_available
        assert "nowhere" in repr(ref)
        assert not made.replicas(Counter)
        with trio.move_on_after(0.5) as scope:
            await ref.ask(Add(1.0))
        assert scope.cancelled_caught
        assert "waits for a home: the cluster has no node" in caplog.text
        nodes.add("node-1")
        assert (await ref.ask(Where()))[0] == "node-1"
        with trio.move_on_after(0.3) as scope:
            await alone.ask(Add(1.0))
        assert scope.cancelled_caught
        assert "the cluster has not node node-0" in caplog.text


async def test_entities_end_when_nobody_asks() -> None:
    async with opened(1, idle_after=0.3) as (made, _):
        ref = made.entity(Counter, "a")
        assert await ref.ask(Add(1.0)) == 1.0
        assert await ref.ask(Echo("slow", 1.0)) == "slow"
        assert await ref.ask(Add(1.0)) == 2.0
        # clock: a longer pause only makes it surer that nobody has asked for `idle_after`
        await trio.sleep(1.0)
        assert await ref.ask(Add(1.0)) == 1.0


async def test_the_tree_shows_the_nodes() -> None:
    async with (
        ta.open_system("test") as system,
        cluster.open_cluster(
            system,
            cluster.LocalNodes(["x"]),
            options=cluster.ClusterOptions(devices=(BACKEND,), device=INLINE),
        ) as made,
    ):
        assert made.members[0].devices == (NAME,)
        assert "nodes" in str(system.tree())
        assert "x" in str(system.tree())


def test_nodes_are_named_once() -> None:
    for names_ in ([], 0, ["a", "a"]):
        with pytest.raises(ValueError, match="LocalNodes: names must be"):
            cluster.LocalNodes(names_)


PROGRAM = """
import sys, trio, trio_accel as ta
from trio_accel import cluster

async def main():
    options = cluster.ClusterOptions(device=ta.DeviceOptions(isolation=sys.argv[1]))
    nodes = cluster.LocalNodes(2)
    async with ta.open_system("t") as system, cluster.open_cluster(system, nodes, options=options):
        print(nodes.pid("node-0"), nodes.pid("node-1"), flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_agents_end_with_the_program(end: signal.Signals) -> None:
    root = Path(ta.__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, "inline"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root) as program:
        assert program.stdout is not None
        agents = [int(word) for word in program.stdout.readline().split()]
        assert len(agents) == 2
        program.send_signal(end)
        program.wait()
        # After Ctrl-C the program has waited for its agents, which may take the kernel a moment to reap.
        deadline = time.monotonic() + 30.0
        while (left := [pid for pid in agents if _is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        # An orphan with a new parent that reaps slowly has also ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
