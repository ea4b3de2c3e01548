"""Limits around an application: the steps of a request before, during and after the application."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from email.utils import formatdate
from math import inf
from typing import Any, TypeAlias

import attrs
import trio

from ._connection import BROKEN, Connection, ignore
from ._limits import Limits

__all__ = ["Application"]

_logger = logging.getLogger("trio_accel.http")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[Any]]
"""An application of ASGI 3: Starlette, FastAPI, or an async function of a scope, `receive` and `send`."""

_DEADLINE = b"x-deadline"
_RETRY = (b"retry-after", b"1")
_CLOSE = (b"connection", b"close")
# Headers without anything that could be wrong or that changes the meaning of a request for a probe.
_PLAIN = re.compile(rb"(GET|HEAD) (/[!-$&-~]*) HTTP/1\.1(\r\n(?:[A-Za-z0-9-]+:[\t -~]*\r\n)*)\r\n", re.ASCII)
_HOST = re.compile(rb"(?i)\nhost:[ \t]*[!-~]")
_CLOSING = re.compile(rb"(?i)\nconnection:[ \t]*close[ \t]*\r")
_MEANT = re.compile(
    rb"(?i)\n(?:connection:(?![ \t]*(?:close|keep-alive)[ \t]*\r)"
    rb"|expect:|upgrade:|content-length:|x-deadline:)"
)


@attrs.frozen
class Reply:
    """A short answer that `serve` gives on its own.

    Attributes:
        status: The status.
        body: A text, or an object for JSON.
        headers: More headers.
    """

    status: int
    body: str | Mapping[str, object]
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, send: Send) -> None:
        """Send it as ASGI messages."""
        headers, body = self._parts()
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def encode(self, is_last: bool, has_body: bool) -> bytes:
        """Return it as bytes of HTTP/1.1, without the body for ``HEAD``."""
        headers, body = self._parts()
        headers.append((b"date", formatdate(usegmt=True).encode()))
        if is_last:
            headers.append(_CLOSE)
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"HTTP/1.1 %d \r\n%b\r\n%b" % (self.status, head, body if has_body else b"")

    def _parts(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        if isinstance(self.body, str):
            body, kind = self.body.encode(), b"text/plain; version=0.0.4; charset=utf-8"
        else:
            body, kind = json.dumps(self.body).encode(), b"application/json"
        return [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *self.headers], body


Probe: TypeAlias = Callable[[], Awaitable[Reply]]
ErrorBody: TypeAlias = Callable[[int, str], Mapping[str, object]]


@attrs.define(eq=False)
class Edge:
    """The application, its limits and its connections.

    Attributes:
        app: The application.
        limits: The limits.
        probes: Routes that need no free place.
        error_body: Makes the JSON of an error from its status and its text.
        connections: All connections, the longest idle one first.
        requests: The number of requests that the application serves.
        body_bytes: The total bytes of bodies in memory.
        reading: The requests with unfinished bodies, the oldest one first.
        is_ending: Whether no request follows on a connection.
    """

    app: Application
    limits: Limits
    probes: Mapping[str, Probe]
    error_body: ErrorBody
    connections: dict[Connection, None] = attrs.field(factory=dict[Connection, None], init=False)
    requests: int = attrs.field(default=0, init=False)
    body_bytes: int = attrs.field(default=0, init=False)
    reading: dict[Exchange, None] = attrs.field(factory=dict["Exchange", None], init=False)
    is_ending: bool = attrs.field(default=False, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def connect(
        self, stream: trio.SocketStream, server: Callable[[Connection], Awaitable[None]]
    ) -> None:
        """Serve a connection to its end. An error ends only this connection."""
        limits = self.limits
        connection = Connection(stream, limits.stall, self.error_body, limits.wait, self.short_answer)
        self.touch(connection)
        # A connection before its first request is idle, so busy ones must not count. They are counted only if
        # it matters, because each of hundreds of new connections would count all others.
        limit = limits.connections
        if (
            len(self.connections) > limit
            and sum(not open_connection.requests for open_connection in self.connections) > limit
        ):
            self.close_idle()
        try:
            if len(self.connections) <= 2 * limit:
                with connection.scope:
                    await server(connection)
                await connection.linger()
        except* BROKEN:
            _logger.debug("a connection ended", exc_info=True)
        except* Exception:
            _logger.exception("a connection failed")
        finally:
            stream.socket.close()
            self.connections.pop(connection, None)
            self._changed.set()

    def touch(self, connection: Connection) -> None:
        """Note that a connection begins to wait, or begins a request."""
        self.connections.pop(connection, None)
        self.connections[connection] = None

    def end_idle(self) -> None:
        """Close the connections without a request."""
        for connection in self.connections:
            connection.end_idle()

    async def short_answer(self, connection: Connection, head: bytes) -> tuple[bytes, bool] | None:
        """Return the answer to a plain request for a probe, and whether it is the last of its connection.

        Args:
            connection: The connection.
            head: The checked headers of a request without a body.

        Returns:
            None for each other request, which may be wrong or ask for more than the probe.
        """
        request = _PLAIN.fullmatch(head)
        if request is None or (probe := self.probes.get(path := request[2].decode())) is None:
            return None
        if len(_HOST.findall(request[3])) != 1 or _MEANT.search(request[3]):
            return None
        self.touch(connection)
        is_last = self.is_ending or _CLOSING.search(request[3]) is not None
        if (reply := connection.replies.get(path)) is None:
            reply = connection.replies[path] = await probe()
        return reply.encode(is_last, request[1] == b"GET"), is_last

    def close_idle(self) -> bool:
        """Close the connection that has been idle the longest. Return whether there was one."""
        idle = next((connection for connection in self.connections if not connection.requests), None)
        if idle is not None:
            # The next connection needs its descriptor now, and not when its task has ended.
            del self.connections[idle]
            idle.cut("too many connections")
        return idle is not None

    async def wait_empty(self) -> None:
        """Wait until all connections are closed."""
        while self.connections:
            self._changed = trio.Event()
            await self._changed.wait()

    def cut_all(self) -> None:
        """Close all connections at once."""
        for connection in self.connections:
            connection.cut("the service ends")

    def limit_bodies(self) -> None:
        """Refuse the largest unfinished bodies until the rest is within the limit.

        If the newest body was refused instead, a few clients that never end theirs would keep all others out.
        """
        while self.body_bytes > self.limits.bodies and self.reading:
            max(self.reading, key=lambda exchange: exchange.body_bytes).refuse_body()

    async def answer(self, connection: Connection, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request of a connection; except for the first argument, an ASGI application."""
        exchange = Exchange(self, connection, scope, receive, send)
        connection.requests += 1
        connection.on_leave = exchange.leave
        self.touch(connection)
        try:
            await exchange.run()
        finally:
            connection.requests -= 1
            # After the answer the next request may have begun, while the application was still at work.
            if not exchange.has_ended:
                connection.end_answer()
            connection.end_if_over()
            if connection.on_leave == exchange.leave:
                connection.on_leave = ignore
            exchange.drop_body()
            if connection in self.connections:
                self.touch(connection)


