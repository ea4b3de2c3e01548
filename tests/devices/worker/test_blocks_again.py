"""Arrays in blocks that held others before: each has its own values, whatever ends in between."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND
from isolated import options, replace_worker, wait_in_flight
from processes import until
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation

NO = ta.LibraryError("no", library="blas", code="no")
# All but the last are equally large, so that facts known of an array do not pass to the next one.
SHAPES = [(4, 4), (4, 4), (2, 8), (16,), (2, 3)]


async def test_a_program_that_drops_its_results_has_one_block_for_all(
    system: ta.System, isolation: Isolation
) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        host = np.arange(9.0).reshape(3, 3)
        x, y = await device.put(host), await device.put(np.eye(3))
        seen: set[int] = set()
        for _ in range(5):
            product = await ta.linalg.matmul(x, y)
            np.testing.assert_array_equal(await product.to_host(), host)
            seen.add(product.block.id)
            del product
        assert len(seen) == 1
        assert (await device.statistics()).memory.blocks == 2


@pytest.mark.parametrize("how", ["dropped", "released"])
async def test_a_block_in_flight_becomes_no_other(system: ta.System, isolation: Isolation, how: str) -> None:
    changes = ta.DeviceOptions(isolation=isolation, close_grace=0.2)
    async with system.open_device(BACKEND, options=changes) as device:
        x = await device.put(np.ones(5))
        # A library loaded only now would wait for the held stream.
        await ta.linalg.scal(1.0, x)
        number = x.block.id
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        pending = device.submit(ta.linalg.Scal(2.0, x))
        await wait_in_flight(device)
        if how == "released":
            x.release()
        del x
        other = await device.put(np.zeros(5))
        assert other.block.id != number
        assert not pending.is_done


async def test_withdrawn_work_does_not_delay_its_block(system: ta.System, isolation: Isolation) -> None:
    async with system.open_device(BACKEND, options=options(isolation=isolation, cancel_grace=5.0)) as device:
        if not (isolation == "inline" or device.state.backend.shares_memory_with_host):
            pytest.skip("its memory cannot be leased from a worker")
        x, host = await device.put(np.arange(5.0)), np.full(5, 2.0)
        first = await device.put(host)
        number = first.block.id
        async with x.lease(write=True):
            del first
            with trio.move_on_after(0.03) as scope:
                await x.copy()
            assert scope.cancelled_caught
            await wait_all_tasks_blocked()
            gc.collect()
            # It does not touch the leased array, nor does its target.
            with trio.fail_after(60):
                other = await device.put(host)
            assert other.block.id == number
            assert (await other.to_host() == host).all()
        if isolation == "process":
            # A withdrawn one is answered without a place.
            await replace_worker(device)
            assert (await other.to_host() == host).all()


async def test_failed_work_leaves_no_reservation(system: ta.System) -> None:
    """The memory of its result is another's when the worker dies and the next one gets the addresses."""
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.eye(4))
        first = await ta.linalg.matmul(x, x)
        number = first.block.id
        del first
        ta.testing.inject_fault(device, ta.linalg.Matmul, fail=NO)
        with pytest.raises(ta.LibraryError) as caught:
            await ta.linalg.matmul(x, x)
        assert number not in device.dispatch._chunks.blocks
        others = [await device.put(np.full((4, 4), float(value))) for value in range(6)]
        await replace_worker(device)
        for value, other in enumerate(others):
            assert (await other.to_host() == value).all()
        # It has lived until here, and with it what its frames hold.
        del caught


