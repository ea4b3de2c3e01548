"""A loop that never ends: the device gives it up, and comes back. It is also a program."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel import graphs, linalg

AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)


async def comes_back(system: ta.System, backend: str, isolation: Any, before: int) -> None:
    """Replay a loop that ends after a turn this many times, and then once when it never ends."""
    options = ta.DeviceOptions(isolation=isolation, stuck_after=0.3, backoff=AT_ONCE)
    async with system.open_device(backend, options=options) as device:
        go, once = await device.put(np.bool_(True)), await device.put(np.bool_(True))

        async def body() -> None:
            await go.fill(1)
            await graphs.if_(once, lambda: go.fill(0))

        graph = await graphs.capture(device, lambda: graphs.while_(go, body))
        for _ in range(before):
            await go.fill(1)
            assert await (await graph.replay()).item() == 1
        await once.fill(0)
        await go.fill(1)
        with pytest.raises(ta.CompletionTimeoutError, match="stuck_after"):
            await graph.replay()
        x = await device.put(np.ones(3))
        np.testing.assert_array_equal(await (await linalg.scal(2.0, x)).to_host(), np.full(3, 2.0))
        assert device.generation == 2


async def main(backend: str, isolation: str, before: str) -> None:
    async with ta.open_system("endless") as system:
        await comes_back(system, backend, isolation, int(before))
    print("it has come back")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
