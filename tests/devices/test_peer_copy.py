"""Copies from one device to another, by an operation that spans both."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN
from collective_library import Double, PeerCopy

import trio_accel as ta

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

INLINE = ta.DeviceOptions(isolation="inline")


@pytest.fixture
async def pair(system: ta.System) -> AsyncGenerator[tuple[ta.Device, ta.Device], None]:
    async with (
        system.open_device(BACKEND, options=INLINE) as first,
        system.open_device(BACKEND, options=INLINE) as second,
    ):
        yield first, second


@pytest.mark.parametrize("shape", [(), (0,), (1,), (257,), (4, 6)])
async def test_a_copy(pair: tuple[ta.Device, ta.Device], shape: tuple[int, ...]) -> None:
    host = np.random.default_rng(1).standard_normal(shape)
    for source, target in (pair, pair[::-1]):
        copied = await ta.ask_across(PeerCopy(await source.put(host), target))
        assert copied.device is target
        np.testing.assert_array_equal(await copied.to_host(), host)


async def test_a_copy_of_a_view(pair: tuple[ta.Device, ta.Device]) -> None:
    host = np.arange(24.0).reshape(4, 6)
    source = await pair[0].put(host)
    copied = await ta.ask_across(PeerCopy(source[1:, ::2], pair[1]))
    np.testing.assert_array_equal(await copied.to_host(), host[1:, ::2])


async def test_a_copy_between_operations_of_each_device(pair: tuple[ta.Device, ta.Device]) -> None:
    source = await pair[0].put(np.ones(1000))
    out = await pair[1].put(np.zeros(1000))
    for number in range(10):
        # In flight when the copy is asked for, and when it is over the next.
        pair[0].submit(Double(source))
        await ta.ask_across(PeerCopy(source, pair[1], out))
        doubled = pair[1].submit(Double(out))
        np.testing.assert_array_equal(await out.to_host(), np.full(1000, 2.0 ** (number + 2)))
        await doubled.wait()


async def test_a_copy_leaves_nothing(pair: tuple[ta.Device, ta.Device]) -> None:
    source = await pair[0].put(np.ones(1000))
    blocks = [(await device.statistics()).memory.blocks for device in pair]
    for _ in range(10):
        await ta.ask_across(PeerCopy(source, pair[1]))
    for device in pair:
        await device.synchronize()
    statistics = [await device.statistics() for device in pair]
    assert [one.memory.blocks for one in statistics] == blocks
    assert [one.in_flight for one in statistics] == [0, 0]


@pytest.mark.skipif(not IS_STAND_IN, reason="the GPUs of the stand-in cannot reach one another")
async def test_gpus_that_cannot_reach_each_other(system: ta.System) -> None:
    async with (
        system.open_device("cuda:0", options=INLINE) as first,
        system.open_device("cuda:1", options=INLINE) as second,
    ):
        source = await first.put(np.ones(4))
        launched = [(await device.statistics()).launched for device in (first, second)]
        with pytest.raises(ta.NotSupportedError, match="cuda:1 cannot reach the memory of cuda:0"):
            await ta.ask_across(PeerCopy(source, second))
        assert [(await device.statistics()).launched for device in (first, second)] == launched
