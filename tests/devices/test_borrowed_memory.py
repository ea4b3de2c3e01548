"""A worker maps memory of other devices only for reading, and only while something is borrowed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import suppress

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from mapped_programs import Mapped

import trio_accel as ta

pytestmark = [
    pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning"),
    pytest.mark.skipif(BACKEND != "cpu", reason="memory of a GPU is not a mapping of a file"),
]
LENT, SECRET = np.full(1000, 1.5), np.full(1000, 2.5)
READ = ["map r--s", "descriptor read"]
OPTIONS = ta.DeviceOptions(isolation="process", retry=1)


@attrs.frozen
class Pair:
    """A device with two arrays, and a device with a program that looks around in its worker."""

    owner: ta.Device
    other: ta.Device
    lent: ta.AccelRef
    secret: ta.AccelRef
    program: ta.ProgramRef[Mapped]
    memory: list[int]

    async def foreign(self) -> list[str]:
        """The foreign memory of the other device's worker at the moment."""
        found: list[str] = await self.program.ask("has", self.memory)
        return found

    async def check(self) -> None:
        """The arrays of the owner are as they were."""
        np.testing.assert_array_equal(await self.lent.to_host(), LENT)
        np.testing.assert_array_equal(await self.secret.to_host(), SECRET)


@pytest.fixture
async def pair(system: ta.System) -> AsyncGenerator[Pair, None]:
    async with (
        system.open_device(BACKEND, options=OPTIONS) as owner,
        system.open_device(BACKEND, options=OPTIONS) as other,
    ):
        lent, secret = await owner.put(LENT), await owner.put(SECRET)
        memory = await (await ta.open_program(owner, Mapped)).ask("inodes")
        program = await ta.open_program(other, Mapped)
        pair = Pair(owner, other, lent, secret, program, memory)
        assert memory
        assert await pair.foreign() == []
        yield pair


async def kill(device: ta.Device) -> None:
    """Have the next worker serve."""
    generation, pid = device.generation, (await device.statistics()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with trio.fail_after(60):
        while device.generation == generation:
            with suppress(ta.ContextLostError):
                await device.zeros((1,))


async def test_memory_of_others_is_mapped_to_read_it_while_it_is_borrowed(pair: Pair) -> None:
    async with pair.other.borrow(pair.lent) as borrowed:
        assert await pair.foreign() == READ
        assert await (await ta.arrays.sum(borrowed)).item() == LENT.sum()
        assert await pair.program.ask("punch", pair.memory) == [False]
        async with pair.other.borrow(pair.secret):
            assert await pair.foreign() == READ
        assert await pair.foreign() == READ
    assert await pair.foreign() == []
    await pair.check()


async def test_code_that_writes_there_ends_only_its_own_worker(pair: Pair) -> None:
    async with pair.other.borrow(pair.lent) as borrowed:
        with pytest.raises(ta.ContextLostError):
            await pair.program.ask("overwrite", borrowed)
        assert await (await ta.arrays.sum(borrowed)).item() == LENT.sum()
    assert pair.owner.generation == 1
    await pair.check()


async def test_nothing_is_mapped_after_a_copy(pair: Pair) -> None:
    copy = await pair.lent.copy_to(pair.other)
    assert await pair.foreign() == []
    np.testing.assert_array_equal(await copy.to_host(), LENT)


async def test_a_world_maps_once_and_to_read(pair: Pair) -> None:
    async with ta.open_world([pair.owner, pair.other]) as world:
        arrays = [pair.lent, await pair.other.put(SECRET)]
        for _ in range(3):
            sums = await world.all_reduce(arrays)
            assert await pair.foreign() == READ
            np.testing.assert_array_equal(await sums[1].to_host(), LENT + SECRET)
    assert await pair.foreign() == []
    await pair.check()


async def test_the_end_of_a_world_leaves_memory_to_another_world_and_a_loan(pair: Pair) -> None:
    arrays = [pair.lent, await pair.other.put(SECRET)]
    async with ta.open_world([pair.owner, pair.other]) as one:
        await one.all_reduce(arrays)
        async with ta.open_world([pair.owner, pair.other]) as another:
            await another.all_reduce(arrays)
            async with pair.other.borrow(pair.lent) as borrowed:
                one.close()
                assert await pair.foreign() == READ
                assert await (await ta.arrays.sum(borrowed)).item() == LENT.sum()
            sums = await another.all_reduce(arrays)
            assert await pair.foreign() == READ
        assert await pair.foreign() == []
    np.testing.assert_array_equal(await sums[1].to_host(), LENT + SECRET)


@pytest.mark.parametrize("loss", ["owner", "other"])
async def test_the_same_holds_for_the_next_workers(pair: Pair, loss: str) -> None:
    async with pair.other.borrow(pair.lent) as borrowed:
        await kill(getattr(pair, loss))
        assert await (await ta.arrays.sum(borrowed)).item() == LENT.sum()
        assert await pair.foreign() == READ
    assert await pair.foreign() == []
    async with ta.open_world([pair.owner, pair.other]) as world:
        arrays = [pair.lent, await pair.other.put(SECRET)]
        await world.all_reduce(arrays)
        await kill(getattr(pair, loss))
        await world.all_reduce(arrays)
        assert await pair.foreign() == READ
    assert await pair.foreign() == []
    await pair.check()


async def test_it_is_unmapped_at_the_end_of_an_abandoned_operation(pair: Pair) -> None:
    async with pair.other.borrow(pair.lent) as borrowed:
        ta.testing.inject_fault(pair.other, "arrays.sum", delay=0.3)
        with ta.cancel_grace(0.0), trio.move_on_after(0.1) as scope:
            await ta.arrays.sum(borrowed)
        assert scope.cancelled_caught
    assert await pair.foreign() == READ
    await pair.lent.fill(1.5)
    assert await pair.foreign() == []


async def test_a_failed_operation_keeps_nothing_mapped(pair: Pair) -> None:
    async with pair.other.borrow(pair.lent) as borrowed:
        with pytest.raises(ta.ActorFailedError, match="not what was wanted"):
            await pair.program.ask("refuse", borrowed)
    assert await pair.foreign() == []


async def test_descriptors_of_the_application_do_not_grow(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        async with pair.other.borrow(pair.lent):
            pass
    assert len(os.listdir("/proc/self/fd")) == before
