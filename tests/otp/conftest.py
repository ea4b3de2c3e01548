"""The Erlang VM that all comparisons share, and the modules next to this file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

# With importlib mode the tests' own modules are found only if their folder is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from crash_scripts import OtpReference, why_no_otp


@pytest.fixture(scope="session")
def otp() -> Generator[OtpReference, None, None]:
    """An Erlang VM that runs scripts; skips the test where there is none."""
    reason = why_no_otp()
    if reason is not None:
        pytest.skip(reason)
    with OtpReference() as reference:
        yield reference


@pytest.fixture(autouse=True)
def quiet_crashes(caplog: pytest.LogCaptureFixture) -> None:
    """The scripts are about crashes, and there are thousands."""
    caplog.set_level(logging.ERROR, logger="trio_accel.actors")
