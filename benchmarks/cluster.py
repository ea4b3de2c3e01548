"""Asks of entities on other nodes: by streams and by Ray's calls, on simulated nodes of one host.

    python -m benchmarks.cluster local           agents are plain processes
    python -m benchmarks.cluster stream          agents are actors of a Ray that is running; address "auto"
    python -m benchmarks.cluster ray ADDRESS     the same, asked by Ray's calls

The entities are those of the tests, so `tests/cluster` is to be in PYTHONPATH, for Ray's processes, too.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import trio

import trio_accel as ta
from trio_accel import cluster

from ._statistics import percentile

__all__ = ["figures"]

_ASKS = 2000
_ASKERS = 64
_SECONDS = 5.0


async def figures(nodes: cluster.Nodes) -> dict[str, str]:
    """Measure asks of an entity of the tests; the last figure kills its agent."""
    entities: Any = importlib.import_module("cluster_entities")
    options = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"))
    found: dict[str, str] = {}
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, nodes, options=options) as opened,
    ):
        refs = [opened.entity(entities.Counter, key) for key in range(_ASKERS)]
        for ref in refs:
            await ref.ask(entities.Add(1.0))
        taken = [await _milliseconds(refs[number % _ASKERS], entities.Add(1.0)) for number in range(_ASKS)]
        found["ask, p50 and p95"] = f"{percentile(taken, 50):.2f} and {percentile(taken, 95):.2f} ms"
        found[f"{_ASKERS} askers"] = f"{await _rate(refs, entities.Add(1.0)):.0f} a second"
        array = np.zeros(1 << 23)
        taken = [await _milliseconds(refs[0], entities.Echo(array)) for _ in range(5)]
        found["64 MiB there and back"] = f"{percentile(taken, 50):.0f} ms"
        taken = await _beside(opened, entities, array)
        found["an ask beside them, p50 and p95"] = (
            f"{percentile(taken, 50):.1f} and {percentile(taken, 95):.1f} ms"
        )
        taken = [await _told(opened.entity(entities.Counter, "Ann"), entities) for _ in range(3)]
        found["a kill is told after"] = ", ".join([f"{one:.2f}" for one in sorted(taken)]) + " s"
    return found


async def _milliseconds(ref: Any, request: object) -> float:
    begun = time.perf_counter()
    await ref.ask(request)
    return (time.perf_counter() - begun) * 1e3


async def _rate(refs: list[Any], request: object) -> float:
    count = 0

    async def ask(ref: Any) -> None:
        nonlocal count
        while True:
            await ref.ask(request)
            count += 1

    with trio.move_on_after(_SECONDS):
        async with trio.open_nursery() as nursery:
            for ref in refs:
                nursery.start_soon(ask, ref)
    return count / _SECONDS


async def _beside(opened: cluster.Cluster, entities: Any, array: object) -> list[float]:
    """Ask an entity for little, while another one of its node gets and gives large arrays."""
    node = opened.members[0].name
    homes = {key: (await opened.entity(entities.Counter, key).ask(entities.Where()))[0] for key in range(64)}
    small, large = [opened.entity(entities.Counter, key) for key, home in homes.items() if home == node][:2]
    taken: list[float] = []

    async def carry() -> None:
        while True:
            await large.ask(entities.Echo(array))

    with trio.move_on_after(_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry)
            while True:
                taken.append(await _milliseconds(small, entities.Add(1.0)))
                await trio.sleep(0.005)
    return taken


async def _told(ref: Any, entities: Any) -> float:
    """Kill the agent of an entity with an ask in flight; returns after how many seconds that was told."""
    _, pid, _ = await ref.ask(entities.Where())
    killed = told = 0.0

    async def wait() -> None:
        nonlocal told
        try:
            await ref.ask(entities.Echo(None, 60.0))
        except cluster.NodeLostError:
            told = time.perf_counter()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(0.5)
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
    await trio.sleep(4.0)
    return told - killed


def _nodes(transport: str, *address: str) -> cluster.Nodes:
    if transport == "local":
        return cluster.LocalNodes(3)
    if transport == "ray":
        nodes: cluster.Nodes = importlib.import_module("ray_calls").RayCalls(*address)
        return nodes
    return cluster.RayNodes(*address)


if __name__ == "__main__":
    for name, figure in trio.run(figures, _nodes(*sys.argv[1:])).items():
        sys.stdout.write(f"{name}: {figure}\n")
