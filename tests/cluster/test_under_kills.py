"""Totals of durable entities equal the acknowledged additions, whoever was killed, left, or stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from cluster_entities import Account, Add, Counter, until

import trio_accel as ta
from trio_accel import cluster

INLINE, PROCESS = ta.DeviceOptions(isolation="inline"), ta.DeviceOptions(isolation="process")
KEYS = [f"key {number}" for number in range(12)]
CLIENTS = 16
SECONDS = 900
# A sample, and as many as the design asks for.
ROUNDS = [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(SECONDS)])]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "entities")


@asynccontextmanager
async def opened(
    nodes: cluster.LocalNodes, store: Any, device: ta.DeviceOptions = INLINE
) -> AsyncGenerator[cluster.Cluster, None]:
    options = cluster.ClusterOptions(device=device, backoff=ta.Backoff(base=0.05))
    with trio.fail_after(SECONDS):
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, nodes, store=store, options=options) as made,
        ):
            yield made


def names(made: cluster.Cluster) -> set[str]:
    return {one.name for one in made.members}


def homes(made: cluster.Cluster) -> dict[str, str]:
    return {key: repr(made.entity(Account, key)).rpartition("on ")[2] for key in KEYS}


def workers_of(agent: int) -> list[int]:
    """Return the processes that an agent, or one of these, has started."""
    found = list[int]()
    for task in Path(f"/proc/{agent}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *workers_of(child)]
    return found


async def totals_under(
    made: cluster.Cluster, harm: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
) -> int:
    """Have clients add until harm is done; all totals equal the acknowledged additions.

    Args:
        made: The cluster.
        harm: Kills and removes; it gets a function that waits until more than 20 further additions were
            acknowledged.
    """
    added = dict.fromkeys(KEYS, 0.0)
    is_over = False
    asks = 0

    async def client(number: int) -> None:
        nonlocal asks
        chosen = random.Random(number)
        while not is_over:
            key, x = chosen.choice(KEYS), float(chosen.randrange(1, 9))
            await made.entity(Account, key).ask(Add(x))
            added[key] += x
            asks += 1

    async def work() -> None:
        before = asks
        await until(lambda: asks > before + 20)

    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(client, number)
        await harm(work)
        is_over = True
    assert {key: await made.entity(Account, key).ask(Add(0.0)) for key in KEYS} == added
    return asks


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_totals_under_kills_leaves_and_joins(path: str, rounds: int) -> None:
    nodes = cluster.LocalNodes(3)
    async with opened(nodes, cluster.SqliteStore(path)) as made:
        # Entities without a store show the moves: they begin again.
        counters = [made.entity(Counter, key) for key in KEYS]

        def kill_and_remove(name: str) -> None:
            os.kill(nodes.pid(name), signal.SIGKILL)
            # Its agent would come back, and with it the keys.
            nodes.remove(name)

        async def leave(name: str, how: Callable[[], Any]) -> None:
            """Have a node leave: its keys move, and no other."""
            before = homes(made)
            totals = [await one.ask(Add(1.0)) for one in counters]
            where = [repr(one).rpartition("on ")[2] for one in counters]
            left = how()
            if left is not None:
                await left
            await until(lambda: name not in names(made))
            now = homes(made)
            assert {key for key in KEYS if now[key] != before[key]} == {
                key for key in KEYS if before[key].startswith(name)
            }
            for one, total, home in zip(counters, totals, where, strict=True):
                assert await one.ask(Add(1.0)) == (1.0 if home.startswith(name) else total + 1.0)

        async def harm(work: Callable[[], Awaitable[None]]) -> None:
            chosen = random.Random(7)
            for _ in range(rounds):
                await work()
                await until(lambda: len(made.members) == 3)
                name = chosen.choice(sorted(names(made)))
                await leave(name, lambda name=name: kill_and_remove(name))
                nodes.add(name)
                await until(lambda: len(made.members) == 3)
                name = chosen.choice(sorted(names(made)))
                await leave(name, lambda name=name: made.drain(name))
                nodes.remove(name)
                await work()
                nodes.add(name)
                # An agent is killed while its node stays.
                await until(lambda: len(made.members) == 3)
                name = chosen.choice(sorted(names(made)))
                os.kill(nodes.pid(name), signal.SIGKILL)
                await until(lambda name=name: name not in names(made))

        asks = await totals_under(made, harm)
        print(f"{3 * rounds} kills, leaves and joins beside {asks} additions")
        assert asks > 20 * rounds


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_totals_under_kills_of_workers(path: str, rounds: int) -> None:
    nodes = cluster.LocalNodes(1)
    async with opened(nodes, cluster.SqliteStore(path), PROCESS) as made:

        async def harm(work: Callable[[], Awaitable[None]]) -> None:
            for _ in range(rounds):
                await work()
                # The launcher is the first, and its workers follow it.
                await until(lambda: workers_of(nodes.pid("node-0"))[1:])
                os.kill(workers_of(nodes.pid("node-0"))[-1], signal.SIGKILL)

        asks = await totals_under(made, harm)
        print(f"{rounds} kills of workers beside {asks} additions")
        assert asks > 20 * rounds


PROGRAM = """
import os, sys, trio, trio_accel as ta
from trio_accel import cluster
from cluster_entities import Account, Add

async def main():
    options = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"), heartbeat_timeout=3.0)
    nodes, store = cluster.LocalNodes(2), cluster.SqliteStore(sys.argv[1])
    async with (
        ta.open_system("older") as system,
        cluster.open_cluster(system, nodes, store=store, options=options) as made,
    ):
        for number in range(10_000):
            key = f"key {number % 12}"
            try:
                await made.entity(Account, key).ask(Add(1.0))
            except cluster.FencedError:
                print("fenced", flush=True)
                return
            print(key, flush=True)

trio.run(main)
"""


async def test_a_stopped_and_replaced_program_is_fenced(path: str) -> None:
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(ta.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": folders}
    acknowledged = dict.fromkeys(KEYS, 0.0)
    with tempfile.TemporaryFile() as errors, ExitStack() as stack:
        older = await trio.lowlevel.open_process(
            [sys.executable, "-c", PROGRAM, path], stdout=subprocess.PIPE, stderr=errors, env=environment
        )
        stack.callback(older.kill)  # A failure leaves no process behind, which other tests would see.
        assert older.stdout is not None
        lines = _lines(older.stdout)
        for _ in range(30):
            acknowledged[await anext(lines)] += 1.0
        os.kill(older.pid, signal.SIGSTOP)
        async with opened(cluster.LocalNodes(2), cluster.SqliteStore(path)) as made:
            for key in KEYS:
                await made.entity(Account, key).ask(Add(100.0))
                acknowledged[key] += 100.0
            os.kill(older.pid, signal.SIGCONT)
            with trio.fail_after(60):
                async for line in lines:
                    if line == "fenced":
                        break
                    acknowledged[line] += 1.0
                else:
                    errors.seek(0)
                    pytest.fail(errors.read().decode())
                await older.wait()
            totals = {key: await made.entity(Account, key).ask(Add(0.0)) for key in KEYS}
        # One message of the older program may have been on its way when it was stopped.
        extra = {key: totals[key] - acknowledged[key] for key in KEYS}
        assert set(extra.values()) <= {0.0, 1.0}
        assert sum(extra.values()) <= 1.0
        await lines.aclose()
        await older.stdout.aclose()


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncGenerator[str, None]:
    text = b""
    async for part in stream:
        *whole, text = (text + part).split(b"\n")
        for line in whole:
            yield line.decode()
