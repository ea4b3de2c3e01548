"""Questions for the health of a service, from a process of their own with a priority above the others.

In the process of a service or of its clients, the questions would wait for the work there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

__all__ = ["LONGEST", "Health", "asked_beside"]

LONGEST = 0.5
"""Seconds that an answer may take."""

_ASKER = Path(__file__).with_name("_asker.py")
_PATIENCE = 60.0  # seconds in which the process must end


@attrs.define(kw_only=True)
class Health:
    """The answers to questions for health.

    Attributes:
        asked: The number of questions.
        longest: Seconds of the slowest answer.
        refused: The number of answers without the status 200.
        priority: How the process was preferred: ``"real-time"``, ``"nice"`` or ``"none"``.
    """

    asked: int = 0
    longest: float = 0.0
    refused: int = 0
    priority: str = "none"

    def __str__(self) -> str:
        return (
            f"health: {self.asked} questions with priority {self.priority}, longest {self.longest:.3f} s, "
            f"{self.refused} not 200"
        )

    def add(self, other: Health) -> None:
        """Add the answers to later questions."""
        self.asked += other.asked
        self.longest = max(self.longest, other.longest)
        self.refused += other.refused
        self.priority = other.priority

    def faults(self) -> list[str]:
        """Return the reasons why this is not the health of a good service."""
        found = [] if self.asked else ["health was never asked"]
        if self.longest > LONGEST:
            found.append(f"an answer of /health took {self.longest:.3f} s, above {LONGEST:g} s")
        if self.refused:
            found.append(f"{self.refused} of {self.asked} answers of /health were not 200")
        return found


@asynccontextmanager
async def asked_beside(port: int, path: str = "/health") -> AsyncGenerator[Health]:
    """Ask from another process during the block. The yielded object has the answers after the block."""
    health, found = Health(), b"{}"
    command = [sys.executable, "-I", "-S", str(_ASKER), str(port), path]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.receive_some(1)
        yield health
    finally:
        with trio.CancelScope(shield=True):
            found = await _end(process)
    for name, value in json.loads(found).items():
        setattr(health, name, value)


async def _end(process: trio.Process) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.aclose()
    found = b""
    with trio.move_on_after(_PATIENCE):
        async for part in process.stdout:
            found += part
    if process.returncode is None:
        process.kill()
    await process.stdout.aclose()
    await process.wait()
    return found or b"{}"
