"""Helpers for tests of programs that use actors and devices.

Fixtures for pytest are in `trio_accel.testing.fixtures`, which needs pytest and pytest-trio.
"""

from ._leaks import Leak, LeakError, LeakKind, leak_check
from ._operations import FaultInjection, ManualCompletion, inject_fault, poison
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
