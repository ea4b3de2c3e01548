"""A recorder's figures of a program, compared with the program's actions."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncGenerator

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from telemetry.read_snapshot import read_snapshot

import trio_accel as ta
from trio_accel.devices import ProcessStatistics
from trio_accel.telemetry import ActorMemoryRow, ActorRow, OperationRow, Recorder, SystemSnapshot, record


@attrs.frozen
class Sleep(ta.Request["Sleeper", int]):
    seconds: float
    error: Exception | None = None


@attrs.frozen
class Later(ta.Request["Sleeper", int]):
    replies: list[ta.DeferredReply[int]]


class Sleeper(ta.Actor):
    @ta.handles(Sleep)
    async def sleep(self, message: Sleep) -> int:
        await trio.sleep(message.seconds)
        if message.error is not None:
            raise message.error
        return 1

    @ta.handles(Later)
    async def later(self, message: Later) -> ta.DeferredReply[int]:
        message.replies.append(self.context.defer())
        return message.replies[-1]


@attrs.frozen
class Make(ta.Request["Maker", None]):
    count: int


class Maker(ta.Actor):
    def __init__(self, device: ta.Device) -> None:
        self.device = device
        self.made: list[ta.AccelRef] = []

    @ta.handles(Make)
    async def make(self, message: Make) -> None:
        self.made.append(await self.device.zeros(message.count))


@pytest.fixture
async def system() -> AsyncGenerator[ta.System, None]:
    async with ta.open_system("shop") as opened:
        yield opened


def operation(recorder: Recorder, message_type: str) -> OperationRow:
    [row] = [row for row in recorder.snapshot().operations if row.message_type == message_type]
    return row


def actor(snapshot: SystemSnapshot, path: str) -> ActorRow:
    [row] = [row for row in snapshot.actors if row.path == path]
    return row


async def test_times_in_the_queue_and_in_the_handler(
    autojump_clock: trio.testing.MockClock, system: ta.System
) -> None:
    sleeper = await system.spawn(Sleeper, name="sleeper")
    with record(system) as recorder:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(sleeper.ask, Sleep(2.0))
        row = operation(recorder, "Sleep")
        assert (row.path, row.completed, row.failed, row.cancelled) == ("shop/sleeper", 4, 0, 0)
        # They wait for one another: 0, 2, 4 and 6 s, and take 2 s each.
        assert row.queue.total == pytest.approx(12.0)
        assert row.run.total == pytest.approx(8.0)
        assert dict(zip(row.run.bounds, row.run.counts, strict=False))[2.5] == 4
        assert (row.p50, row.p99) == pytest.approx((4.0, 8.0))
        seen = actor(recorder.snapshot(), "shop/sleeper")
        assert (seen.handled, seen.p50, seen.p99) == pytest.approx((4, 4.0, 8.0))
        assert seen.rate == pytest.approx(4 / 8.0)


async def test_deferred_replies_are_timed_to_the_reply(
    autojump_clock: trio.testing.MockClock, system: ta.System
) -> None:
    sleeper = await system.spawn(Sleeper)
    with record(system) as recorder:
        replies: list[ta.DeferredReply[int]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper.ask, Later(replies))
            await trio.sleep(3.0)
            assert recorder.snapshot().operations == ()
            replies[0].set(2)
        row = operation(recorder, "Later")
        assert (row.completed, row.run.total) == (1, pytest.approx(3.0))


async def test_failures_and_cancellations_are_distinguished(
    autojump_clock: trio.testing.MockClock, system: ta.System
) -> None:
    resume = ta.Policy(directives={ValueError: ta.Directive.RESUME})
    sleeper = await system.spawn(Sleeper, name="sleeper", policy=resume)
    with record(system) as recorder:
        with pytest.raises(ValueError, match="no such"):
            await sleeper.ask(Sleep(1.0, ValueError("no such thing")))
        with trio.move_on_after(0.5):
            await sleeper.ask(Sleep(1.0))
        row = operation(recorder, "Sleep")
        assert (row.completed, row.failed, row.cancelled) == (0, 1, 1)
        [failure] = recorder.snapshot().failures
        assert (failure.path, failure.kind, failure.message_type) == ("shop/sleeper", "message", "Sleep")
        assert failure.error == "ValueError: no such thing"
        assert "in sleep\n" in failure.traceback
        assert "raise message.error" in failure.traceback


async def test_a_crash_is_one_failure_with_its_restart(system: ta.System) -> None:
    at_once = ta.Policy(backoff=ta.Backoff(initial=0.0))
    sleeper = await system.spawn(Sleeper, name="sleeper", policy=at_once)
    with record(system) as recorder:
        with pytest.raises(ta.ActorFailedError):
            await sleeper.ask(Sleep(0.0, KeyError("boom")))
        await sleeper.ask(Sleep(0.0))
        snapshot = recorder.snapshot()
        [failure] = snapshot.failures
        assert (failure.kind, failure.message_type, failure.count) == ("restart", "Sleep", 1)
        assert actor(snapshot, "shop/sleeper").restarts == 1


async def test_an_error_of_megabytes_is_cut_off(system: ta.System) -> None:
    at_once = ta.Policy(backoff=ta.Backoff(initial=0.0))
    sleeper = await system.spawn(Sleeper, name="sleeper", policy=at_once)
    with record(system) as recorder:
        with pytest.raises(ta.ActorFailedError):
            await sleeper.ask(Sleep(0.0, KeyError("x" * 3_000_000)))
        await sleeper.ask(Sleep(0.0))
        snapshot = recorder.snapshot()
        assert (actor(snapshot, "shop/sleeper").last_error or "").startswith("KeyError: 'xxx")
        assert len(snapshot.to_json()) < 100_000


async def test_the_same_failure_again_and_again_is_counted(system: ta.System) -> None:
    resume = ta.Policy(directives={Exception: ta.Directive.RESUME})
    sleeper = await system.spawn(Sleeper, policy=resume)
    with record(system, failures=3) as recorder:
        for _ in range(50):
            with pytest.raises(ValueError, match="again"):
                await sleeper.ask(Sleep(0.0, ValueError("again")))
        assert sum(failure.count for failure in recorder.snapshot().failures) == 50
        for number in range(100):
            with pytest.raises(ValueError, match="number"):
                await sleeper.ask(Sleep(0.0, ValueError(f"number {number}")))
        failures = recorder.snapshot().failures
        assert [failure.error for failure in failures] == [f"ValueError: number {n}" for n in (97, 98, 99)]
        # Only this many a second are written out.
        assert sum("Traceback" in failure.traceback for failure in failures) < 3


async def test_dead_letters_are_counted(system: ta.System) -> None:
    full = ta.MailboxOptions(capacity=1, overflow=ta.Overflow.REJECT)
    sleeper = await system.spawn(Sleeper, mailbox=full)
    with record(system) as recorder:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(sleeper.ask, Sleep(0.01))
                await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ta.MailboxFullError):
                await sleeper.ask(Sleep(0.0))
        assert operation(recorder, "Sleep").dropped == recorder.snapshot().dead_letters == 1


async def test_durations_are_measured_only_during_a_recording(system: ta.System) -> None:
    sleeper = await system.spawn(Sleeper)
    await sleeper.ask(Sleep(0.0))
    with record(system) as recorder:
        await sleeper.ask(Sleep(0.0))
    await sleeper.ask(Sleep(0.0))
    assert operation(recorder, "Sleep").completed == 1
    with record(system) as later:
        assert later.snapshot().operations == ()
        with record(system, operations=1) as same:
            assert same is later
        await sleeper.ask(Sleep(0.0))
        assert operation(later, "Sleep").completed == 1


async def test_actors_beyond_the_bound_are_counted_together(system: ta.System) -> None:
    with record(system, operations=2) as recorder:
        for _ in range(5):
            sleeper = await system.spawn(Sleeper)
            await sleeper.ask(Sleep(0.0))
        counts = {row.path: row.completed for row in recorder.snapshot().operations}
        assert counts == {"shop/sleeper-1": 1, "shop/sleeper-2": 1, "(other)": 3}


async def test_ended_actors_make_room(autojump_clock: trio.testing.MockClock, system: ta.System) -> None:
    with record(system, operations=10) as recorder:
        keeper = await system.spawn(Sleeper, name="keeper")
        await keeper.ask(Sleep(0.0))
        for number in range(100):
            sleeper = await system.spawn(Sleeper, name=f"brief-{number}")
            await sleeper.ask(Sleep(0.0))
            await sleeper.ask(Sleep(1.0))
            await sleeper.stop()
            await sleeper.wait_terminated()
        # A name may be used again, and its owner is alive.
        again = await system.spawn(Sleeper, name="brief-99")
        for _ in range(20):
            brief = await system.spawn(Sleeper)
            await brief.ask(Sleep(0.0))
            await brief.stop()
            await brief.wait_terminated()
        await again.ask(Sleep(0.0))
        await keeper.ask(Sleep(0.0))
        snapshot = recorder.snapshot()
    rows = {row.path: row for row in snapshot.operations}
    assert len(rows) <= 11
    assert rows["shop/keeper"].completed == 2
    assert rows["shop/brief-99"].completed == 3
    # Nothing is counted twice, and nothing is lost: not in the ranges either.
    assert sum(row.completed for row in rows.values()) == 2 + 200 + 20 + 1
    assert sum(row.run.count for row in rows.values()) == 223
    assert sum(row.run.total for row in rows.values()) == pytest.approx(100.0)
    assert rows["(other)"].p99 == 1.0
    # It had ended long ago what is counted for others now.
    assert rows["(other)"].rate < 10
    assert snapshot.rate == pytest.approx(sum(row.rate for row in rows.values()))


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_device_with_its_loss_and_recovery(system: ta.System, isolation: ta.Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device("cpu", options=options) as device:
        with record(system) as recorder:
            array = await device.put(np.ones((32, 32)))
            await ta.linalg.matmul(array, array)
            await recorder.refresh()
            [row] = recorder.snapshot().devices
            assert (row.path, row.name, row.backend, row.isolation) == (
                device.path,
                "cpu:0",
                "cpu",
                isolation,
            )
            assert (row.state, row.generation, row.losses, row.recovery_time) == ("running", 1, 0, None)
            assert row.age is not None
            assert row.launched == row.completed >= 2
            assert row.memory is not None
            assert row.memory.used >= array.nbytes
            assert (row.pid is None) is (isolation == "inline")
            ta.testing.poison(device, "for the test")
            with pytest.raises(ta.ContextLostError):
                await device.put(np.ones(3))
            await device.put(np.ones(3))
            [row] = recorder.snapshot().devices
            assert (row.generation, row.losses, device.losses) == (2, 1, 1)
            assert row.recovery_time is not None
            assert 0 < row.recovery_time < 30
            assert any("for the test" in failure.error for failure in recorder.snapshot().failures)
    assert system.devices == ()


async def test_memory_by_the_actor_that_made_it(system: ta.System) -> None:
    async with system.open_device("cpu") as device:
        makers = [await system.spawn(Maker, device, name=f"maker-{number}") for number in range(103)]
        with record(system) as recorder:
            own = await device.put(np.ones(5))
            for number, maker in enumerate(makers):
                await maker.ask(Make(number + 1))
            await makers[-1].ask(Make(7))
            await recorder.refresh()
            snapshot = recorder.snapshot()
    [row] = snapshot.devices
    bytes_of = {maker.path: 8 * (number + 1) for number, maker in enumerate(makers)}
    bytes_of[makers[-1].path] += 56
    assert {one.path: one.array_bytes for one in snapshot.actors if one.array_bytes} == bytes_of
    bytes_of[""] = own.nbytes
    # The hundred largest, and the rest of them.
    ordered = sorted(bytes_of.items(), key=lambda item: (-item[1], item[0]))
    assert [(one.path, one.used) for one in row.actors[:-1]] == ordered[:100]
    assert row.actors[-1] == ActorMemoryRow(path="(other)", used=sum(used for _, used in ordered[100:]))


async def test_a_snapshot_does_not_wait_for_a_device(system: ta.System) -> None:
    async with system.open_device("cpu") as device:
        with record(system) as recorder:
            [row] = recorder.snapshot().devices
            assert (row.age, row.memory) == (None, None)
            await recorder.refresh()
            [row] = recorder.snapshot().devices
            assert row.memory is not None
            assert system.devices == (device,)


async def test_json_there_and_back(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    # Logged records are sent to another process by pytest-xdist, which takes no half of a pair.
    monkeypatch.setattr(logging.getLogger("trio_accel.actors"), "disabled", True)
    sleeper = await system.spawn(Sleeper, name="naïve 🐌")
    async with system.open_device("cpu") as device:
        with record(system) as recorder:
            with pytest.raises(ta.ActorFailedError):
                await sleeper.ask(Sleep(0.0, ValueError("\ud800 is half of a pair")))
            await device.put(np.ones(3))
            await recorder.refresh()
            snapshot = recorder.snapshot()
    text = snapshot.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert read_snapshot(text) == snapshot


async def test_another_thread_has_a_snapshot_when_the_loop_has_a_moment(system: ta.System) -> None:
    await system.spawn(Sleeper, name="sleeper")
    with record(system) as recorder:
        snapshot = await trio.to_thread.run_sync(recorder.snapshot)
        assert [row.path for row in snapshot.actors] == ["shop", "shop/sleeper"]

    async def elsewhere() -> None:
        recorder.snapshot()

    with pytest.raises(RuntimeError):
        await trio.to_thread.run_sync(trio.run, elsewhere)


async def test_bad_arguments(system: ta.System) -> None:
    with pytest.raises(TypeError, match="system must be an open system"), record("shop"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="operations must be"), record(system, operations=0):
        pass
    with pytest.raises(ValueError, match="failures must be"), record(system, failures=-1):
        pass
    with record(system) as recorder, pytest.raises(RuntimeError, match="measured already"):
        system.measure(recorder._tallies)  # pyright: ignore[reportPrivateUsage]


async def test_processes_of_the_program_and_of_its_workers(system: ta.System) -> None:
    """Compared with the system's figures of the processes."""
    options = ta.DeviceOptions(isolation="process")
    async with system.open_device("cpu", options=options) as device:
        with record(system) as recorder:
            before = time.process_time()
            rows = {row.path: row for row in recorder.snapshot().processes}
            after = time.process_time()
        own, worker = rows[system.name], rows[f"{device.path}/context"]
        statistics = await device.statistics()
    assert own.pid == os.getpid()
    assert before <= own.processor_seconds <= after
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert 1 << 20 < own.memory <= peak
    assert statistics.process is not None
    assert worker.pid == statistics.pid == statistics.process.pid
    assert 0 < worker.processor_seconds <= statistics.process.processor_seconds
    assert worker.memory > 1 << 20


async def test_the_load_of_a_process(system: ta.System) -> None:
    with record(system) as recorder:
        first = recorder.snapshot().processes[0]
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        second = recorder.snapshot().processes[0]
    assert first.load == 0
    assert 0.05 < second.load < 64
    assert second.processor_seconds - first.processor_seconds >= 0.2


def test_an_ended_process_has_no_figures() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert ProcessStatistics.of(process.pid) is None
