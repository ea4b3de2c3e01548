"""The observer socket: shows a running program to others of its user, and takes no orders from them (D127).

`open_socket` is the program's end, and `open_observation` that of another program. Both know the folder of
sockets, which the user alone may enter, the lines, and their limits.

Each line is one JSON object. The program begins with a line that has the number of the protocol, and
``name``, ``pid`` and ``system``. Then it sends a `SystemSnapshot` at an interval. A client may send
``{"interval": seconds}`` at any time. A line that begins with ``{"error":`` is the last one before the
program closes the connection.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import struct
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import cast

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import Actor, ActorContext, System, is_number
from ..backends.base import AccelError, NotSupportedError
from ._recorder import record
from ._snapshot import SystemSnapshot

__all__ = [
    "Observation",
    "ObservedProgram",
    "ObserverSocket",
    "ObserverSocketError",
    "list_programs",
    "open_observation",
    "open_socket",
]

SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 60.0
_MOST_AT_ONCE = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")
_SUFFIX = ".sock"
_MODE = 0o600
# The bytes of `sun_path`, with the zero byte at its end: the least of the platforms.
_LONGEST_PATH = 104
_LOCK_SECONDS, _RETRY_SECONDS = 5.0, 0.02
_IN_USE = (errno.EAGAIN, errno.EINPROGRESS)


@attrs.define(eq=False, slots=False)
class ObserverSocketError(AccelError):
    """An observer socket cannot be opened or used; the message says why and what to do about it."""


def peer_of(connection: socket.socket | trio.socket.SocketType) -> tuple[int | None, int | None]:
    """Return the process that connected, or that listens, and its user; None where no kernel tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


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
        Programs in ``$XDG_RUNTIME_DIR/trio_accel`` and in ``trio_accel-<uid>`` in the folder for temporary
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
        pid, _ = peer_of(connection)
    return ObservedProgram(name=path.stem, pid=pid, path=path)


def _listen(path: Path) -> socket.socket:
    """Clean up, and take a name that no running program has, with mode 0600. The lock keeps others out."""
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


_logger = logging.getLogger("trio_accel.telemetry")

_PROTOCOL = 1
_ERROR = b'{"error":'
_DEFAULT_SECONDS = 1.0
_MOST_CLIENTS = 8
_LONGEST_REQUEST = 1024
# Lines that a client sends faster stay in the kernel's buffer of its connection.
_READ_PAUSE = 0.1
# More frequent connections wait in the kernel's queue.
_ACCEPT_PAUSE = 0.02
# A client is let go when it has not taken a line for so long.
_WRITE_SECONDS = 5.0
_LAST_WORD_SECONDS = 1.0
# Snapshots take at most this share of the program's time, whatever its clients ask for.
_LARGEST_SHARE = 0.02
_LONGEST_SYSTEM_NAME = 48
# A tree of a hundred thousand actors; more is no snapshot.
_LONGEST_LINE = 64 << 20
_LONGEST_REASON = 300


@attrs.frozen(kw_only=True, eq=False)
class ObserverSocket:
    """An observer socket that is open.

    Attributes:
        name: Its name, by which ``trio-accel top`` finds it.
        path: Where it is.
    """

    name: str
    path: Path
    _server: _Server = attrs.field(alias="server")

    @property
    def clients(self) -> int:
        """The number of connected clients."""
        return self._server.clients


