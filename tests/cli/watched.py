"""A program that `top` looks at: its worker fails at its start, and once for each line of standard input."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import cluster

MARKUP = "[bold red]not red[not bold] :smile:"
CONTROL = "\x1b[2J\x1b]0;title\x07\x9b\r\nnew \u202eline"
INLINE = ta.DeviceOptions(isolation="inline")
OPTIONS = ta.SystemOptions(intensity=ta.Intensity(1000, 1.0))
AT_ONCE = ta.Policy(backoff=ta.Backoff(base=0.0))
Odd = type("Odd[red]\x1b[31m", (LookupError,), {})


@attrs.frozen
class Fail(ta.Message["Worker"]):
    text: str


class Worker(ta.Actor):
    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise (Odd if message.text == "odd" else LookupError)(message.text)


async def main() -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        system = await enter(ta.open_system("shop", options=OPTIONS))
        if "cluster" in sys.argv:
            options = cluster.ClusterOptions(device=INLINE)
            await enter(cluster.open_cluster(system, cluster.LocalNodes(["left", "right"]), options=options))
        else:
            device = await enter(system.open_device("cpu", options=INLINE))
            array = await device.put(np.ones(1 << 20, np.uint8))
            stack.callback(array.release)
        worker = await system.spawn(Worker, name="worker", policy=AT_ONCE)
        for name in (MARKUP, CONTROL):
            await (await system.spawn(Worker, name=name, policy=AT_ONCE)).tell(Fail("odd"))
        dashboard = await enter(ta.open_dashboard(system, errors=True))
        restarts = 0
        async for _ in trio.lowlevel.FdStream(os.dup(0)):
            await worker.tell(Fail("a secret: of the program"))
            restarts += 1
            while sum(one.restarts for one in system.tree().walk()) < restarts + 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
            print(dashboard.url, flush=True)


if __name__ == "__main__":
    trio.run(main)
