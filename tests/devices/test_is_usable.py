"""`AccelRef.is_usable` foretells whether an operation would refuse an array, without asking the device."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np
import pytest
import trio
from chosen import BACKEND, NAME

import trio_accel as ta
from trio_accel.testing import inject_fault, poison

RECOVERS = ta.DeviceOptions(
    isolation="process", intensity=ta.Intensity(1000, 60.0), backoff=ta.Backoff(base=0.0)
)
GIVES_UP = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(0))
HOST = np.arange(6.0).reshape(2, 3)

needs_workers = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


async def agrees(ref: ta.AccelRef, *, expected: bool) -> None:
    """Compare the answer with the outcome of an operation."""
    assert ref.is_usable is expected
    if expected:
        await ref.to_host()
    else:
        with pytest.raises((ta.StaleRefError, ta.DeviceLostError)):
            await ref.to_host()


async def test_a_released_array_is_not(device: ta.Device) -> None:
    x = await device.put(HOST)
    view = x[1]
    await agrees(view, expected=True)
    x.release()
    await agrees(x, expected=False)
    await agrees(view, expected=False)


async def test_an_array_of_a_closed_device_is_not(system: ta.System) -> None:
    async with system.open_device(NAME) as device:
        x = await device.put(HOST)
        assert x.is_usable
    await agrees(x, expected=False)


@needs_workers
async def test_only_the_damaged_view_is_not_usable(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=RECOVERS) as device:
        x = await device.put(HOST)
        inject_fault(device, ta.linalg.Scal, kill=True)
        with pytest.raises(ta.ContextLostError):
            await ta.linalg.scal(2.0, x[1])
        await agrees(x[0], expected=True)
        await agrees(x[1], expected=False)
        await agrees(x, expected=False)
        await x[1].fill(0.0)
        await agrees(x, expected=True)


@pytest.mark.no_device
async def test_an_array_lost_with_its_context_is_not_usable(system: ta.System) -> None:
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
        x = await device.put(HOST)
        poison(device)
        with trio.fail_after(60):
            while device.generation == 1:
                with suppress(ta.AccelError):
                    await device.put(HOST)
        await agrees(x, expected=False)


@needs_workers
async def test_an_array_is_usable_again_when_its_device_is_adopted(system: ta.System) -> None:
    device = await system.open_device(BACKEND, options=GIVES_UP)
    x = await device.put(HOST)
    inject_fault(device, ta.linalg.Matmul, kill=True)
    with pytest.raises((ta.ContextLostError, ta.DeviceLostError)):
        await ta.linalg.matmul(x, x.T)
    with trio.fail_after(60):
        while not device.is_ended:
            with suppress(ta.AccelError):
                await device.put(HOST)
    assert not x.is_usable
    async with system.open_device(adopt=device):
        await agrees(x, expected=True)
