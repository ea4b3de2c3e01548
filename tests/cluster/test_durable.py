"""Durable entities: no message is lost or counted twice, whatever becomes of their nodes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trio
from cluster_entities import (
    Account,
    Add,
    Counter,
    Dice,
    Echo,
    Equal,
    Fail,
    FailingStore,
    Ledger,
    Note,
    Picky,
)

import trio_accel as ta
from trio_accel import cluster

INLINE = ta.DeviceOptions(isolation="inline")
KEYS = [f"key {number}" for number in range(12)]
Made = tuple[cluster.Cluster, Any]


@asynccontextmanager
async def opened(
    nodes: cluster.LocalNodes | int, store: Any, device: ta.DeviceOptions = INLINE, **options: Any
) -> AsyncGenerator[Made, None]:
    nodes = cluster.LocalNodes(nodes) if isinstance(nodes, int) else nodes
    chosen = cluster.ClusterOptions(device=device, backoff=ta.Backoff(base=0.05), **options)
    with trio.fail_after(60):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, nodes, store=store, options=chosen) as made,
        ):
            yield made, nodes


@asynccontextmanager
async def alone(store: Any) -> AsyncGenerator[Any, None]:
    """Have entities in this process."""
    async with (
        ta.open_system("test") as system,
        system.open_devices(["cpu"], options=INLINE) as devices,
        cluster.open_entities(system, devices, store) as entities,
    ):
        yield entities


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "entities")


async def test_messages_ids_and_errors(path: str) -> None:
    async with opened(1, cluster.SqliteStore(path)) as (made, nodes):
        ref = made.entity(Account, "a")
        assert await ref.ask(Add(1.0), id="one") == 1.0
        assert await ref.ask(Add(1.0), id="one") == 1.0
        assert await ref.ask(Add(1.0)) == 2.0
        await ref.tell(Note(1.0))
        assert await ref.ask(Add(0.0)) == 3.0
        # An error that it refuses with has changed nothing; another one takes back what it has.
        with pytest.raises(KeyError, match="refused"):
            await ref.ask(Fail(KeyError("refused")))
        with pytest.raises(ZeroDivisionError, match="half") as caught:
            await ref.ask(Fail(ZeroDivisionError("half")))
        assert "cluster_entities.py" in caught.value.__notes__[0]
        assert await ref.ask(Add(0.0)) == 3.0
        # A cancelled request has changed nothing, or all.
        with trio.move_on_after(0.2) as scope:
            await ref.ask(Echo(None, 30.0))
        assert scope.cancelled_caught
        assert await ref.ask(Add(1.0), id="two") == 4.0
        # Those of before the save, and of before the node's end, are known.
        for _ in range(7):
            await ref.ask(Add(0.0))
        os.kill(nodes.pid("node-0"), signal.SIGKILL)
        assert await ref.ask(Add(1.0), id="one") == 1.0
        assert await ref.ask(Add(1.0), id="two") == 4.0
        assert await ref.ask(Add(1.0)) == 5.0
        # An entity without state in a store begins again.
        assert await made.entity(Counter, "a").ask(Add(1.0)) == 1.0


async def test_saves_keep_arrays_and_ids_are_reported(path: str) -> None:
    wanted = list[str]()
    for begin in range(0, 9, 3):
        async with alone(cluster.SqliteStore(path)) as entities:
            ref = entities.entity(Ledger, 7)
            for number in range(begin, begin + 3):
                wanted.append(f"id {number}")
                ids, total, host, dtype = await ref.ask(Add(1.0), id=wanted[-1])
                assert ids == wanted
                assert (total, host, dtype) == (12.0 * len(ids), 2.0 * len(ids), "float32")


async def test_unrepeatable_requests_are_reported(path: str) -> None:
    async with alone(cluster.SqliteStore(path)) as entities:
        ref = entities.entity(Dice, "a")
        first = await ref.ask(Add(1.0), id="one")
        for _ in range(3):
            await ref.ask(Add(1.0))
        # The store of a program to be killed here: the end of this one saves.
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(path + ".killed")) as target:
            source.backup(target)
    async with alone(cluster.SqliteStore(path + ".killed")) as entities:
        ref = entities.entity(Dice, "a")
        repaired = r"message 4, Add, has replied '\w+', and '\w+' before; .*reads=True"
        for _ in range(2):
            with pytest.raises(cluster.NotRepeatableError, match=repaired):
                await ref.ask(Add(1.0))
        # Another one is none the worse.
        assert await entities.entity(Dice, "b").ask(Add(1.0)) != first


@pytest.mark.parametrize("how", ["shared text", "a set", "sets in a set"])
async def test_an_equal_reply_repeats_another(path: str, how: str) -> None:
    """After a restart, objects are equal that were one object, and sets have another order."""
    async with alone(cluster.SqliteStore(path)) as entities:
        ref = entities.entity(Equal, "a")
        found = [await ref.ask(Echo(how, 0.0)) for _ in range(4)]
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(path + ".killed")) as target:
            source.backup(target)
    Equal.is_repeated = True
    try:
        async with alone(cluster.SqliteStore(path + ".killed")) as entities:
            assert await entities.entity(Equal, "a").ask(Echo(how, 0.0)) == found[0]
    finally:
        Equal.is_repeated = False


@pytest.mark.parametrize("is_cluster", [True, False])
async def test_a_store_is_away(path: str, is_cluster: bool) -> None:
    store, away = FailingStore(path), Path(path + ".away")
    made_by = opened(1, store) if is_cluster else alone(store)
    async with made_by as found:
        made = found[0] if isinstance(found, tuple) else found
        ref, other = made.entity(Account, "a"), made.entity(Account, "b")
        for number in range(7):
            assert await ref.ask(Add(1.0), id=f"id {number}") == number + 1
        away.touch()  # noqa: ASYNC240
        for id_ in ("lost", "lost", None):
            with pytest.raises(cluster.StoreError, match="the store is away"):
                await ref.ask(Add(100.0), id=id_)
            with pytest.raises(cluster.StoreError, match="the store is away"):
                await other.ask(Add(100.0))
        away.unlink()  # noqa: ASYNC240
        assert await ref.ask(Add(1.0), id="lost") == 8.0
        assert await ref.ask(Add(1.0), id="lost") == 8.0
        assert await other.ask(Add(1.0)) == 1.0


async def test_a_store_that_another_process_has_locked_is_waited_for(path: str) -> None:
    """As by an agent stopped while it writes: for longer than the store itself waits."""
    async with opened(2, cluster.SqliteStore(path, timeout=0.2)) as (made, _):
        refs = [made.entity(Account, key) for key in KEYS]
        for ref in refs[:6]:
            assert await ref.ask(Add(1.0)) == 1.0
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            totals = list[float]()

            async def ask(ref: Any) -> None:
                totals.append(await ref.ask(Add(1.0)))

            async with trio.open_nursery() as nursery:
                for ref in refs:
                    nursery.start_soon(ask, ref)
                # clock: a longer pause only makes it surer
                await trio.sleep(1.0)
                assert totals == []
                # A caller with less time than that learns it by its deadline.
                with trio.move_on_after(0.1) as scope:
                    await refs[0].ask(Add(1.0))
                assert scope.cancelled_caught
                other.execute("rollback")
        assert sorted(totals) == [1.0] * 6 + [2.0] * 6


async def test_the_older_of_two_clusters_is_fenced(path: str) -> None:
    async with opened(1, cluster.SqliteStore(path)) as (older, _):
        for key in KEYS:
            assert await older.entity(Account, key).ask(Add(1.0)) == 1.0
        async with opened(1, cluster.SqliteStore(path)) as (newer, _):
            assert newer.epoch > older.epoch
            for total in (2.0, 3.0):
                for key in KEYS:
                    assert await newer.entity(Account, key).ask(Add(1.0)) == total
                    with pytest.raises(cluster.FencedError, match="its owner is of epoch"):
                        await older.entity(Account, key).ask(Add(1.0))
        assert await older.entity(Account, "another").ask(Add(1.0)) == 1.0


async def test_the_older_of_two_clusters_ends_with_its_next_change(path: str) -> None:
    async def change() -> None:
        async with (
            opened(1, cluster.SqliteStore(path)) as (_, nodes),
            opened(1, cluster.SqliteStore(path)),
        ):
            nodes.add("another")
            await trio.sleep_forever()

    failed = pytest.RaisesExc(ta.ActorFailedError, match="another program has opened the store")
    with pytest.RaisesGroup(failed, flatten_subgroups=True):
        await change()


async def test_a_failure_after_the_handler_is_not_a_refusal(path: str) -> None:
    """The handler has changed its state, and the store has nothing of that."""
    async with alone(cluster.SqliteStore(path)) as entities:
        ref = entities.entity(Picky, "a")
        assert await ref.ask(Add(1.0)) == 1.0
        with pytest.raises(TypeError, match="must be positive"):
            await ref.ask(Add(-1.0))
        with pytest.raises(TypeError, match="another node"):
            await ref.ask(Echo("a reply that cannot be pickled"))
        assert await ref.ask(Add(1.0)) == 2.0


async def test_the_error_of_a_told_message_is_its_own(path: str) -> None:
    async with alone(cluster.SqliteStore(path)) as entities:
        ref = entities.entity(Picky, "a")
        await ref.tell(Note(1.0))
        with pytest.raises(ValueError, match="a note of nothing"):
            await ref.tell(Note(0.0))
        assert await ref.ask(Add(1.0)) == 2.0


async def test_an_id_is_for_durable_entities(path: str) -> None:
    async with alone(cluster.SqliteStore(path)) as entities:
        with pytest.raises(TypeError, match="id is for a DurableEntity"):
            await entities.entity(Counter, "a").ask(Add(1.0), id="order-1")


class UnreachableNodes(cluster.LocalNodes):
    """Nodes of which one cannot be reached, so that its agent cannot be ended."""

    def __init__(self, names: int) -> None:
        super().__init__(names)
        self.unreachable = ""
        self.kept: list[trio.Process] = []

    async def end(self, node: str) -> None:
        if node == self.unreachable and not self.kept:
            self.kept.append(self._processes.pop(node))
        await super().end(node)


async def test_a_returning_agent_is_fenced(path: str) -> None:
    nodes = UnreachableNodes(2)
    async with opened(nodes, cluster.SqliteStore(path), heartbeat_timeout=2.0) as (made, _):
        refs = {key: made.entity(Account, key) for key in KEYS}
        mine = [key for key in KEYS if "on node-1" in repr(refs[key])]
        assert len(mine) >= 2
        for key in mine:
            await refs[key].ask(Add(1.0))
        member = made.members[1]
        nodes.unreachable = member.name
        old_epoch, refused = made.epoch, list[str]()
        async with trio.open_nursery() as nursery:
            # A link of its own, which does not end with the cluster's: like the link of an agent with an old
            # table.
            link = await member.address.connect("the stopped one", 64, nursery)

            async def ask(key: str, seconds: float) -> None:
                request = Echo(key, seconds)
                with pytest.raises((cluster.FencedError, cluster.EntityMovedError)) as caught:
                    await link.ask(("ask", old_epoch, refs[key]._target, request, f"late {key}", False))
                refused.append(type(caught.value).__name__)

            async with trio.open_nursery() as asks:
                for key in mine[:2]:
                    asks.start_soon(ask, key, 2.0)
                # clock: they have begun after a moment, and end while their agent is stopped
                await trio.sleep(0.5)
                stopped = nodes.pid("node-1")
                os.kill(stopped, signal.SIGSTOP)
                for key in mine:
                    assert await refs[key].ask(Add(1.0)) == 2.0
                os.kill(stopped, signal.SIGCONT)
            # Both had begun before it was stopped, and may no longer write.
            assert refused == ["FencedError", "FencedError"]
            await ask(mine[0], 0.0)
            for key in mine:
                assert await refs[key].ask(Add(1.0)) == 3.0
            [process] = nodes.kept
            process.kill()
            nursery.cancel_scope.cancel(reason="it is gone")
        await process.wait()
        assert process.stdin is not None
        await process.stdin.aclose()


PROGRAM = """
import sys, trio, trio_accel as ta
from trio_accel import cluster
from cluster_entities import Account, Add

