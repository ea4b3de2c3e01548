"""Asks over streams: what goes to a node and comes back, with deadlines, cancellation and back-pressure."""

from __future__ import annotations

import hmac
import itertools
import math
import os
import platform
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import outcome
import trio
from trio import socket

from .._version import __version__
from ._frames import Failure, Parts, pack, unpack

__all__ = ["Address", "Link", "LinkLostError", "Serve", "StreamLink", "listen", "serve_one"]

Serve: TypeAlias = Callable[[Any], Awaitable[object]]
"""Serves a request of the other end."""

# Number of the request, kind, number of parts, and then the bytes of each.
_HEAD = struct.Struct("<QBI")
_LENGTH = struct.Struct("<Q")
_ASK, _CANCEL, _VALUE, _ERROR = range(4)
# Frames of more bytes have a stream of their own: a small one does not wait for a large one.
_LARGE = 1 << 16
_MOST_PARTS = 1 << 16
_NONCE = 32
# Seconds in which who connects must prove the secret.
_PROOF = 2.0
_VERSION = f"trio_accel {__version__}, Python {'.'.join(platform.python_version_tuple()[:2])}"


class LinkLostError(ConnectionError):
    """The other end is gone.

    Attributes:
        is_begun: Whether the request was on its way, so that it may have been executed.
    """

    def __init__(self, message: str, *, is_begun: bool) -> None:
        super().__init__(message)
        self.is_begun: bool = is_begun


class Link(Protocol):
    """The way to a node."""

    async def ask(self, request: object) -> Any:
        """Have the other end serve a request.

        Raises:
            LinkLostError: It is gone.
            Exception: As it says.
        """
        ...

    async def wait_lost(self) -> None:
        """Wait until the other end is gone."""
        ...

    def close(self) -> None:
        """End it; what waits for a reply hears of that."""
        ...


@attrs.frozen
class Address:
    """Where a node listens.

    Attributes:
        host: Its address.
        port: Its port.
        secret: What both ends prove to have.
    """

    host: str
    port: int
    secret: bytes = attrs.field(repr=False)

    async def connect(self, name: str, window: float, nursery: trio.Nursery) -> Link:
        """Connect to the node that listens there; the link ends with the nursery.

        Raises:
            LinkLostError: There is nobody, or who is there has not the secret, or is of another version.
        """
        token, streams = os.urandom(_NONCE), list[_Stream]()
        try:
            with trio.fail_after(_PROOF):
                for _ in range(2):
                    streams.append(_stream(socket.socket()))
                    await streams[-1].sock.connect((self.host, self.port))
                    await _prove(streams[-1], self.secret, is_asked=False, token=token)
        except (OSError, trio.TooSlowError, trio.EndOfChannel) as error:
            for stream in streams:
                stream.sock.close()
            why = str(error) or type(error).__name__
            raise LinkLostError(f"node {name} cannot be reached: {why}", is_begun=False) from error
        link = StreamLink(streams, name, window=window)
        nursery.start_soon(link.run)
        return link


@attrs.define(eq=False)
class _Stream:
    """One connection: frames of a number, a kind and parts."""

    sock: trio.socket.SocketType
    lock: trio.Lock = attrs.field(factory=trio.Lock)

    async def write(self, *views: bytes | bytearray | memoryview) -> None:
        for view in map(memoryview, views):
            left = view.cast("B")
            while left:
                left = left[await self.sock.send(left[: 1 << 22]) :]

    async def read(self, size: int) -> memoryview:
        view = memoryview(np.empty(size, np.uint8))
        got = 0
        while got < size:
            count = await self.sock.recv_into(view[got:])
            if not count:
                raise trio.EndOfChannel
            got += count
        return view

    async def send(self, number: int, kind: int, parts: Parts) -> None:
        head = _HEAD.pack(number, kind, len(parts)) + b"".join([_LENGTH.pack(len(one)) for one in parts])
        async with self.lock:
            # Half a frame would be the end of the stream.
            with trio.CancelScope(shield=True):
                await self.write(head, *parts)

    async def receive(self) -> tuple[int, int, list[memoryview]]:
        number, kind, count = _HEAD.unpack(await self.read(_HEAD.size))
        if kind > _ERROR or count > _MOST_PARTS:
            raise trio.EndOfChannel
        lengths = [size for (size,) in _LENGTH.iter_unpack(await self.read(_LENGTH.size * count))]
        return number, kind, [await self.read(size) for size in lengths]


