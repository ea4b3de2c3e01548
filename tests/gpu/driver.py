"""The driver's own reports, asked in a separate process, because this one never loads it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from chosen import BACKEND

_PROGRAM = Path(__file__).with_name("driver_child.py")
_SECONDS = 60


def free_memory() -> int:
    """Bytes of the device that nobody has; 0 on a device without memory of its own."""
    return 0 if BACKEND == "cpu" else int(_ask("free"))


@cache
def seconds_to_report(how: str) -> float:
    """How long after its launch the driver reports what a faulty kernel did; 0 without a driver."""
    return 0.0 if BACKEND == "cpu" else float(_ask("report", how))


def _ask(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout
