"""Copies from one device to another, in pieces: exact, whole or not at all, in bounded host memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN

import trio_accel as ta
from trio_accel.devices import OpenDevice, PutPart
from trio_accel.devices.front import _memory

ISOLATIONS = ("inline", "process")


@attrs.frozen
class Pair:
    source: ta.Device
    target: ta.Device


@pytest.fixture(params=[(a, b) for a in ISOLATIONS for b in ISOLATIONS], ids="-".join)
async def pair(
    request: pytest.FixtureRequest, system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Pair, None]:
    """Two devices, with pieces so small that arrays of a test have many."""
    monkeypatch.setattr(_memory, "_CHUNK_BYTES", 4096)
    source, target = (ta.DeviceOptions(isolation=isolation) for isolation in request.param)
    async with (
        system.open_device(BACKEND, options=source) as a,
        system.open_device(BACKEND, options=target) as b,
    ):
        yield Pair(a, b)


@pytest.fixture(params=[True, False], ids=["addressed", "staged"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether pieces are copied from the memory of the source itself."""
    if request.param and BACKEND != "cpu":
        pytest.skip("the host addresses the memory of the CPU backend alone")
    if not request.param:
        monkeypatch.setattr(_memory, "_is_addressed", lambda backend: False)
    return bool(request.param)


def in_pieces(pair: Pair) -> None:
    """Skip the test where no pieces are made."""
    if (pair.source.isolation, pair.target.isolation) != ("inline", "process"):
        pytest.skip("the other device copies it at once")


def noise(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(count).integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


async def used(device: ta.Device) -> int:
    await device.synchronize()
    return (await device.statistics()).memory.used


@pytest.mark.usefixtures("way")
async def test_every_shape_and_dtype_is_exact(pair: Pair) -> None:
    for shape in ((), (0,), (7,), (5000,), (3, 0, 5), (100, 33), (3, 5, 700), (2, 3000), (1, 1, 9001)):
        for dtype in (np.float64, np.uint8, ml_dtypes.bfloat16):
            host = noise(shape, dtype)
            copy = await (await pair.source.put(host)).copy_to(pair.target)
            assert copy.device is pair.target
            assert (copy.shape, copy.dtype.dtype) == (shape, host.dtype)
            assert (await copy.to_host()).tobytes() == host.tobytes()


@pytest.mark.usefixtures("way")
async def test_views_arrive_contiguous(pair: Pair) -> None:
    host = noise((60, 70, 8), np.int32)
    x = await pair.source.put(host)
    for view, expected in (
        (x.T, host.T),
        (x[::2, ::-1], host[::2, ::-1]),
        (x[7], host[7]),
        (x[..., 3], host[..., 3]),
    ):
        copy = await view.copy_to(pair.target)
        assert copy.spec.is_contiguous
        assert (await copy.to_host()).tobytes() == np.ascontiguousarray(expected).tobytes()
    assert (await x.to_host()).tobytes() == host.tobytes()


async def test_on_its_own_device_it_is_a_copy(pair: Pair) -> None:
    host = noise((3000,), np.float32)
    x = await pair.source.put(host)
    copy = await x.copy_to(pair.source)
    assert copy.block is not x.block
    assert (await copy.to_host()).tobytes() == host.tobytes()


async def test_host_memory_is_that_of_three_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(pair)
    monkeypatch.setattr(_memory, "_is_addressed", lambda backend: False)
    made: list[int] = []
    empty = OpenDevice.host_empty

    def counting(device: ta.Device, *arguments: Any) -> npt.NDArray[Any]:
        array = empty(device, *arguments)
        made.append(array.nbytes)
        return array

    monkeypatch.setattr(OpenDevice, "host_empty", counting)
    x = await pair.source.put(noise((100_000,), np.uint8))
    await x.copy_to(pair.target)
    assert made == [4096] * 3


@pytest.mark.usefixtures("way")
async def test_pieces_are_on_their_way_at_the_same_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(pair)
    at_once = most = 0
    ask = pair.target.ask

    async def counting(operation: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            return await ask(operation)
        finally:
            at_once -= 1

    x = await pair.source.put(noise((100_000,), np.uint8))
    monkeypatch.setattr(pair.target, "ask", counting)
    await x.copy_to(pair.target)
    assert 1 < most <= 3


@pytest.mark.usefixtures("way")
async def test_a_piece_that_fails_is_the_error_and_nothing_is_left(pair: Pair) -> None:
    in_pieces(pair)
    x = await pair.source.put(noise((50_000,), np.uint8))
    before = await used(pair.target)
    ta.testing.inject_fault(pair.target, PutPart, fail=ZeroDivisionError("piece"))
    with pytest.raises(ta.ActorFailedError) as caught:
        await x.copy_to(pair.target)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert await used(pair.target) == before
    copy = await x.copy_to(pair.target)
    assert (await copy.to_host()).tobytes() == (await x.to_host()).tobytes()


@pytest.mark.usefixtures("way")
async def test_a_cancelled_copy_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(pair)
    x = await pair.source.put(noise((200_000,), np.uint8))
    before = await used(pair.target)
    ask, count = pair.target.ask, 0

    async def cancelling(operation: Any) -> Any:
        nonlocal count
        count += 1
        if count == 10:
            scope.cancel()
        return await ask(operation)

    with monkeypatch.context() as patch, trio.CancelScope() as scope:
        patch.setattr(pair.target, "ask", cancelling)
        await x.copy_to(pair.target)
    assert scope.cancelled_caught
    assert await used(pair.target) == before
    assert (await (await x.copy_to(pair.target)).to_host()).tobytes() == (await x.to_host()).tobytes()


async def test_a_released_array_is_refused(pair: Pair) -> None:
    x = await pair.source.put(np.ones(3))
    x.release()
    with pytest.raises(ta.StaleRefError, match="released"):
        await x.copy_to(pair.target)


@pytest.mark.skipif(IS_STAND_IN, reason="the same on every backend")
@pytest.mark.parametrize("retry", [0, 1])
async def test_the_loss_of_the_other_device(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, retry: int
) -> None:
    monkeypatch.setattr(_memory, "_CHUNK_BYTES", 4096)
    source = ta.DeviceOptions(isolation="inline")
    target = ta.DeviceOptions(isolation="process", retry=retry)
    host = noise((100_000,), np.uint8)
    async with (
        system.open_device(BACKEND, options=source) as a,
        system.open_device(BACKEND, options=target) as b,
    ):
        x = await a.put(host)
        ta.testing.inject_fault(b, PutPart, poison=True)
        if retry:
            assert (await (await x.copy_to(b)).to_host()).tobytes() == host.tobytes()
        else:
            with pytest.raises(ta.ContextLostError):
                await x.copy_to(b)
        await b.zeros((1,))
        assert b.generation == 2
