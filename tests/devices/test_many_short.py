"""Many short operations at once, asked by many tasks, on two streams."""

from __future__ import annotations

import numpy as np
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation


async def test_many_askers(system: ta.System, isolation: Isolation) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        rng = np.random.default_rng(2)
        b = rng.standard_normal((4, 4))
        second = await device.put(b)

        async def ask() -> None:
            host = rng.standard_normal((4, 4))
            first = await device.put(host)
            for _ in range(5):
                product = await ta.linalg.matmul(first, second)
                # Of another length, on another stream, and concurrently on the same.
                tripled = await ta.linalg.scal(3.0, product)
                np.testing.assert_allclose(await tripled.to_host(), 3 * (host @ b))

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask)
        statistics = await device.statistics()
        assert (statistics.in_flight, statistics.launched) == (0, statistics.completed)
