"""One failure is shown once, with any reporters, and in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.actors import ActorRestarted
from trio_accel.backends.base import Isolation
from trio_accel.telemetry import _tally, record


class Clock:
    """Replaces the module `time`: the clock of the day may be set, and the other continues."""

    passed = 0.0
    set_by = 0.0

    @property
    def now(self) -> float:
        return 1000.0 + self.passed + self.set_by

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return 50.0 + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_tally, "time", clock)
    return clock


def restarted(path: str, error: Exception) -> ActorRestarted:
    return ActorRestarted(path=path, incarnation=1, error=error, delay=0.0)


def rows(failures: _tally.Failures) -> list[tuple[str, str, str | None, int]]:
    return [(row.path, row.kind, row.message_type, row.count) for row in failures.rows]


def test_a_message_and_the_restart_above_it_are_one_in_any_order(clock: Clock) -> None:
    tell: list[Callable[[_tally.Failures], None]] = [
        lambda failures: failures.message("s/device/context/blas", "Scal", ValueError("lost")),
        lambda failures: failures.observe(restarted("s/device/context", ValueError("lost"))),
    ]
    for order in itertools.permutations(tell):
        failures = _tally.Failures(10)
        for say in order:
            say(failures)
        assert rows(failures) == [("s/device/context", "restart", "Scal", 1)]
        # Again at once: it is counted.
        clock.passed += 0.5
        for say in order:
            say(failures)
        assert rows(failures) == [("s/device/context", "restart", "Scal", 2)]
        # And later, with the first time and the last.
        first = clock.now - 0.5
        for hour in range(3, 6):
            clock.passed += 3600.0
            for say in order:
                say(failures)
            assert rows(failures) == [("s/device/context", "restart", "Scal", hour)]
            assert (failures.rows[0].first, failures.rows[0].time) == (first, clock.now)


def test_an_hour_of_losses_is_one_line_with_their_count(clock: Clock) -> None:
    failures = _tally.Failures(10)
    began = clock.now
    for _ in range(36):
        # The texts of both differ: the operation's text names it.
        for message in ("Scal", "Gemm"):
            error = ta.ContextPoisonedError("killed", operation=message)
            failures.message("s/device/context/blas", message, error)
        failures.observe(restarted("s/device/context", ta.ContextPoisonedError("killed")))
        failures.message("s/device/context/fft", "Fft", ta.ContextPoisonedError("killed", operation="Fft"))
        clock.passed += 100.0
    [row] = failures.rows
    assert (row.path, row.count, row.first, row.time) == ("s/device/context", 36, began, began + 3500.0)


def test_only_messages_are_counted(clock: Clock) -> None:
    failures = _tally.Failures(10)
    for seconds in (0.0, 0.1, 10.0, 10.1):
        clock.passed = seconds
        failures.message("s/a", "Scal", ValueError("bad"))
    [row] = failures.rows
    assert (row.kind, row.count, row.first, row.time) == ("message", 4, 1000.0, 1010.1)


def test_others_are_shown_separately(clock: Clock) -> None:
    failures = _tally.Failures(10)
    failures.message("s/a/b", "Scal", ValueError("lost"))
    # Next to it, with a similar name, below it, and with another error.
    for path in ("s/c", "s/a/bc", "s/a/b/c"):
        failures.observe(restarted(path, ValueError("lost")))
    failures.observe(restarted("s/a", ValueError("other")))
    assert [row[0] for row in rows(failures)] == ["s/a/b", "s/c", "s/a/bc", "s/a/b/c", "s/a"]
    clock.passed += 1.0
    failures.observe(restarted("s/a", ValueError("lost")))
    assert len(failures.rows) == 6


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_lost_context_is_one_failure_with_the_operation(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device("cpu", options=options) as device:
        with record(system) as recorder:
            x = await device.put(np.ones(3))
            ta.testing.poison(device, "for the test")
            with pytest.raises(ta.ContextPoisonedError):
                await ta.linalg.scal(2.0, x)
            # The next context serves.
            await device.put(np.ones(3))
            found = recorder.snapshot().failures
    assert [(row.path, row.kind, row.message_type) for row in found] == [
        (f"{device.path}/context", "restart", "linalg.Scal")
    ]
    assert "for the test" in found[0].error


def test_a_clock_set_back_joins_nothing(clock: Clock) -> None:
    """A clock that nobody sets decides which events count as one failure; the time of day is shown."""
    failures = _tally.Failures(10)
    failures.message("s/device/context/blas", "Scal", ValueError("lost"))
    clock.passed += 60.0
    clock.set_by = -7200.0
    failures.observe(restarted("s/device/context", ValueError("lost")))
    assert [(row[0], row[1]) for row in rows(failures)] == [
        ("s/device/context/blas", "message"),
        ("s/device/context", "restart"),
    ]
    assert failures.rows[1].time == clock.time()
