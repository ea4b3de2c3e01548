"""Our intended differences from OTP are those written down, and no others."""

from __future__ import annotations

import pytest
from crash_scripts import OtpReference, lines, run_on_ours, side_by_side
from crash_scripts.differences import DIFFERENCES

NAMES = sorted(DIFFERENCES)


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_as_written_down(name: str) -> None:
    difference = DIFFERENCES[name]
    for _ in range(5):
        assert lines(run_on_ours(difference.script)) == difference.ours


@pytest.mark.parametrize("name", NAMES)
def test_otp_is_as_written_down(otp: OtpReference, name: str) -> None:
    (reference,) = otp.run(DIFFERENCES[name].script)
    assert lines(reference) == DIFFERENCES[name].otp


@pytest.mark.parametrize("name", NAMES)
def test_they_differ(name: str) -> None:
    difference = DIFFERENCES[name]
    assert difference.otp != difference.ours
    assert side_by_side(difference.otp, difference.ours) == difference.logs.strip("\n")
