"""`Shared`: versions that only rise, writers one at a time, and leases of writers that die, hang or leave."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.agents import LeaseExpiredError, Shared, Version, VersionConflictError

pytestmark = pytest.mark.no_device


async def write(
    shared: Shared[Any], value: object, then: Callable[[], Awaitable[object]], *, lease: float = 1.0
) -> None:
    """Set a value, and then do something else."""
    async with shared.write(lease=lease) as draft:
        draft.value = value
        await then()


async def fail() -> None:
    await trio.lowlevel.checkpoint()
    raise OSError("full")


async def test_a_change_makes_a_version_and_an_unchanged_block_does_not() -> None:
    shared = Shared[tuple[int, ...]]((1,))
    first = shared.read()
    async with shared.write(lease=1) as draft:
        assert draft.version == 1
        assert draft.value == (1,)
        assert not draft.is_set
        draft.value += (2,)
        assert draft.is_set
        assert shared.read() is first
    assert first == Version(1, (1,))
    assert shared.read() == Version(2, (1, 2))
    async with shared.write(lease=1):
        pass
    assert shared.read().number == 2


async def test_after_an_error_nothing_has_changed() -> None:
    shared = Shared(1)
    with pytest.raises(OSError, match="full"):
        await write(shared, 2, fail)
    assert shared.read() == Version(1, 1)
    async with shared.write(lease=1) as draft:
        draft.value = 3
    assert shared.read() == Version(2, 3)


async def test_a_lease_cancels_its_block(autojump_clock: MockClock) -> None:
    shared, begun = Shared(1), trio.current_time()
    with pytest.raises(LeaseExpiredError, match="longer than its lease of 2 s"):
        await write(shared, 2, trio.sleep_forever, lease=2)
    assert trio.current_time() - begun == 2
    assert shared.read() == Version(1, 1)


async def test_waiting_for_the_turn_does_not_count(autojump_clock: MockClock) -> None:
    shared = Shared(list[int]())

    async def append(number: int) -> None:
        async with shared.write(lease=1) as draft:
            await trio.sleep(0.9)
            draft.value = [*draft.value, number]

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(append, number)
            await wait_all_tasks_blocked()
    # In the order in which they asked.
    assert shared.read() == Version(21, [*range(20)])


async def test_a_waiting_writer_that_leaves_is_skipped(autojump_clock: MockClock) -> None:
    shared = Shared(0)
    scope = trio.CancelScope()

    async def leave() -> None:
        with scope:
            await write(shared, 1, trio.lowlevel.checkpoint)

    async with trio.open_nursery() as nursery, shared.write(lease=5):
        nursery.start_soon(leave)
        await wait_all_tasks_blocked()
        nursery.start_soon(write, shared, 2, trio.lowlevel.checkpoint)
        await wait_all_tasks_blocked()
        scope.cancel()
        await wait_all_tasks_blocked()
    assert shared.read() == Version(2, 2)


async def test_a_writer_that_cannot_be_cancelled_holds_nobody_up(autojump_clock: MockClock) -> None:
    shared = Shared(0)
    refused: list[LeaseExpiredError] = []

    async def hang() -> None:
        try:
            async with shared.write(lease=2) as draft:
                with trio.CancelScope(shield=True):
                    await trio.sleep(100)
                draft.value = -1
        except LeaseExpiredError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hang)
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        async with shared.write(lease=200) as draft:
            assert trio.current_time() - begun == 2
            await trio.sleep(150)
            assert refused
            draft.value = 7
    assert shared.read() == Version(2, 7)


async def test_a_block_that_holds_the_loop_beyond_its_lease_is_refused() -> None:
    shared = Shared(0)

    async def hold_the_loop() -> None:
        # clock: a longer pause only makes it surer
        time.sleep(0.002)  # noqa: ASYNC251  # the fault under test

    with pytest.raises(LeaseExpiredError):
        await write(shared, 1, hold_the_loop, lease=0.001)
    assert shared.read() == Version(1, 0)


async def test_replace_compares_the_version(autojump_clock: MockClock) -> None:
    shared = Shared("a")
    assert await shared.replace("b", version=1) == Version(2, "b")
    with pytest.raises(
        VersionConflictError, match=r"version 1 is not the current one, 2; read again"
    ) as caught:
        await shared.replace("c", version=1)
    assert caught.value.current == 2
    async with trio.open_nursery() as nursery, shared.write(lease=5) as draft:

        async def replace() -> None:
            with pytest.raises(VersionConflictError):
                await shared.replace("d", version=2)

        nursery.start_soon(replace)
        await wait_all_tasks_blocked()
        draft.value = "e"
    assert shared.read() == Version(3, "e")


async def test_compare_and_set_loses_no_addition() -> None:
    shared = Shared(0)

    async def add() -> None:
        for _ in range(20):
            while True:
                version = shared.read()
                await trio.lowlevel.checkpoint()
                try:
                    await shared.replace(version.value + 1, version=version.number)
                except VersionConflictError:
                    continue
                break

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(add)
    assert shared.read() == Version(101, 100)


async def test_a_thousand_readers_under_writers_that_die_hang_and_leave(autojump_clock: MockClock) -> None:
    """Each value is a pair of equal numbers, which a torn read would show."""
    rng = random.Random(7)
    shared = Shared[tuple[int, int]]((0, 0))
    last, ends = 20, dict[str, int]()

    async def read() -> None:
        seen = shared.read()
        while seen.number <= last:
            newer = await shared.wait_newer(seen.number)
            assert newer.number > seen.number
            assert newer.value[0] == newer.value[1] > seen.value[0]
            seen = newer

    async def write_and(fate: str) -> None:
        try:
            with trio.move_on_after(0.3 if fate == "left" else math.inf):
                async with shared.write(lease=1) as draft:
                    now = draft.value[0]
                    await trio.sleep(rng.random() / 4)
                    draft.value = (now + 1, draft.value[1])
                    if fate == "died":
                        await fail()
                    if fate != "well":
                        await trio.sleep_forever()
                    draft.value = (now + 1, now + 1)
        except OSError:
            assert fate == "died"
        except LeaseExpiredError:
            assert fate == "hung"
        ends[fate] = ends.get(fate, 0) + 1

    with trio.fail_after(200):
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(read)
            fates = [*["well"] * last, *["died"] * 20, *["hung"] * 20, *["left"] * 20]
            rng.shuffle(fates)
            for fate in fates:
                nursery.start_soon(write_and, fate)
    assert shared.read() == Version(last + 1, (last, last))
    assert ends == dict.fromkeys(("well", "died", "hung", "left"), 20)


async def test_a_writer_in_an_actor_that_crashes(autojump_clock: MockClock) -> None:
    shared = Shared(0)

    class Crash(ta.Message["Writer"]):
        """Crash while it writes."""

    class Writer(ta.Actor):
        @ta.handles(Crash)
        async def crash(self, message: Crash) -> None:
            async with shared.write(lease=5) as draft:
                draft.value = 1
                raise OSError("a crash")

    async with ta.open_system("writers") as system:
        ref = await system.spawn(Writer)
        await ref.tell(Crash())
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        async with shared.write(lease=5) as draft:
            assert trio.current_time() == begun
            draft.value = 2
    assert shared.read() == Version(2, 2)


@pytest.mark.parametrize("lease", [0, -1, math.nan, math.inf, "1", None, True])
async def test_invalid_leases_are_refused(lease: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="write: lease must be a"):
        async with Shared(1).write(lease=lease):
            pytest.fail("it has a turn")


@pytest.mark.parametrize("version", [-1, 1.5, "1", None])
async def test_invalid_versions_are_refused(version: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="wait_newer: version must be"):
        await Shared(1).wait_newer(version)


async def test_the_error_of_write_without_async_with_names_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"async with shared\.write\(lease=seconds\) as draft"):
        await Shared(1).write(lease=1)  # type: ignore[misc]
