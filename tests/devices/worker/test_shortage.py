"""A process with too many open files: its losses, and their complete clean-up."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from isolated import options
from processes import descriptors, until

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend
from trio_accel.devices import Empty
from trio_accel.devices.dispatch import _pool

# NVIDIA's driver fails with such limits, and the next test that uses it in this process would fail.
pytestmark = pytest.mark.skipif(
    BACKEND == "cuda" and not IS_STAND_IN and "TRIO_ACCEL_TEST_APART" not in os.environ,
    reason="test_shortage_apart runs them in a process of their own",
)
# More than the first chunk has room for.
LARGE = 9 << 20


@contextmanager
def no_descriptors() -> Generator[None, None, None]:
    """The application gets no descriptor in the body; its open ones stay open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_short(error: BaseException) -> bool:
    """Whether it repeats the system's text."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause is not None and cause.errno == errno.EMFILE and "open files" in str(error)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's memory cannot be mapped here, as that of an accelerator."""
    monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: False))


mapped = pytest.mark.skipif(BACKEND != "cpu", reason="the host cannot map the memory of this device")


async def ask(device: ta.Device, what: str) -> None:
    """Have the worker make memory."""
    if what == "put":
        await device.put(np.ones(LARGE))
    elif what == "zeros":
        await device.zeros(LARGE)
    elif what == "operand":
        await device.ask(ta.linalg.Nrm2(np.ones(LARGE)))
    else:
        pending = device.submit(Empty((LARGE,), ta.DType.float64))
        with pytest.raises(ta.OutOfMemoryError) as caught:
            await pending.wait()
        with pytest.raises(ta.StaleRefError, match="spoiled by"):
            await pending.value.to_host()
        raise caught.value


@mapped
@pytest.mark.parametrize("what", ["put", "zeros", "submit", "operand"])
async def test_it_is_the_error_of_that_request_only(system: ta.System, what: str) -> None:
    """The worker makes memory for it that this process cannot hold."""
    async with system.open_device(BACKEND, options=options(intensity=ta.Intensity(0, 60.0))) as device:
        x = await device.put(np.ones(3))
        await ta.linalg.nrm2(x)
        process = device.dispatch.process
        with no_descriptors():
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await ask(device, what)
            assert is_short(caught.value)
            # Work without descriptors continues.
            await ta.linalg.scal(2.0, x)
            assert (await x.to_host()).tolist() == [2.0] * 3
        del caught
        await until(lambda: not device.dispatch._chunks.missing)
        large = await device.put(np.arange(LARGE, dtype=float))
        assert (await large.to_host())[-1] == LARGE - 1
        assert (device.generation, device.dispatch.process) == (1, process)
        del large
        # An array lives as long as a traceback refers to it.
        gc.collect()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 1


@mapped
async def test_missing_memory_survives_the_next_worker(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        with no_descriptors(), pytest.raises(ta.OutOfMemoryError):
            await device.zeros(LARGE)
        await until(lambda: not device.dispatch._chunks.missing)
        large = await device.put(np.arange(LARGE, dtype=float))
        device.dispatch.process.kill()
        await until(lambda: device.generation == 2)
        assert (await large.to_host())[-1] == LARGE - 1


@mapped
async def test_a_worker_dies_short_of_memory(system: ta.System) -> None:
    """Nothing of the program is there; the next one makes its own."""
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.ones(3))
        with no_descriptors():
            with pytest.raises(ta.OutOfMemoryError):
                await device.zeros(LARGE)
            device.dispatch.process.kill()
            await until(lambda: device.dispatch.process is None)
            assert not device.dispatch._chunks.missing
        large = await device.put(np.arange(LARGE, dtype=float))
        assert (await large.to_host())[-1] == LARGE - 1
        assert (await x.to_host()).tolist() == [1.0] * 3
        assert device.generation == 2


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("is_put", [True, False], ids=["put", "to_host"])
async def test_host_memory_that_cannot_be_had(system: ta.System, is_put: bool) -> None:
    async with system.open_device("cpu", options=options(intensity=ta.Intensity(0, 60.0))) as device:
        x = await device.put(np.ones(64))
        big = await device.full(1 << 16, 3.0)
        process = device.dispatch.process
        with no_descriptors():
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await (device.put(np.ones(1 << 16)) if is_put else big.to_host())
            assert is_short(caught.value)
            with pytest.raises(MemoryError):
                device.host_empty(1 << 16)
            assert (await x.to_host()).tolist() == [1.0] * 64
        del caught
        assert (await big.to_host()).tolist() == [3.0] * (1 << 16)
        assert (await (await device.put(np.ones(1 << 16))).to_host()).sum() == 1 << 16
        assert (device.generation, device.dispatch.process) == (1, process)


