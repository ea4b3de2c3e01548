"""Operations read another device's arrays in place; and the effects of a loss of either device."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import cast

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.devices import lend

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

ISOLATIONS = ("inline", "process")
HOST = np.random.default_rng(38).normal(size=(40, 30))


@attrs.frozen
class Pair:
    """A device with an array, and a device that borrows it."""

    owner: ta.Device
    other: ta.Device
    array: ta.AccelRef


@asynccontextmanager
async def open_pair(system: ta.System, owner: str, other: str) -> AsyncGenerator[Pair, None]:
    options = [ta.DeviceOptions(isolation=cast("ta.Isolation", one)) for one in (owner, other)]
    async with (
        system.open_device(BACKEND, options=options[0]) as a,
        system.open_device(BACKEND, options=options[1]) as b,
    ):
        yield Pair(a, b, await a.put(HOST))


# Devices whose memory operations of a second device can read; a worker cannot map the program's memory.
IN_PLACE = (("process", "process"), ("inline", "inline"), ("process", "inline"))


@pytest.fixture(params=IN_PLACE, ids="-".join)
async def pair(request: pytest.FixtureRequest, system: ta.System) -> AsyncGenerator[Pair, None]:
    async with open_pair(system, *request.param) as pair:
        yield pair


@pytest.fixture
async def workers(system: ta.System) -> AsyncGenerator[Pair, None]:
    async with open_pair(system, *IN_PLACE[0]) as pair:
        yield pair


@pytest.fixture(params=[(a, b) for a in ISOLATIONS for b in ISOLATIONS], ids="-".join)
async def any_pair(request: pytest.FixtureRequest, system: ta.System) -> AsyncGenerator[Pair, None]:
    async with open_pair(system, *request.param) as pair:
        yield pair


async def pid_of(device: ta.Device) -> int:
    pid = (await device.statistics()).pid
    assert pid != os.getpid()
    return pid


async def lose(device: ta.Device) -> None:
    """Have the device lose its context, and get the next."""
    generation = device.generation
    if device.isolation == "process":
        os.kill(await pid_of(device), signal.SIGKILL)
    else:
        ta.testing.poison(device)
    with trio.fail_after(60):
        while device.generation == generation:
            with suppress(ta.ContextLostError):
                await device.zeros((1,))


async def used(device: ta.Device) -> int:
    await device.synchronize()
    return (await device.statistics()).memory.used


async def test_operations_of_the_other_device_read_it(any_pair: Pair) -> None:
    pair = any_pair
    before = await used(pair.other)
    async with pair.other.borrow(pair.array) as borrowed:
        assert borrowed.device is pair.other
        assert (borrowed.shape, borrowed.dtype) == (HOST.shape, ta.DType.float64)
        product = await ta.linalg.matmul(borrowed, borrowed.T)
        part = await ta.arrays.sum(borrowed[3:9, ::-1], axis=0)
        np.testing.assert_array_equal(await borrowed.to_host(), HOST)
        again = await borrowed.copy_to(pair.owner)
    np.testing.assert_allclose(await product.to_host(), HOST @ HOST.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(await part.to_host(), HOST[3:9, ::-1].sum(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(await again.to_host(), HOST)
    product.release()
    part.release()
    assert await used(pair.other) == before


async def test_reachable_memory_is_not_copied(pair: Pair) -> None:
    before = await used(pair.other)
    async with pair.other.borrow(pair.array) as borrowed:
        assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
        assert await used(pair.other) == before
        async with pair.other.borrow(pair.array[3]) as row:
            assert await (await ta.arrays.max(row)).item() == HOST[3].max()


async def test_a_view_is_borrowed_unchanged(pair: Pair) -> None:
    async with pair.other.borrow(pair.array[5:20, 3].reshape(5, 3)) as borrowed:
        np.testing.assert_array_equal(
            await (await borrowed.copy()).to_host(), np.ascontiguousarray(HOST[5:20, 3]).reshape(5, 3)
        )


async def test_it_is_read_only_and_back_at_the_end(pair: Pair) -> None:
    async with pair.other.borrow(pair.array) as borrowed:
        for write in (borrowed.fill(0.0), ta.arrays.abs(borrowed, out=borrowed), borrowed.assign(1.0)):
            with pytest.raises(ValueError, match=r"borrowed from .*, and can only be read"):
                await write
        with pytest.raises(ValueError, match="release: the array is borrowed"):
            borrowed.release()
        with pytest.raises(ValueError, match="lease: the array is borrowed"):
            async with borrowed.lease(write=True):
                pass
    for use in (ta.arrays.abs(borrowed), borrowed.to_host(), borrowed.copy_to(pair.owner)):
        with pytest.raises(ta.StaleRefError, match="was given back"):
            await use
    np.testing.assert_array_equal(await pair.array.to_host(), HOST)


async def test_writes_of_its_own_device_wait(pair: Pair) -> None:
    filled = trio.Event()
    other = await pair.owner.put(np.ones(3))

    async def fill() -> None:
        await pair.array.fill(7.0)
        filled.set()

    async with trio.open_nursery() as nursery:
        async with pair.other.borrow(pair.array) as borrowed:
            nursery.start_soon(fill)
            await wait_all_tasks_blocked()
            # Operations of the owner on other arrays continue, in other libraries than the library of the
            # write.
            await ta.arrays.max(other)
            total = await (await ta.arrays.sum(borrowed)).item()
            assert not filled.is_set()
        with trio.fail_after(60):
            await filled.wait()
    assert total == pytest.approx(HOST.sum())
    assert (await pair.array.to_host() == 7.0).all()


@pytest.mark.parametrize("loss", ["killed", "poisoned"])
async def test_it_is_there_when_its_owner_is_lost(workers: Pair, loss: str) -> None:
    pair = workers
    async with pair.other.borrow(pair.array) as borrowed:
        if loss == "killed":
            os.kill(await pid_of(pair.owner), signal.SIGKILL)
        else:
            ta.testing.poison(pair.owner)
        for _ in range(3):
            assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
        while pair.owner.generation == 1:
            # One of them finds it.
            with suppress(ta.ContextPoisonedError):
                await pair.owner.zeros((1,))
        assert await (await ta.arrays.max(borrowed)).item() == HOST.max()
    # The hold is also over in the next worker.
    with trio.fail_after(60):
        await pair.array.fill(1.0)
    assert (await pair.array.to_host() == 1.0).all()


async def test_it_can_be_read_after_the_loss_of_an_inline_owner(system: ta.System) -> None:
    async with open_pair(system, "inline", "inline") as pair:
        async with pair.other.borrow(pair.array) as borrowed:
            await lose(pair.owner)
            # Blocks of the next context have other addresses.
            again = [await pair.owner.full(HOST.shape, 3.0) for _ in range(4)]
            for _ in range(3):
                assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
        with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
            await pair.array.to_host()
        with pytest.raises(ta.StaleRefError, match="lost with generation 1"):
            async with pair.other.borrow(pair.array):
                pytest.fail("it is gone")
        async with pair.other.borrow(again[0]) as borrowed:
            assert await (await ta.arrays.max(borrowed)).item() == 3.0
        with trio.fail_after(60):
            await again[0].fill(1.0)


async def test_it_is_lost_with_both_of_two_inline_devices(system: ta.System) -> None:
    async with open_pair(system, "inline", "inline") as pair:
        async with pair.other.borrow(pair.array) as borrowed:
            await lose(pair.owner)
            await lose(pair.other)
            with pytest.raises(ta.StaleRefError, match="its memory was lost with generation 1"):
                await ta.arrays.sum(borrowed)
        assert await used(pair.other) == 0


async def test_the_next_context_of_the_borrower_has_it(pair: Pair) -> None:
    async with pair.other.borrow(pair.array) as borrowed:
        assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
        await lose(pair.other)
        assert pair.other.generation == 2
        assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
    with trio.fail_after(60):
        await pair.array.fill(1.0)


async def test_a_repeated_operation_finds_it(system: ta.System) -> None:
    """Requests put back reach the next worker after the arrays they read, in any order of the queue."""
    options = ta.DeviceOptions(isolation="process", retry=2)
    async with (
        system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as owner,
        system.open_device(BACKEND, options=options) as other,
    ):
        array, own = await owner.put(HOST), await other.put(HOST)
        await ta.arrays.sum(own)
        sums: list[float] = []

        async def add(x: ta.AccelRef) -> None:
            sums.append(await (await ta.arrays.sum(x)).item())

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                ta.testing.inject_fault(other, "arrays.sum", delay=1.0)
                nursery.start_soon(add, own)
                await wait_all_tasks_blocked()
                async with other.borrow(array) as borrowed, trio.open_nursery() as readers:
                    readers.start_soon(add, borrowed)
                    readers.start_soon(add, borrowed[:])
                    await wait_all_tasks_blocked()
                    os.kill(await pid_of(other), signal.SIGKILL)
        assert sums == pytest.approx([HOST.sum()] * 9)


async def test_a_repeated_inline_operation_finds_it(system: ta.System) -> None:
    """Arrays borrowed by an inline device survive its context; its own arrays do not."""
    options = ta.DeviceOptions(isolation="inline", retry=1)
    async with (
        system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as owner,
        system.open_device(BACKEND, options=options) as other,
    ):
        array, own = await owner.put(HOST), await other.put(HOST)
        ta.testing.inject_fault(other, "arrays.sum", poison=True)
        async with other.borrow(array) as borrowed:
            assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
            assert other.generation == 2
        with pytest.raises(ta.StaleRefError):
            await ta.arrays.sum(own)
        ta.testing.inject_fault(other, "devices.PeerCopy", poison=True)
        copy = await array.copy_to(other)
        assert other.generation == 3
        np.testing.assert_array_equal(await copy.to_host(), HOST)
        ta.testing.inject_fault(other, "arrays.add", poison=True)
        async with other.borrow(array) as borrowed:
            with pytest.raises(ta.ContextLostError):
                await ta.arrays.add(borrowed, copy)


async def test_a_loss_at_the_end_gives_it_back(pair: Pair) -> None:
    async with pair.other.borrow(pair.array):
        if pair.other.isolation == "process":
            os.kill(await pid_of(pair.other), signal.SIGKILL)
        else:
            ta.testing.poison(pair.other)
    with trio.fail_after(60):
        await pair.array.fill(1.0)
    with suppress(ta.ContextLostError):
        # The loss of an inline device may not be seen yet.
        await pair.other.zeros((1,))
    # Waits for the next context.
    np.testing.assert_array_equal(await (await pair.array.copy_to(pair.other)).to_host(), np.ones_like(HOST))


async def test_memory_returned_at_a_loss_is_not_held_by_the_next_worker(workers: Pair) -> None:
    """A device that lends an array to itself, as in collectives, and dies before it learns of the end."""
    pair = workers
    pid = await pid_of(pair.owner)
    async with lend("test", [pair.array], [pair.owner]) as lent, lent.to(pair.owner):
        os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    with trio.fail_after(60):
        await pair.array.fill(1.0)
    assert (await pair.array.to_host() == 1.0).all()


async def test_a_cancelled_wait_leaves_nothing(pair: Pair) -> None:
    ta.testing.inject_fault(pair.owner, "devices.Fill", delay=0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.array.fill, 1.0)
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.05) as scope:
            async with pair.other.borrow(pair.array):
                pytest.fail("it is being written")
        assert scope.cancelled_caught
    with trio.fail_after(60):
        await pair.array.fill(1.0)
    async with pair.other.borrow(pair.array) as borrowed:
        assert await (await ta.arrays.max(borrowed)).item() == 1.0


async def test_a_reader_that_runs_on_keeps_it(pair: Pair) -> None:
    """A departed caller leaves its operation: the array is not changed before the operation ends."""
    async with pair.other.borrow(pair.array) as borrowed:
        await ta.arrays.sum(borrowed)  # compiled kernels are kept; a cancelled compilation launches nothing
        ta.testing.inject_fault(pair.other, "arrays.sum", delay=0.5)
        start = trio.current_time()
        with ta.cancel_grace(0.0), trio.move_on_after(0.1) as scope:
            await ta.arrays.sum(borrowed)
        assert scope.cancelled_caught
    await pair.array.fill(1.0)
    assert trio.current_time() - start > 0.5


@pytest.mark.skipif(BACKEND != "cpu", reason="memory of a GPU is not a mapping of a file")
async def test_no_mapping_and_no_descriptor_is_left(pair: Pair) -> None:
    pid = (await pair.other.statistics()).pid or os.getpid()

    def mappings() -> int:
        with open(f"/proc/{pid}/maps") as file:
            return sum("memfd" in line for line in file)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{pid}/fd")) + len(os.listdir("/proc/self/fd"))

    await (await ta.arrays.sum(await pair.other.zeros((3,)))).item()
    before = mappings(), descriptors()
    large = await pair.owner.zeros((40 << 20,), "uint8")
    for _ in range(20):
        async with pair.other.borrow(large) as borrowed:
            assert await (await ta.arrays.max(borrowed)).item() == 0
    await pair.owner.close()
    with trio.fail_after(60):
        while (mappings(), descriptors()) > before:  # noqa: ASYNC110  # another process
            await trio.sleep(0.01)


async def test_its_memory_stays_while_it_is_borrowed_from_a_closed_device(pair: Pair) -> None:
    async with pair.other.borrow(pair.array) as borrowed:
        assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
        await pair.owner.close()
        # A newly opened file may have the number of a closed descriptor.
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        for _ in range(2):
            assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
            if pair.owner.isolation == "process":
                await lose(pair.other)
        for descriptor in opened:
            os.close(descriptor)
    with pytest.raises(ta.StaleRefError):
        await borrowed.copy()


async def test_many_borrow_it_at_once(pair: Pair) -> None:
    sums: list[float] = []

    async def read(device: ta.Device) -> None:
        async with device.borrow(pair.array) as borrowed:
            sums.append(await (await ta.arrays.sum(borrowed)).item())

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(read, pair.other)
    assert sums == pytest.approx([HOST.sum()] * 8)
    await pair.array.fill(0.0)


async def test_an_operation_begun_before_the_end_reads_it_to_its_end(pair: Pair) -> None:
    """And what waits for room is refused; the owner may write to the array when all of it is over."""
    copies: list[ta.AccelRef] = []
    refused: list[ta.StaleRefError] = []

    async def copy() -> None:
        try:
            copies.append(await borrowed.copy())
        except ta.StaleRefError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        async with pair.other.borrow(pair.array) as borrowed:
            await borrowed.copy()  # opens the library, so that the next ones begin at once
            ta.testing.inject_fault(pair.other, "devices.Copy", delay=0.2)
            for _ in range(80):
                nursery.start_soon(copy)
            await wait_all_tasks_blocked()
        with pytest.raises(ta.StaleRefError, match="was given back"):
            await borrowed.copy()
        await pair.array.fill(1.0)
        assert copies
    assert len(copies) + len(refused) == 80
    for one in copies:
        np.testing.assert_array_equal(await one.to_host(), HOST)


async def test_a_closing_device_gives_back_its_borrowed_arrays(pair: Pair) -> None:
    async with pair.other.borrow(pair.array) as borrowed:
        ta.testing.inject_fault(pair.other, "arrays.sum", delay=0.2)
        with ta.cancel_grace(0.0), trio.move_on_after(0.05):
            await ta.arrays.sum(borrowed)
    await pair.other.close()
    with trio.fail_after(60):
        await pair.array.fill(1.0)


async def test_two_devices_that_read_and_write_each_other_s_arrays_do_not_wait_for_ever(pair: Pair) -> None:
    back = pair.owner if pair.owner.isolation == pair.other.isolation else pair.other
    array = await pair.other.put(HOST)

    async def read(device: ta.Device, ref: ta.AccelRef) -> None:
        for _ in range(5):
            async with device.borrow(ref) as borrowed:
                await ta.arrays.sum(borrowed)

    async def write(ref: ta.AccelRef) -> None:
        for _ in range(5):
            await ref.fill(2.0)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read, pair.other, pair.array)
                nursery.start_soon(write, pair.array)
                nursery.start_soon(read, back, array)
                nursery.start_soon(write, array)
    for ref in (pair.array, array):
        assert (await ref.to_host() == 2.0).all()


@pytest.mark.skipif(not IS_STAND_IN, reason="the GPUs of the stand-in reach one another if they are told to")
@pytest.mark.parametrize("peers", ["-1/1-", "--/--"], ids=["reached", "apart"])
async def test_two_gpus(system: ta.System, monkeypatch: pytest.MonkeyPatch, peers: str) -> None:
    monkeypatch.setenv("STAND_IN_PEERS", peers)
    options = ta.DeviceOptions(isolation="inline")
    async with (
        system.open_device("cuda:0", options=options) as owner,
        system.open_device("cuda:1", options=options) as other,
    ):
        array = await owner.put(HOST)
        before = await used(other)
        async with other.borrow(array) as borrowed:
            copied = await used(other) - before
            assert copied == (0 if "1" in peers else array.nbytes)
            assert await (await ta.arrays.sum(borrowed)).item() == pytest.approx(HOST.sum())
        assert await used(other) == before
        np.testing.assert_array_equal(await (await array.copy_to(other)).to_host(), HOST)


async def test_bad_input(pair: Pair) -> None:
    with pytest.raises(TypeError, match="borrow: ref must be an AccelRef of another device, got ndarray"):
        async with pair.other.borrow(HOST):  # type: ignore[arg-type]
            pass
    gone = await pair.owner.put(HOST)
    gone.release()
    with pytest.raises(ta.StaleRefError, match="borrow: its memory was released"):
        async with pair.other.borrow(gone):
            pass
    await pair.other.close()
    with pytest.raises(ta.DeviceLostError):
        async with pair.other.borrow(pair.array):
            pass
    await pair.array.fill(1.0)
    await pair.owner.close()
    with pytest.raises((ta.DeviceLostError, ta.StaleRefError)):
        async with pair.other.borrow(pair.array):
            pass