@asynccontextmanager
@enable_ki_protection
async def open_socket(system: System, name: str | None = None) -> AsyncGenerator[ObserverSocket, None]:
    """Open a socket on which other programs of the same user see this one, such as ``trio-accel top``.

    It is open for the body of the ``async with``, and removed at the end. It is served by an actor of the
    system, named ``observer``, whose supervisor restarts it if it fails. Clients get snapshots as lines of
    JSON. They cannot change anything.

    It is a Unix socket of mode 0600 in ``$XDG_RUNTIME_DIR/trio_accel``, or in ``trio_accel-<uid>`` in the
    folder for temporary files. No other user may enter that folder. On Linux, the kernel also tells whether a
    peer is this user or root; others are refused.

    Clients cannot hold up the program. At most 8 are connected, the memory for each is bounded, and a client
    that does not read for 5 s is let go. Snapshots take at most 2 % of the time of the program: of a large
    tree they come less often than was asked for.

    Args:
        system: The system to show.
        name: Name of the socket. None takes the name of the system and the number of the process.

    Raises:
        ValueError: The name is not valid: letters, digits, ``_``, ``-`` and ``.``, at most 64. Or the system
            has an observer socket open already.
        ObserverSocketError: A running program has a socket of this name; its process is named. Or the folder
            is another user's, or is open to others.
        NotSupportedError: The platform has no Unix sockets.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise NotSupportedError("observer sockets need a platform with Unix sockets")
    if name is None:
        plain = re.sub(r"[^A-Za-z0-9_.\-]", "_", system.name).lstrip("-.")
        name = f"{plain[:_LONGEST_SYSTEM_NAME] or 'system'}-{os.getpid()}"
    with record(system) as recorder:
        path = _path_of(own_folder(), name)
        async with _locked(path.parent):
            listening = _listen(path)
        inode = path.lstat().st_ino
        server = _Server(
            path=path,
            hello=encode({"protocol": _PROTOCOL, "name": name, "pid": os.getpid(), "system": system.name}),
            lines=_SharedLine(look=lambda: recorder.snapshot().to_json().encode() + b"\n"),
        )
        with listening:
            try:
                actor = await system.spawn(ObserverActor, listening, server, name="observer")
                try:
                    yield ObserverSocket(name=name, path=path, server=server)
                finally:
                    actor.cancel("the observer socket is closed")
                    with trio.CancelScope(shield=True):
                        await actor.wait_terminated()
            finally:
                # The file goes before the server stops to listen: from then on another program may take the
                # name.
                unlink(path, inode)


class ObserverActor(Actor):
    """Serves the socket; restarted by its supervisor, at the same path, should that fail."""

    def __init__(self, listening: socket.socket, server: _Server) -> None:
        self._listening = listening
        self._server = server

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Serve meanwhile."""
        # A listener closes its socket, which the next incarnation needs, so it gets a copy.
        again = trio.socket.from_stdlib_socket(self._listening.dup())
        async with _PacedListener(trio.SocketListener(again)) as listener, trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._server.serve, [listener])
            yield
            nursery.cancel_scope.cancel(reason="the observer socket is closed")


@attrs.frozen(eq=False)
class _PacedListener(trio.abc.Listener[trio.SocketStream]):
    """Takes so many connections per second that who comes and goes in a loop costs little."""

    inner: trio.SocketListener

    async def accept(self) -> trio.SocketStream:
        await trio.sleep(_ACCEPT_PAUSE)
        return await self.inner.accept()

    async def aclose(self) -> None:
        await self.inner.aclose()


