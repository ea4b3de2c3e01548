"""Host arrays on their way to and from a worker with a device with separate memory.

On the CPU backend the application pretends that it cannot map the device's memory. So the same steps run,
except that there is nothing to register.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from cuts import Cut
from isolated import options, outcome, wait_at_worker, wait_in_flight
from processes import until
from recovery_load import MEMORY

import trio_accel as ta
from trio_accel.backends.base.contract.ops import FillSpec
from trio_accel.backends.cpu import CpuBackend
from trio_accel.devices import Operation, Planned, Planner, Put, ToHost
from trio_accel.devices.base import _host_pool
from trio_accel.devices.dispatch._worker_dispatch import Generations

pytestmark = pytest.mark.any_backend

SIZE = 1 << 16
HOST = np.arange(SIZE, dtype=float)


@pytest.fixture(autouse=True)
def memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: False))


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=options()) as device:
        yield device


def copies(device: ta.Device) -> int:
    """How many the application has made."""
    return device.dispatch._copies.begun


def taken(device: ta.Device) -> int:
    """Bytes of the pool."""
    device.state.host_pool.drain()
    return device.state.host_pool.used


def maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:trio_accel")


async def balanced(device: ta.Device, blocks: int, bytes_taken: int = 0) -> None:
    """Nothing is under way, and only this many arrays are there."""
    await device.synchronize()
    found = await device.statistics()
    assert (found.in_flight, device.pending, found.queues) == (0, 0, {})
    assert found.memory.blocks == blocks
    assert not device.dispatch._copies._running
    assert taken(device) == bytes_taken


class TestHowOftenTheHostCopies:
    async def test_arrays_of_the_pool_never(self, device: ta.Device) -> None:
        for shape in ((3, 5), (300, 500)):
            host = device.host_empty(shape)
            host[...] = np.arange(host.size).reshape(shape)
            ref = await device.put(host)
            back = device.host_empty(shape)
            assert await ref.to_host(out=back) is back
            np.testing.assert_array_equal(back, np.arange(host.size).reshape(shape))
            # A contiguous part of it, as well.
            part = await device.put(host[1:3])
            await part.to_host(out=back[:2])
            np.testing.assert_array_equal(back[:2], host[1:3])
            np.testing.assert_array_equal(back[2:], host[2:])
        assert copies(device) == 0

    async def test_any_other_large_one_once(self, device: ta.Device) -> None:
        ref = await device.put(HOST)
        assert copies(device) == 1
        np.testing.assert_array_equal(await ref.to_host(), HOST)
        assert copies(device) == 2
        out = np.zeros(2 * SIZE)[::2]
        await ref.to_host(out=out)
        np.testing.assert_array_equal(out, HOST)
        assert copies(device) == 3
        square = HOST.reshape(256, 256)
        product = await device.ask(ta.linalg.Matmul(square, square.T))
        assert copies(device) == 5
        np.testing.assert_allclose(await product.to_host(), square @ square.T, rtol=1e-12)
        assert copies(device) == 6
        await balanced(device, 2)

    async def test_a_strided_array_of_the_pool_is_copied_once(self, device: ta.Device) -> None:
        host = device.host_empty((256, 256))
        host[...] = HOST.reshape(256, 256)
        ref = await device.put(host.T[::-1])
        await ref.to_host(out=host[::-1].T)
        assert copies(device) == 2
        np.testing.assert_array_equal(host, HOST.reshape(256, 256)[::-1, ::-1])

    async def test_small_arrays_are_sent_in_messages(self, device: ta.Device) -> None:
        ref = await device.put(HOST[:64])
        np.testing.assert_array_equal(await ref.to_host(), HOST[:64])
        assert copies(device) == 0
        assert not device.state.host_pool.slabs

    async def test_every_dtype_arrives_bit_for_bit(self, device: ta.Device) -> None:
        for number, dtype in enumerate(ta.DType, 1):
            end = 2 if dtype is ta.DType.bool else 256
            # Different bits for each, so that none is right by the old contents.
            bits = np.random.default_rng(number).integers(0, end, 1 << 18, np.uint8)
            host = bits.view(dtype.dtype)
            assert (await (await device.put(host)).to_host()).tobytes() == host.tobytes(), dtype
            assert copies(device) == 2 * number


async def test_copies_overlap_with_the_work_before(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has the request before the array is copied, and holds up nothing but what needs it."""
    x = await device.put(HOST)
    cut = Cut(monkeypatch)
    put = device.submit(Put(-HOST))
    scaled = device.submit(ta.linalg.Scal(2.0, put.value))
    await cut.wait_entered()
    await wait_at_worker(device)
    # Other libraries continue.
    transform = await ta.fft.fft(x[:4])
    assert (put.is_done, scaled.is_done) == (False, False)
    cut.leave.set()
    await put.wait()
    await scaled.wait()
    np.testing.assert_array_equal(await put.value.to_host(), -2.0 * HOST)
    np.testing.assert_allclose(await transform.to_host(), np.fft.fft(HOST[:4]), rtol=1e-12)


