"""The other end of an observer socket: what another program sees."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import trio

from ._folder import ObservedProgram, is_name
from ._protocol import (
    ERROR,
    PROTOCOL,
    LineReader,
    ObserverSocketError,
    check_interval,
    decode,
    encode,
    peer_of,
)
from ._snapshot import SystemSnapshot

__all__ = ["Observation", "open_observation"]

# A tree of a hundred thousand actors; more is no snapshot.
_LONGEST_LINE = 64 << 20
_LONGEST_REASON = 300


@attrs.frozen(kw_only=True, eq=False)
class Observation:
    """A connection to a running program; iterating over it gives snapshots until the program ends.

    Attributes:
        program: The program that is seen.
        system: Name of its system.
    """

    program: ObservedProgram
    system: str
    _stream: trio.SocketStream = attrs.field(alias="stream")
    _lines: LineReader = attrs.field(alias="lines")

    async def set_interval(self, interval: float) -> None:
        """Ask for a snapshot every so many seconds, 0.1 to 60.

        Raises:
            ValueError: It is no such number.
        """
        await _ask(self._stream, check_interval(interval))

    def __aiter__(self) -> Observation:
        return self

    async def __anext__(self) -> SystemSnapshot:
        line = await _next(self._lines)
        if line is None:
            raise StopAsyncIteration
        try:
            return SystemSnapshot.from_json(line)
        except ValueError as error:
            raise ObserverSocketError(f"{self.program.path} sent what is no snapshot: {error}") from error


@asynccontextmanager
async def open_observation(
    path: str | os.PathLike[str], *, interval: float = 1.0
) -> AsyncGenerator[Observation, None]:
    """Connect to the observer socket of a running program.

    ``list_programs`` tells which there are. The snapshots of ``async for snapshot in observation`` end when
    the program closes its socket, or ends. Waiting can be cancelled.

    Args:
        path: Where the socket is.
        interval: Seconds between two snapshots, 0.1 to 60.

    Raises:
        ValueError: The interval is no such number.
        ObserverSocketError: No program listens there, it refuses, or what it sends is not understood.
    """
    check_interval(interval)
    with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as connection:
        try:
            await connection.connect(os.fspath(path))
        except OSError as error:
            raise ObserverSocketError(_why_not(path, error)) from error
        peer = peer_of(connection)
        stream = trio.SocketStream(connection)
        lines = LineReader(stream, _LONGEST_LINE)
        await _ask(stream, interval)
        hello = _hello(await _next(lines))
        program = ObservedProgram(
            name=str(hello.get("name")), pid=None if peer is None else peer.pid, path=Path(path)
        )
        yield Observation(program=program, system=str(hello.get("system")), stream=stream, lines=lines)


def _why_not(path: str | os.PathLike[str], error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK}:
        return f"no program listens at {os.fspath(path)}"
    return f"cannot connect to {os.fspath(path)}: {error.strerror or error}"


async def _ask(stream: trio.SocketStream, interval: float) -> None:
    # Why the program has closed the connection is in what it sent before.
    with suppress(trio.BrokenResourceError):
        await stream.send_all(encode({"interval": interval}))


async def _next(lines: LineReader) -> bytes | None:
    """What the program sends next; None at the end."""
    try:
        line = await lines.receive()
        if line is not None and line.startswith(ERROR):
            why = " ".join(str(decode(line)["error"])[:_LONGEST_REASON].split())
            raise ObserverSocketError(f"the program refused: {why}")
    except trio.BrokenResourceError:
        return None
    except ValueError as error:
        raise ObserverSocketError(f"no observer socket: {error}") from error
    return line


def _hello(line: bytes | None) -> dict[str, object]:
    if line is None:
        raise ObserverSocketError("no observer socket: it closed the connection without a word")
    try:
        content = decode(line)
    except ValueError as error:
        raise ObserverSocketError(f"no observer socket: {error}") from error
    if content.get("protocol") != PROTOCOL:
        begin = line[:60]
        raise ObserverSocketError(f"no observer socket of this version: it begins with {begin!r}")
    if not is_name(content.get("name")):
        raise ObserverSocketError("no observer socket: the name that it gives is none")
    return content
