"""Host arrays that the device hands out."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cpu._backend import CpuDevice
from trio_accel.devices.base import _host_pool
from trio_accel.devices.base._host_pool import Copying

SHAPES: list[Any] = [0, 5, (), (3, 0, 2), (200, 150)]
DTYPES: list[Any] = [ta.DType.float64, "complex64", ta.DType.bfloat16, np.int8]


async def test_they_travel_both_ways(device: ta.Device) -> None:
    # All on one device: a worker for each would take most of the time.
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        await _travel_both_ways(device, shape, dtype)


async def _travel_both_ways(device: ta.Device, shape: Any, dtype: Any) -> None:
    host = device.host_empty(shape, dtype)
    assert host.dtype == ta.DType.of(dtype).dtype
    assert host.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert host.flags.writeable
    assert host.flags.c_contiguous
    host[...] = np.arange(host.size).reshape(host.shape).astype(np.int8).astype(host.dtype)
    back = device.host_empty(shape, dtype)
    # Old contents of this memory from an earlier case must not be taken for arrived data.
    back[...] = -1
    assert await (await device.put(host)).to_host(out=back) is back
    assert back.tobytes() == host.tobytes()


NO_SHAPES: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "host_empty: shape must hold sizes of at least 0, got -1"),
    ((2, True), ValueError, r"host_empty: shape must hold sizes of at least 0, got \(2, True\)"),
    (2.0, TypeError, "shape must be a size or a sequence of sizes, got 2.0"),
    ((2.0,), TypeError, "'float' object cannot be interpreted as an integer"),
]


async def test_an_invalid_shape_is_refused(device: ta.Device) -> None:
    for shape, error, message in NO_SHAPES:
        with pytest.raises(error, match=message):
            device.host_empty(shape)


async def test_an_invalid_dtype_is_refused(device: ta.Device) -> None:
    with pytest.raises(TypeError, match="datetime64"):
        device.host_empty(3, "datetime64[s]")


async def test_they_outlive_their_device(system: ta.System, isolation: Isolation) -> None:
    device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    host = device.host_empty(100_000)
    await (await device.put(np.arange(100_000.0))).to_host(out=host)
    view = host[1::2]
    await device.close()
    del host
    after = device.host_empty(100_000)
    after[...] = -1.0
    np.testing.assert_array_equal(view, np.arange(100_000.0)[1::2])


async def lose(device: ta.Device) -> None:
    """Poison the context, and wait for the next: a real fault shows when work meets it."""
    ta.testing.poison(device)
    while device.generation == 1:
        with contextlib.suppress(ta.ContextPoisonedError):
            await device.zeros(3)


async def test_they_outlive_a_context(device: ta.Device) -> None:
    host = device.host_empty((300, 400), "float32")
    host[...] = np.arange(300 * 400).reshape(300, 400)
    await device.put(host)
    await lose(device)
    back = device.host_empty((300, 400), "float32")
    await (await device.put(host[100:])).to_host(out=back[100:])
    np.testing.assert_array_equal(back[100:], np.arange(300 * 400).reshape(300, 400)[100:])
    assert device.generation == 2


async def test_one_made_in_another_thread_travels_like_any(device: ta.Device) -> None:
    host = await trio.to_thread.run_sync(device.host_empty, 100_000)
    host[...] = np.arange(100_000.0)
    np.testing.assert_array_equal(await (await device.put(host)).to_host(), host)


class Registered:
    """The calls to devices about host memory, in their order, if only 256 MiB are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_host_pool, "total_bytes", lambda: 1 << 30)
        self.told: list[tuple[str, Any, int]] = []
        if BACKEND == "cpu":
            monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: False))
            self._watch(monkeypatch, CpuDevice)
        else:
            from trio_accel.backends.cuda._device import CudaDevice

            self._watch(monkeypatch, CudaDevice)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, cls: type[Any]) -> None:
        for name in ("register_host", "unregister_host"):
            method = getattr(cls, name)

            def tell(device: Any, memory: Any, *, name: str = name, method: Any = method) -> None:
                method(device, memory)
                self.told.append((name, device, memory.nbytes))

            monkeypatch.setattr(cls, name, tell)

    def of(self, device: Any) -> list[tuple[str, int]]:
        """The calls to one of the devices."""
        return [(name, nbytes >> 20) for name, told, nbytes in self.told if told is device]

    async def wait(self, count: int) -> None:
        """Wait for this many calls."""
        with trio.fail_after(60):
            while len(self.told) < count:  # noqa: ASYNC110  # threads tell
                await trio.sleep(0.001)


