"""Requests over streams between nodes, with deadlines, cancellation and back-pressure."""

from __future__ import annotations

import hmac
import itertools
import math
import os
import platform
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import outcome
import trio

from .._version import __version__
from ..actors import TaskEvent
from ..devices.base._lobby import Admit, Lobby
from ._frames import MOST_BYTES, MOST_PARTS, Parts, failure, pack, raised, unpack

Serve: TypeAlias = Callable[[Any], Awaitable[object]]
"""Serves a request of the other end."""
Allocate: TypeAlias = "Callable[[int], npt.NDArray[np.uint8]]"
"""Makes memory of so many bytes for what comes."""

Frame: TypeAlias = "tuple[int, int, Parts]"
"""Number of a request, kind, and what it holds."""
# Number of the request, kind, number of parts, and then the bytes of each.
_HEAD = struct.Struct("<QBI")
_LENGTH = struct.Struct("<Q")
_ASK, _CANCEL, _VALUE, _ERROR = range(4)
# Larger frames use a separate stream, so that a small one does not wait for a large one.
_STREAM_FROM_BYTES = 1 << 16
_NONCE = 32
# Seconds in which the other end must prove the secret, and the number of connections without proof: a proof
# takes a millisecond. The kernel keeps new connections until they are accepted.
_PROOF, _MAX_STRANGERS, _BACKLOG = 2.0, 256, 1024
_CONNECTION_ERRORS = (
    trio.TooSlowError,
    trio.EndOfChannel,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
VERSION = f"trio_accel {__version__}, Python {'.'.join(platform.python_version_tuple()[:2])}"


class LinkLostError(ConnectionError):
    """The other end is lost.

    Attributes:
        is_begun: Whether the request was in flight, so that it may have been executed.
        beside: The number of other requests in flight.
    """

    def __init__(self, message: str, *, is_begun: bool, beside: int = 0) -> None:
        super().__init__(message)
        self.is_begun: bool = is_begun
        self.beside: int = beside


def allocate_any(size: int) -> npt.NDArray[np.uint8]:
    """Allocate plain memory, unknown to any device."""
    return np.empty(size, np.uint8)


@attrs.frozen
class Address:
    """The address at which a node listens.

    Attributes:
        host: The host address.
        port: The port.
        secret: The secret that both ends prove to know.
    """

    host: str
    port: int
    secret: bytes = attrs.field(repr=False)

    async def connect(
        self, name: str, window: float, nursery: trio.Nursery, allocate: Allocate = allocate_any
    ) -> Link:
        """Connect to the node that listens there; the link ends with the nursery.

        Raises:
            LinkLostError: Nobody listens, or the other end lacks the secret, or has another version.
        """
        token, streams, is_proved = os.urandom(_NONCE), list[_Connection](), False
        link = Link(streams, name, window=window)
        try:
            with trio.fail_after(_PROOF):
                for _ in range(2):
                    streams.append(_Connection(trio.socket.socket(), allocate))
                    await streams[-1].sock.connect((self.host, self.port))
                    await _prove(streams[-1], self.secret, is_asked=False, token=token)
            is_proved = True
        except (OSError, *_CONNECTION_ERRORS) as error:
            reason = str(error) or type(error).__name__
            raise LinkLostError(f"node {name} cannot be reached: {reason}", is_begun=False) from error
        finally:
            if not is_proved:
                link.close()
        nursery.start_soon(link.run)
        return link


class _Connection:
    """A connection: a sequence of frames, each with number, kind and parts."""

    def __init__(self, sock: trio.socket.SocketType, allocate: Allocate) -> None:
        self.sock, self._allocate = sock, allocate
        self._written = trio.SocketStream(sock)
        # One task writes, in the order of posting, so that a request always precedes its own cancellation.
        self.posted, self._frames = trio.open_memory_channel[Frame](math.inf)

    async def write(self, *views: bytes | bytearray | memoryview) -> None:
        for view in views:
            await self._written.send_all(view)

    async def read(self, size: int) -> memoryview:
        view = memoryview((self._allocate if size > _STREAM_FROM_BYTES else allocate_any)(size).data)
        got = 0
        while got < size:
            count = await self.sock.recv_into(view[got:])
            if not count:
                raise trio.EndOfChannel
            got += count
        return view

    async def write_posted(self) -> None:
        async for number, kind, parts in self._frames:
            lengths = b"".join([_LENGTH.pack(len(part)) for part in parts])
            await self.write(_HEAD.pack(number, kind, len(parts)) + lengths, *parts)

    async def receive(self) -> tuple[int, int, list[memoryview]]:
        number, kind, count = _HEAD.unpack(await self.read(_HEAD.size))
        if kind > _ERROR or count > MOST_PARTS:
            raise trio.EndOfChannel
        lengths = [size for (size,) in _LENGTH.iter_unpack(await self.read(_LENGTH.size * count))]
        if sum(lengths) > MOST_BYTES:
            raise trio.EndOfChannel
        return number, kind, [await self.read(size) for size in lengths]


class Link:
    """One end of two connections: one for small frames, one for large ones.

    Attributes:
        lost: Set when the other end is lost.

    Args:
        streams: The connections.
        name: The name of the other end, for errors.
        serve: Serves its requests; None if it sends none.
        window: The maximum number of requests that wait for its replies; further ones wait in their own
            tasks.
    """

    def __init__(
        self, streams: list[_Connection], name: str, serve: Serve | None = None, window: float = math.inf
    ) -> None:
        self._streams, self._name, self._serve = streams, name, serve
        self._window = trio.CapacityLimiter(window)
        self._numbers = itertools.count(1)
        self._replies: dict[int, TaskEvent] = {}
        self._outcomes: dict[int, outcome.Outcome[Any]] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self.lost: TaskEvent = TaskEvent()
        self._beside = 0
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Read messages until a connection ends, which raises nothing."""
        try:
            async with trio.open_nursery() as self._nursery:
                for stream in self._streams:
                    self._nursery.start_soon(self._read, stream)
                    self._nursery.start_soon(self._write, stream)
                await self.lost.wait()
                self._nursery.cancel_scope.cancel(reason="the other end is gone")
        finally:
            self.close()

    def close(self) -> None:
        """End it, and fail all requests that wait for a reply."""
        self.lost.set()
        # Count the requests before they leave the window one after the other.
        self._beside = max(self._beside, self._window.borrowed_tokens - 1)
        for stream in self._streams:
            stream.sock.close()
        for event in self._replies.values():
            event.set()

    async def wait_answered(self) -> None:
        """Wait until no request waits for its reply, or the other end is lost."""
        while self._replies and not self.lost.is_set():
            await next(iter(self._replies.values())).wait()
            # The caller takes the reply in its own task.
            await trio.lowlevel.checkpoint()

    async def ask(self, request: object, *, at_once: bool = False) -> Any:
        """Have the other end serve a request.

        Args:
            request: The request.
            at_once: Whether to bypass the window, because messages that keep a cluster together must not wait
                for requests.

        Raises:
            LinkLostError: The other end is lost.
            Exception: The error of the other end.
        """
        parts = pack((request, trio.current_effective_deadline() - trio.current_time()))
        stream = self._stream(parts)
        async with nullcontext() if at_once else self._window:
            if self.lost.is_set():
                raise LinkLostError(f"node {self._name} is gone", is_begun=False)
            number = next(self._numbers)
            replied = self._replies[number] = TaskEvent()
            try:
                stream.posted.send_nowait((number, _ASK, parts))
                await replied.wait()
            except trio.Cancelled:
                stream.posted.send_nowait((number, _CANCEL, []))
                raise
            finally:
                # A cancelled request does not wait for a reply.
                self._replies.pop(number).set()
                outcome = self._outcomes.pop(number, None)
        if outcome is None:
            text = f"node {self._name} was lost with this request in flight"
            raise LinkLostError(text, is_begun=True, beside=self._beside)
        return outcome.unwrap()

    def _stream(self, parts: Parts) -> _Connection:
        return self._streams[sum(map(len, parts)) > _STREAM_FROM_BYTES]

    async def _write(self, stream: _Connection) -> None:
        try:
            await stream.write_posted()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.lost.set()

    async def _read(self, stream: _Connection) -> None:
        try:
            while True:
                self._take(*await stream.receive())
        except (OSError, trio.EndOfChannel, trio.ClosedResourceError, MemoryError):
            self.lost.set()

    def _take(self, number: int, kind: int, parts: list[memoryview]) -> None:
        if kind == _ASK:
            assert self._nursery is not None  # its task reads this
            scope = self._scopes[number] = trio.CancelScope()
            self._nursery.start_soon(self._answer, number, parts, scope)
        elif kind == _CANCEL:
            if number in self._scopes:
                self._scopes[number].cancel(reason="the asker was cancelled")
        elif number in self._replies:
            self._outcomes[number] = self._outcome(kind, parts)
            self._replies[number].set()

    def _outcome(self, kind: int, parts: list[memoryview]) -> outcome.Outcome[Any]:
        try:
            value = unpack(parts)
            return outcome.Value(value) if kind == _VALUE else outcome.Error(raised(value, self._name))
        except Exception as error:  # noqa: BLE001  # it ends that request alone
            return outcome.Error(error)

    async def _answer(self, number: int, parts: list[memoryview], scope: trio.CancelScope) -> None:
        with scope:
            try:
                request, seconds = unpack(parts)
                # Seconds and no time: clocks of two hosts have nothing to do with each other.
                scope.deadline = trio.current_time() + seconds
                if self._serve is None:
                    raise RuntimeError("this end serves no requests")  # noqa: TRY301  # as any error of a request
                kind, reply = _VALUE, pack(await self._serve(request))
            except Exception as error:  # noqa: BLE001  # the asker gets it
                kind, reply = _ERROR, pack(failure(error))
            finally:
                self._scopes.pop(number, None)
            self._stream(reply).posted.send_nowait((number, kind, reply))
        if scope.cancelled_caught:
            # The caller may have changed its deadline meanwhile.
            error_parts = pack(failure(trio.TooSlowError("the deadline with which it was asked has passed")))
            self._stream(error_parts).posted.send_nowait((number, _ERROR, error_parts))


async def listen(
    host: str,
    secret: bytes,
    serve: Serve,
    nursery: trio.Nursery,
    allocate: Allocate = allocate_any,
    ports: Iterable[int] = (0,),
) -> Address:
    """Serve each end that connects and proves the secret, until the nursery ends; return the address.

    Raises:
        OSError: No port is free.
    """
    for port in ports:
        # Two agents may bind a port at the same time, but only one can listen. A socket is bound only once.
        sock = trio.socket.socket()
        with suppress(OSError):
            # The previous agent at this port may have just ended.
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
            await sock.bind((host, port))
            sock.listen(_BACKLOG)
            break
        sock.close()
    else:
        raise OSError(f"{host} has none of these ports free: {ports}")
    # Streams by token, until the other half is connected.
    halves: dict[bytes, _Connection] = {}

    async def greet(connection: trio.SocketStream, admit: Admit) -> None:
        stream = _Connection(connection.socket, allocate)
        token = await _prove(stream, secret, is_asked=True)
        admit()
        half = halves.pop(token, None)
        if half is not None:
            await Link([half, stream], "the program", serve).run()
            return
        halves[token] = stream
        try:
            await trio.sleep(_PROOF)
        finally:
            if halves.get(token) is stream:
                del halves[token]
                connection.socket.close()

    lobby = Lobby(greet, max_strangers=_MAX_STRANGERS, seconds=_PROOF)
    nursery.start_soon(_listen_until_closed, lobby, trio.SocketListener(sock))
    return Address(host, sock.getsockname()[1], secret)


async def _listen_until_closed(lobby: Lobby, listener: trio.SocketListener) -> None:
    async with listener:
        await lobby.run(listener)


async def _prove(stream: _Connection, secret: bytes, *, is_asked: bool, token: bytes = b"") -> bytes:
    """Prove the secret to the other end, and verify its proof; return the token of the connecting end.

    Each end signs a random number of the other, so no proof is valid twice.
    """
    version = VERSION.encode().ljust(64)
    local_nonce = os.urandom(_NONCE)
    await stream.write(version, local_nonce, token)
    theirs = bytes(await stream.read(64))
    if theirs != version:
        raise OSError(f"it has {theirs.decode(errors='replace').strip()}, and this is {VERSION}")
    remote_nonce = bytes(await stream.read(_NONCE))
    if is_asked:
        token = bytes(await stream.read(_NONCE))
    signed = [local_nonce + remote_nonce, remote_nonce + local_nonce]
    await stream.write(hmac.digest(secret, signed[is_asked] + b"ca"[is_asked : is_asked + 1], "sha256"))
    proof = bytes(await stream.read(_NONCE))
    expected = hmac.digest(secret, signed[is_asked] + b"ac"[is_asked : is_asked + 1], "sha256")
    if not hmac.compare_digest(proof, expected):
        raise OSError("it does not know the secret")
    return token
