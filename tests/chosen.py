"""Which backend the tests run on that hold for every one."""

from __future__ import annotations

import os

import trio_accel as ta

BACKEND = os.environ.get("TRIO_ACCEL_BACKEND", "").partition(":")[0] or "cpu"
"""What the environment names, else the CPU's."""

NAME = f"{BACKEND}:0"
"""Name of its first device."""

INLINE = ta.DeviceOptions(isolation="inline")
"""For tests of what is the same in both isolations, and of what only an engine in this process shows."""
