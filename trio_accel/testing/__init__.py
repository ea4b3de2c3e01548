"""Helpers for tests of programs that use actors and devices.

Fixtures for pytest are in `trio_accel.testing.fixtures`, which needs pytest and pytest-trio.
"""

from ._faults import FaultInjection, inject_fault, poison
from ._jitter import FixedRandom
from ._probe import Probe, open_probe
from ._quiet import wait_until_quiet

__all__ = [
    "FaultInjection",
    "FixedRandom",
    "Probe",
    "inject_fault",
    "open_probe",
    "poison",
    "wait_until_quiet",
]
