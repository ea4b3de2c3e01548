"""The payer for a fault of the device: the request that caused it, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from isolated import options
from processes import until

import trio_accel as ta
from trio_accel.devices import Operation
from trio_accel.patterns import Batcher, Replica, ReplicaPool, Submit
from trio_accel.testing import inject_fault

pytestmark = pytest.mark.any_backend

# One has its own library, and one uses the good requests' library.
BAD: dict[str, Callable[[ta.AccelRef], Operation[Any, Any]]] = {
    "fft.Fft": ta.fft.Fft,
    "linalg.Nrm2": lambda x: ta.linalg.Nrm2(x[0]),
}
EYE = np.eye(8) + 0j
# On some devices a product of this many rows takes long, but not on a GPU.
CHOSEN, LONG = (BACKEND, 1200) if IS_STAND_IN else ("cpu", 1500)


class Load:
    """Callers of products and of other requests in the meantime."""

    def __init__(self, device: ta.Device) -> None:
        self.device = device
        self.good = 0
        self.errors: list[Exception] = []

    async def multiply(self, x: ta.AccelRef) -> None:
        while True:
            try:
                product = await ta.linalg.matmul(x, x)
                np.testing.assert_array_equal(await product.to_host(), 4.0 * EYE)
                self.good += 1
            except ta.AccelError as error:
                self.errors.append(error)

    async def answers(self, count: int) -> None:
        """Wait for this many more."""
        wanted = self.good + count
        await until(lambda: self.good >= wanted)

    async def ask_bad(self, bad: Operation[Any, Any]) -> ta.ContextLostError:
        inject_fault(self.device, type(bad), poison=True, repeat=True)
        with pytest.raises(ta.ContextPoisonedError) as caught:
            await self.device.ask(bad)
        assert caught.value.is_to_blame
        assert caught.value.generation is not None
        assert caught.value.operation in BAD
        assert "no other operation can have caused it" in str(caught.value)
        return caught.value


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_request_costs_one_loss_and_one_error(system: ta.System, bad: str) -> None:
    async with system.open_device(CHOSEN, options=options(retry=1, spares=1)) as device:
        load, x = Load(device), await device.put(2.0 * EYE)
        request = BAD[bad](x)
        await device.ask(request)
        async with trio.open_nursery() as nursery:
            for _ in range(24):
                nursery.start_soon(load.multiply, x)
            for number in range(1, 9):
                await load.answers(48)
                error = await load.ask_bad(request)
                assert (error.operation, error.generation) == (bad, number)
                assert "retry_suspects=True" in str(error)
            await load.answers(48)
            assert device.generation == 9
            assert (await device.statistics()).losses == 8
            nursery.cancel_scope.cancel()
        assert load.errors == []
        np.testing.assert_array_equal(await x.to_host(), 2.0 * EYE)


@pytest.mark.parametrize("bad", BAD)
async def test_with_suspects_that_run_again_it_costs_two_losses(system: ta.System, bad: str) -> None:
    chosen = options(retry=1, spares=1, retry_suspects=True)
    async with system.open_device(CHOSEN, options=chosen) as device:
        load, x = Load(device), await device.put(2.0 * EYE)
        request = BAD[bad](x)
        await device.ask(request)
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(load.multiply, x)
            for number in range(1, 5):
                error = await load.ask_bad(request)
                assert "retry_suspects" not in str(error)
                await load.answers(24)
                assert device.generation == 1 + 2 * number
            nursery.cancel_scope.cancel()
        assert load.errors == []


@pytest.fixture
async def long_and_short(system: ta.System) -> AsyncIterator[tuple[ta.Device, ta.AccelRef, ta.AccelRef]]:
    """A device, an array with a slow product, and a small one."""
    async with system.open_device(CHOSEN, options=options(retry=1, spares=1)) as device:
        long, short = await device.put(2.0 * np.eye(LONG)), await device.put(EYE)
        await ta.linalg.matmul(long, long)
        await ta.fft.fft(short)
        yield device, long, short


Devices = tuple[ta.Device, ta.AccelRef, ta.AccelRef]


async def begun(device: ta.Device) -> None:
    """Wait until something is in flight."""
    with trio.fail_after(60):
        while True:
            if (await device.statistics()).in_flight:
                return
            await trio.sleep(0.001)


async def test_a_suspect_that_seemed_likelier_gets_no_error(long_and_short: Devices) -> None:
    device, long, short = long_and_short
    # More of these have succeeded than products, so this one runs first, and costs a second loss.
    for _ in range(4):
        await ta.fft.fft(short)
    product = device.submit(ta.linalg.Matmul(long, long))
    await begun(device)
    inject_fault(device, ta.fft.Fft, poison=True, repeat=True)
    with pytest.raises(ta.ContextPoisonedError) as caught:
        await ta.fft.fft(short)
    assert caught.value.is_to_blame
    assert caught.value.generation == 2
    await product.wait()
    assert (await product.value.to_host())[7, 7] == 4.0
    assert device.generation == 3
    # Now its library is known for it.
    product = device.submit(ta.linalg.Matmul(long, long))
    await begun(device)
    inject_fault(device, ta.fft.Fft, poison=True, repeat=True)
    with pytest.raises(ta.ContextPoisonedError):
        await ta.fft.fft(short)
    await product.wait()
    await device.zeros(1)
    assert device.generation == 4


async def test_a_spontaneous_fault_costs_the_last_suspect_an_error(long_and_short: Devices) -> None:
    device, long, short = long_and_short
    for _ in range(4):
        await ta.linalg.matmul(short, short)
    product = device.submit(ta.linalg.Matmul(long, long))
    await begun(device)
    inject_fault(device, ta.fft.Fft, poison=True)
    spectrum = device.submit(ta.fft.Fft(short))
    # It reads what is lost with it.
    behind = device.submit(ta.linalg.Matmul(spectrum.value, short))
    with pytest.raises(ta.ContextPoisonedError, match=r"DeviceOptions\(retry_suspects=True\)"):
        await spectrum.wait()
    with pytest.raises(ta.InputFailedError, match=r"fft\.fft"):
        await behind.wait()
    await product.wait()
    assert device.generation == 2


async def test_a_suspect_that_cannot_run_again_clears_no_other(long_and_short: Devices) -> None:
    device, long, short = long_and_short
    out = await device.put(np.zeros((LONG, LONG)))
    product = device.submit(ta.linalg.Gemm(1.0, long, long, 1.0, out))
    await begun(device)
    inject_fault(device, ta.fft.Fft, poison=True)
    spectrum = device.submit(ta.fft.Fft(short))
    with pytest.raises(ta.ContextPoisonedError) as caught:
        await product.wait()
    assert not caught.value.is_to_blame
    await spectrum.wait()
    np.testing.assert_allclose(await spectrum.value.to_host(), np.fft.fft(EYE))
    assert device.generation == 2


async def test_bad_requests_of_two_libraries_at_once(system: ta.System) -> None:
    async with system.open_device(CHOSEN, options=options(retry=1, spares=1)) as device:
        load, x = Load(device), await device.put(2.0 * EYE)
        for bad in BAD.values():
            await device.ask(bad(x))
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(load.multiply, x)
            async with trio.open_nursery() as bad_ones:
                for bad in BAD.values():
                    bad_ones.start_soon(load.ask_bad, bad(x))
            # Each once among others, and perhaps one of them once on its own.
            assert device.generation <= 4
            await load.answers(12)
            nursery.cancel_scope.cancel()
        assert load.errors == []


async def test_two_bad_requests_at_once(system: ta.System) -> None:
    async with system.open_device(CHOSEN, options=options(retry=1, spares=1)) as device:
        load, x = Load(device), await device.put(2.0 * EYE)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(load.multiply, x)
            inject_fault(device, ta.fft.Fft, poison=True, repeat=True, count=2)

            async def bad() -> None:
                with pytest.raises(ta.ContextLostError):
                    await ta.fft.fft(x)

            async with trio.open_nursery() as bad_ones:
                bad_ones.start_soon(bad)
                bad_ones.start_soon(bad)
            # Each once among others, and once on its own.
            assert device.generation <= 5
            await load.answers(12)
            nursery.cancel_scope.cancel()
        assert load.errors == []


async def test_the_first_of_a_stream_is_the_suspect(system: ta.System) -> None:
    async with system.open_device(CHOSEN, options=options(retry=1, retry_suspects=False)) as device:
        # A product of it takes long enough for its successors to begin.
        x = await device.put(2.0 * np.eye(LONG))
        await ta.linalg.matmul(x, x)
        before = device.submit(ta.linalg.Matmul(x, x))
        inject_fault(device, ta.linalg.Matmul, poison=True)
        bad, *behind = [device.submit(ta.linalg.Matmul(x, x)) for _ in range(5)]
        await before.wait()
        with pytest.raises(ta.ContextLostError) as caught:
            await bad.wait()
        assert caught.value.is_to_blame
        for pending in behind:
            await pending.wait()
            assert (await pending.value.to_host())[7, 7] == 4.0
        assert device.generation == 2


async def test_a_killed_worker_blames_nobody(system: ta.System) -> None:
    async with system.open_device(CHOSEN, options=options(retry=1, retry_suspects=False)) as device:
        x = await device.put(2.0 * EYE)
        inject_fault(device, ta.linalg.Matmul, kill=True)
        product = await ta.linalg.matmul(x, x)
        np.testing.assert_array_equal(await product.to_host(), 4.0 * EYE)
        assert device.generation == 2


@pytest.mark.parametrize("suspects", [True, False])
async def test_a_batcher_finds_the_item(system: ta.System, *, suspects: bool) -> None:
    chosen = options(retry=1, spares=1, retry_suspects=suspects)
    async with system.open_device(CHOSEN, options=chosen) as device, trio.open_nursery() as nursery:

        async def transform(rows: list[np.ndarray]) -> np.ndarray:
            # A request with a negative number is bad, in any company.
            if any(row[0] < 0 for row in rows):
                inject_fault(device, ta.fft.Fft, poison=True, repeat=True)
            x = await device.put(np.stack(rows) + 0j)
            return await (await ta.fft.fft(x)).to_host()

        batcher = await system.spawn(
            Batcher[Any, Any], transform, max_size=8, max_wait=1.0, adaptive=False, name="batcher"
        )
        found: dict[int, Any] = {}

        async def ask(number: int) -> None:
            row = np.full(4, -1.0 if number == 5 else 1.0 + number)
            try:
                found[number] = await batcher.ask(Submit(row))
            except ta.ContextLostError as error:
                found[number] = error

        for number in range(8):
            nursery.start_soon(ask, number)
    assert isinstance(found.pop(5), ta.ContextLostError)
    for number, result in found.items():
        np.testing.assert_allclose(result, np.fft.fft(np.full(4, 1.0 + number)))


async def test_a_batcher_cannot_find_a_request_bad_only_in_company(system: ta.System) -> None:
    chosen = options(retry=1, spares=1, retry_suspects=False)
    async with system.open_device(CHOSEN, options=chosen) as device, trio.open_nursery() as nursery:

        async def transform(rows: list[np.ndarray]) -> np.ndarray:
            # The first and the last of them, together.
            if {1.0, 8.0} <= {row[0] for row in rows}:
                inject_fault(device, ta.fft.Fft, poison=True, repeat=True)
            x = await device.put(np.stack(rows) + 0j)
            return await (await ta.fft.fft(x)).to_host()

        batcher = await system.spawn(
            Batcher[Any, Any], transform, max_size=8, max_wait=1.0, adaptive=False, name="batcher"
        )
        found: dict[int, Any] = {}

        async def ask(number: int) -> None:
            found[number] = await batcher.ask(Submit(np.full(4, 1.0 + number)))

        for number in range(8):
            nursery.start_soon(ask, number)
    for number, result in found.items():
        np.testing.assert_allclose(result, np.fft.fft(np.full(4, 1.0 + number)))
    assert len(found) == 8


@pytest.mark.filterwarnings("ignore:open_device. .+ is open already:RuntimeWarning")
async def test_a_bad_request_in_each_replica_of_a_pool(system: ta.System) -> None:
    chosen = options(retry=1, spares=1, retry_suspects=False)
    devices = [await system.open_device(CHOSEN, options=chosen) for _ in range(2)]

    def model(device: ta.Device) -> Any:
        async def transform(item: str) -> Any:
            x = await device.put(2.0 * EYE)
            if item == "bad":
                inject_fault(device, ta.fft.Fft, poison=True, repeat=True)
                return await (await ta.fft.fft(x)).to_host()
            return await (await ta.linalg.matmul(x, x)).to_host()

        return transform

    replicas = {str(number): Replica(model(device), device=device) for number, device in enumerate(devices)}
    pool = await system.spawn(ReplicaPool[Any, Any], replicas)
    right = 0

    async def ask_good() -> None:
        nonlocal right
        while True:
            np.testing.assert_array_equal(await pool.ask(Submit("good")), 4.0 * EYE)
            right += 1

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(ask_good)
        bad = 0
        # Until each has had one, in any order of the pool.
        while min(device.generation for device in devices) == 1 and bad < 40:
            with pytest.raises(ta.ContextPoisonedError) as caught:
                await pool.ask(Submit("bad"))
            assert caught.value.is_to_blame
            bad += 1
            wanted = right + 12
            await until(lambda wanted=wanted: right >= wanted)
        nursery.cancel_scope.cancel()
    assert sum(device.generation - 1 for device in devices) >= 2
    for device in devices:
        await device.close()
