"""What holds the loop is found, with its stack; what does not is not."""

from __future__ import annotations

import logging
import threading
import time

import attrs
import pytest
import trio
import trio.lowlevel

import trio_accel as ta
from trio_accel.telemetry import watch_loop


@attrs.frozen
class Hold(ta.Request["Holder", None]):
    seconds: float


class Holder(ta.Actor):
    @ta.handles(Hold)
    async def hold(self, message: Hold) -> None:
        compute(message.seconds)


def keep_the_lock(seconds: float) -> None:
    """Compute in one call, which lets no other thread run."""
    size, took = 100_000, 0.0
    while took < seconds:
        size *= 2
        start = time.perf_counter()
        sum(range(size))
        took = time.perf_counter() - start


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def test_a_handler_that_holds_the_loop_is_reported_once_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with ta.open_system("shop") as system:
        holder = await system.spawn(Holder, name="holder")
        with watch_loop(bound=0.05) as watch:
            await holder.ask(Hold(0.4))
            await trio.lowlevel.checkpoint()
        [report] = [report for report in watch.reports if report.path == "shop/holder"]
        assert 0.05 <= report.seconds < 0.4
        assert "in hold\n" in report.stack
        assert "compute(message.seconds)" in report.stack
        assert report.place.endswith(", in compute")
        # What is below the task is Trio's, and the same for all.
        assert "unrolled_run" not in report.stack
        [record] = [record for record in caplog.records if "shop/holder" in record.getMessage()]
        assert record.name == "trio_accel.telemetry"
        assert record.__dict__["path"] == "shop/holder"
        assert record.__dict__["seconds"] == report.seconds


async def test_a_place_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with watch_loop(bound=0.04) as watch:
        for _ in range(3):
            time.sleep(0.2)  # noqa: ASYNC251  # to be found
            # Long enough for the loop to show that it goes on.
            await trio.sleep(0.05)
    here = [report for report in watch.reports if "test_a_place_is_logged" in report.place]
    assert len(here) == 3
    assert all(report.path is None and "test_a_place_is_logged" in report.task for report in here)
    assert sum("test_a_place_is_logged" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
async def test_many_short_steps_hold_nothing() -> None:
    async def short() -> None:
        for _ in range(3):
            time.sleep(0.005)  # noqa: ASYNC251
            await trio.lowlevel.checkpoint()

    with watch_loop(bound=0.6) as watch:
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(short)
    assert watch.reports == ()


async def test_one_that_keeps_the_lock_of_the_interpreter_is_told_of_afterwards() -> None:
    with watch_loop(bound=0.04) as watch:
        await trio.lowlevel.checkpoint()
        keep_the_lock(0.3)
        await trio.lowlevel.checkpoint()
    assert any(report.seconds >= 0.04 and "keep_the_lock" in report.stack for report in watch.reports)


async def test_an_idle_loop_is_not_slow() -> None:
    with watch_loop(bound=0.3) as watch:
        await trio.sleep(0.7)
    assert watch.reports == ()


async def test_nothing_is_left_behind() -> None:
    before = threading.active_count()
    with watch_loop():
        assert threading.active_count() == before + 1
    with pytest.raises(KeyError), watch_loop():
        raise KeyError
    assert threading.active_count() == before


@pytest.mark.parametrize("bound", [0, -1.0, 0.001, float("nan"), float("inf"), "0.1", True])
async def test_bad_bounds(bound: object) -> None:
    with pytest.raises(ValueError, match="bound must be seconds"), watch_loop(bound):  # type: ignore[arg-type]
        pass


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bound_of_thousands_of_years() -> None:
    with watch_loop(1e12):
        await trio.sleep(0.01)


async def test_a_clock_that_is_set_back_hides_no_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A place is logged once a minute, and that is a minute of a clock that is not set."""
    moment = {"time": 1e9, "monotonic": 50.0}
    caplog.set_level(logging.WARNING)
    with watch_loop(1.0) as watch:
        pass
    monkeypatch.setattr(time, "time", lambda: moment["time"])
    monkeypatch.setattr(time, "monotonic", lambda: moment["monotonic"])

    def note() -> int:
        caplog.clear()
        watch._note(2.0, task="t", path=None, stack="", place="here")
        return len(caplog.records)

    assert (note(), note()) == (1, 0)
    moment["time"] -= 7200.0
    moment["monotonic"] += 61.0
    assert note() == 1
    moment["time"] += 86400.0
    assert note() == 0
    assert watch.reports[-1].time == moment["time"]


def test_there_must_be_a_loop() -> None:
    with pytest.raises(RuntimeError), watch_loop():
        pass
