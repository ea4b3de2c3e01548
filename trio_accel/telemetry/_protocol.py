"""What both ends of an observer socket know: the lines, and their limits.

Each line is one JSON object. The program begins with a line that has the number of the protocol, and
``name``, ``pid`` and ``system``. Then it sends a `SystemSnapshot` at an interval. A client may send
``{"interval": seconds}`` at any time. A line that begins with ``{"error":`` is the last one before the
program closes the connection.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from typing import cast

import attrs
import trio

from ..backends.base import AccelError

__all__ = [
    "DEFAULT_SECONDS",
    "ERROR",
    "LONGEST_SECONDS",
    "PROTOCOL",
    "SHORTEST_SECONDS",
    "LineReader",
    "ObserverSocketError",
    "Peer",
    "check_interval",
    "decode",
    "encode",
    "peer_of",
]

PROTOCOL = 1
ERROR = b'{"error":'
SHORTEST_SECONDS, DEFAULT_SECONDS, LONGEST_SECONDS = 0.1, 1.0, 60.0
_MOST_AT_ONCE = 1 << 16
_CREDENTIALS = struct.Struct("3i")


@attrs.define(eq=False, slots=False)
class ObserverSocketError(AccelError):
    """An observer socket cannot be opened or used; the message says why and what to do about it."""


@attrs.frozen
class Peer:
    """The process at the other end of a connection, as the kernel tells it.

    Attributes:
        pid: Its number.
        uid: Number of the user that it runs as.
    """

    pid: int
    uid: int


def peer_of(connection: socket.socket | trio.socket.SocketType) -> Peer | None:
    """The process that connected, or that listens; None where the platform does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Peer(pid, uid)


def check_interval(interval: object) -> float:
    """The seconds between two snapshots.

    Raises:
        ValueError: They are no number from 0.1 to 60.
    """
    is_number = isinstance(interval, (int, float)) and not isinstance(interval, bool)
    if not is_number or not SHORTEST_SECONDS <= cast("float", interval) <= LONGEST_SECONDS:
        raise ValueError(
            f"interval must be a number of seconds from {SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g}, "
            f"got {str(interval)[:40]}"
        )
    return float(cast("float", interval))


def encode(content: dict[str, object]) -> bytes:
    """A line, with its end."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, object]:
    """What a line says.

    Raises:
        ValueError: It is no JSON object.
    """
    try:
        content: object = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return cast("dict[str, object]", content)
    raise ValueError(f"a line must be one JSON object, got {bytes(line[:40])!r}")


@attrs.define(eq=False)
class LineReader:
    """The lines that come on a connection, without their ends.

    A call that is cancelled loses nothing. A last line without an end is left out.

    Attributes:
        stream: Where they come from.
        longest: Bytes of the longest line.
        pause: Seconds to wait before more is read: what comes faster stays with its sender.
    """

    stream: trio.abc.ReceiveStream
    longest: int
    pause: float = 0.0
    _whole: deque[bytes] = attrs.field(factory=deque[bytes], init=False)
    _rest: bytearray = attrs.field(factory=bytearray, init=False)

    async def receive(self) -> bytes | None:
        """The next line; None where the connection has ended.

        Raises:
            ValueError: The line is too long.
            BrokenResourceError: The connection broke.
        """
        while not self._whole:
            await trio.sleep(self.pause)
            part = await self.stream.receive_some(min(self.longest, _MOST_AT_ONCE))
            if not part:
                return None
            first, *others = part.split(b"\n")
            self._rest += first
            for other in others:
                self._whole.append(bytes(self._rest))
                self._rest = bytearray(other)
            if len(self._rest) > self.longest:
                raise ValueError(f"a line must have at most {self.longest} bytes")
        return self._whole.popleft()
