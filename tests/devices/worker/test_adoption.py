"""The arrays of a given up device belong to the next device that adopts them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from processes import descriptors, until

import trio_accel as ta
from trio_accel.backends.base import DeviceInfo
from trio_accel.devices.dispatch import LeftMemory

OPTIONS = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(0))
ADOPTABLE = r"; its arrays are intact: system\.open_device\(adopt=device\)"


def chunks() -> int:
    """How many chunks this process has open; on the CPU, where they are known by their names."""
    return sum("/memfd:trio_accel (deleted)" in target for target in descriptors().values())


def descriptors_of(memory: LeftMemory) -> list[int]:
    return [chunk.descriptor for chunk in memory.chunks.chunks.values()]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def left(device: ta.Device) -> LeftMemory:
    assert device.dispatch.left is not None
    return device.dispatch.left


async def give_up(device: ta.Device) -> None:
    """Have it lose its only context, and be given up."""
    device.dispatch.process.kill()  # type: ignore[attr-defined]
    await until(lambda: device.state.availability.is_ended)
    await device.wait_ended()


async def given_up(system: ta.System, **changes: Any) -> ta.Device:
    device = await system.open_device(BACKEND, options=attrs.evolve(OPTIONS, **changes))
    device.kept = await device.put(np.arange(12.0).reshape(3, 4))  # type: ignore[attr-defined]
    await give_up(device)
    return device


@pytest.fixture
async def old(system: ta.System) -> ta.Device:
    """A given up device, with an array in `kept`."""
    return await given_up(system)


def kept(device: ta.Device) -> ta.AccelRef:
    ref: ta.AccelRef = device.kept  # type: ignore[attr-defined]
    return ref


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Each chunk belongs to an open device."""
    before = chunks()
    yield
    gc.collect()
    assert chunks() == before


async def test_the_next_device_has_the_arrays_by_the_same_references(system: ta.System) -> None:
    """Also of views, from device to device; invalid arrays stay invalid, with their reason."""
    host = np.random.default_rng(0).standard_normal((300, 1000))
    device = await system.open_device(BACKEND, options=OPTIONS)
    x, small = await device.put(host), await device.put(np.ones(3))
    view = x[10:20].T
    struck = await device.put(np.zeros(4))
    ta.testing.inject_fault(device, ta.linalg.Scal, kill=True)
    with pytest.raises(ta.ContextLostError):
        await ta.linalg.scal(2.0, struck)
    await until(lambda: device.state.availability.is_ended)
    with pytest.raises(ta.DeviceLostError, match=ADOPTABLE):
        await x.to_host()
    with pytest.raises(ta.DeviceLostError, match=ADOPTABLE):
        device.submit(ta.linalg.Nrm2(small))
    for generation in (2, 3):
        heir = await system.open_device(adopt=device)
        assert heir is not device
        assert (heir.options, heir.generation) == (OPTIONS, generation)
        assert all(ref.device is heir for ref in (x, small, view, struck))
        np.testing.assert_array_equal(await x.to_host(), host)
        np.testing.assert_array_equal(await view.to_host(), host[10:20].T)
        # Both in one operation, and with new arrays.
        fresh = await heir.put(np.full(3, 2.0))
        assert await (await ta.linalg.dot(small, fresh)).item() == 6.0
        with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
            await struck.to_host()
        assert (await heir.statistics()).memory.blocks == 4
        with pytest.raises(ta.DeviceLostError, match=f"were adopted by the next device, {heir.path}"):
            await device.put(np.ones(3))
        device = heir
        del fresh
        if generation == 2:
            await give_up(device)
    await device.close()
    with pytest.raises(ta.DeviceLostError, match="the device is closed"):
        await x.to_host()


async def test_unadopted_arrays_are_released_with_the_last_reference(
    system: ta.System, old: ta.Device
) -> None:
    (descriptor,) = descriptors_of(left(old))
    assert left(old).nbytes == 96
    view = kept(old)[1:]
    del old.kept  # type: ignore[attr-defined]
    gc.collect()
    await trio.lowlevel.checkpoint()
    assert is_open(descriptor)
    del view
    gc.collect()
    with trio.fail_after(60):
        while is_open(descriptor):  # noqa: ASYNC110  # there is nothing to wait for
            await trio.lowlevel.checkpoint()
    assert descriptors_of(left(old)) == []


async def test_unadopted_arrays_are_released_with_the_system() -> None:
    async with ta.open_system("s") as system:
        device = await given_up(system)
        (descriptor,) = descriptors_of(left(device))
        assert is_open(descriptor)
    assert not is_open(descriptor)
    assert not kept(device).block.is_released


async def test_a_closed_device_leaves_nothing(system: ta.System) -> None:
    device = await system.open_device(BACKEND, options=OPTIONS)
    x = await device.put(np.ones(3))
    await device.close()
    assert chunks() == 0
    with pytest.raises(ValueError, match="was closed, which gave its memory back"):
        await system.open_device(adopt=device)
    with pytest.raises(ta.DeviceLostError, match="the device is closed"):
        await x.to_host()


