"""Which backend the tests run on that hold for every one."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

import trio_accel as ta

BACKEND = os.environ.get("TRIO_ACCEL_BACKEND", "").partition(":")[0] or "cpu"
"""What the environment names, else the CPU's."""

IS_STAND_IN = "STAND_IN_DIR" in os.environ
"""Whether CUDA's driver and libraries are the stand-in's."""

ROOT = Path(__file__).parents[1]
"""Of the project."""

SEARCHED = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""Where programs that tests start look for modules: here, and where the tests do."""

NAME = f"{BACKEND}:0"
"""Name of its first device."""


async def for_ever(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until it fails, for ten seconds at most: a real fault shows when the driver has noticed it."""
    with trio.fail_after(60):
        while True:
            await ask()


INLINE = ta.DeviceOptions(isolation="inline")
"""For tests of what is the same in both isolations, and of what only an engine in this process shows."""
