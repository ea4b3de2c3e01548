"""The watch over the Trio loop: the holds it sees, its reports of them, and its cost."""

from __future__ import annotations

import ctypes
import importlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_accel.actors import ActorSystem, LoopHolds, SystemOptions, open_system

# The watch measures the loop in real time, so time taken by other programs is also a hold.
pytestmark = pytest.mark.alone

MODULE = importlib.import_module("trio_accel.actors._loop_watch")
HELD = SystemOptions(held_after=0.2)


def sleep() -> None:
    time.sleep(0.4)


def keep_the_lock() -> None:
    """Sleep with the interpreter's lock, as a long regular expression does."""
    # A `PyDLL` keeps it.
    ctypes.PyDLL(None).usleep(400_000)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trio_accel loop watch"]


async def holds_after(system: ActorSystem, count: int) -> LoopHolds:
    """Wait until the loop has answered the watch."""
    with trio.fail_after(60):
        while system.loop_holds.count < count:  # noqa: ASYNC110  # nobody is told
            await trio.sleep(0.01)
    return system.loop_holds


@pytest.mark.parametrize("hold", [sleep, keep_the_lock])
async def test_a_hold_is_measured_and_its_line_is_named(
    hold: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    line = hold.__code__.co_firstlineno + (1 if hold is sleep else 3)
    async with open_system("shop", options=HELD) as system:
        await wait_all_tasks_blocked()
        began = time.perf_counter()
        hold()
        took = time.perf_counter() - began
        found = await holds_after(system, 1)
    where = f"test_loop_watch.py:{line}, in {hold.__name__}"
    assert found == LoopHolds(count=1, seconds=found.longest, longest=found.longest, longest_at=where)
    assert 0.25 < found.seconds < took + 0.1
    [record] = caplog.records
    assert (record.name, record.levelno) == ("trio_accel.actors", logging.WARNING)
    text = f"the Trio loop was held for {found.seconds:.1f} s by {where}: no other task ran; move such work "
    assert record.getMessage() == text + "to a thread (trio.to_thread.run_sync) or to a device"
    told: Any = record
    assert (told.where, told.seconds, told.is_untold) == (where, found.seconds, True)


async def test_a_library_that_holds_is_named_by_the_line_of_the_program(system: ActorSystem) -> None:
    before = system.loop_holds.count
    threading.Event().wait(0.35)
    found = await holds_after(system, before + 1)
    assert found.longest_at is not None
    assert found.longest_at.endswith("in test_a_library_that_holds_is_named_by_the_line_of_the_program")


async def test_a_line_that_holds_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_system("shop", options=HELD) as system:
        for count in (1, 2):
            sleep()
            await holds_after(system, count)
    assert len(caplog.records) == 1


async def test_a_hold_is_reported_while_it_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_REPORT_INTERVAL", 0.2)
    seen: list[str] = []
    with caplog.at_level(logging.INFO):
        async with open_system("shop", options=HELD) as system:
            end = time.monotonic() + 5
            while not caplog.records and time.monotonic() < end:
                threading.Event().wait(0.01)
            seen += caplog.messages
            await holds_after(system, 1)
    assert len(seen) == 1
    assert seen[0].startswith("the Trio loop is held for ")
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


async def test_short_holds_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with open_system("shop") as system:
        sleep()
        await holds_after(system, 1)
    assert caplog.records == []


class Turns(trio.abc.Instrument):
    """Counts the turns of the loop."""

    count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_a_waiting_loop_causes_no_warning() -> None:
    turns = Turns()
    async with open_system("shop", options=HELD) as system:
        await wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(turns)
        await trio.sleep(0.5)
        trio.lowlevel.remove_instrument(turns)
        assert system.loop_holds == LoopHolds()
    assert turns.count <= 2


async def test_the_watch_can_be_switched_off() -> None:
    before = watchers()
    async with open_system("shop", options=SystemOptions(held_after=None)) as system:
        assert watchers() == before
        sleep()
        await trio.sleep(0.05)
        assert system.loop_holds == LoopHolds()


async def test_systems_of_a_run_share_a_thread() -> None:
    before = len(watchers())
    async with open_system("a", options=HELD) as first:
        async with open_system("b") as second:
            assert len(watchers()) == before + 1
            sleep()
            assert await holds_after(first, 1) == second.loop_holds
        assert len(watchers()) == before + 1
    assert len(watchers()) == before


STOPPED = """
import trio
from trio_accel.actors import SystemOptions, open_system

async def main():
    async with open_system("shop", options=SystemOptions(held_after=0.2)) as system:
        print("open", flush=True)
        with trio.fail_after(10):
            while not system.loop_holds.count:
                await trio.sleep(0.02)
        print(system.loop_holds.longest > 0.3, system.loop_holds.longest_at)

trio.run(main)
"""


def test_a_stopped_process_causes_no_warning() -> None:
    """A busy machine also stops processes."""
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "True None\n", "")


@pytest.mark.parametrize("value", [0.0, 0.05, -1, True, float("nan")])
def test_a_bad_time_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"held_after must be a number of at least 0\.1"):
        SystemOptions(held_after=value)
