"""Who has made the arrays that take a device's memory, and which libraries hold some for themselves."""

from __future__ import annotations

import random
from contextlib import suppress

import attrs
import numpy as np
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation


@attrs.frozen
class Make(ta.Request["Maker", None]):
    """Make an array, and keep it."""

    count: int


@attrs.frozen
class Drop(ta.Request["Maker", None]):
    """Let the oldest array go."""


@attrs.frozen
class MakeInNursery(ta.Request["Maker", None]):
    """Make an array in a task that the handler starts."""

    count: int


class Maker(ta.Actor):
    def __init__(self, device: ta.Device) -> None:
        self.device = device
        self.made: list[ta.AccelRef] = []

    @ta.handles(Make)
    async def make(self, message: Make) -> None:
        self.made.append(await self.device.zeros(message.count))

    @ta.handles(Drop)
    async def drop(self, message: Drop) -> None:
        del self.made[0]

    @ta.handles(MakeInNursery)
    async def make_in_nursery(self, message: MakeInNursery) -> None:
        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  # a task of its own
            nursery.start_soon(self.make, Make(message.count))


async def test_bytes_are_counted_by_the_actor_that_made_each_array(
    system: ta.System, isolation: Isolation
) -> None:
    """Against lists of sizes, while arrays come and go; and against the backend's own count."""
    dice = random.Random(7)
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        makers = [await system.spawn(Maker, device, name=f"maker-{number}") for number in range(3)]
        sizes: dict[str, list[int]] = {maker.path: [] for maker in makers}
        own: list[ta.AccelRef] = []
        for _ in range(80):
            maker = dice.choice(makers)
            if sizes[maker.path] and dice.random() < 0.4:
                await maker.ask(Drop())
                del sizes[maker.path][0]
            elif dice.random() < 0.2:
                # The caller's task makes it: no actor.
                own.append(await device.zeros(dice.choice((3, 300))))
            else:
                # Few sizes, because the address of a dropped array is the next one's.
                count = dice.choice((1, 64, 64, 1000))
                await maker.ask(Make(count))
                sizes[maker.path].append(8 * count)
            expected = {path: sum(kept) for path, kept in sizes.items() if kept}
            if own:
                expected[""] = sum(array.nbytes for array in own)
            statistics = await device.statistics()
            assert statistics.actors == expected
            assert sum(expected.values()) == statistics.memory.used


async def test_who_is_whose(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        maker = await system.spawn(Maker, device, name="maker")
        await maker.ask(MakeInNursery(10))
        assert (await device.statistics()).actors == {"": 80}
        await maker.ask(Make(5))
        await maker.ask(Drop())
        kept = await device.put(np.ones(2))
        assert (await device.statistics()).actors == {maker.path: 40, "": kept.nbytes}
        # A view shares the memory. An array written by others stays its maker's.
        view, other = kept[:1], await device.zeros(3)
        await ta.linalg.scal(2.0, other)
        assert (await device.statistics()).actors == {maker.path: 40, "": kept.nbytes + other.nbytes}
        other.release()
        assert (await device.statistics()).actors == {maker.path: 40, "": kept.nbytes}
        size = kept.nbytes
        del kept
        assert (await device.statistics()).actors == {maker.path: 40, "": size}
        assert view.shape == (1,)


async def test_lost_arrays_no_longer_count(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(100))
        ta.testing.poison(device, "for the test")
        with trio.fail_after(60):
            while device.generation == 1:
                with suppress(ta.AccelError):
                    await device.zeros(3)
        statistics = await device.statistics()
        assert sum(statistics.actors.values()) == statistics.memory.used
        assert statistics.memory.used == (0 if isolation == "inline" else x.nbytes)


async def test_workspace_is_that_of_the_libraries(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.eye(8, dtype=np.float32))
        await ta.linalg.matmul(x, x)
        await ta.linalg.nrm2(x[0])
        statistics = await device.statistics()
        held = {path: used.workspace for path, used in statistics.libraries.items() if used.workspace}
        assert sum(held.values()) == statistics.memory.workspace
        # Those of the CPU hold nothing.
        assert ("trio_accel.linalg:BlasActor" in held and sum(held.values()) > 0) is (BACKEND == "cuda")
