"""The soak with bad requests, for a few seconds: every request has its outcome, and the device continues."""

from __future__ import annotations

from typing import Any

import pytest

import trio_accel as ta
from benchmarks.bad_requests import BadRequests, Report


@pytest.mark.slow
async def test_a_bad_request_now_and_then_with_default_options(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process")
    async with system.open_device("cpu", options=options) as device:
        faults = ("poison", "kill", "segfault")
        report = await BadRequests(device, seconds=2.5, every=0.7, clients=3, faults=faults).run()
    assert report.begun == sum(report.outcomes.values())
    assert set(report.outcomes) <= {"right", "ContextLostError", "ContextPoisonedError"}
    assert report.outcomes["right"] > 0
    assert set(report.bad) <= {"ContextLostError", "ContextPoisonedError"}
    assert 1 <= report.losses == sum(report.bad.values()) <= 3
    assert report.kept
    assert ", 0 without an outcome" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("asks", [ta.linalg.Nrm2, ta.fft.Fft], ids=["same-library", "another-library"])
async def test_each_costs_its_sender_one_loss_and_one_error(system: ta.System, asks: Any) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, spares=1)
    async with system.open_device("cpu", options=options) as device:
        report = await BadRequests(device, seconds=2.5, every=0.4, asks=asks).run()
    assert set(report.bad) == {"ContextPoisonedError"}
    assert report.bad["ContextPoisonedError"] == report.losses >= 2
    assert report.outcomes == {"right": report.begun}
    assert report.kept


def test_the_report_names_the_faults() -> None:
    report = Report(
        seconds=10.0,
        bad={"ContextPoisonedError": 2},
        losses=2,
        begun=10,
        outcomes={"right": 6, "wrong": 1, "ContextPoisonedError": 1},
        kept=False,
        waits=(0.1, 0.3, 0.2),
        slots=200,
        answered=150,
    )
    text = str(report)
    assert "2 contexts lost over 2 bad requests with 2 errors" in text
    assert "10, of which 6 right, 1 wrong, 1 ContextPoisonedError, 2 without an outcome" in text
    assert "75.0% of the time" in text
    assert "60.00% of the requests" in text
    assert "median 0.200 s, longest 0.300 s" in text
    assert "CHANGED OR LOST" in text