class StreamLink:
    """One end of two connections: one for small frames, one for large ones. See `Link`.

    Args:
        streams: The connections.
        name: Name of the other end, for errors.
        serve: Serves its requests; None where it asks none.
        window: The most requests that wait for its replies; who asks more waits in their own task.
    """

    def __init__(
        self, streams: list[_Stream], name: str, serve: Serve | None = None, window: float = math.inf
    ) -> None:
        self._streams, self._name, self._serve = streams, name, serve
        self._window = trio.CapacityLimiter(window)
        self._numbers = itertools.count(1)
        self._replies: dict[int, trio.Event] = {}
        self._outcomes: dict[int, outcome.Outcome[Any]] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self._lost = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Read what comes, until a connection ends; raises nothing for that."""
        try:
            async with trio.open_nursery() as self._nursery:
                for stream in self._streams:
                    self._nursery.start_soon(self._read, stream)
                await self._lost.wait()
                self._nursery.cancel_scope.cancel(reason="the other end is gone")
        finally:
            self.close()

    async def wait_lost(self) -> None:
        """See `Link`."""
        await self._lost.wait()

    def close(self) -> None:
        """See `Link`."""
        self._lost.set()
        for stream in self._streams:
            stream.sock.close()
        for event in self._replies.values():
            event.set()

    async def ask(self, request: object) -> Any:
        """See `Link`."""
        parts = pack((request, trio.current_effective_deadline() - trio.current_time()))
        async with self._window:
            if self._lost.is_set():
                raise LinkLostError(f"node {self._name} is gone", is_begun=False)
            number = next(self._numbers)
            replied = self._replies[number] = trio.Event()
            try:
                self._post(number, _ASK, parts)
                await replied.wait()
            except trio.Cancelled:
                # A task of the link's tells it: this one is to go.
                self._post(number, _CANCEL, [])
                raise
            finally:
                del self._replies[number]
                found = self._outcomes.pop(number, None)
        if found is None:
            raise LinkLostError(f"node {self._name} was lost with this request in flight", is_begun=True)
        return found.unwrap()

    def _post(self, number: int, kind: int, parts: Parts) -> None:
        if not self._lost.is_set() and self._nursery is not None:
            self._nursery.start_soon(self._send, number, kind, parts)

    async def _send(self, number: int, kind: int, parts: Parts) -> None:
        is_large = sum(map(len, parts)) > _LARGE
        try:
            await self._streams[is_large].send(number, kind, parts)
        except (OSError, trio.ClosedResourceError):
            self._lost.set()

    async def _read(self, stream: _Stream) -> None:
        try:
            while True:
                self._take(*await stream.receive())
        except (OSError, trio.EndOfChannel, trio.ClosedResourceError, MemoryError):
            self._lost.set()

    def _take(self, number: int, kind: int, parts: list[memoryview]) -> None:
        if kind == _ASK:
            assert self._nursery is not None  # its task reads this
            self._nursery.start_soon(self._answer, number, parts)
        elif kind == _CANCEL:
            if number in self._scopes:
                self._scopes[number].cancel(reason="the asker was cancelled")
        elif number in self._replies:
            self._outcomes[number] = self._outcome(kind, parts)
            self._replies[number].set()

    def _outcome(self, kind: int, parts: list[memoryview]) -> outcome.Outcome[Any]:
        try:
            value = unpack(parts)
        except Exception as error:  # noqa: BLE001  # it ends that request alone
            return outcome.Error(error)
        return outcome.Value(value) if kind == _VALUE else outcome.Error(value.made(self._name))

    async def _answer(self, number: int, parts: list[memoryview]) -> None:
        with trio.CancelScope() as scope:
            self._scopes[number] = scope
            try:
                kind, reply = _VALUE, await serve_one(self._serve, parts, scope)
            except Exception as error:  # noqa: BLE001  # the asker gets it
                kind, reply = _ERROR, pack(Failure.of(error))
            finally:
                del self._scopes[number]
            await self._send(number, kind, reply)


async def serve_one(serve: Serve | None, parts: Any, scope: trio.CancelScope) -> Parts:
    """Serve a request within its deadline; returns the reply as bytes."""
    request, left = unpack(parts)
    # Seconds and no time: clocks of two hosts have nothing to do with each other.
    scope.deadline = trio.current_time() + left
    if serve is None:
        raise RuntimeError("this end serves no requests")
    return pack(await serve(request))


async def listen(host: str, secret: bytes, serve: Serve, nursery: trio.Nursery) -> Address:
    """Serve whoever connects and proves the secret, until the nursery ends; returns where."""
    sock = socket.socket()
    await sock.bind((host, 0))
    sock.listen(128)
    halves: dict[bytes, _Stream] = {}

    async def accept() -> None:
        with sock:
            while True:
                connection, _ = await sock.accept()
                nursery.start_soon(greet, connection)

    async def greet(connection: trio.socket.SocketType) -> None:
        stream = _stream(connection)
        try:
            with trio.fail_after(_PROOF):
                token = await _prove(stream, secret, is_asked=True)
        except (OSError, trio.TooSlowError, trio.EndOfChannel):
            connection.close()
            return
        other = halves.pop(token, None)
        if other is None:
            halves[token] = stream
        else:
            await StreamLink([other, stream], "the program", serve).run()

    nursery.start_soon(accept)
    return Address(*sock.getsockname()[:2], secret)


def _stream(sock: trio.socket.SocketType) -> _Stream:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Stream(sock)


async def _prove(stream: _Stream, secret: bytes, *, is_asked: bool, token: bytes = b"") -> bytes:
    """Prove the secret to the other end, and have it do so; returns the token of who has connected.

    Each end has a number of its own in what the other one signs, so no proof serves twice.
    """
    version = _VERSION.encode().ljust(64)
    own = os.urandom(_NONCE)
    await stream.write(version, own, token)
    theirs = bytes(await stream.read(64))
    if theirs != version:
        raise OSError(f"it has {theirs.decode(errors='replace').strip()}, and this is {_VERSION}")
    other = bytes(await stream.read(_NONCE))
    if is_asked:
        token = bytes(await stream.read(_NONCE))
    signed = [own + other, other + own]
    await stream.write(hmac.digest(secret, signed[is_asked] + b"ca"[is_asked : is_asked + 1], "sha256"))
    proof = bytes(await stream.read(_NONCE))
    wanted = hmac.digest(secret, signed[is_asked] + b"ac"[is_asked : is_asked + 1], "sha256")
    if not hmac.compare_digest(proof, wanted):
        raise OSError("it does not know the secret")
    return token
