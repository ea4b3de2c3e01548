"""Nodes removed and added again at once, in every order, are there in the end with new agents."""

from __future__ import annotations

import itertools
from contextlib import aclosing
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from cluster_entities import until

import trio_accel as ta
from trio_accel import cluster


@attrs.define
class Follower:
    """Follows the nodes as a cluster does: agents of missing nodes end first, and others start."""

    nodes: cluster.LocalNodes
    agents: dict[str, int] = attrs.field(factory=dict)
    ends: int = 0
    starts: int = 0

    async def run(self, pause: float) -> None:
        async with aclosing(self.nodes.watch()) as changes:
            async for names in changes:
                for name in [name for name in self.agents if name not in names]:
                    await trio.sleep(pause)
                    del self.agents[name]
                    self.ends += 1
                for name in names:
                    if name not in self.agents:
                        await trio.sleep(pause)
                        self.starts += 1
                        self.agents[name] = self.starts


@pytest.mark.no_device
@pytest.mark.parametrize("pause", [0.0, 1.0])
async def test_every_quick_order(pause: float, autojump_clock: Any) -> None:
    for steps in itertools.product(["remove", "add", "wait"], repeat=4):
        await check_order(steps, pause)


async def check_order(steps: tuple[str, ...], pause: float) -> None:
    nodes = cluster.LocalNodes(["a", "b", "c"])
    follower = Follower(nodes)
    is_there, is_new = {"a": True, "b": True}, False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run, pause)
        await trio.sleep(10)
        first = dict(follower.agents)
        for step in steps:
            if step == "wait":
                await trio.sleep(0.5)
                continue
            for name in "ab":
                if step == "add":
                    nodes.add(name)
                    is_there[name] = True
                elif is_there[name]:
                    nodes.remove(name)
                    is_there[name], is_new = False, True
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert follower.agents.keys() == {"c", *(name for name in "ab" if is_there[name])}
    assert follower.agents["c"] == first["c"]
    for name in follower.agents.keys() & {"a", "b"}:
        assert (follower.agents[name] != first[name]) == is_new
    assert follower.starts - follower.ends == len(follower.agents)


async def test_a_drained_node_is_added_again_at_once() -> None:
    options = cluster.ClusterOptions(devices=("cpu",), device=ta.DeviceOptions(isolation="inline"))
    nodes = cluster.LocalNodes(1)
    with trio.fail_after(100):
        async with (
            ta.open_system("s") as system,
            cluster.open_cluster(system, nodes, options=options) as made,
        ):
            first = nodes.pid("node-0")
            nodes.remove("node-0")
            nodes.add("node-0")
            await until(lambda: made.epoch >= 3 and made.members)
            second = nodes.pid("node-0")
            await made.drain("node-0")
            assert not made.members
            nodes.remove("node-0")
            nodes.add("node-0")
            await until(lambda: made.members)
            assert len({first, second, nodes.pid("node-0")}) == 3


@pytest.mark.no_device
def test_names_that_cannot_be() -> None:
    nodes = cluster.LocalNodes(["one"])
    with pytest.raises(KeyError, match=r"LocalNodes.remove: 'on' is not a node; did you mean 'one'"):
        nodes.remove("on")
    wrong: Any
    for wrong in (3, "", "a/b", None):
        with pytest.raises(TypeError, match="the name of a node must be a str without a slash"):
            nodes.add(wrong)
        with pytest.raises(TypeError, match="the name of a node must be a str without a slash"):
            cluster.LocalNodes([wrong])
