"""A program that reports the end after its head of Ray's is killed. Its argument is the transport."""

from __future__ import annotations

import sys
import time

import trio
from cluster_entities import Add, Counter
from ray_calls import RayCalls
from ray_host import RayHost

import trio_accel as ta
from trio_accel import cluster


async def main(host: RayHost) -> None:
    nodes = (RayCalls if sys.argv[1] == "ray" else cluster.RayNodes)(host.address)
    options = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"))
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, nodes, options=options) as opened,
    ):
        refs = [opened.entity(Counter, key) for key in range(8)]
        for ref in refs:
            await ref.ask(Add(1.0))
        host.kill_head()
        print("killed", flush=True)
        while True:
            for ref in refs:
                with trio.fail_after(60):
                    await ref.ask(Add(1.0))
            await trio.sleep(0.1)


host = RayHost()
print(host.folder, flush=True)
begun = time.monotonic()
try:
    trio.run(main, host)
except BaseException as error:
    print(f"ended by {error!r}", flush=True)
    raise
finally:
    host.end()