async def main():
    options = ta.DeviceOptions(isolation="inline")
    store = cluster.SqliteStore(sys.argv[1])
    async with (
        ta.open_system("t") as system,
        system.open_devices(["cpu"], options=options) as devices,
        cluster.open_entities(system, devices, store) as entities,
    ):
        while True:
            print(await entities.entity(Account, "a").ask(Add(1.0)), flush=True)

trio.run(main)
"""


def test_a_killed_program_continues_when_it_is_started_again(path: str) -> None:
    least = 0.0
    for _ in range(3):
        command = [sys.executable, "-c", PROGRAM, path]
        folders = os.pathsep.join([str(Path(ta.__file__).parents[1]), str(Path(__file__).parent)])
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": folders}
        ) as program:
            assert program.stdout is not None
            totals = [float(program.stdout.readline()) for _ in range(23)]
            program.kill()
            totals += [float(line) for line in program.stdout if line.endswith("\n")]
        # The last one before may have been written, and not printed.
        assert least + 1 <= totals[0] <= least + 2
        assert totals == [totals[0] + number for number in range(len(totals))]
        least = totals[-1]


async def test_a_store_of_one_host_and_nodes_of_several(path: str) -> None:
    nodes = cluster.LocalNodes(1)
    nodes.is_one_host = False
    async with ta.open_system("test") as system:
        with pytest.raises(ValueError, match="this store is for one host"):
            async with cluster.open_cluster(system, nodes, store=cluster.SqliteStore(path)):
                pass
        with pytest.raises(cluster.StoreError):
            async with cluster.open_cluster(
                system, cluster.LocalNodes(1), store=cluster.SqliteStore(path + "/nowhere/x")
            ):
                pass
