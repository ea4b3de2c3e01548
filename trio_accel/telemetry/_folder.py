"""Where observer sockets lie: a folder that the user alone may enter."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import trio

from ._protocol import ObserverSocketError, peer_of

__all__ = ["ObservedProgram", "bind", "is_name", "list_programs", "own_folder", "unlink"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")
_SUFFIX = ".sock"
_MODE = 0o600
# Of `sun_path`, with the zero byte at its end: the least of the platforms.
_LONGEST_PATH = 104
_LOCK_SECONDS, _RETRY_SECONDS = 5.0, 0.02
_IN_USE = (errno.EAGAIN, errno.EINPROGRESS)


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
    """The programs of this user that have an observer socket open, by name.

    Sockets that dead programs left are not among them. Each program is connected to for a moment.

    Returns:
        Those in ``$XDG_RUNTIME_DIR/trio_accel`` and in ``trio_accel-<uid>`` in the folder for temporary
        files. A folder that is not the user's own is left out.
    """
    found: dict[Path, ObservedProgram] = {}
    for folder in _folders():
        if _problem(folder) is None:
            found |= {program.path: program for program in _programs(folder)}
    return sorted(found.values(), key=lambda program: (program.name, program.path))


def own_folder() -> Path:
    """The folder of this user, made where it is missing.

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
    """A socket of that name that listens, with mode 0600, and its path; what dead programs left is removed.

    Raises:
        ValueError: It is no name.
        ObserverSocketError: A running program has a socket of that name.
    """
    path = _path_of(folder, name)
    async with _locked(folder):
        return _listen(path), path


def is_name(name: object) -> bool:
    """Whether a socket may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def unlink(path: Path, inode: int) -> None:
    """Remove a socket, unless it is another program's by now."""
    # Somebody may have cleaned up before.
    with suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _folders() -> Iterator[Path]:
    """Those where programs of this user put their sockets, the preferred one first."""
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
    """Why a folder is none to put a socket into, or to trust one in."""
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


def _programs(folder: Path) -> Iterator[ObservedProgram]:
    for path in folder.glob(f"*{_SUFFIX}"):
        program = _probe(path)
        if program is not None:
            yield program


def _probe(path: Path) -> ObservedProgram | None:
    """The program that listens there; None if none does. Does not wait."""
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
    """One program at a time looks which names are free; the kernel gives a dead program's turn back."""
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
