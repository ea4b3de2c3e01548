"""A task that drives an await by hand and leaves it half-way harms nobody else."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta


def close(waiting: Any) -> None:
    waiting.close()


def throw(waiting: Any) -> None:
    with suppress(KeyError):
        waiting.throw(KeyError("by hand"))


def drop(waiting: Any) -> None:
    """The last reference ends with the caller's."""


def send_nonsense(waiting: Any) -> None:
    with suppress(AttributeError, StopIteration):
        waiting.send("nonsense")


KEPT: list[Any] = []
"""Awaits that are neither continued nor closed before the end of a test."""

LEAVES = [close, throw, drop, send_nonsense, KEPT.append]

ASKS: dict[str, Callable[[ta.Device, ta.AccelRef], Awaitable[Any]]] = {
    "call": lambda _, x: x @ x,
    "chain": lambda _, x: ta.arrays.sum(ta.nn.relu(x @ x) + 1.0),
    "host": lambda _, x: x.to_host(),
    "chain_to_host": lambda _, x: (x @ x).to_host(),
    "put": lambda device, _: device.put(np.ones((64, 64))),
    "gather": lambda _, x: ta.gather(x @ x, x + 1.0),
    "step": lambda _, x: _step(x),
    "in_place": lambda _, x: x.fill(0.0),
    "synchronize": lambda device, _: device.synchronize(),
    "statistics": lambda device, _: device.statistics(),
}


@ta.step
def _step(x: ta.AccelRef) -> ta.Call[ta.AccelRef]:
    return ta.nn.relu(x @ x) + 1.0


def begin(awaitable: Awaitable[Any], turns: int = 1) -> Any:
    """Drive an await by hand; return None if it ends at once."""
    waiting = awaitable.__await__()
    try:
        for _ in range(turns):
            waiting.send(None)
    except (StopIteration, AttributeError):
        return None
    return waiting


@pytest.mark.parametrize("name", ASKS)
async def test_an_await_left_half_way_harms_no_later_call(device: ta.Device, name: str) -> None:
    ask = ASKS[name]
    x = await device.put(np.eye(64))
    generation = device.generation
    KEPT.clear()
    for leave in LEAVES:
        for _ in range(2):
            waiting = begin(ask(device, x))
            if waiting is not None:
                leave(waiting)
            del waiting
            for _ in range(2):
                np.testing.assert_array_equal(await (x @ x).to_host(), await x.to_host())
                await trio.lowlevel.checkpoint()

    KEPT.clear()
    gc.collect()
    await device.synchronize()
    assert device.generation == generation


@pytest.mark.parametrize("leave", LEAVES)
async def test_requests_left_half_way_during_a_lease(device: ta.Device, leave: Callable[[Any], Any]) -> None:
    """One of them polls for a due answer, and would poll for ever."""
    if device.isolation == "process" and device.info.backend != "cpu":
        pytest.skip("the memory of a GPU is its worker's")
    x = await device.put(np.eye(64))
    for _ in range(30):
        await (x @ x).to_host()
    async with x.lease(write=True):
        for awaitable in ((x @ x).to_host(), x.to_host()):
            waiting = begin(awaitable)
            if waiting is not None:
                leave(waiting)
            del waiting
    pending = (x @ x).start()
    begin(pending.wait())
    with trio.fail_after(60):
        np.testing.assert_array_equal(await (x @ x).to_host(), np.eye(64))
        await pending.wait()
    KEPT.clear()
