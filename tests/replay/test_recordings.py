"""Recordings of random work, replayed inline and in a worker, have the same bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from chosen import BACKEND
from isolations import inline, isolated
from random_work import recorded, replayed
from replayed_programs import native

import trio_accel as ta
from trio_accel import replay
from trio_accel.backends.base import Isolation

# Values without a use in the last step are not awaited.
pytestmark = pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")


async def check(system: ta.System, journal: replay.RecordingJournal, read: int) -> None:
    for isolation in ("inline", "process"):
        report = await replayed(system, journal, isolation)
        assert not report.differences, report
        assert not report.failures, report
        assert report.compared >= read
        assert report.environment == []


FEW_AND_MANY = pytest.mark.parametrize(
    "count", [60, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)


@FEW_AND_MANY
@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("tasks", [1, 4])
async def test_random_work(system: ta.System, isolation: Isolation, tasks: int, count: int) -> None:
    journal, read, _ = await recorded(system, isolation, tasks, count)
    assert len(read) > count // 3
    await check(system, journal, len(read))


@FEW_AND_MANY
@isolated
async def test_kills(system: ta.System, isolation: Isolation, count: int) -> None:
    kills = count // 25
    journal, read, device = await recorded(system, isolation, 1, count, retry=1, kills=kills)
    assert device.generation > kills
    await check(system, journal, len(read))


async def test_arrays_from_outside_of_the_recording(system: ta.System, isolation: Isolation) -> None:
    journal = replay.MemoryJournal()
    host = np.arange(36.0).reshape(6, 6)
    async with (
        system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device,
        system.open_device(BACKEND, name="other") as other,
    ):
        before, large = await device.put(host), await device.put(np.ones((512, 512)))
        far = await other.put(host + 1)
        async with replay.record(device, journal) as recording:
            read = [await (await (before.T @ before)).to_host()]
            async with before.lease(write=True) as given:
                native(given)[1:3] = 7.0
            read.append(await (before * 3.0).to_host())
            read.append(await (large + 1.0).to_host())
            async with device.borrow(far) as borrowed:
                read.append(await (borrowed @ before).to_host())
            await far.fill(2.0)
            async with device.borrow(far) as borrowed:
                read.append(await (borrowed @ before).to_host())
            copied = await far.copy_to(device)
            await recording.mark("copied", copied=copied, part=copied[1:, ::2])
            read.append(await copied.to_host())
        np.testing.assert_array_equal(read[1][1:3], 21.0)
        assert f"{recording.operations} operations" in repr(recording)
        with pytest.raises(ValueError, match=r"mark: x must be on .* got .*other"):
            await recording.mark("x", x=far)
    await check(system, journal, len(read) + 2)


async def test_numbers_of_a_mark(system: ta.System) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND) as device, replay.record(device, journal) as recording:
        x = await device.put(np.ones(8))
        await ta.linalg.scal(2.0, x)
        await recording.mark("twice", x=x[::2])
    entries = list(journal.entries())
    # The recorded numbers of the mark differ from the numbers of the replay.
    entries[-1] = entries[-1].replace(np.full(4, 2.0).tobytes(), np.full(4, 3.0).tobytes())
    changed = replay.MemoryJournal()
    for entry in entries:
        changed.append(entry)
    report = await replayed(system, changed, "inline")
    assert str(report.differences[0]).startswith("mark 'twice': 4 of 4 elements differ in x, first at [0]")
    assert report.compared == 1


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_outcomes_of_started_and_cancelled_calls(system: ta.System, isolation: Isolation) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        before = await device.put(np.ones((6, 6)))
        singular = await device.put(np.zeros((3, 3)))
        async with replay.record(device, journal) as recording:
            product = (before @ before).start()
            failed = ta.linalg.inv(singular).start()
            with trio.CancelScope() as scope:
                scope.cancel()
                await ta.linalg.scal(2.0, before)
            with trio.move_on_after(0.01):
                while True:
                    await ta.linalg.scal(1.5, before)
            with pytest.raises(ta.AccelError):
                await failed.wait()
            await product.wait()
            with suppress(ta.StaleRefError):
                await before.to_host()
            await product.value.to_host()
        # A machine with other work lacks the time for a loop of them.
        assert recording.operations > 2
    for where in ("inline", "process"):
        report = await replayed(system, journal, where)
        assert report.is_same, report
        assert report.compared


async def test_a_world(system: ta.System) -> None:
    journals = [replay.MemoryJournal(), replay.MemoryJournal()]
    async with (
        system.open_device(BACKEND) as one,
        system.open_device(BACKEND, name="two") as two,
        ta.collectives.open_world([one, two]) as world,
    ):
        devices = one, two
        async with replay.record(devices[0], journals[0]), replay.record(devices[1], journals[1]):
            parts = [await device.put(np.arange(6.0) + n) for n, device in enumerate(devices)]
            sums = await world.all_reduce(parts)
            read = [await (part * 2.0).to_host() for part in sums]
        np.testing.assert_array_equal(read[0], read[1])
    for journal in journals:
        report = await replayed(system, journal, "inline")
        assert report.is_same, report
        assert report.compared == 1


@inline
async def test_lost_contexts(system: ta.System, isolation: Isolation) -> None:
    journal, lost = replay.MemoryJournal(), 0
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device, replay.record(device, journal):
        for turn in range(6):
            x = await device.put(np.arange(16.0).reshape(4, 4) + turn)
            y = await (x @ x)
            if turn % 2:
                ta.testing.inject_fault(device, ta.linalg.Scal, poison=True)
                with pytest.raises(ta.ContextLostError):
                    await ta.linalg.scal(2.0, y)
                lost += 1
            else:
                await ta.linalg.scal(2.0, y)
                await y.to_host()
    for where in ("inline", "process"):
        report = await replayed(system, journal, where)
        assert report.is_same, report
        assert report.compared == 3
        assert [each.operation for each in report.skipped] == ["linalg.Scal"] * lost
        assert "skipped: 3 of linalg.Scal: it ended with Context" in str(report)


@inline
async def test_without_contents(system: ta.System, isolation: Isolation) -> None:
    journal, journals = replay.MemoryJournal(), replay.MemoryJournal()
    secret, y = 123.456789, np.empty(0)
    async with system.open_device(BACKEND) as device:
        before = await device.put(np.full((4, 4), secret))
        for contents, kept in ((False, journal), (True, journals)):
            async with replay.record(device, kept, contents=contents) as recording:
                x = await device.put(np.full((4, 4), secret))
                y = await ta.arrays.softmax(ta.nn.relu(x @ before) * secret, axis=1).to_host()
                await (x + secret + before).fill(secret)
                await (ta.arrays.sum(x) + np.full(3, secret)).to_host()
                await recording.mark("x", x=x)
    assert y.shape == (4, 4)
    number = np.float64(secret).tobytes()
    assert any(number in entry or number[::-1] in entry for entry in journals.entries())
    assert not any(number in entry or number[::-1] in entry for entry in journal.entries())
    report = await replayed(system, journal, "inline")
    assert report.is_same, report
    assert report.operations
    assert report.compared == 0


async def test_two_recordings_in_one_file(system: ta.System, tmp_path: Path) -> None:
    journal = replay.FileJournal(tmp_path / "journal")
    for turn in range(2):
        async with system.open_device(BACKEND) as device, replay.record(device, journal):
            x = await device.put(np.arange(4.0) + turn)
            await (ta.nn.relu(x + 1.0) * 2.0).to_host()
    report = await replayed(system, journal, "inline")
    assert report.is_same, report
    assert (report.operations, report.compared) == (4, 2)
    async with system.open_device(BACKEND) as device:
        assert (await replay.replay(journal, device, until=3)).compared == 1


async def test_two_recordings_of_one_device(system: ta.System, isolation: Isolation) -> None:
    journals = outer, inner = replay.MemoryJournal(), replay.MemoryJournal()
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        before = await device.put(np.ones((3, 3)))
        async with replay.record(device, outer):
            x = await device.put(np.eye(3) + 1)
            async with replay.record(device, inner):
                # Each lacks some content that the launch needs, so the launch is refused.
                await (x @ before).to_host()
                product = (x @ before).start()
                await product.value.to_host()
                large = await device.put(np.full((300, 500), 0.5))
                await (large + 1.0).to_host()
                await ta.linalg.scal(2.0, x)
            await (x + before).to_host()
    for journal, compared in zip(journals, (4, 3), strict=True):
        report = await replayed(system, journal, "inline")
        assert report.is_same, report
        assert report.compared == compared
        assert {each.reason for each in report.skipped} <= {
            "it ended with NotExecutedError when it was recorded"
        }


async def test_a_full_disk_of_one_of_two_recordings(device: ta.Device, system: ta.System) -> None:
    journal = replay.MemoryJournal()
    x = await device.put(np.ones(4))
    async with replay.record(device, journal):
        await ta.linalg.scal(2.0, x)
        # The content of `x` is the second entry, and the launch the third.
        await asked_of_a_full_disk(device, Failing(2), x)
        assert (await x.to_host()).tolist() == [2.0] * 4
    report = await replayed(system, journal, "inline")
    assert report.is_same, report
    assert (report.operations, report.compared) == (2, 1)


class Failing:
    """A journal on a disk without space from some entry on."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.entered = 0

    def append(self, entry: bytes, /) -> None:
        self.entered += 1
        if self.entered > self.most:
            raise OSError(28, "No space left on device")

    def entries(self) -> Iterator[bytes]:
        return iter(())