async def test_each_context_in_this_process_knows_the_memory(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = Registered(monkeypatch)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        first = device.dispatch.session.engine.device
        host, large = device.host_empty(1 << 20, "uint8"), device.host_empty(300 << 20, "uint8")
        await registered.wait(2)
        assert registered.of(first) == [("register_host", 64), ("register_host", 300)]
        del large
        await registered.wait(3)
        assert registered.of(first)[2:] == [("unregister_host", 300)]
        host[...] = np.arange(1 << 20, dtype=np.uint8)
        await lose(device)
        back = device.host_empty(1 << 20, "uint8")
        await (await device.put(host)).to_host(out=back)
        np.testing.assert_array_equal(back, host)
        await registered.wait(4)
        second = device.dispatch.session.engine.device
        assert second is not first
        assert registered.of(second) == [("register_host", 64)]
        if BACKEND == "cuda":
            assert second.transfers.straight(host) is not None
    if BACKEND == "cuda":
        # Whoever uses the same memory next finds it as the system gave it.
        assert second.transfers.straight(host) is None


async def test_memory_is_forgotten_when_the_device_rests(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver waits for all that runs, and holds up every launch meanwhile."""
    registered = Registered(monkeypatch)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        first = device.dispatch.session.engine.device
        ref = await device.put(np.ones(3))
        large = device.host_empty(300 << 20, "uint8")
        await registered.wait(1)
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.3)
        pending = device.submit(ta.linalg.Scal(2.0, ref))
        while not (await device.statistics()).in_flight:
            pass
        del large
        # An array made meanwhile is registered at once.
        following = device.host_empty(1 << 20, "uint8")
        await registered.wait(2)
        assert registered.of(first) == [("register_host", 300), ("register_host", 64)]
        assert not pending.is_done
        await pending.wait()
        await registered.wait(3)
        assert registered.of(first)[2:] == [("unregister_host", 300)]
        del following


async def test_a_device_that_cannot_know_the_memory_transfers_all_the_same(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = Registered(monkeypatch)

    def refuse(device: object, memory: object) -> None:
        registered.told.append(("refused", device, 0))
        raise ta.AccelError("no page can be locked")

    cls = CpuDevice
    if BACKEND == "cuda":
        from trio_accel.backends.cuda._device import CudaDevice as cls  # noqa: N813
    monkeypatch.setattr(cls, "register_host", refuse)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        host = device.host_empty(100_000)
        host[...] = np.arange(100_000.0)
        await registered.wait(1)
        np.testing.assert_array_equal(await (await device.put(host)).to_host(), host)
        assert device.generation == 1


async def test_the_same_arrays_again_and_again_with_other_numbers(device: ta.Device) -> None:
    """A worker learns of them once, and their contents are those of each time."""
    hosts = [device.host_empty((50, 60), "float32") for _ in range(2)]
    backs = [device.host_empty((50, 60), "float32") for _ in range(2)]
    for number in range(12):
        host, back = hosts[number % 2], backs[number // 2 % 2]
        host[...] = number + np.arange(60)
        back[...] = -1
        array = await device.put(host)
        host[...] = -2
        await array.to_host(out=back)
        np.testing.assert_array_equal(back, np.broadcast_to(number + np.arange(60), (50, 60)))
    # Others lie there from now on.
    del host, back, hosts, backs
    for number in range(4):
        host = device.host_empty((60, 50), "int16")
        host[...] = number
        assert ((await (await device.put(host)).to_host()) == number).all()


async def test_inline_an_operation_waits_until_its_host_array_is_copied(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    if BACKEND == "cpu":
        monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: False))
    begun, go_on = threading.Event(), threading.Event()
    run = Copying.run

    def wait(copying: Copying) -> None:
        begun.set()
        assert go_on.wait(60)
        run(copying)

    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        host, found = np.arange(150_000.0), list[Any]()
        await device.put(-host)
        monkeypatch.setattr(Copying, "run", wait)

        async def put() -> None:
            found.append(await device.put(host))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            try:
                assert await trio.to_thread.run_sync(begun.wait, 60)
                await wait_all_tasks_blocked()
                assert not found
            finally:
                go_on.set()
        monkeypatch.setattr(Copying, "run", run)
        np.testing.assert_array_equal(await found[0].to_host(), host)


@pytest.mark.skipif(BACKEND == "cpu", reason="the memory of the device is the host's")
async def test_inline_the_host_copies_an_array_once_and_one_of_the_pool_never(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Copying] = []
    run = Copying.run

    def count(copying: Copying) -> None:
        runs.append(copying)
        run(copying)

    monkeypatch.setattr(Copying, "run", count)
    options = ta.DeviceOptions(isolation="inline")
    async with system.open_device(BACKEND, options=options) as device:
        wanted = np.arange(150_000.0).reshape(300, 500)
        for host, out, copies in (
            (device.host_empty(wanted.shape), device.host_empty(wanted.shape), 0),
            (np.empty_like(wanted), np.empty_like(wanted), 1),
            (np.empty_like(wanted), np.empty(wanted.shape[::-1]).T, 1),
        ):
            host[...] = wanted
            runs.clear()
            ref = await device.put(host)
            assert len(runs) == copies
            assert await ref.to_host(out=out) is out
            assert len(runs) == 2 * copies
            np.testing.assert_array_equal(out, wanted)