@pytest.mark.parametrize("is_copied", [False, True], ids=["while-it-is-copied", "when-it-is-copied"])
async def test_a_copy_on_its_way_to_a_dying_worker_goes_to_the_next(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    async with system.open_device(BACKEND, options=options(retry=1)) as device:
        other = await device.put(HOST)
        cut = Cut(monkeypatch)
        if is_copied:
            cut.leave.set()
            ta.testing.inject_fault(device, Put, kill=True)
        pending = device.submit(Put(-HOST))
        if not is_copied:
            await cut.wait_entered()
            await wait_at_worker(device)
            device.dispatch.process.kill()
            await until(lambda: device.generation == 2)
            cut.leave.set()
        ref = await pending.wait()
        # It was copied once, for both workers.
        assert copies(device) == 2
        np.testing.assert_array_equal(await ref.to_host(), -HOST)
        np.testing.assert_array_equal(await other.to_host(), HOST)
        assert device.generation == 2
        del pending
        await balanced(device, 2)


@pytest.mark.parametrize("is_known", [False, True], ids=["any-array", "of-the-pool"])
@pytest.mark.parametrize("retry", [0, 1])
async def test_the_worker_dies_while_it_fills_a_host_array(
    system: ta.System, retry: int, is_known: bool
) -> None:
    async with system.open_device(BACKEND, options=options(retry=retry)) as device:
        ref = await device.put(HOST)
        out = device.host_empty(SIZE) if is_known else np.empty(SIZE)
        ta.testing.inject_fault(device, ToHost, kill=True)
        found = await outcome(device.ask, ToHost(ref, out))
        if retry:
            np.testing.assert_array_equal(out, HOST)
        else:
            assert type(found) is ta.ContextLostError
            # It is the program's again: the worker that wrote to it is dead.
            assert len(device.dispatch._pool._links) <= 1
        assert await ref.to_host(out=out) is out
        np.testing.assert_array_equal(out, HOST)
        del found
        await balanced(device, 1, out.nbytes if is_known else 0)


async def test_the_worker_dies_when_it_has_filled_a_host_array(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await device.put(HOST)
    out = np.zeros(SIZE)
    cut = Cut(monkeypatch)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.ask, ToHost(ref, out))
        await cut.wait_entered()
        device.dispatch.process.kill()
        await until(lambda: device.generation == 2)
        cut.leave.set()
    np.testing.assert_array_equal(out, HOST)
    await balanced(device, 1)


class TestCancelled:
    """While the application copies: within the grace the copy ends, and past it it is cut."""

    async def test_within_the_grace(self, device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        ref = await device.put(HOST)
        cut = Cut(monkeypatch)
        out = np.zeros(SIZE)
        is_over = False

        async def ask(scope: trio.CancelScope) -> None:
            nonlocal is_over
            with scope, ta.cancel_grace(30.0):
                await ref.to_host(out=out)
            is_over = True

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(ask, scope)
            await cut.wait_entered()
            scope.cancel()
            await device.statistics()
            assert not is_over
            cut.leave.set()
        assert device.generation == 1
        np.testing.assert_array_equal(out, HOST)
        await balanced(device, 1)

    async def test_past_the_grace(self, system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
        async with system.open_device(BACKEND, options=options(cancel_grace=0.1)) as device:
            ref = await device.put(HOST)
            cut = Cut(monkeypatch)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(device.ask, ToHost(ref, np.zeros(SIZE)))
                    await cut.wait_entered()
                    scope.cancel()
            assert scope.cancelled_caught
            assert not device.dispatch._copies._running
            cut.leave.set()
            np.testing.assert_array_equal(await ref.to_host(), HOST)
            # A worker that has done its part need not die for it.
            assert device.generation == 1
            await balanced(device, 1)

    @pytest.mark.parametrize("is_put", [True, False], ids=["put", "to_host"])
    async def test_an_abandoned_copy_keeps_its_host_memory_until_it_ends(
        self, device: ta.Device, is_put: bool
    ) -> None:
        """The worker transfers from or to it all the while; the program's own array is free at once."""
        staging = device.dispatch._staging
        ref = await device.put(HOST)
        operation = Put if is_put else ToHost
        delay = ta.testing.inject_fault(device, operation, delay=1.5)
        host = HOST.copy()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(device.ask, Put(host) if is_put else ToHost(ref, host))
                await until(lambda: device.dispatch._requests.sent == 1)
                await wait_in_flight(device, 1, "trio_accel.devices:MemoryActor")
                scope.cancel()
        assert scope.cancelled_caught
        assert delay.remaining == 0
        assert staging.taken == HOST.nbytes
        host[:] = np.nan
        await device.synchronize()
        await until(lambda: not staging.taken)
        assert np.isnan(host).all()
        np.testing.assert_array_equal(await ref.to_host(), HOST)
        assert device.generation == 1
        await balanced(device, 1)

    async def test_a_transfer_by_the_device_itself_is_awaited(self, device: ta.Device) -> None:
        ref = await device.put(HOST)
        out = device.host_empty(SIZE)
        out[:] = 0.0
        ta.testing.inject_fault(device, ToHost, delay=0.3)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(device.ask, ToHost(ref, out))
                await wait_in_flight(device, 1, "trio_accel.devices:MemoryActor")
                scope.cancel()
        np.testing.assert_array_equal(out, HOST)
        await balanced(device, 1, out.nbytes)

    async def test_before_it_is_launched(self, device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """A request waiting for its host array is withdrawn, and the copy is cut at once."""
        ref = await device.put(HOST)
        cut = Cut(monkeypatch)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(device.ask, Put(HOST))
                await cut.wait_entered()
                await wait_at_worker(device)
                scope.cancel()
        assert scope.cancelled_caught
        assert not device.dispatch._copies._running
        assert not cut.leave.is_set()
        cut.leave.set()
        np.testing.assert_array_equal(await ref.to_host(), HOST)
        assert device.generation == 1
        await balanced(device, 1)

    async def test_before_the_next_worker_has_it(
        self, system: ta.System, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with system.open_device(BACKEND, options=options(retry=1)) as device:
            cut = Cut(monkeypatch)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(device.put, HOST)
                    await cut.wait_entered()
                    await wait_at_worker(device)
                    device.dispatch.process.kill()
                    await until(lambda: device.dispatch.process is None)
                    scope.cancel()
            assert scope.cancelled_caught
            assert not device.dispatch._copies._running
            cut.leave.set()
            await balanced(device, 0)


@attrs.frozen(eq=False)
class Misplaced(Operation[ta.linalg.BlasActor, ta.AccelRef]):
    """Its library does not have it, which is found when its operand is on its way."""

    host: np.ndarray
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        planner.read("host", self.host)
        out = planner.output((3,), ta.DType.float64)
        return Planned(FillSpec(1.0, out.spec), out)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["staged", "mapped"])
async def test_a_refused_copy_delays_nothing(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    """Its operand is still transferred: the stream waits for that, and continues."""
    if is_mapped:
        if BACKEND != "cpu":
            pytest.skip("the host cannot map the memory of this device")
        monkeypatch.setattr(CpuBackend, "shares_memory_with_host", property(lambda self: True))
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.ones(3))
        for _ in range(3):
            with pytest.raises(ta.NotSupportedError):
                await device.ask(Misplaced(HOST))
        with trio.fail_after(60):
            assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(3**0.5)
            await device.synchronize()
        del x
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 0


async def test_without_host_memory_an_array_is_refused(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than any machine has, in eight bytes.
    endless = np.broadcast_to(np.float64(1.0), (1 << 46,))
    with pytest.raises(ta.OutOfMemoryError, match=r"device\.host_empty\(\)") as caught:
        await device.put(endless)
    assert (caught.value.device, caught.value.operation) == (device.name, "devices.Put")
    assert caught.value.requested == endless.nbytes
    with pytest.raises(MemoryError):
        device.host_empty(1 << 46)
    with monkeypatch.context() as patch:
        patch.setattr(_host_pool, "available_bytes", lambda: 0)
        with pytest.raises(ta.OutOfMemoryError):
            await device.put(HOST)
        # Work without such memory continues.
        ref = await device.put(HOST[:64])
        np.testing.assert_array_equal(await ref.to_host(), HOST[:64])
        large = await ta.linalg.matmul(*[await device.zeros((256, 256)) for _ in range(2)])
        with pytest.raises(ta.OutOfMemoryError):
            await large.to_host()
    assert np.count_nonzero(await large.to_host()) == 0
    np.testing.assert_array_equal(await (await device.put(HOST)).to_host(), HOST)
    del ref, large, caught
    # Errors hold on to the frames that they passed.
    gc.collect()
    await balanced(device, 0)


@pytest.mark.slow
async def test_a_thousand_arrays_leave_nothing(device: ta.Device) -> None:
    async def round_trips(count: int) -> None:
        for number in range(count):
            host = device.host_empty(20_000) if number % 2 else np.empty(20_000)
            host[...] = number
            ref = await device.put(host)
            out = device.host_empty(20_000) if number % 3 else None
            assert (await ref.to_host(out=out))[-1] == number

    await round_trips(20)
    gc.collect()
    process = device.dispatch.process
    before = len(os.listdir("/proc/self/fd")), maps(os.getpid()), maps(process.pid)
    await round_trips(1000)
    gc.collect()
    assert len(device.state.host_pool.slabs) == 1
    assert (len(os.listdir("/proc/self/fd")), maps(os.getpid()), maps(process.pid)) == before
    await balanced(device, 0)


async def test_every_worker_has_the_slabs_and_gives_them_back(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of so little memory only 256 MiB are kept.
    monkeypatch.setattr(_host_pool, "total_bytes", lambda: 1 << 30)
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        dispatch = device.dispatch
        await until(lambda: dispatch.spares == 1)
        links = dispatch._pool._links
        before = {link.process.pid: maps(link.process.pid) for link in links}
        assert len(before) == 2
        kept = device.host_empty(40 << 20, "uint8")
        large = device.host_empty(300 << 20, "uint8")
        assert len(device.state.host_pool.slabs) == 2
        await until(lambda: all(maps(pid) >= count + 2 for pid, count in before.items()))
        del large
        await device.synchronize()
        await until(lambda: len(device.state.host_pool.slabs) == 1)
        await until(lambda: all(maps(pid) == count + 1 for pid, count in before.items()))
        # A new worker learns of the existing chunks.
        dispatch.process.kill()
        await until(lambda: device.generation == 2 and dispatch.spares == 1)
        assert not {link.process.pid for link in links} <= before.keys()
        kept[...] = np.arange(40 << 20, dtype=np.uint8)
        ref = await device.put(kept)
        np.testing.assert_array_equal(await ref.to_host(), kept)
        assert copies(device) == 1


async def test_a_worker_that_knows_a_copy_by_heart_gives_its_memory_back(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of so little memory only 256 MiB are kept.
    monkeypatch.setattr(_host_pool, "total_bytes", lambda: 1 << 30)
    async with system.open_device(BACKEND, options=options()) as device:
        ref = await device.put(HOST)
        pid = device.dispatch.process.pid
        # Its first slab stays.
        small = device.host_empty(SIZE)
        await (await device.put(small)).to_host(out=small)
        before = maps(pid)
        for _ in range(2):
            large = device.host_empty(300 << 20, "uint8")
            part = large[: HOST.nbytes].view(np.float64)
            for number in range(5):
                part[...] = number
                ref = await device.put(part)
                part[...] = 99.0
                await ref.to_host(out=part)
                assert (part == number).all()
            assert maps(pid) == before + 1
            del large, part
            await device.synchronize()
            await until(lambda: maps(pid) == before)
        # Its other memory continues to be known.
        small[...] = 5.0
        ref = await device.put(small)
        small[...] = 6.0
        await ref.to_host(out=small)
        assert (small == 5.0).all()


async def test_arrays_outlive_the_device(system: ta.System) -> None:
    device = await system.open_device(BACKEND, options=options())
    host = device.host_empty(SIZE)
    ref = await device.put(HOST)
    await ref.to_host(out=host)
    await device.close()
    np.testing.assert_array_equal(host, HOST)
    after = device.host_empty(SIZE)
    after[...] = host
    del host, ref
    gc.collect()
    np.testing.assert_array_equal(after, HOST)


async def test_in_another_thread_it_is_an_ordinary_array(device: ta.Device) -> None:
    host = await trio.to_thread.run_sync(device.host_empty, SIZE)
    assert device.state.host_pool.find(host) is None
    host[...] = HOST
    np.testing.assert_array_equal(await (await device.put(host)).to_host(), HOST)


async def test_a_lease_is_refused_at_once(device: ta.Device) -> None:
    ref = await device.put(HOST)
    with pytest.raises(ta.NotSupportedError, match="isolation='inline'"):
        async with ref.lease():
            pass
    assert device.dispatch._requests.sent == 0


async def test_so_much_is_on_its_way_at_a_time(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in the application, without host memory; a larger request runs on its own."""
    staging = device.dispatch._staging
    staging.limit = 2 * HOST.nbytes
    cut = Cut(monkeypatch)
    pending = [device.submit(Put(number * HOST)) for number in range(6)]
    large = device.submit(Put(np.concatenate([HOST] * 5)))
    await cut.wait_entered()
    assert staging.taken == taken(device) == 2 * HOST.nbytes
    assert device.dispatch._requests.waiting == 5
    # Work without it continues, also when more than the limit is taken.
    staging.limit = HOST.nbytes
    small = device.submit(ta.linalg.Nrm2(HOST[:3]))
    await small.wait()
    staging.limit = 2 * HOST.nbytes
    cut.leave.set()
    for number, put in enumerate(pending):
        np.testing.assert_array_equal(await (await put.wait()).to_host(), number * HOST)
    np.testing.assert_array_equal(await (await large.wait()).to_host(), np.concatenate([HOST] * 5))
    assert staging.taken == 0
    del pending, large, put, small
    await balanced(device, 0)


async def test_a_worker_with_a_blocked_loop_needs_no_message(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(completion=ta.SyncCompletion())) as device:
        host = device.host_empty(SIZE)
        host[...] = HOST
        for given in (host, HOST):
            ref = await device.put(given)
            np.testing.assert_array_equal(await ref.to_host(), HOST)
            back = device.host_empty(SIZE)
            await ref.to_host(out=back)
            np.testing.assert_array_equal(back, HOST)
        assert copies(device) == 0


async def test_without_device_memory_the_copied_bytes_go_back(system: ta.System) -> None:
    """It is tried again when garbage is collected, by the same way."""
    async with system.open_device(BACKEND, options=options(memory_limit=3 * HOST.nbytes)) as device:
        kept = [await device.put(HOST) for _ in range(2)]
        with pytest.raises(ta.OutOfMemoryError) as caught:
            await device.put(np.concatenate([HOST] * 2))
        assert caught.value.total == 3 * HOST.nbytes
        # It is copied at most once, and cut when it is refused.
        assert copies(device) == 3
        np.testing.assert_array_equal(await kept[1].to_host(), HOST)
        # Memory held only by garbage makes room.
        cycle: list[object] = [kept.pop()]
        cycle.append(cycle)
        del cycle
        ref = await device.put(np.concatenate([HOST] * 2))
        np.testing.assert_array_equal(await ref.to_host(), np.concatenate([HOST] * 2))
        del ref, caught
        await balanced(device, 1)


@pytest.mark.skipif(BACKEND == "cpu", reason="a thread of the lost process may still write")
async def test_a_request_for_a_host_array_fails_before_the_lost_process_ends(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Generations, "_wait_until_gone", never)
    async with system.open_device(BACKEND, options=options()) as device:
        ref = await device.put(HOST)
        # The library is open, because opening it next to a hanging operation would take as long as it does.
        await device.ask(ta.random.Bits(1, 0, (4,)))
        ta.testing.inject_fault(device, ToHost, hang=True)
        out = np.zeros_like(HOST)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(outcome, device.ask, ToHost(ref, out))
                await wait_in_flight(device, 1, MEMORY)
                ta.testing.inject_fault(device, ta.random.Bits, poison=True)
                with pytest.raises(ta.ContextLostError):
                    await device.ask(ta.random.Bits(1, 0, (4,)))
