"""Questions for the health of a service, from a process of their own with a priority above the others.

``python -m benchmarks._health PORT PATH`` asks until its standard input ends, and prints `Health` as JSON.
In the process of a service or of its clients, the questions would wait for the work there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import attrs
import trio

__all__ = ["LONGEST", "Health", "asked_beside"]

LONGEST = 0.5
"""Seconds that an answer may take."""

_EVERY = 0.05
_PRIORITY, _NICE = 10, -10
_PATIENCE = 30.0  # seconds until a question ends without an answer


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
    health = Health()
    command = [sys.executable, "-m", "benchmarks._health", str(port), path]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
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
    with trio.move_on_after(2 * _PATIENCE):
        async for part in process.stdout:
            found += part
    if process.returncode is None:
        process.kill()
    await process.stdout.aclose()
    await process.wait()
    return found or b"{}"


def _prefer() -> str:
    """Give this process the highest priority that the system permits, and return its kind."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        return "real-time"
    with suppress(OSError):
        os.nice(_NICE)
        return "nice"
    return "none"


def _ask(port: int, path: str) -> int:
    """Return the status of an answer, or 0."""
    question = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    found = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _PATIENCE) as client:
        client.sendall(question)
        while part := client.recv(1 << 16):
            found += part
    parts = found.split(None, 2)
    return int(parts[1]) if len(parts) > 1 else 0


def main(port: int, path: str) -> None:
    """Ask until the standard input ends, and print the answers."""
    health, ending = Health(priority=_prefer()), threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        ending.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ending.is_set():
        began = time.perf_counter()
        health.refused += _ask(port, path) != 200
        health.longest = max(health.longest, time.perf_counter() - began)
        health.asked += 1
        ending.wait(_EVERY)
    print(json.dumps(attrs.asdict(health)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
