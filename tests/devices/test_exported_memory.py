"""Memory still held by other code: it serves no other array before its release."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from foreign_arrays import ByDlpack, ByInterface

import trio_accel as ta
from trio_accel.backends.base import Isolation

pytestmark = [
    pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning"),
    pytest.mark.skipif(BACKEND == "cuda" and not IS_STAND_IN, reason="NumPy shows the memory"),
]
of_numpy = pytest.mark.skipif(BACKEND != "cpu", reason="NumPy has the arrays")
HOST = np.arange(3000.0)

WAYS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda x: x,
    "a view": lambda x: x[10:20, None].T[:, ::2],
    "its base": lambda x: np.asarray(x).reshape(30, 100)[3].base,
    "dlpack": np.from_dlpack,
    "a buffer": memoryview,
    "a buffer of a view": lambda x: memoryview(x[1::2]),
    "its interface": lambda x: np.asarray(_Interface(x)),
    "a consumer of dlpack": ByDlpack,
    "a consumer of its interface": ByInterface,
}
if BACKEND == "cuda":
    WAYS = {name: way for name, way in WAYS.items() if name.startswith("a consumer")}


class _Interface:
    """An object with only NumPy's protocol, which keeps the array."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> Any:
        return self._array.__array_interface__


@pytest.fixture(autouse=True)
def addressed(isolation: Isolation) -> None:
    if BACKEND == "cuda" and isolation == "process":
        pytest.skip("the memory of a GPU is its worker's")


async def others(device: ta.Device) -> list[ta.AccelRef]:
    """Take the free memory."""
    return [await device.put(np.full(3000, -1.0 - number)) for number in range(20)]


def bytes_of(kept: Any) -> bytes:
    return np.asarray(kept).tobytes()


@pytest.mark.parametrize("way", WAYS)
async def test_a_kept_export_of_a_lease_is_unchanged(device: ta.Device, way: str) -> None:
    ref = await device.put(HOST)
    async with ref.lease() as array:
        kept = WAYS[way](array)
        del array
    before = bytes_of(kept)
    assert before == bytes_of(WAYS[way](HOST))
    ref.release()
    with pytest.raises(ta.StaleRefError, match="released"):
        await ref.to_host()
    made = await others(device)
    assert bytes_of(kept) == before
    del ref, made
    await others(device)
    assert bytes_of(kept) == before


async def test_a_dropped_reference_leaves_it_too(device: ta.Device) -> None:
    ref = await device.put(HOST)
    async with ref.lease(write=True) as array:
        kept = ByDlpack(array)
    del ref, array
    gc.collect()
    await others(device)
    np.testing.assert_array_equal(kept, HOST)


async def used(device: ta.Device) -> int:
    await device.synchronize()
    return (await device.statistics()).memory.used


@pytest.mark.parametrize("released", [True, False])
async def test_its_memory_is_given_back_when_it_is_let_go(device: ta.Device, released: bool) -> None:
    ref = await device.put(HOST)
    before = await used(device) - HOST.nbytes
    kept: list[Any] = []
    for _ in range(2):
        async with ref.lease() as array:
            kept.append(array)
        del array
    if released:
        ref.release()
        ref.release()
    del ref
    gc.collect()
    for _ in range(2):
        assert await used(device) == before + HOST.nbytes
        await trio.to_thread.run_sync(kept.pop)
    # The thread only notifies the loop, which gives the memory back.
    with trio.fail_after(60):
        while await used(device) != before:  # noqa: ASYNC110  # nobody tells of it
            await trio.sleep(0.001)


@of_numpy
async def test_it_is_there_when_its_device_is_closed(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        ref = await device.put(HOST)
        async with ref.lease() as array:
            pass
        ref.release()
    async with system.open_device(BACKEND, options=options) as device:
        made = await others(device)
        np.testing.assert_array_equal(array, HOST)
        del made


@of_numpy
async def test_it_is_not_written_to_after_the_lease(device: ta.Device) -> None:
    ref = await device.put(HOST)
    async with ref.lease() as array, ref.lease() as other:
        for one in (array, array[3:], other, np.from_dlpack(array)):
            with pytest.raises(ValueError, match="WRITEABLE"):
                one.flags.writeable = True
    async with ref.lease(write=True) as array:
        array[0] = 7.0
    with pytest.raises(ValueError, match="read-only"):
        array[1] = 7.0
    assert (await ref.to_host())[:2].tolist() == [7.0, 1.0]


@of_numpy
async def test_an_export_holds_it(device: ta.Device) -> None:
    api = ta.interop.array_api(device)

    def work() -> None:
        for make in (lambda x: x, lambda x: x[::-2], lambda x: x[2:40]):
            x = api.asarray(HOST)
            view, again = np.from_dlpack(make(x)), np.from_dlpack(make(x))
            x.ref.release()
            kept = [api.asarray(np.full(3000, -float(number))) for number in range(20)]
            np.testing.assert_array_equal(view, make(HOST))
            del view
            kept += [api.asarray(np.full(3000, -float(number))) for number in range(20)]
            np.testing.assert_array_equal(again, make(HOST))

    await trio.to_thread.run_sync(work)