async def test_a_full_disk(device: ta.Device) -> None:
    x = await device.put(np.ones(4))
    with pytest.raises(replay.JournalError, match=r"cannot be written: .*No space"):
        async with replay.record(device, Failing(0)):
            raise AssertionError
    journal = Failing(1)
    # The content that the started call would have used could not be written.
    with pytest.raises(replay.JournalError, match="No space"):
        await asked_of_a_full_disk(device, journal, x)
    assert journal.entered > 3
    # Nothing was launched.
    np.testing.assert_array_equal(await x.to_host(), 1.0)


async def asked_of_a_full_disk(device: ta.Device, journal: replay.RecordingJournal, x: ta.AccelRef) -> None:
    async with replay.record(device, journal):
        with pytest.raises(replay.JournalError, match="No space"):
            await ta.linalg.scal(2.0, x)
        with pytest.raises(replay.JournalError, match="No space"):
            await (x * 2.0).to_host()
        with pytest.raises(replay.JournalError, match="No space"):
            ta.linalg.scal(2.0, x).start()
        with pytest.raises(replay.JournalError, match="No space"):
            await device.put(np.ones((200, 1024)))


async def test_less_memory_than_was_used(system: ta.System) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND) as device, replay.record(device, journal):
        await (await device.put(np.ones(1 << 17))).to_host()
        held = await device.put(np.ones(1 << 20))
        await held.to_host()
    options = ta.DeviceOptions(memory_limit=4 << 20)
    async with system.open_device(BACKEND, options=options) as device:
        with pytest.raises(ta.OutOfMemoryError, match=r"operation 3, devices\.Put"):
            await replay.replay(journal, device)
        assert (await replay.replay(journal, device, until=2)).compared == 1


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
async def test_a_recording_that_ends_in_the_middle(
    system: ta.System, isolation: Isolation, turns: int
) -> None:
    """The device closes, or the recording is cancelled, while operations are asked and submitted."""
    for is_closed in (False, True):
        journal = replay.MemoryJournal()
        async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
            before, large = await device.put(np.eye(3)), await device.put(np.ones((400, 500)))
            with suppress(ta.AccelError), trio.move_on_after(5) as scope:
                async with replay.record(device, journal), trio.open_nursery() as nursery:
                    for array in (before, large):
                        nursery.start_soon(asked_forever, array)
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    if is_closed:
                        await device.close()
                        nursery.cancel_scope.cancel()
                    else:
                        scope.cancel()
            assert not is_closed or not scope.cancelled_caught
            if not is_closed:
                # The device is as it was, and the next recording works.
                async with replay.record(device, journal):
                    await (before + 1.0).to_host()
        report = await replayed(system, journal, "inline")
        assert report.is_same, report


async def asked_forever(array: ta.AccelRef) -> None:
    with suppress(ta.AccelError):
        while True:
            (array * 3.0).start()
            await ta.linalg.scal(1.5, array)
            await (array + 1.0).to_host()


@pytest.mark.parametrize("is_pair", [False, True])
async def test_a_cancelled_replay(system: ta.System, isolation: Isolation, is_pair: bool) -> None:
    """At each checkpoint, and the devices have no memory of it."""
    journal, _, _ = await recorded(system, "inline", 1, 20)
    options = ta.DeviceOptions(isolation=isolation)
    async with (
        system.open_device(BACKEND, options=options) as device,
        system.open_device(BACKEND, options=options, name="other") as other,
    ):
        for turns in (0, 1, 3, 10, 30, 100, 300):
            async with trio.open_nursery() as nursery:
                if is_pair:
                    nursery.start_soon(partial(replay.lockstep, journal, device, other, programs=True))
                else:
                    nursery.start_soon(partial(replay.replay, journal, device, programs=True))
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            for each in (device, other):
                gc.collect()
                await each.synchronize()
                assert (await each.statistics()).memory.blocks == 0
        assert (await replay.replay(journal, device, programs=True)).is_same
