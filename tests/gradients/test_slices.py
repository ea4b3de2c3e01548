"""Deriving a long function: in slices of time, and in a time that is linear in its length."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import trio
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
HOST = numbers((3,), 1)
LAYERS = 30


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause after each call that is derived."""
    monkeypatch.setattr("trio_accel.devices.front._chains._SLICE", 0.0)


def layers(x: Any, target: Any) -> Any:
    for _ in range(LAYERS):
        x = a.sin(x) * 1.01
    return a.sum((x - target) ** 2)


def slope(x: Any, target: Any) -> Any:
    """Return the gradient of `layers`."""
    values = [x]
    for _ in range(LAYERS):
        values.append(np.sin(values[-1]) * 1.01)
    g = 2 * (values.pop() - target)
    while values:
        g = g * 1.01 * np.cos(values.pop())
    return g


async def count_turns(turns: list[int]) -> None:
    while True:
        await trio.lowlevel.checkpoint()
        turns.append(1)


@pytest.mark.usefixtures("slices")
async def test_other_tasks_run_while_a_function_is_derived(device: ta.Device) -> None:
    x, target, turns = await device.put(HOST), await device.put(HOST / 3), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns, turns)
        found = await ta.grad(layers)(x, target)
        nursery.cancel_scope.cancel()
    assert len(turns) > 2 * LAYERS
    np.testing.assert_allclose(await found.to_host(), slope(HOST, HOST / 3), rtol=1e-12)


@pytest.mark.usefixtures("slices")
async def test_host_arrays_are_those_of_the_call(device: ta.Device) -> None:
    """The program changes one while the gradient is derived."""
    x, host = await device.put(HOST), HOST / 3

    async def change() -> None:
        while True:
            await trio.lowlevel.checkpoint()
            host[:] += 1.0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        found = await ta.grad(layers)(x, host)
        nursery.cancel_scope.cancel()
    np.testing.assert_allclose(await found.to_host(), slope(HOST, HOST / 3), rtol=1e-12)


@pytest.mark.usefixtures("slices")
async def test_a_cancelled_derivation_leaves_nothing(device: ta.Device) -> None:
    x, target = await device.put(HOST), await device.put(HOST / 3)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_in, 7, scope)
            await ta.grad(layers)(x, target)
    assert scope.cancelled_caught
    found = await ta.grad(layers)(x, target)
    np.testing.assert_allclose(await found.to_host(), slope(HOST, HOST / 3), rtol=1e-12)


async def cancel_in(turns: int, scope: trio.CancelScope) -> None:
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@pytest.mark.usefixtures("slices")
async def test_a_call_is_used_once_while_it_is_derived(device: ta.Device) -> None:
    x, target = await device.put(HOST), await device.put(HOST / 3)
    both = ta.gradients.flat_grad_and_value(layers)(x, target)
    async with trio.open_nursery() as nursery:

        async def use_again() -> None:
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            with pytest.raises(RuntimeError, match="was awaited before"):
                await both

        nursery.start_soon(use_again)
        found = await both
    np.testing.assert_allclose((await found.to_host())[:3], slope(HOST, HOST / 3), rtol=1e-12)


async def test_the_layout_of_a_call_follows_from_those_of_its_operands(device: ta.Device) -> None:
    """It takes the same work after 10 and after 300 calls."""

    def counted(x: Any) -> int:
        count = 0

        def see(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(see)
        try:
            assert x.shape == (3,)
        finally:
            sys.setprofile(None)
        return count

    counts, x = list[int](), await device.put(HOST)
    call = a.sin(x)
    for _ in range(300):
        call = a.sin(call)
        counts.append(counted(call))
    assert counts[10] == counts[299]
    call.silence()


@pytest.mark.usefixtures("slices")
async def test_equal_calls_are_derived_at_once(device: ta.Device) -> None:
    """All find the same plan, which any of them records, fuses or uses."""
    x, target = await device.put(HOST), await device.put(HOST / 3)
    want = slope(HOST, HOST / 3)

    async def ask() -> None:
        for _ in range(4):
            found = await ta.grad(layers)(x, target)
            np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12)

    for _ in range(3):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