async def test_an_array_in_a_reused_block_outlives_the_worker(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        x, y = await device.put(np.eye(4) * 3), await device.put(np.eye(4) * 2)
        first = await ta.linalg.matmul(x, x)
        number, place = first.block.id, device.dispatch._chunks.blocks[first.block.id]
        del first
        second = await ta.linalg.matmul(x, y)
        # Its answer does not mention the address.
        assert second.block.id == number
        assert device.dispatch._chunks.blocks[number] == place
        await replace_worker(device)
        assert (await second.to_host() == np.eye(4) * 6).all()
        assert device.dispatch._chunks.blocks[number] == place


async def test_an_unfinished_block_is_not_offered_to_the_next_worker(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.eye(4))
        first = await ta.linalg.matmul(x, x)
        number = first.block.id
        del first
        ta.testing.inject_fault(device, ta.linalg.Matmul, hang=True)
        pending = device.submit(ta.linalg.Matmul(x, x))
        assert pending.value.block.id == number
        await wait_in_flight(device)
        generation = device.generation
        device.dispatch.process.kill()
        with pytest.raises(ta.ContextLostError):
            await pending.wait()
        await until(lambda: device.generation > generation)
        assert number not in device.dispatch._chunks.blocks
        others = [await device.put(np.full((4, 4), float(value))) for value in range(6)]
        for value, other in enumerate(others):
            assert (await other.to_host() == value).all()
        with pytest.raises(ta.StaleRefError, match="spoiled"):
            await pending.value.to_host()


class Model:
    """Arrays of the device, and their expected contents."""

    def __init__(self, device: ta.Device, seed: int, *actions: str) -> None:
        self.device: ta.Device = device
        self.actions: list[str] = ["put", "put", "product", "drop", "drop", "release", "submit", *actions]
        self.random: random.Random = random.Random(seed)
        self.arrays: list[tuple[ta.AccelRef, npt.NDArray[Any]]] = []

    async def step(self) -> None:
        action = self.random.choice(self.actions)
        if action == "put" or not self.arrays:
            shape = self.random.choice(SHAPES)
            host = np.full(shape, self.random.randrange(1000), self.random.choice(["float64", "int64"]))
            self.arrays.append((await self.device.put(host), host))
            return
        ref, host = self.arrays[self.random.randrange(len(self.arrays))]
        if action in ("product", "submit") and host.shape == (4, 4) and host.dtype == np.float64:
            product: Any
            if action == "product":
                product = await ta.linalg.matmul(ref, np.eye(4))
            else:
                product = self.device.submit(ta.linalg.Matmul(ref, np.eye(4))).value
            self.arrays.append((product, host))
        elif action == "invalidate":
            ta.testing.inject_fault(self.device, ta.linalg.Matmul, fail=NO)
            with pytest.raises(ta.LibraryError):
                await self.device.ask(ta.linalg.Matmul(np.eye(4), np.eye(4)))
        elif action in ("drop", "release"):
            self.arrays = [pair for pair in self.arrays if pair[0] is not ref]
            if action == "release":
                # A submission that has not begun would have lost its array.
                await self.device.synchronize()
                ref.release()

    async def check(self) -> None:
        assert len({ref.block.id for ref, _ in self.arrays}) == len(self.arrays)
        for ref, host in self.arrays:
            np.testing.assert_array_equal(await ref.to_host(), host)


@pytest.mark.parametrize("seed", range(6))
async def test_random_programs_with_dying_workers(system: ta.System, seed: int) -> None:
    async with system.open_device(BACKEND, options=options(spares=1, retry=100)) as device:
        model = Model(device, seed, "invalidate")
        for number in range(90):
            await model.step()
            if number % 30 == 29:
                await device.synchronize()
                generation = device.generation
                device.dispatch.process.kill()
                await model.check()
                # If there is no array, nobody has waited for it.
                await until(lambda before=generation: device.generation > before)


async def test_programs_at_random_side_by_side(system: ta.System, isolation: Isolation) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:

        async def program(seed: int) -> None:
            model = Model(device, seed)
            for number in range(60):
                await model.step()
                if number % 20 == 19:
                    await model.check()

        async with trio.open_nursery() as nursery:
            for seed in range(5):
                nursery.start_soon(program, seed)