@mapped
async def test_a_lease_of_memory_that_cannot_be_mapped(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.full(3, 2.0)
        with no_descriptors():
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await x.lease().__aenter__()
            assert is_short(caught.value)
        async with x.lease() as array:
            assert array.tolist() == [2.0] * 3
        assert device.generation == 1


async def test_a_worker_is_started_when_there_are_descriptors_again(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses in the meantime do not use up the intensity."""
    tries, start = 0, _pool.WorkerPool._start

    async def counted(pool: Any) -> Any:
        nonlocal tries
        tries += 1
        return await start(pool)

    async with system.open_device(BACKEND, options=options(intensity=ta.Intensity(1, 60.0))) as device:
        x = await device.put(np.arange(3.0))
        before = descriptors()
        monkeypatch.setattr(_pool.WorkerPool, "_start", counted)
        with no_descriptors():
            device.dispatch.process.kill()
            await until(lambda: tries >= 4)
        assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0]
        assert device.generation == 2
        await until(lambda: len(descriptors()) <= len(before))


@pytest.mark.parametrize("number", range(1, 8))
async def test_each_descriptor_of_a_new_worker_may_be_the_one_too_many(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whichever is refused, it is tried again, and nothing is left of the attempt."""
    first = _pool.WorkerPool._start
    is_over = False

    async def short(pool: Any) -> Any:
        nonlocal is_over
        if is_over:
            return await first(pool)
        is_over = True
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = sorted(set(range(max(descriptors()) + number + 1)) - set(descriptors()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[number - 1], limits[1]))
        try:
            return await first(pool)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    async with system.open_device(BACKEND, options=options(intensity=ta.Intensity(1, 60.0))) as device:
        x = await device.put(np.arange(3.0))
        before = descriptors()
        monkeypatch.setattr(_pool.WorkerPool, "_start", short)
        device.dispatch.process.kill()
        with trio.fail_after(60):
            assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0]
        assert device.generation == 2
        await until(lambda: len(descriptors()) <= len(before))


@mapped
async def test_a_spare_that_cannot_be_given_memory_is_replaced(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        await until(lambda: device.dispatch.spares == 1)
        x = await device.put(np.ones(3))
        process, pool = device.dispatch.process, device.dispatch._pool
        spare = pool._spares[0]
        send = spare.send

        def refuse(message: Any, descriptors: Any = (), **options: Any) -> None:
            if descriptors:
                raise OSError(errno.EMFILE, "Too many open files")
            send(message, descriptors, **options)

        spare.send = refuse
        large = await device.zeros(LARGE)
        await until(lambda: pool._spares and pool._spares[0] is not spare)
        assert (device.generation, device.dispatch.process) == (1, process)
        process.kill()
        await until(lambda: device.generation == 2)
        assert (await large.to_host()).sum() == 0
        assert (await x.to_host()).tolist() == [1.0] * 3


@contextmanager
def limited(process: int, which: int, limit: int) -> Generator[None, None, None]:
    """A process has a limit in the body."""
    before = resource.prlimit(process, which)
    resource.prlimit(process, which, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, which, before)


def addresses(process: int) -> int:
    """Bytes that a process has mapped."""
    pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


@mapped
@pytest.mark.parametrize("what", ["put", "zeros", "submit", "operand"])
@pytest.mark.parametrize("limit", ["files", "memory"])
async def test_a_worker_that_the_system_refuses_memory(system: ta.System, limit: str, what: str) -> None:
    """As a full file system does, and a limit of addresses: it is the error of that request only."""
    async with system.open_device(BACKEND, options=options(intensity=ta.Intensity(0, 60.0))) as device:
        x = await device.put(np.ones(3))
        await ta.linalg.nrm2(x)
        process = device.dispatch.process
        used = addresses(process.pid)
        which, most = {
            "files": (resource.RLIMIT_FSIZE, 1 << 20),
            "memory": (resource.RLIMIT_AS, used + (32 << 20)),
        }[limit]
        with limited(process.pid, which, most):
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await ask(device, what)
            assert caught.value.requested == 8 * LARGE
            assert any("ulimit" in note for note in caught.value.__notes__)
            await ta.linalg.scal(2.0, x)
            assert (await x.to_host()).tolist() == [2.0] * 3
        del caught
        large = await device.put(np.arange(LARGE, dtype=float))
        assert (await large.to_host())[-1] == LARGE - 1
        assert (device.generation, device.dispatch.process) == (1, process)
        del large
        gc.collect()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 1


@mapped
@pytest.mark.parametrize("what", ["put", "operand", "to_host"])
async def test_an_application_that_the_system_refuses_a_mapping(system: ta.System, what: str) -> None:
    """The worker has the memory, and this process has no addresses for it."""
    async with system.open_device(BACKEND, options=options(intensity=ta.Intensity(0, 60.0))) as device:
        x = await device.put(np.ones(3))
        await ta.linalg.nrm2(x)
        process, host, there = device.dispatch.process, np.ones(LARGE), await device.zeros(LARGE)
        asking = {
            "put": partial(device.put, host),
            "operand": partial(device.ask, ta.linalg.Nrm2(host)),
            "to_host": partial(there.to_host, out=host),
        }[what]
        with limited(os.getpid(), resource.RLIMIT_AS, addresses(os.getpid()) + (32 << 20)):
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await asking()
            assert "Cannot allocate memory" in str(caught.value)
            assert "ulimit -v" in str(caught.value)
            await ta.linalg.scal(2.0, x)
            assert (await x.to_host()).tolist() == [2.0] * 3
        del caught
        host[-1] = 7.0
        large = await device.put(host)
        assert (await large.to_host())[-1] == 7.0
        assert (await there.to_host())[-1] == 0.0
        assert (device.generation, device.dispatch.process) == (1, process)
        del large, there, asking
        gc.collect()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 1