async def test_a_refused_adoption_gives_the_reason(system: ta.System, old: ta.Device) -> None:
    """And stays where it is: in the end it is adopted."""
    with pytest.raises(TypeError, match="adopt must be a Device that was given up, got 'cpu'"):
        system.open_device(adopt="cpu")  # type: ignore[arg-type]
    inline = ta.DeviceOptions(isolation="inline")
    with pytest.raises(ValueError, match="isolation='inline' has memory of its own in each context"):
        await system.open_device(adopt=old, options=inline)
    with pytest.raises(ValueError, match="take 96 bytes, more than memory_limit = 95"):
        await system.open_device(adopt=old, options=attrs.evolve(OPTIONS, memory_limit=95))
    with pytest.raises(ValueError, match="toaster"):
        await system.open_device("toaster", adopt=old)
    async with ta.open_system("other") as other:
        with pytest.raises(ValueError, match="is a device of another system"):
            await other.open_device(adopt=old)
    async with system.open_device(adopt=old) as heir:
        np.testing.assert_array_equal(await kept(old).to_host(), np.arange(12.0).reshape(3, 4))
        with pytest.raises(ValueError, match=r"is open; only a device that was given up"):
            await system.open_device(adopt=heir)
        with pytest.raises(ValueError, match=f"were adopted already, by {heir.path}"):
            await system.open_device(adopt=old)


async def test_other_hardware_is_refused(
    system: ta.System, old: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = attrs.evolve(old.info, index=old.info.index + 1)

    def found(spec: str | None) -> list[tuple[Any, DeviceInfo]]:
        return [(old.state.backend, other)]

    monkeypatch.setattr("trio_accel.devices.front._system.candidates", found)
    with pytest.raises(ValueError, match=f"are in the memory of {old.name}, which {other.name} cannot use"):
        await system.open_device(other.name, adopt=old)


@pytest.mark.skipif(BACKEND != "cpu", reason="elsewhere its loss is not made by hand")
async def test_an_inline_device_has_nothing_to_adopt(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="inline", intensity=ta.Intensity(0))
    device = await system.open_device(BACKEND, options=options)
    x = await device.put(np.ones(3))
    ta.testing.poison(device)
    with pytest.raises(ta.ContextLostError):
        await x.to_host()
    await until(lambda: device.state.availability.is_ended)
    with pytest.raises(ta.DeviceLostError, match=r"inline.* were lost with its context; make them again"):
        await system.open_device(adopt=device)


async def test_a_closed_inline_device_was_closed(system: ta.System) -> None:
    device = await system.open_device("cpu", options=ta.DeviceOptions(isolation="inline"))
    await device.close()
    with pytest.raises(ValueError, match=f"{device.path} was closed, which gave its memory back"):
        await system.open_device(adopt=device)


async def test_after_an_uncorrectable_memory_error_nothing_is_adopted(system: ta.System) -> None:
    device = await system.open_device(BACKEND, options=OPTIONS)
    x = await device.put(np.ones(3))
    broken = ta.ContextPoisonedError("an uncorrectable ECC error", is_memory_damaged=True)
    ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=broken)
    with pytest.raises(ta.ContextLostError):
        await ta.linalg.nrm2(x)
    await until(lambda: device.state.availability.is_ended)
    with pytest.raises(
        ta.DeviceLostError, match=r"uncorrectable error of its memory .*ECC.*; make them again"
    ):
        await system.open_device(adopt=device)
    with pytest.raises(ta.DeviceLostError) as caught:
        await x.to_host()
    assert "intact" not in str(caught.value)


async def test_a_failed_opening_leaves_the_arrays_in_place(
    system: ta.System, old: ta.Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Whether the worker does not start, or the opening is cancelled."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        with pytest.raises(ta.AccelError, match="exited with code 7"):
            await system.open_device(adopt=old)
    with trio.move_on_after(0.005) as scope:
        await system.open_device(adopt=old)
    assert scope.cancelled_caught
    assert kept(old).device is old
    with pytest.raises(ta.DeviceLostError, match=ADOPTABLE):
        await kept(old).to_host()
    async with system.open_device(adopt=old) as heir:
        assert kept(old).device is heir
        np.testing.assert_array_equal(await kept(old).to_host(), np.arange(12.0).reshape(3, 4))


@pytest.mark.skipif(BACKEND != "cpu", reason="the host can address the memory on the CPU alone")
async def test_a_leased_array_is_let_go_before(system: ta.System) -> None:
    device = await system.open_device(BACKEND, options=OPTIONS)
    x = await device.put(np.ones(3))
    async with x.lease(write=True) as array:
        await give_up(device)
        with pytest.raises(ValueError, match=r"1 of the arrays of .* are leased; end the leases first"):
            await system.open_device(adopt=device)
        array[:] = 7.0
    async with system.open_device(adopt=device):
        np.testing.assert_array_equal(await x.to_host(), np.full(3, 7.0))
