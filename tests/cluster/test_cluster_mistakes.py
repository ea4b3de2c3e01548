"""Clusters refuse wrong arguments with an error that states the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_entities import Account, Add, Counter

import trio_accel as ta
from trio_accel import cluster

INLINE = ta.DeviceOptions(isolation="inline")


async def enter(opening: Any) -> None:
    async with opening:
        pass


async def test_arguments_of_openings() -> None:
    anything: Any
    async with ta.open_system("s") as system:
        nodes = cluster.LocalNodes(1)
        for anything, text in (
            (cluster.open_cluster("s", nodes), "open_cluster: system must be the system of open_system"),  # type: ignore[arg-type]
            (cluster.open_cluster(system, 3), r"open_cluster: nodes must be LocalNodes\(...\) or RayNodes"),  # type: ignore[arg-type]
            (
                cluster.open_cluster(system, nodes, store="x.db"),  # type: ignore[arg-type]
                r"open_cluster: store must be a Store, got 'x.db'; write SqliteStore\('x.db'\)",
            ),
            (
                cluster.open_cluster(system, nodes, options={}),  # type: ignore[arg-type]
                r"open_cluster: options must be ClusterOptions\(...\), got {}",
            ),
            (cluster.open_entities(system, "cpu"), "open_entities: devices must be a group of"),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=text):
                await enter(anything)


@pytest.mark.no_device
@pytest.mark.parametrize("names", ["abc", 1.5, None, True])
def test_names_of_nodes(names: Any) -> None:
    with pytest.raises(TypeError, match="LocalNodes: names must be a number or a list of names, got"):
        cluster.LocalNodes(names)
    with pytest.raises(KeyError, match=r"LocalNodes.pid: node 'x' has no agent now"):
        cluster.LocalNodes(["x"]).pid("x")


async def test_classes_keys_and_ids() -> None:
    wrong: Any
    async with (
        ta.open_system("s") as system,
        system.open_devices(["cpu"], options=INLINE) as devices,
        cluster.open_entities(system, devices) as router,
    ):
        for wrong in ("Ent", Add(1.0), int, ta.Actor):
            with pytest.raises(TypeError, match="entity: cls must be a subclass of Entity, the class itself"):
                router.entity(wrong, "a")
        wrong = 3
        with pytest.raises(TypeError, match="on_node: node must be the name of a node, a str, got 3"):
            router.on_node(Counter, wrong)
        for key in (5, -1):
            router.entity(Counter, key)
        router.entity(Counter, "a")
        for wrong in ("5", b"6", "-7"):
            with pytest.raises(
                TypeError, match=r"entity: Counter has keys such as 5, and .* keys of one type"
            ):
                router.entity(Counter, wrong)
        router.entity(Account, "5")
        with pytest.raises(TypeError, match="use keys of one type"):
            router.entity(Account, 5)
        for wrong in ("", 3):
            with pytest.raises(TypeError, match="ask: id must be a str that is not empty"):
                await router.entity(Account, "a").ask(Add(1.0), id=wrong)


async def test_a_drain_of_an_unknown_node() -> None:
    options = cluster.ClusterOptions(devices=("cpu",), device=INLINE)
    async with (
        ta.open_system("s") as system,
        cluster.open_cluster(system, cluster.LocalNodes(1), options=options) as made,
    ):
        with pytest.raises(
            KeyError, match="drain: 'node-O' is not a node with an agent; did you mean 'node-0'"
        ):
            await made.drain("node-O")
        await made.drain("node-0")
        with pytest.raises(KeyError, match="drain: 'node-0' is not a node with an agent; there are none"):
            await made.drain("node-0")
