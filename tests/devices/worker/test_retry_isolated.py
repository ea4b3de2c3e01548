"""Operations in flight that run again, because they write no array from before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from isolated import BLAS, options, outcome
from processes import until
from recovery_load import AT_ONCE, MANY, MEMORY

import trio_accel as ta
from trio_accel.devices import Copy, Put, ToHost

EYE = np.eye(3)


async def lose(device: ta.Device, count: int = 1, library: str = BLAS) -> None:
    """Kill the worker when it has begun with this many of a library, and wait for the next."""
    while True:
        queue = (await device.statistics()).queues.get(library)
        if queue is not None and queue.in_flight == count:
            break
        await trio.sleep(0.001)
    generation = device.generation
    device.dispatch.process.kill()
    await until(lambda: device.generation > generation)


@pytest.mark.parametrize("fault", ["kill", "poison", "segfault"])
async def test_an_operation_that_writes_no_input_runs_again(system: ta.System, fault: str) -> None:
    async with system.open_device(BACKEND, options=options(retry=1, retry_suspects=True)) as device:
        x = await device.put(2.0 * EYE)
        injected = ta.testing.inject_fault(device, ta.linalg.Matmul, **{fault: True})
        product = await ta.linalg.matmul(x, x)
        np.testing.assert_array_equal(await product.to_host(), 4.0 * EYE)
        assert device.generation == 2
        assert injected.hit == 1
        # An output of the caller's is overwritten, so it does not matter what was written by then.
        await product.fill(0.0)
        ta.testing.inject_fault(device, ta.linalg.Matmul, **{fault: True})
        await ta.linalg.matmul(x, x, out=product)
        np.testing.assert_array_equal(await product.to_host(), 4.0 * EYE)
        np.testing.assert_array_equal(await x.to_host(), 2.0 * EYE)
        assert device.generation == 3


@pytest.mark.parametrize("losses", [2, 3])
async def test_so_many_losses_it_survives_and_no_more(system: ta.System, losses: int) -> None:
    async with system.open_device(BACKEND, options=options(retry=2)) as device:
        # A busy machine may look late, so the operation is in flight until its worker is killed. It is a
        # copy, because CUDA loads the first product of each worker, and its loop waits with the held stream.
        fault = ta.testing.inject_fault(device, Copy, delay=60.0, repeat=True)
        x = await device.put(2.0 * EYE)
        pending = device.submit(Copy(x))
        for loss in range(losses):
            if losses == 2 and loss == 1:
                # The third try is not killed, so it may end.
                fault.remove()
            await lose(device, library=MEMORY)
        found = await outcome(pending.wait)
        if losses > 2:
            assert type(found) is ta.ContextLostError
            assert found.operation == "devices.Copy"
            with pytest.raises(ta.StaleRefError, match=r"spoiled by copy"):
                await pending.value.to_host()
        else:
            assert found is pending.value
            np.testing.assert_array_equal(await pending.value.to_host(), 2.0 * EYE)
        assert device.generation == 1 + losses


async def test_updates_in_place_never_run_again(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=5)) as device:
        x = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, kill=True)
        with pytest.raises(ta.ContextLostError):
            await ta.linalg.scal(2.0, x)
        with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
            await x.to_host()
        await device.put(np.ones(3))
        assert device.generation == 2


@pytest.mark.parametrize("size", [3, 1 << 16], ids=["small", "large"])
async def test_copies_run_again(system: ta.System, size: int) -> None:
    async with system.open_device(BACKEND, options=options(retry=1)) as device:
        host = np.arange(size, dtype=float)
        ta.testing.inject_fault(device, Put, kill=True)
        ref = await device.put(host)
        assert device.generation == 2
        ta.testing.inject_fault(device, ToHost, kill=True)
        np.testing.assert_array_equal(await ref.to_host(), host)
        ta.testing.inject_fault(device, ToHost, kill=True)
        out = np.zeros(size)
        await ref.to_host(out=out)
        np.testing.assert_array_equal(out, host)
        assert device.generation == 4


async def test_submissions_after_a_repeated_operation_are_right(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=1)) as device:
        a = await device.put(2.0 * EYE + 0j)
        # To make a plan, a vendor's library may wait for all that runs.
        await ta.fft.fft(await ta.linalg.matmul(a, a))
        ta.testing.inject_fault(device, ta.linalg.Matmul, delay=60.0)
        product = device.submit(ta.linalg.Matmul(a, a))
        transform = device.submit(ta.fft.Fft(product.value))
        scaled = device.submit(ta.linalg.Scal(2.0, transform.value))
        apart = device.submit(ta.linalg.Matmul(a, EYE + 0j))
        await lose(device, 3)
        # The product and its readers make their outputs again; the update in place was also in flight.
        for pending in (product, transform, apart):
            await pending.wait()
        np.testing.assert_array_equal(await product.value.to_host(), 4.0 * EYE)
        np.testing.assert_array_equal(await apart.value.to_host(), 2.0 * EYE)
        with pytest.raises(ta.ContextLostError):
            await scaled.wait()
        with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
            await transform.value.to_host()
        assert device.generation == 2


async def test_a_chain_after_a_repeated_operation_had_not_begun(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=1, in_flight=4)) as device:
        a = await device.put(2.0 * EYE)
        # A product loaded only now would wait for the held stream.
        (await ta.linalg.matmul(a, a)).release()
        ta.testing.inject_fault(device, ta.linalg.Matmul, delay=60.0)
        product = device.submit(ta.linalg.Matmul(a, a))
        others = [device.submit(ta.linalg.Matmul(a, a)) for _ in range(3)]
        found: list[object] = []

        async def ask(operation: Any) -> None:
            found.append(await outcome(device.ask, operation))

        async with trio.open_nursery() as nursery:
            # The window is full: it waits in the application.
            nursery.start_soon(ask, ta.linalg.Scal(3.0, product.value))
            while True:
                queue = (await device.statistics()).queues.get(BLAS)
                if queue is not None and (queue.in_flight, queue.waiting) == (4, 1):
                    break
                await trio.sleep(0.001)
            await lose(device, 4)
        assert found == [product.value]
        for pending in others:
            np.testing.assert_array_equal(await (await pending.wait()).to_host(), 4.0 * EYE)
        np.testing.assert_array_equal(await product.value.to_host(), 12.0 * EYE)


async def test_inline_only_work_without_arrays_runs_again(system: ta.System) -> None:
    changes = ta.DeviceOptions(isolation="inline", retry=1, intensity=MANY, backoff=AT_ONCE)
    async with system.open_device(BACKEND, options=changes) as device:
        x = await device.put(EYE)
        ta.testing.inject_fault(device, ta.linalg.Matmul, poison=True)
        product = await device.ask(ta.linalg.Matmul(EYE, 2.0 * EYE))
        np.testing.assert_array_equal(await product.to_host(), 2.0 * EYE)
        assert device.generation == 2
        y = await device.put(EYE)
        ta.testing.inject_fault(device, ta.linalg.Matmul, poison=True)
        with pytest.raises(ta.ContextLostError):
            await device.ask(ta.linalg.Matmul(y, 2.0 * EYE))
        for ref in (x, y, product):
            with pytest.raises(ta.StaleRefError, match="lost with generation"):
                await ref.to_host()
        # Its own memory would be lost a second time.
        ta.testing.inject_fault(device, ta.linalg.Matmul, poison=True, count=2)
        with pytest.raises(ta.ContextLostError):
            await device.ask(ta.linalg.Matmul(EYE, 2.0 * EYE))