@attrs.define(eq=False)
class Exchange:
    """A request and its answer.

    Attributes:
        edge: The application and its limits.
        connection: The connection.
        scope: The scope of ASGI.
        from_client: Hypercorn's ``receive``.
        to_client: Hypercorn's ``send``.
        body_bytes: Bytes of the body.
        has_ended: Whether the last part of the answer was sent.
    """

    edge: Edge
    connection: Connection
    scope: Any
    from_client: Receive
    to_client: Send
    body_bytes: int = attrs.field(default=0, init=False)
    _parts: list[bytes] = attrs.field(factory=list[bytes], init=False)
    _head: Message | None = attrs.field(default=None, init=False)
    _has_begun: bool = attrs.field(default=False, init=False)
    has_ended: bool = attrs.field(default=False, init=False)
    _has_left: bool = attrs.field(default=False, init=False)
    # The answer has ended, or its client has left.
    _over: trio.Event = attrs.field(factory=trio.Event, init=False)
    _task: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _is_bounded: bool = attrs.field(default=False, init=False)
    _body_task: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _is_refused: bool = attrs.field(default=False, init=False)

    def leave(self) -> None:
        """Note that the client has left, and cancel the application unless its answer has ended.

        Background tasks after the answer go on.
        """
        self._has_left = True
        self._over.set()
        if not self.has_ended:
            self._task.cancel(reason="the client has left")

    async def run(self) -> None:
        """Read the body, and answer or have the application answer."""
        status = await self._read_body()
        if self._has_left:
            return
        if status:
            await self._refuse(status)
        elif self.scope["method"] in {"GET", "HEAD"} and (probe := self.edge.probes.get(self.scope["path"])):
            await self._reply(await probe())
        elif self.edge.requests >= self.edge.limits.requests:
            await self._fail(503, "too many requests")
        else:
            self.edge.requests += 1
            try:
                await self._ask()
            finally:
                self.edge.requests -= 1

    async def _read_body(self) -> int:
        """Read the whole body; return the status with which it is refused, or 0."""
        edge, limits = self.edge, self.edge.limits
        length = next((int(value) for name, value in self.scope["headers"] if name == b"content-length"), 0)
        if length > limits.body:
            return 413
        self._body_task.deadline = trio.current_time() + limits.wait
        edge.reading[self] = None
        try:
            with self._body_task:
                return await self._read_parts()
        finally:
            edge.reading.pop(self, None)
        return 503 if self._is_refused else 408

    async def _read_parts(self) -> int:
        edge, limits = self.edge, self.edge.limits
        while True:
            message = await self.from_client()
            if message["type"] != "http.request":
                self._has_left = True
                return 0
            part = message["body"]
            self._parts.append(part)
            self.body_bytes += len(part)
            edge.body_bytes += len(part)
            if self.body_bytes > limits.body:
                return 413
            edge.limit_bodies()
            if self._is_refused:
                return 503
            if not message["more_body"]:
                return 0

    def refuse_body(self) -> None:
        """Have the unfinished body refused, and drop its received part."""
        self._is_refused = True
        self.edge.reading.pop(self, None)
        self.drop_body()
        self._body_task.cancel(reason="the bodies of all requests are too large")

    def drop_body(self) -> None:
        """Release the bytes of the body."""
        self.edge.body_bytes -= self.body_bytes
        self.body_bytes = 0
        self._parts.clear()

    async def _refuse(self, status: int) -> None:
        """Answer without the application, and end the connection, whatever still arrives on it."""

        async def drop() -> None:
            # Hypercorn waits for a reader of each part, also before it ends the connection.
            while (await self.from_client())["type"] == "http.request":
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drop)
            limits = self.edge.limits
            text = {
                408: f"the body must arrive within {limits.wait:g} s",
                413: f"the body must have at most {limits.body} bytes",
                503: "the bodies of all requests are too large: try again",
            }[status]
            await self._fail(status, text, _CLOSE)
            nursery.cancel_scope.cancel()
        self.connection.scope.cancel(reason="the request is refused")

    async def _ask(self) -> None:
        """Have the application answer; this ends when the client leaves or the deadline passes."""
        from ..patterns import Deadline

        header = next(
            (value.decode("latin1") for name, value in self.scope["headers"] if name == _DEADLINE), None
        )
        self._is_bounded = header is not None
        try:
            self._task.deadline = Deadline.from_header(header, at_most=self.edge.limits.answer).at
        except ValueError:
            return await self._fail(400, f"x-deadline must be seconds, such as 1.5, got {header!r:.40}")
        if self.connection.has_left:
            # Nothing more is received, so only the time can end an answer that nobody reads.
            self._is_bounded = True
            self._task.deadline = min(self._task.deadline, trio.current_time() + self.edge.limits.stall)
        try:
            with self._task:
                await self.edge.app(self.scope, self._receive, self._send)
        except Exception:
            _logger.exception("%s %s failed", self.scope["method"], self.scope["path"])
        else:
            if self._task.cancelled_caught and not self._has_left and not self._has_begun:
                return await self._fail(504, "the deadline has passed")
        # Hypercorn cuts the connection where the answer has begun and not ended.
        if not self._has_begun and not self._has_left:
            await self._fail(500, "internal server error")
        return None

    async def _receive(self) -> Message:
        """Return the whole body, and then wait for the end: ``receive`` of the application."""
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        # Starlette asks in a cancelled scope whether the client has left. A checkpoint would hide the answer.
        if not self._over.is_set():
            await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Send a part of the answer: ``send`` of the application.

        The head waits for the first part of the body, as ASGI demands, so that an error before it is a 500.
        """
        if message["type"] == "http.response.start" and not self._has_begun:
            self._head = message
            return
        # Hypercorn could not be cancelled in the middle of a part without harm to the connection.
        await trio.lowlevel.checkpoint_if_cancelled()
        if message["type"] == "http.response.body":
            self.has_ended = not message.get("more_body")
            if self.has_ended or not self._is_bounded:
                self._task.deadline = inf
            if not self._has_begun and self._head is not None:
                await self._begin(self._head)
            self.connection.is_holding = self.connection.is_holding or self.has_ended
        try:
            await self.to_client(message)
        finally:
            await self.connection.flush()  # noqa: ASYNC102  # it shields itself, and its time has a limit
        if self.has_ended:
            self._over.set()
            self.connection.end_answer()

    async def _begin(self, head: Message) -> None:
        self._has_begun = True
        if self.edge.is_ending:
            head = {**head, "headers": [*head.get("headers", ()), _CLOSE]}
        self.connection.is_holding = True
        await self.to_client(head)

    async def _fail(self, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
        """Answer with an error in the form of the service."""
        retry = (_RETRY,) if status == 503 else ()
        await self._reply(Reply(status, self.edge.error_body(status, text), (*headers, *retry)))

    async def _reply(self, reply: Reply) -> None:
        """Answer in place of the application, which may have prepared a head."""
        self._head = None
        self._task.deadline = inf
        await reply.send(self._send)
