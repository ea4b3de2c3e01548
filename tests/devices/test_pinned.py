"""`put` with `pinned=True`: one copy on the host for all calls, which lives as long as the array."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.backends.cpu import CpuBackend
from trio_accel.devices.base._host_pool import Copying

SIZE = 50_000


def lasting(seed: int = 0, size: int = SIZE) -> npt.NDArray[Any]:
    array = np.random.default_rng(seed).random(size)
    array.flags.writeable = False
    return array


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies on the host, to devices with separate memory, which the CPU's devices pretend to have."""
    if BACKEND == "cpu":
        monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: False))
    runs: list[int] = []
    run = Copying.run

    def count(copying: Copying) -> None:
        # Not the object, which has the array.
        runs.append(1)
        run(copying)

    monkeypatch.setattr(Copying, "run", count)
    return runs


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return "inline"


async def put(device: ta.Device, host: npt.NDArray[Any]) -> bool:
    x = await device.put(host, pinned=True)
    back = device.host_empty(host.shape, host.dtype)
    return bool(((await x.to_host(out=back)) == host).all())


async def test_one_copy_serves_all_calls(device: Any, copies: list[int]) -> None:
    first, second = lasting(1), lasting(2)
    for _ in range(3):
        assert await put(device, first)
        assert await put(device, second)
    assert len(copies) == 2
    # A view is another array, with a copy of its own.
    assert await put(device, first[::-2])
    assert len(copies) == 3


async def test_the_copy_ends_with_its_array(device: Any, copies: list[int]) -> None:
    pool, host = device.state.host_pool, lasting()
    assert await put(device, host)
    gc.collect()
    pool.drain()
    kept = pool.used
    assert kept >= host.nbytes
    del host
    pool.drain()
    assert pool.used == kept - -(-SIZE * 8 // 4096) * 4096
    # Any array that takes its address next has no copy yet.
    others = [lasting(seed) for seed in range(20)]
    assert all([await put(device, other) for other in others])
    assert len(copies) == 21


async def test_it_outlives_a_context(device: Any, copies: list[int]) -> None:
    host = lasting()
    assert await put(device, host)
    ta.testing.poison(device)
    while device.generation == 1:
        with contextlib.suppress(ta.ContextPoisonedError):
            await device.zeros(3)
    assert await put(device, host)
    assert len(copies) == 1


async def test_small_arrays_are_not_kept(device: Any, copies: list[int]) -> None:
    host = lasting(size=8192)
    assert await put(device, host)
    assert device.state.host_pool.copy_of(host) is None
    assert not copies


async def test_changeable_memory_is_refused(system: ta.System) -> None:
    changes = np.ones((4, 5))
    view = changes[1:]
    view.flags.writeable = False
    async with system.open_device(BACKEND) as device:
        for array, place in ((changes, "array"), (view, "array.base"), (view.T, "array.base")):
            with pytest.raises(
                ValueError, match=rf"must be read-only; set {place}\.flags\.writeable = False;"
            ):
                await device.put(array, pinned=True)
        changes.flags.writeable = False
        np.testing.assert_array_equal(await (await device.put(view, pinned=True)).to_host(), view)
        lent = np.frombuffer(bytes(80), "int64")
        np.testing.assert_array_equal(await (await device.put(lent, pinned=True)).to_host(), lent)


async def test_an_operand_must_be_an_array(system: ta.System, copies: list[int]) -> None:
    words, masked = np.array(["a"] * SIZE), np.ma.masked_array(lasting(), mask=np.zeros(SIZE))
    words.flags.writeable = masked.flags.writeable = False
    cases: list[tuple[Any, str]] = [
        ([1.0, 2.0], r"pinned=True takes a NumPy array, .* got list; make it one: np\.asarray\(value\)"),
        (3.0, "pinned=True takes a NumPy array, .* got float"),
        (masked, "host is a masked array"),
        (words, "host: dtype: .* is not an element type of a device"),
    ]
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        for host, told in cases:
            with pytest.raises(TypeError, match=told):
                await device.put(host, pinned=True)
        with pytest.raises(TypeError, match="the array is on"):
            await device.put(await device.zeros(3), pinned=True)
    with pytest.raises(ta.DeviceLostError):
        await device.put(lasting(), pinned=True)
    assert not copies


async def test_a_worker_is_given_the_copy(system: ta.System) -> None:
    host = lasting()
    options = ta.DeviceOptions(isolation="process")
    async with system.open_device(BACKEND, options=options) as device:
        for _ in range(3):
            assert await put(device, host)
        if BACKEND == "cpu":
            # Its memory is the host's: a copy would be in vain.
            assert device.state.host_pool is None
        else:
            assert device.state.host_pool.find(device.state.host_pool.copy_of(host)) is not None
