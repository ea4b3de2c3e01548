"""Leases: the device's own memory as a NumPy array, ordered like an operation."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from isolations import isolated
from manual_backend import ManualBackend
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices.dispatch import WorkerDispatch

pytestmark = pytest.mark.skipif(
    BACKEND != "cpu", reason="only the host's memory is a NumPy array; tests/interop has those of CUDA"
)


async def test_writes_are_seen_by_operations_and_the_other_way_round(device: ta.Device) -> None:
    ref = await device.zeros((3, 4))
    async with ref.lease(write=True) as array:
        array[...] = np.arange(12.0).reshape(3, 4)
    await ta.linalg.scal(2.0, ref[1])
    async with ref.lease() as array:
        np.testing.assert_array_equal(array[1], [8, 10, 12, 14])
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1.0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        assert memoryview(array).readonly
    async with ref.T[1:3].lease() as view:
        np.testing.assert_array_equal(view, (await ref.to_host()).T[1:3])
    low = await device.zeros((), "bfloat16")
    async with low.lease() as number:
        assert number.dtype.name == "bfloat16"


async def test_it_waits_for_earlier_writes_and_holds_later_ones_back(
    manual: ta.Device, backend: ManualBackend
) -> None:
    ref = await manual.put(np.ones(3))
    log: list[str] = []
    backend.device.is_held = True
    release = trio.Event()

    async def lease(write: bool) -> None:
        async with ref.lease(write=write) as array:
            log.append(f"{'write' if write else 'read'} {array[0]}")
            if write:
                array[:] = 7.0
            await release.wait()

    async def scale() -> None:
        await ta.linalg.scal(10.0, ref)
        log.append("scaled")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scale)
        await wait_all_tasks_blocked()
        nursery.start_soon(lease, True)
        await wait_all_tasks_blocked()
        nursery.start_soon(scale)
        await wait_all_tasks_blocked()
        assert log == []
        backend.device.release()
        await wait_all_tasks_blocked()
        # Both tasks are woken by the same completion; the lease saw its result.
        assert sorted(log) == ["scaled", "write 10.0"]
        release.set()
    assert log[2:] == ["scaled"]
    np.testing.assert_array_equal(await ref.to_host(), [70, 70, 70])


async def test_readers_do_not_hold_each_other_back(device: ta.Device) -> None:
    ref = await device.put(np.arange(3.0))
    async with ref.lease() as first, ref.lease() as second:
        assert first[1] == second[1] == 1.0
        assert await (await ta.linalg.dot(ref, ref)).item() == 5.0
        other = await device.zeros(3)
        async with other.lease(write=True) as written:
            np.copyto(written, first)
    np.testing.assert_array_equal(await other.to_host(), [0, 1, 2])


async def test_a_cancelled_or_failed_lease_leaves_nothing_behind(
    manual: ta.Device, backend: ManualBackend
) -> None:
    ref = await manual.put(np.ones(3))
    backend.device.is_held = True
    pending = manual.submit(ta.linalg.Scal(2.0, ref))
    await wait_all_tasks_blocked()
    with trio.move_on_after(0) as scope:
        async with ref.lease():
            raise AssertionError("it was being written")
    assert scope.cancelled_caught
    backend.device.release()
    await pending.wait()
    with pytest.raises(LookupError):
        async with ref.lease(write=True):
            raise LookupError
    await ta.linalg.scal(2.0, ref)
    np.testing.assert_array_equal(await ref.to_host(), [4, 4, 4])
    ref.release()
    with pytest.raises(ta.StaleRefError, match="lease: its memory was released"):
        async with ref.lease():
            pass


async def test_an_array_released_while_its_lease_waits(manual: ta.Device, backend: ManualBackend) -> None:
    ref = await manual.zeros(3)
    backend.device.is_held = True

    async def lease() -> None:
        with pytest.raises(ta.StaleRefError, match="lease: its memory was released"):
            async with ref.lease(write=True):
                raise AssertionError

    async with trio.open_nursery() as nursery:
        for task in (lambda: ta.linalg.scal(2.0, ref), lease):
            nursery.start_soon(task)
            await wait_all_tasks_blocked()
        ref.release()
        backend.device.release()
    await manual.synchronize()
    assert (await manual.statistics()).memory.blocks == 0


@isolated
async def test_an_array_released_while_its_lease_waits_for_others(
    system: ta.System, isolation: Isolation
) -> None:
    """The worker learns of the lease when the array is released."""
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation=isolation, in_flight=1)
    ) as device:
        refs, ended = [await device.zeros(3) for _ in range(2)], list[str]()
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.5)

        async def lease() -> None:
            with pytest.raises(ta.StaleRefError, match="lease: its memory was released"):
                async with refs[1].lease(write=True):
                    raise AssertionError
            ended.append("lease")

        async def add() -> None:
            # It is still queued.
            with pytest.raises(ta.StaleRefError, match="y: its memory was released"):
                await ta.linalg.axpy(1.0, refs[0], refs[1])
            ended.append("add")

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                # Each hands over in its first turn, long before the delay ends.
                for task in (lambda: ta.linalg.scal(2.0, refs[0]), add, lease):
                    nursery.start_soon(task)
                    await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
                refs[1].release()
        assert sorted(ended) == ["add", "lease"]
        refs.clear()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 0


async def test_an_array_released_while_leased_is_freed_afterwards(device: ta.Device) -> None:
    ref = await device.put(np.ones(3))
    async with ref.lease() as array:
        ref.release()
        assert (await device.statistics()).memory.blocks == 1
        assert array.sum() == 3.0
        del array
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 0


async def test_an_array_released_before_its_operation_is_launched(device: ta.Device) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    async with y.lease(write=True):
        pending = device.submit(ta.linalg.Axpy(1.0, x, y))
        x.release()
        # A worker learns of the release with the next request.
        await device.put(np.ones(3))
    with pytest.raises(ta.StaleRefError, match=r"linalg\.Axpy: x: its memory was released") as caught:
        await pending.wait()
    assert caught.value.generation == device.generation == 1


async def test_there_are_no_streams_of_others_on_the_cpu(device: ta.Device) -> None:
    ref = await device.put(np.ones(3))
    with pytest.raises(ta.NotSupportedError, match="lease: stream: "):
        async with ref.lease(stream=1):
            pass
    async with ref.lease(stream=None) as array:
        assert array.tolist() == [1, 1, 1]


async def test_a_waiting_lease_fails_with_the_lost_context(manual: ta.Device, backend: ManualBackend) -> None:
    ref = await manual.put(np.ones(3))
    backend.device.is_held = True
    pending = manual.submit(ta.linalg.Scal(2.0, ref))
    await wait_all_tasks_blocked()

    async def lease() -> None:
        with pytest.raises(ta.ContextLostError, match="lost while this operation was waited for"):
            async with ref.lease():
                pass

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lease)
            await wait_all_tasks_blocked()
            manual.dispatch.poison("by a test")
    with pytest.raises(ta.ContextLostError, match="while this operation was in flight"):
        await pending.wait()


async def test_an_array_can_be_copied_to_another_device(system: ta.System, device: ta.Device) -> None:
    async with system.open_device(BACKEND, options=INLINE) as other:
        host = np.arange(6.0).reshape(2, 3)
        there = await (await device.put(host)).T.copy_to(other)
        assert there.device is other
        np.testing.assert_array_equal(await there.to_host(), host.T)


async def test_it_waits_for_its_turn_and_holds_later_writers_back(
    system: ta.System, isolation: Isolation
) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        ref = await device.put(np.ones(3))
        await ta.linalg.scal(1.0, ref)
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.1)
        async with trio.open_nursery() as nursery:
            first = device.submit(ta.linalg.Scal(10.0, ref))
            async with ref.lease(write=True) as array:
                assert array.tolist() == [10, 10, 10]
                assert first.is_done
                later = device.submit(ta.linalg.Scal(2.0, ref))
                seen: list[float] = []

                async def read() -> None:
                    async with ref.lease() as other:
                        seen.append(float(other[0]))

                nursery.start_soon(read)
                # Neither the reader nor the writer begins, however much is done elsewhere.
                elsewhere = await device.put(np.ones(3))
                for _ in range(20):
                    await ta.fft.fft(elsewhere)
                assert not later.is_done
                assert not seen
                array[:] = 7.0
            await later.wait()
        assert seen == [14.0]
        np.testing.assert_array_equal(await ref.to_host(), [14, 14, 14])


@isolated
async def test_it_survives_the_death_of_the_worker(device: ta.Device) -> None:
    """The holder continues, and waiting requests keep waiting, for another worker."""
    written = await device.put(np.arange(4.0))
    read = await device.put(np.arange(20_000.0))
    async with written.lease(write=True) as mine, read.lease() as shown:
        mine[0] = 5.0
        later = device.submit(ta.linalg.Scal(2.0, written))
        assert isinstance(device.dispatch, WorkerDispatch)
        assert device.dispatch.process is not None
        device.dispatch.process.kill()
        other = await device.put(np.ones(2))  # by the next worker
        assert device.generation == 2
        np.testing.assert_allclose(await (await ta.fft.fft(other)).to_host(), [2, 0], atol=1e-12)
        assert mine.tolist() == [5, 1, 2, 3]
        mine[1] = 6.0
        assert not later.is_done
        np.testing.assert_array_equal(await (await read.copy()).to_host(), shown)
    await later.wait()
    np.testing.assert_array_equal(await written.to_host(), [10, 12, 4, 6])
    np.testing.assert_array_equal(await read.to_host(), np.arange(20_000.0))


@isolated
async def test_a_waiting_lease_of_a_dead_worker_is_granted_by_the_next(device: ta.Device) -> None:
    ref = await device.put(np.ones(3))
    other = await device.put(np.ones(3))
    ta.testing.inject_fault(device, ta.fft.Fft, hang=True)
    pending = device.submit(ta.fft.Fft(ref))
    granted: list[float] = []

    async def lease() -> None:
        async with ref.lease(write=True) as array:
            granted.append(float(array[0]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lease)
        with trio.fail_after(60):
            while (await device.statistics()).in_flight < 1:
                pass
        await ta.linalg.scal(3.0, other)
        assert not granted
        assert isinstance(device.dispatch, WorkerDispatch)
        assert device.dispatch.process is not None
        device.dispatch.process.kill()
    assert granted == [1.0]
    with pytest.raises(ta.ContextLostError):
        await pending.wait()
    np.testing.assert_array_equal(await other.to_host(), [3, 3, 3])
