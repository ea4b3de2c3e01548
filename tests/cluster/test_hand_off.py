"""Entities that ask each other while nodes leave and come in order: each ask runs once and is answered."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from cluster_entities import Add, Counter, Echo, Pass, until

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links

AGENT: Any = __import__("trio_accel.cluster._agent", fromlist=["Agent"])
NUMBERS = range(16)


@asynccontextmanager
async def opened(nodes: int) -> AsyncGenerator[tuple[cluster.Cluster, cluster.LocalNodes], None]:
    local = cluster.LocalNodes(nodes)
    # An agent that waits for its own hand-off is ended after 10 s.
    options = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"), hand_off=10.0)
    with trio.fail_after(60):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, local, options=options) as made,
        ):
            # All entities are there.
            for number in NUMBERS:
                for letter in "abc":
                    await made.entity(Counter, f"{letter} {number}").ask(Add(1.0))
            yield made, local


class Asks:
    """Asks in flight from entity to entity, and their replies."""

    def __init__(self, made: cluster.Cluster, file: Path) -> None:
        self._made, self._file = made, file
        self.replies = dict[int, Any]()
        file.touch()

    def begun(self) -> list[str]:
        return self._file.read_text().split("\n")[:-1]

    async def ask(self, number: int, request: ta.Request[Any, Any], epoch: int = 0) -> None:
        """Have entity a ask entity b to ask entity c; a waits for a table after the epoch."""
        inner = Pass(str(self._file), f"c {number}", request, 0)
        outer = Pass(str(self._file), f"b {number}", inner, epoch)
        self.replies[number] = await self._made.entity(Counter, f"a {number}").ask(outer)

    def check(self, value: Any) -> None:
        assert self.replies.keys() == {*NUMBERS}
        assert all(np.array_equal(reply, value) for reply in self.replies.values())
        # Nothing ran twice.
        assert Tally(self.begun()) == Tally([f"{letter} {number}" for letter in "ab" for number in NUMBERS])


async def test_entities_ask_each_other_while_nodes_are_drained(tmp_path: Path) -> None:
    value = np.full(1 << 17, 7.0)
    # Requests have asked on when the drain begins, some of them at least; or all ask on while it lasts.
    rounds = ((1, False), (len(NUMBERS) + 1, False), (len(NUMBERS), True))
    async with opened(2) as (made, nodes):
        for turn, (begun, is_late) in enumerate(rounds, 1):
            asks = Asks(made, tmp_path / f"{turn}")
            async with trio.open_nursery() as nursery:
                for number in NUMBERS:
                    nursery.start_soon(asks.ask, number, Echo(value, 0.2), made.epoch if is_late else 0)
                await until(lambda asks=asks, begun=begun: len(asks.begun()) >= begun)
                await made.drain(f"node-{turn}")
            asks.check(value)
            nodes.add(f"node-{turn + 1}")
            await until(lambda: len(made.members) == 2)


async def test_entities_ask_entities_that_move_to_a_new_node(tmp_path: Path) -> None:
    async with opened(1) as (made, nodes):
        asks = Asks(made, tmp_path / "begun")
        async with trio.open_nursery() as nursery:
            for number in NUMBERS:
                nursery.start_soon(asks.ask, number, Echo(None), made.epoch)
            await until(lambda: len(asks.begun()) == len(NUMBERS))
            nodes.add("node-9")
        asks.check(None)
        await until(lambda: len(made.members) == 2)


async def test_a_link_that_opens_while_its_member_leaves_is_closed() -> None:
    """A request by it has not begun, and is asked again at the new home."""
    begun, go, made = trio.Event(), trio.Event(), links.Link([], "b")

    class Address:
        async def connect(self, *_: object) -> links.Link:
            begun.set()
            await go.wait()
            return made

    member = cluster.Member("b", (), 1, Address())
    async with trio.open_nursery() as nursery:
        peers = AGENT._Peers(4, nursery, links.allocate_any)
        peers.update(cluster.Table(1, (member,)))

        async def ask() -> None:
            with pytest.raises(links.LinkLostError, match="node b is gone") as caught:
                await peers.link(member)
            assert not caught.value.is_begun

        nursery.start_soon(ask)
        await begun.wait()
        peers.update(cluster.Table(2), peers.table)
        await peers.settle(1.0)
        go.set()
    assert made.lost.is_set()


async def test_links_to_who_leaves_end_after_their_answers_and_to_who_is_lost_at_once() -> None:
    members = [cluster.Member(name, (), 1, None) for name in "ab"]
    router = cluster.EntityRouter()
    lines = dict(zip(members, (links.Link([], "a"), links.Link([], "b")), strict=True))
    router._links.update(lines)
    table = cluster.Table(1, tuple(members))
    router.update(table)
    replied = lines[members[0]]._replies[1] = trio.Event()
    router.update(cluster.Table(2, (members[1],)), table)
    assert not lines[members[0]].lost.is_set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.settle, 60.0)
        await trio.testing.wait_all_tasks_blocked()
        assert router.settled.is_set()
        assert not lines[members[0]].lost.is_set()
        lines[members[0]]._replies.clear()
        replied.set()
    assert lines[members[0]].lost.is_set()
    router.update(cluster.Table(3))
    assert lines[members[1]].lost.is_set()


async def test_asks_in_flight_hear_that_their_cluster_is_closed(tmp_path: Path) -> None:
    caught = list[Exception]()

    async def ask(asks: Asks, number: int) -> None:
        try:
            await asks.ask(number, Echo(None, 1000.0))
        except (cluster.NodeLostError, ta.ActorStoppedError) as error:
            caught.append(error)

    async with trio.open_nursery() as nursery:
        async with opened(2) as (made, _):
            asks = Asks(made, tmp_path / "begun")
            for number in NUMBERS:
                nursery.start_soon(ask, asks, number)
            await until(lambda: len(asks.begun()) == 2 * len(NUMBERS))
        with trio.fail_after(60):
            await until(lambda: len(caught) == len(NUMBERS))
