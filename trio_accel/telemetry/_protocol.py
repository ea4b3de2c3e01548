"""Protocol of an observer socket, for both ends: its folder, the lines, and their limits.

The user alone may enter the folder.

Each line is one JSON object. The program begins with a line that has the number of the protocol, and
``name``, ``pid`` and ``system``. Then it sends a `SystemSnapshot` at an interval. A client may send
``{"interval": seconds}`` at any time. A line that begins with ``{"error":`` is the last one before the
program closes the connection.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import struct
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import attrs
import trio

from ..actors import is_number
from ..backends.base import AccelError

__all__ = [
    "SHORTEST_SECONDS",
    "LineReader",
    "ObservedProgram",
    "ObserverSocketError",
    "Peer",
    "bind",
    "check_interval",
    "decode",
    "encode",
    "is_name",
    "list_programs",
    "own_folder",
    "peer_of",
    "unlink",
]

SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 60.0
_MOST_AT_ONCE = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")
_SUFFIX = ".sock"
_MODE = 0o600
# Of `sun_path`, with the zero byte at its end: the least of the platforms.
_LONGEST_PATH = 104
_LOCK_SECONDS, _RETRY_SECONDS = 5.0, 0.02
_IN_USE = (errno.EAGAIN, errno.EINPROGRESS)


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
    """Return the process that connected, or that listens; None where the platform does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Peer(pid, uid)


def check_interval(interval: object) -> float:
    """Return the seconds between two snapshots.

    Raises:
        ValueError: They are no number from 0.1 to 60.
    """
    if not is_number(interval, SHORTEST_SECONDS, _LONGEST_SECONDS):
        raise ValueError(
            f"interval must be a number of seconds from {SHORTEST_SECONDS:g} to {_LONGEST_SECONDS:g}, "
            f"got {str(interval)[:40]}"
        )
    return float(interval)


def encode(content: dict[str, object]) -> bytes:
    """Return a line, with its end."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, object]:
    """Parse a line.

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
        """Return the next line; None where the connection has ended.

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


@attrs.frozen(kw_only=True)
class ObservedProgram:
    """A running program that has opened an observer socket.

    Attributes:
        name: Name of the socket.
        pid: Number of the process; None where the platform does not tell.
        path: Where the socket is.
    """

    name: str
    pid: int | None
    path: Path


def list_programs() -> list[ObservedProgram]:
    """Return the programs of this user that have an observer socket open, by name.

    Sockets that dead programs left are not among them. Each program is connected to for a moment.

    Returns:
        Those in ``$XDG_RUNTIME_DIR/trio_accel`` and in ``trio_accel-<uid>`` in the folder for temporary
        files. A folder that is not the user's own is left out.
    """
    folders = [folder for folder in _folders() if _problem(folder) is None]
    paths = {path for folder in folders for path in folder.glob(f"*{_SUFFIX}")}
    found = [program for path in paths if (program := _probe(path)) is not None]
    return sorted(found, key=lambda program: (program.name, program.path))


def own_folder() -> Path:
    """Return the folder of this user, made where it is missing.

    Raises:
        ObserverSocketError: It belongs to another user, is a symbolic link, or others may enter it.
    """
    folder = next(_folders())
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise ObserverSocketError(f"cannot make the folder of observer sockets: {error}") from error
    problem = _problem(folder)
    if problem is not None:
        raise ObserverSocketError(f"cannot open an observer socket: {problem}")
    return folder


async def bind(folder: Path, name: str) -> tuple[socket.socket, Path]:
    """Bind a socket of that name, which listens with mode 0600; what dead programs left is removed.

    Raises:
        ValueError: It is no name.
        ObserverSocketError: A running program has a socket of that name.
    """
    path = _path_of(folder, name)
    async with _locked(folder):
        return _listen(path), path


def is_name(name: object) -> bool:
    """Tell whether a socket may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def unlink(path: Path, inode: int) -> None:
    """Remove a socket, unless it is another program's by now."""
    # Somebody may have cleaned up before.
    with suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _folders() -> Iterator[Path]:
    """Yield folders where programs of this user put their sockets, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # Under `sudo` the variable may name another user's.
    if os.path.isabs(runtime) and _is_own(Path(runtime)):
        yield Path(runtime, "trio_accel")
    yield Path(tempfile.gettempdir(), f"trio_accel-{os.getuid()}")


def _is_own(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid() and folder.is_dir()
    except OSError:
        return False


def _problem(folder: Path) -> str | None:
    """Tell why a folder cannot be trusted for a socket; None if it can."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder but something else, a symbolic link perhaps; remove it"
    if found.st_uid != os.getuid():
        return (
            f"{folder} belongs to another user (uid {found.st_uid}); set XDG_RUNTIME_DIR to a folder of yours"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"other users may enter {folder}; run: chmod 700 {folder}"
    return None


def _path_of(folder: Path, name: str) -> Path:
    if not is_name(name):
        raise ValueError(
            "open_socket: name must be 1 to 64 letters, digits, '_', '-' and '.', and not begin with '-' or "
            f"'.', got {name!r}"
        )
    path = folder / f"{name}{_SUFFIX}"
    length = len(os.fsencode(path))
    if length >= _LONGEST_PATH:
        raise ObserverSocketError(
            f"the path of the observer socket is too long for this platform: {path} has {length} bytes, "
            f"allowed are {_LONGEST_PATH - 1}; give a shorter name, or a shorter XDG_RUNTIME_DIR"
        )
    return path


def _probe(path: Path) -> ObservedProgram | None:
    """Return the program that listens there; None if none does. Does not wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(os.fspath(path))
        except OSError as error:
            if error.errno not in _IN_USE:
                return None
            # It listens, and its queue is full.
            return ObservedProgram(name=path.stem, pid=None, path=path)
        peer = peer_of(connection)
    return ObservedProgram(name=path.stem, pid=None if peer is None else peer.pid, path=path)


def _listen(path: Path) -> socket.socket:
    """Clean up, and take a name that no running program has. The lock keeps others out."""
    for old in path.parent.glob(f"*{_SUFFIX}"):
        _remove_if_dead(old)
    taken = _probe(path)
    if taken is not None:
        who = "another program" if taken.pid is None else f"process {taken.pid}"
        raise ObserverSocketError(f"{who} has an observer socket of the name {path.stem!r} open: {path}")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # On Linux the file has this mode from the beginning; elsewhere the folder keeps others out.
        os.fchmod(listening.fileno(), _MODE)
        listening.bind(os.fspath(path))
        path.chmod(_MODE)
        listening.listen()
    except OSError as error:
        listening.close()
        raise ObserverSocketError(f"cannot open the observer socket {path}: {error.strerror}") from error
    return listening


def _remove_if_dead(path: Path) -> None:
    """Remove what a dead program left, and nothing but a socket."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode) and _probe(path) is None:
            path.unlink()


@asynccontextmanager
async def _locked(folder: Path) -> AsyncGenerator[None, None]:
    """Lock the folder while names are looked at; the kernel gives a dead program's turn back."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with trio.move_on_after(_LOCK_SECONDS) as limit:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await trio.sleep(_RETRY_SECONDS)
        if limit.cancelled_caught:
            raise ObserverSocketError(f"another program has locked {folder} for {_LOCK_SECONDS:g} s")
        yield
    finally:
        os.close(descriptor)
