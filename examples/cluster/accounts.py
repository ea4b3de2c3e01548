"""Accounts and a sharded index over several nodes: `python examples/cluster/accounts.py --nodes 3 --faults`.

Clients add to accounts while agents are killed. At the end, each total must equal the acknowledged additions.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import trio
from bank import Account, Add, Fill, Search, Shard

import trio_accel as ta
from trio_accel import cluster


async def run(nodes: int, seconds: float, *, has_faults: bool, folder: Path) -> bool:
    """Run clients and faults for some seconds; return whether the totals equal the acknowledged additions."""
    local = cluster.LocalNodes(nodes)
    store = cluster.SqliteStore(folder / "bank.db")
    options = cluster.ClusterOptions(devices=("cpu",), device=ta.DeviceOptions(isolation="inline"))
    acknowledged: Counter[str] = Counter()
    waits: list[float] = []
    async with (
        ta.open_system("bank") as system,
        cluster.open_cluster(system, local, store=store, options=options) as bank,
    ):
        print(f"{len(bank.members)} nodes: {', '.join(one.name for one in bank.members)}")
        await index(bank)
        kills = 0

        async def client(number: int) -> None:
            chance = np.random.default_rng(number)
            while trio.current_time() < end:
                name = f"account-{chance.integers(16)}"
                began = time.perf_counter()
                await bank.entity(Account, name).ask(Add(1.0))
                acknowledged[name] += 1
                waits.append(time.perf_counter() - began)

        async def disturb() -> None:
            nonlocal kills
            while trio.current_time() + 2.0 < end:
                await trio.sleep(2.0)
                if bank.members:
                    os.kill(local.pid(bank.members[kills % len(bank.members)].name), signal.SIGKILL)
                    kills += 1

        end = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(client, number)
            if has_faults:
                nursery.start_soon(disturb)
        totals = {name: await bank.entity(Account, name).ask(Add(0.0)) for name in acknowledged}
    print(f"{sum(acknowledged.values())} additions, {kills} agents killed, longest wait {max(waits):.2f} s")
    is_right = totals == acknowledged
    print(f"totals {'right' if is_right else 'WRONG'}")
    return is_right


async def index(bank: cluster.Cluster) -> None:
    """Fill a part of an index on each node, and search all parts for the rows nearest to a vector."""
    shards = bank.replicas(Shard)
    for seed, shard in enumerate(shards.values()):
        await shard.ask(Fill(seed, 10_000))
    query, found = np.ones(64, np.float32), list[tuple[float, int]]()

    async def search(shard: cluster.EntityRef[Shard]) -> None:
        found.extend(await shard.ask(Search(query, 3)))

    async with trio.open_nursery() as nursery:
        for shard in shards.values():
            nursery.start_soon(search, shard)
    print(
        "nearest rows:", ", ".join(f"{row} ({score:.1f})" for score, row in sorted(found, reverse=True)[:3])
    )


def main() -> int:
    """Run as the command line requests, and return 0 if all totals are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--faults", action="store_true", help="kill an agent every two seconds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = partial(run, given.nodes, given.seconds, has_faults=given.faults, folder=Path(folder))
        return 0 if trio.run(work) else 1


if __name__ == "__main__":
    sys.exit(main())
