"""Invalid sources and batches, and wrong ways to open a stream."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND, INLINE

import trio_accel as ta

Host = npt.NDArray[Any]


def generator() -> Generator[Host, None, None]:
    yield np.ones(3)


async def async_generator() -> AsyncGenerator[Host, None]:
    yield np.ones(3)


async def asynchronous() -> Host:
    return np.ones(3)


NO_SOURCES: list[tuple[Any, str]] = [
    (3, "got int"),
    (None, "got NoneType"),
    ("abc", "got str"),
    ({"x": np.ones(3)}, "got dict"),
    (generator, r"got the generator function generator; call it: generator\(\)"),
    (async_generator, r"got the generator function async_generator; call it: async_generator\(\)"),
    (asynchronous, "got the async function asynchronous; write an async generator, and call it"),
]


async def test_an_invalid_source_is_refused_at_once(device: ta.Device) -> None:
    for source, told in NO_SOURCES:
        with pytest.raises(TypeError, match=f"stream: batches must be an iterable .* {told}$"):
            ta.stream(device, source)
    x = await device.put(np.ones((3, 3)))
    with pytest.raises(TypeError, match="got AccelRef"):
        ta.stream(device, x)
    coroutine = asynchronous()
    with pytest.raises(TypeError, match="got coroutine; it was not awaited"):
        ta.stream(device, coroutine)  # type: ignore[call-overload]
    coroutine.close()


NO_BATCHES: list[tuple[Any, type[Exception], str]] = [
    (
        [[1.0, 2.0]],
        TypeError,
        r"stream: batch 0 must be a NumPy array, or a tuple or dict of them, got list; ",
    ),
    (np.ones(3), TypeError, "stream: batch 0 must be a NumPy array, .* got float64"),
    (generator, TypeError, "generator function"),
    (
        [(np.ones(2), 1)],
        TypeError,
        "stream: each item of batch 0 must be a NumPy array, got int; make it one",
    ),
    ([{"x": [1]}], TypeError, "stream: each item of batch 0 must be a NumPy array, got list"),
    ([None], TypeError, "stream: batch 0 must be a NumPy array, .* got NoneType"),
    ([np.array(["a"])], TypeError, "is not an element type of a device"),
    ([np.ma.ones(3)], TypeError, "masked"),
    (lambda: 1, TypeError, "stream: batch 0 must be a NumPy array, .* got int"),
]


async def test_an_invalid_batch_fails_in_its_position(device: ta.Device) -> None:
    for source, error, told in NO_BATCHES:
        with pytest.raises(error, match=told):
            async with ta.stream(device, source) as ahead:
                await anext(ahead)
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0


async def test_depth_is_a_whole_number_of_at_least_one(device: ta.Device) -> None:
    wrong: list[Any] = [0, -1, 1.0, True, "3", None]
    for depth in wrong:
        with pytest.raises(ValueError, match="stream: depth must be an integer of at least 1, got "):
            ta.stream(device, [], depth=depth)
    with pytest.raises(TypeError, match="stream: there is no option 'dept'; did you mean 'depth'"):
        ta.stream(device, [], dept=3)  # type: ignore[call-overload]


async def test_no_device(device: ta.Device) -> None:
    with pytest.raises(TypeError, match="stream: device must be an open Device, got str"):
        ta.stream("cpu", [])  # type: ignore[call-overload]


async def test_it_is_opened_and_once(device: ta.Device) -> None:
    ahead: Any = ta.stream(device, [np.ones(3), np.zeros(3)])
    with pytest.raises(TypeError, match=r"stream: it is not open; write `async with ta\.stream"):
        async for _ in ahead:
            pass
    with pytest.raises(TypeError, match=r"a plain `with` does not do; write `async with ta\.stream"), ahead:
        pass
    async with ahead:
        pass
    with pytest.raises(RuntimeError, match=r"stream: it was opened before; call ta.stream\(\) again"):
        async with ahead:
            pass


async def test_a_graph_does_not_record_it(system: ta.System) -> None:
    async def step(x: ta.AccelRef) -> ta.AccelRef:
        async with ta.stream(x.device, [np.ones(3)]) as ahead:
            return await anext(ahead)

    async with system.open_device(BACKEND, options=INLINE) as device:
        x = await device.put(np.ones(3))
        with pytest.raises(ta.NotSupportedError, match="stream: a graph cannot record it"):
            await ta.graphs.capture(device, step, x)
