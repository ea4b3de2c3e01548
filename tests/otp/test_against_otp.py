"""The same scripts on OTP's supervisor and on ours end in the same log."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from crash_scripts import OtpReference, RawEvent, Script, lines, run_on_ours, side_by_side
from crash_scripts.cases import WINDOWS, cases
from crash_scripts.strategies import scripts

CASES = cases()
# Trio runs ready tasks in random order: none may lead elsewhere.
TIMES = 3


def compare(script: Script, reference: Sequence[RawEvent]) -> None:
    expected = lines(reference)
    for _ in range(TIMES):
        found = lines(run_on_ours(script))
        if found != expected:
            raise AssertionError(f"{script}\nOTP, and ours:\n{side_by_side(expected, found)}")


@pytest.mark.parametrize("name", CASES)
def test_the_logs_are_equal(otp: OtpReference, name: str) -> None:
    (reference,) = otp.run(CASES[name])
    compare(CASES[name], reference)


def test_restarts_count_only_within_the_window(otp: OtpReference) -> None:
    for script, reference in zip(WINDOWS, otp.run(*WINDOWS), strict=True):
        compare(script, reference)


@hypothesis.settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    # The fixtures are for the whole test: a script leaves its leftovers for the test.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(script=scripts())
def test_the_logs_of_random_scripts_are_equal(otp: OtpReference, script: Script) -> None:
    (reference,) = otp.run(script)
    compare(script, reference)
