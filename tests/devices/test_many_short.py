"""Many short operations at once: several share an event, and that is not seen by whoever asks for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND

import trio_accel as ta

pytestmark = pytest.mark.skipif(BACKEND != "cuda", reason="of a backend whose events cost something")

_SHARING = 8


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        yield device


@attrs.define
class Asked:
    """What a program asks for again and again."""

    a: ta.AccelRef
    b: ta.AccelRef
    expected: Any

    async def repeat(self, count: int) -> None:
        for _ in range(count):
            product = await ta.linalg.matmul(self.a, self.b)
            np.testing.assert_allclose(await product.to_host(), self.expected)


@pytest.fixture
async def asked(device: ta.Device) -> Asked:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((4, 4)), rng.standard_normal((4, 4))
    asked = Asked(await device.put(a), await device.put(b), a @ b)
    for _ in range(4):
        await asked.repeat(1)
    return asked


@pytest.mark.parametrize(
    ("askers", "least", "most"),
    # As long as fewer than eight are in flight each has its own: of 64 eight, and the others seven.
    [(7, 1.0, 1.0), (64, 1 / _SHARING, 0.5)],
)
async def test_many_askers_share_and_a_few_do_not(
    device: ta.Device, asked: Asked, writes: list[int], askers: int, least: float, most: float
) -> None:
    async def ask() -> None:
        for _ in range(20):
            await ta.linalg.matmul(asked.a, asked.b)

    writes.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(askers):
            nursery.start_soon(ask)
    assert least <= len(writes) / (askers * 20) <= most
    await asked.repeat(1)


async def test_many_askers_of_a_worker(system: ta.System) -> None:
    """There those share that came together, as nobody looks for their ends in between."""
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as device:
        rng = np.random.default_rng(2)
        b = rng.standard_normal((4, 4))
        second = await device.put(b)

        async def ask() -> None:
            host = rng.standard_normal((4, 4))
            first = await device.put(host)
            for _ in range(5):
                product = await ta.linalg.matmul(first, second)
                # Of another length, on another stream, and beside it on the same.
                tripled = await ta.linalg.scal(3.0, product)
                np.testing.assert_allclose(await tripled.to_host(), 3 * (host @ b))

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask)
        statistics = await device.statistics()
        assert (statistics.in_flight, statistics.launched) == (0, statistics.completed)
