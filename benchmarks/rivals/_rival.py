"""A rival, as the benchmarks see it: a process that measures what it is asked to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

__all__ = ["Rival", "RivalMissingError", "open_rival"]

_MOST = 1 << 16
_ROOT = Path(__file__).parents[2]


class RivalMissingError(Exception):
    """A rival cannot be measured here; the text says why."""


class Rival:
    """A process that measures; between two measurements it only waits.

    So this process loads no driver for the sake of a comparison, and a rival has an interpreter to itself,
    as it would have in a program.
    """

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        self._output = process.stdout
        self._buffer = b""

    async def aclose(self) -> None:
        """Close the pipes to it."""
        await self._input.aclose()
        await self._output.aclose()

    async def measure(self, name: str, **arguments: str | float) -> float:
        """Take one measurement.

        Raises:
            RivalMissingError: It failed.
        """
        value: float = await self._ask(name, arguments)
        return value

    async def measure_each(self, name: str, **arguments: str | float) -> list[float]:
        """Take several measurements in a row.

        Raises:
            RivalMissingError: One failed.
        """
        values: list[float] = await self._ask(name, arguments)
        return values

    async def _ask(self, name: str, arguments: dict[str, str | float]) -> Any:
        request = {"name": name, "arguments": arguments}
        await self._input.send_all(json.dumps(request).encode() + b"\n")
        return (await self.receive())["value"]

    async def receive(self) -> dict[str, Any]:
        """Read one line of what it says.

        Raises:
            RivalMissingError: It says that it failed, or ended.
        """
        while b"\n" not in self._buffer:
            data = await self._output.receive_some(_MOST)
            if not data:
                raise RivalMissingError("its process ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise RivalMissingError(said["error"])
        return said


@asynccontextmanager
async def open_rival(kind: str) -> AsyncGenerator[Rival, None]:
    """Start a rival, and end its process at the end.

    Args:
        kind: ``"bare"``, the vendor's library by the same bindings; ``"engine"``, the backend without the
            rest of the package; ``"cupy"``, ``"torch"``.

    Raises:
        RivalMissingError: It is not installed, or finds no device.
    """
    command = [sys.executable, "-m", "benchmarks.rivals", kind]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
    )
    rival = Rival(process)
    try:
        await rival.receive()
        yield rival
    finally:
        # There is nothing that it would have to put in order.
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await rival.aclose()
