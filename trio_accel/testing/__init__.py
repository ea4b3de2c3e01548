"""Helpers for tests of programs that use actors and devices.

Fixtures for pytest are in `trio_accel.testing.fixtures`, which needs pytest and pytest-trio.
"""

from ._census import Leak, LeakKind
from ._faults import FaultInjection, inject_fault, poison
from ._leaks import LeakError, leak_check
from ._manual import ManualCompletion
from ._probe import FixedRandom, Probe, open_probe, wait_until_quiet

__all__ = [
    "FaultInjection",
    "FixedRandom",
    "Leak",
    "LeakError",
    "LeakKind",
    "ManualCompletion",
    "Probe",
    "inject_fault",
    "leak_check",
    "open_probe",
    "poison",
    "wait_until_quiet",
]
