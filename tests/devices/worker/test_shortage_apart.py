"""The tests of `test_shortage`, where the driver of this process would suffer from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import BACKEND, IS_STAND_IN

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


@pytest.mark.skipif(BACKEND != "cuda" or IS_STAND_IN, reason="there is no driver of NVIDIA's in this process")
@pytest.mark.timeout(300)
def test_a_shortage_in_a_process_of_its_own() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        (*PYTEST, str(Path(__file__).with_name("test_shortage.py"))),
        env={**kept, "TRIO_ACCEL_TEST_APART": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