@attrs.define(eq=False, kw_only=True)
class _Server:
    """Takes connections: no more than a few, and only of the user's own processes."""

    path: Path
    hello: bytes
    lines: _SharedLine
    clients: int = attrs.field(default=0, init=False)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection, to its end. No error of it ends the program."""
        async with stream:
            try:
                await self._admit(stream)
            except Exception:
                _logger.exception("%s dropped a client", self.path)

    async def _admit(self, stream: trio.SocketStream) -> None:
        pid, uid = peer_of(stream.socket)
        if uid not in {None, os.getuid(), 0}:
            _logger.warning("the observer socket %s refused process %d of user %d", self.path, pid, uid)
            return
        client = _Client(stream=stream, lines=self.lines)
        if self.clients >= _MOST_CLIENTS:
            await client.say_last(f"{_MOST_CLIENTS} clients are connected already: close one of them")
            return
        self.clients += 1
        try:
            await client.serve(self.hello)
        finally:
            self.clients -= 1
            if not self.clients:
                self.lines.forget()


@attrs.define(eq=False, kw_only=True)
class _SharedLine:
    """The newest snapshot as a line; all clients are sent the same bytes."""

    look: Callable[[], bytes]
    _line: bytes | None = attrs.field(default=None, init=False)
    _fresh_until: float = attrs.field(default=0.0, init=False)

    async def after(self, sent: bytes | None) -> bytes:
        """Return another line than the one that was sent, at the pace that the program can afford."""
        if sent is not None and sent is self._line:
            await trio.sleep_until(self._fresh_until)
        if self._line is None or trio.current_time() >= self._fresh_until:
            began = perf_counter()
            self._line = self.look()
            took = perf_counter() - began
            self._fresh_until = trio.current_time() + max(SHORTEST_SECONDS, took / _LARGEST_SHARE)
        return self._line

    def forget(self) -> None:
        """Keep nothing, as no client is left."""
        self._line = None


@attrs.define(eq=False, kw_only=True)
class _Client:
    """One connection that was admitted."""

    stream: trio.SocketStream
    lines: _SharedLine
    _interval: float = attrs.field(default=_DEFAULT_SECONDS, init=False)
    _asked: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _refusal: str | None = attrs.field(default=None, init=False)
    _is_in_line: bool = attrs.field(default=False, init=False)

    async def serve(self, hello: bytes) -> None:
        """Send snapshots until the client leaves, does not read, or sends what is no request."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, nursery.cancel_scope)
            await self._write(hello)
            nursery.cancel_scope.cancel()
        if self._refusal is not None and not self._is_in_line:
            await self.say_last(self._refusal)

    async def say_last(self, error: str) -> None:
        """Tell why the connection ends, if that can be done at once."""
        await self._send(encode({"error": error}), _LAST_WORD_SECONDS)

    async def _write(self, hello: bytes) -> None:
        is_there = await self._send(hello, _WRITE_SECONDS)
        sent: bytes | None = None
        while is_there:
            sent = await self.lines.after(sent)
            at = trio.current_time()
            is_there = await self._send(sent, _WRITE_SECONDS)
            while trio.current_time() < at + self._interval:
                with trio.move_on_at(at + self._interval):
                    await self._asked.park()

    async def _send(self, line: bytes, seconds: float) -> bool:
        """Tell whether the line was sent in time, to somebody who is there."""
        self._is_in_line = True
        with trio.move_on_after(seconds):
            try:
                await self.stream.send_all(line)
            except trio.BrokenResourceError:
                return False
            self._is_in_line = False
        return not self._is_in_line

    async def _read(self, connection: trio.CancelScope) -> None:
        reader = LineReader(self.stream, _LONGEST_REQUEST, _READ_PAUSE)
        try:
            while (line := await reader.receive()) is not None:
                self._interval = check_interval(decode(line).get("interval"))
                self._asked.unpark_all()
        except trio.BrokenResourceError:
            # The client has gone, and left data that it had not read.
            pass
        except ValueError as error:
            self._refusal = f'{error}; a request is {{"interval": seconds}}'
        connection.cancel()


@attrs.frozen(kw_only=True, eq=False)
class Observation:
    """A connection to a running program; iterating over it gives snapshots until the program ends.

    Attributes:
        program: The program that is seen.
        system: Name of its system.
    """

    program: ObservedProgram
    system: str
    _lines: LineReader = attrs.field(alias="lines")

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
        ObserverSocketError: No program listens there, it refuses, or its lines are not understood.
    """
    check_interval(interval)
    with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as connection:
        try:
            await _connect(connection, os.fspath(path))
        except OSError as error:
            raise ObserverSocketError(_why_not(path, error)) from error
        pid, _ = peer_of(connection)
        stream = trio.SocketStream(connection)
        lines = LineReader(stream, _LONGEST_LINE)
        # The program's last line says why it has closed the connection.
        with suppress(trio.BrokenResourceError):
            await stream.send_all(encode({"interval": interval}))
        hello = _hello(await _next(lines))
        program = ObservedProgram(name=str(hello.get("name")), pid=pid, path=Path(path))
        yield Observation(program=program, system=str(hello.get("system")), lines=lines)


async def _connect(connection: trio.socket.SocketType, path: str) -> None:
    """Connect, as soon as the program has room: while its loop is held, its queue may be full."""
    while True:
        await connection.connect(path)
        with suppress(OSError):
            # Linux refuses it with EAGAIN then, which Trio takes for a connection that is on its way.
            connection.getpeername()
            return
        await trio.sleep(_READ_PAUSE)


def _why_not(path: str | os.PathLike[str], error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK}:
        return f"no program listens at {os.fspath(path)}"
    return f"cannot connect to {os.fspath(path)}: {error.strerror or error}"


async def _next(lines: LineReader) -> bytes | None:
    """Return the program's next line; None at the end."""
    try:
        line = await lines.receive()
        if line is not None and line.startswith(_ERROR):
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
    if content.get("protocol") != _PROTOCOL:
        begin = line[:60]
        raise ObserverSocketError(f"no observer socket of this version: it begins with {begin!r}")
    if not is_name(content.get("name")):
        raise ObserverSocketError("no observer socket: the name that it gives is none")
    return content
