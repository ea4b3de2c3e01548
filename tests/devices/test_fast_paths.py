"""Each fast path has the same results as the general path, and can be turned off."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.backends.base.kit.fast_paths import FastPaths, current_fast_paths, use_fast_paths
from trio_accel.devices import AdaptiveCompletion, LibraryActor
from trio_accel.devices.base._options import window_of
from trio_accel.devices.base._port import AdaptivePort
from trio_accel.devices.base._waits import Availability
from trio_accel.devices.dispatch import _pool
from trio_accel.devices.operations._blocks import BlockTable
from trio_accel.devices.wire._protocol import WorkerConfig

NAMES = [field.name for field in attrs.fields(FastPaths)]
WAYS = {
    "all": FastPaths(),
    "none": FastPaths.disabled(),
    **{f"without {name}": attrs.evolve(FastPaths(), **{name: False}) for name in NAMES},
}
SHAPES = [(3, 5), (40, 7), (16, 16), (3, 5), (1, 64), (40, 7), (128, 9)]


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def paths(request: pytest.FixtureRequest) -> Generator[FastPaths, None, None]:
    before, chosen = current_fast_paths(), request.param
    use_fast_paths(chosen)
    yield chosen
    use_fast_paths(before)


async def test_results_and_errors_are_the_same(
    paths: FastPaths, system: ta.System, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[FastPaths] = []

    def noted(**fields: Any) -> WorkerConfig:
        told.append(fields["fast_paths"])
        return WorkerConfig(**fields)

    monkeypatch.setattr(_pool, "WorkerConfig", noted)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        await ask_one_after_the_other(device)
        await ask_together(device)
        await ask_in_vain(device)
    assert told == ([paths] if isolation == "process" else [])


async def ask_one_after_the_other(device: ta.Device) -> None:
    numbers = np.random.default_rng(98)
    hosts = [numbers.standard_normal(shape) for shape in SHAPES]
    arrays = [await device.put(host) for host in hosts]
    for _ in range(4):
        for host, array in zip(hosts, arrays, strict=True):
            product = await ta.linalg.matmul(array, array.T)
            np.testing.assert_allclose(await product.to_host(), host @ host.T, rtol=1e-11, atol=1e-11)
            spectrum = await ta.fft.rfft(array)
            np.testing.assert_allclose(await spectrum.to_host(), np.fft.rfft(host), rtol=1e-11, atol=1e-11)
    total = await device.put(np.zeros(5))
    ones = await device.put(np.ones(5))
    for _ in range(5):
        await ta.linalg.axpy(0.5, ones, total)
    assert (await total.to_host()).tolist() == [2.5] * 5
    statistics = await device.statistics()
    assert statistics.memory.blocks == len(arrays) + 4
    assert statistics.in_flight == 0


async def ask_together(device: ta.Device) -> None:
    matrix = np.arange(36.0).reshape(6, 6) / 36
    a = await device.put(matrix)
    expected = matrix @ matrix

    async def ask() -> None:
        for _ in range(5):
            product = await ta.linalg.matmul(a, a)
            np.testing.assert_allclose(await product.to_host(), expected, rtol=1e-12)

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(ask)
    pending = [device.submit(ta.linalg.Matmul(a, a)) for _ in range(4)]
    chained = device.submit(ta.linalg.Matmul(pending[0].value, pending[3].value))
    await chained.wait()
    np.testing.assert_allclose(await chained.value.to_host(), expected @ expected, rtol=1e-12)


async def ask_in_vain(device: ta.Device) -> None:
    a = await device.put(np.ones((2, 3)))
    for _ in range(3):
        with pytest.raises(ValueError, match=r"linalg\.matmul: the last axis of a"):
            await ta.linalg.matmul(a, a)
        with trio.CancelScope() as scope:
            scope.cancel()
            await ta.linalg.matmul(a, a.T)
        assert scope.cancelled_caught
    gone = await device.put(np.ones(2))
    gone.release()
    with pytest.raises(ta.StaleRefError, match="released"):
        await ta.linalg.scal(2.0, gone)


async def test_an_operation_that_uses_no_leased_array_is_launched_at_once(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_here, launched = LibraryActor.launch_here, list[bool]()

    def noted(actor: LibraryActor, launch: Any, reply: Any) -> bool:
        launched.append(launch_here(actor, launch, reply))
        return launched[-1]

    monkeypatch.setattr(LibraryActor, "launch_here", noted)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        leased, other = await device.put(np.ones(3)), await device.put(np.ones(3))
        await ta.linalg.scal(2.0, other)
        async with leased.lease(write=True):
            launched.clear()
            await ta.linalg.scal(2.0, other)
            assert launched == [True]
        assert (await other.to_host()).tolist() == [4.0] * 3


async def test_turned_off_means_off(paths: FastPaths) -> None:
    """Each path, as far as it shows without a device."""
    table = BlockTable("cpu:0", Availability())
    table.is_watched = True
    first = table.new(8)
    number = first.id
    del first
    assert (table.new(8).id == number) is paths.reuse
    table.take()
    del number
    port = AdaptiveCompletion().open(lambda: None)
    assert isinstance(port, AdaptivePort)
    assert port._may_be_quick is paths.spin_wait
    info = attrs.evolve(ta.list_devices()[0], completion="adaptive")
    assert paths.spin_wait or window_of(None, info) == 0.0
    port.close()
    await trio.lowlevel.checkpoint()
