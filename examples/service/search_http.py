"""HTTP/1.1 for an application, one connection apart from the others: no client can end the service for all.

`hypercorn.trio.serve` would do, but for some things. What a connection raises ends the whole server there,
and a client that does not read holds up its end. It takes `Upgrade: h2c`, and goes on after a request whose
length is said twice. So this file has the connections, and h11 has the rules of the protocol.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Generator, Iterable, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import attrs
import h11
import trio
from starlette.applications import Starlette

# Requests that are served at once: beyond these, one is refused. A connection takes a place with the last of
# its headers, so clients that send them slowly hold none.
MOST_REQUESTS = 256
# Connections without a place: before their headers have come, and at their end. Beyond these, the one that
# has waited longest is closed.
MOST_WAITING = 256
# Seconds for the headers of a request, from the answer before it on, and for its body.
HEADERS = 5.0
BODY = 5.0
LONGEST_HEADERS = 16 << 10
# Parts of a body: h11 takes longer for each than for its bytes, of which a part may have one.
MOST_PARTS = 4096
# Spaces before the value of a header. h11's time grows with their square if the value is illegal.
MOST_SPACES = 1024
# A line that begins with a space belongs to the header before it.
PADDED = re.compile(rb"[!#-'*+.0-9A-Z^-z|~-]:(?:\r?\n?[ \t]){%d}" % MOST_SPACES)
# Connections that the kernel keeps until they are taken, one in each round of the loop. A new client waits
# for all before it, and a flood is held up by the kernel: where there is no room, a client tries again later.
BACKLOG = 64
# Seconds after which a client that does not read a part of its answer is given up.
SLOW = 10.0
TCP_ESTABLISHED = 1
BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)

logger = logging.getLogger("service")


async def serve_http(
    application: Starlette, listener: trio.SocketListener, stop: trio.Event, *, grace: float = 5.0
) -> None:
    """Serve until `stop`, and then for so many seconds what has begun.

    Args:
        application: What answers. `request.state.is_gone()` says whether a client has left.
        listener: Where clients connect; it is closed at the end.
        stop: Says that the end has come.
        grace: Seconds for the last requests.
    """
    server = Server(application)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accept = partial(trio.serve_listeners, handler_nursery=connections)
            accepting.start_soon(accept, server.connected, [listener])
            await stop.wait()
            accepting.cancel_scope.cancel()
        server.stop()
        with trio.move_on_after(grace):
            await server.has_ended.wait()
        connections.cancel_scope.cancel()


class Server:
    """The connections of an application."""

    def __init__(self, application: Starlette) -> None:
        self.application = application
        self.is_stopping = False
        self.has_ended = trio.Event()
        self.requests = 0
        # Connections without a place, in the order in which they began to wait.
        self.waiting: dict[Connection, trio.CancelScope] = {}
        self._connections = 0

    async def connected(self, stream: trio.SocketStream) -> None:
        """Serve one connection, to its end. What a stranger does wrong is one line of the log."""
        self._connections += 1
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SLOW * 1000))
            if not is_gone(stream):
                await Connection(self, stream).serve()
        except* (*BROKEN, h11.RemoteProtocolError) as ended:
            logger.debug("a connection ended: %r", ended.exceptions)
        except* Exception:
            logger.exception("a request failed")
        finally:
            stream.socket.close()
            self._connections -= 1
            self._note_end()

    def stop(self) -> None:
        """Let connections end that wait for a request, and the others after their answer."""
        self.is_stopping = True
        for connection, scope in self.waiting.items():
            if connection.http.our_state is h11.IDLE:
                scope.cancel()
        self._note_end()

    @contextmanager
    def without_place(self, connection: Connection, seconds: float) -> Generator[None, None, None]:
        """End the body after so many seconds, or when too many others have come that wait, too."""
        with trio.move_on_after(seconds) as scope:
            self.waiting[connection] = scope
            while len(self.waiting) > MOST_WAITING:
                self.waiting.pop(next(iter(self.waiting))).cancel()
            try:
                yield
            finally:
                self.waiting.pop(connection, None)

    def _note_end(self) -> None:
        if self.is_stopping and not self._connections:
            self.has_ended.set()


@attrs.define(eq=False)
class Connection:
    """Requests of one client, one after another."""

    server: Server
    stream: trio.SocketStream
    http: h11.Connection = attrs.field(
        factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_HEADERS)
    )
    # Set by the task that reads, for the one that serves, and the other way round.
    has_come: trio.Event = attrs.field(factory=trio.Event)
    is_wanted: trio.Event = attrs.field(factory=trio.Event)
    body_ended: bool = False
    parts: int = 0
    is_head: bool = False
    # The last bytes that have come, in which spaces may have begun.
    newest: bytes = b""
    # When the body has to be there, and the status of a request that ends without the application's answer.
    body_due: float = 0.0
    fault: int = 0
    answering: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def serve(self) -> None:
        """Serve all requests, until one of both ends says that this was the last."""
        while (request := await self.request()) is not None:
            if self.server.requests >= MOST_REQUESTS:
                return await self.refuse(503, (b"retry-after", b"1"))
            self.server.requests += 1
            try:
                await self.answer(request)
            finally:
                self.server.requests -= 1
            if self.fault:
                await self.refuse(self.fault)
            if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
                return await self.close()
            self.http.start_next_cycle()
        return None

    async def request(self) -> h11.Request | None:
        """Read the headers of the next request; None if there is none that can be served."""
        if self.server.is_stopping:
            return None
        status = 408
        try:
            with self.server.without_place(self, HEADERS):
                while (event := self.http.next_event()) is h11.NEED_DATA:
                    self.take(await self.stream.receive_some(LONGEST_HEADERS))
                if not isinstance(event, h11.Request):
                    return None
                status = why_not(event)
                if not status:
                    return event
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            logger.debug("a request that is none: %s", error)
        # A client that has said nothing, such as one that waits for its next question, is told nothing.
        if status != 408 or self.http.trailing_data[0]:
            await self.refuse(status)
        return None

    def take(self, data: bytes) -> None:
        """Give bytes of the client to h11, unless they would hold it up."""
        seen = self.newest + data
        if PADDED.search(seen):
            raise h11.RemoteProtocolError("a header begins with too many spaces")
        self.newest = seen[-3 * MOST_SPACES - 2 :]
        self.http.receive_data(data)

    async def refuse(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        """Answer without the application, and end the connection."""
        if self.http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        close = [(b"content-length", b"0"), (b"connection", b"close"), *headers]
        response = h11.Response(status_code=status, headers=close, reason=HTTPStatus(status).phrase)
        await self.send_events([response, h11.EndOfMessage()])
        await self.close()

    async def close(self) -> None:
        """End the connection; what the client still sends must not destroy the answer on its way."""
        with self.server.without_place(self, 1.0), suppress(*BROKEN):
            await self.stream.send_eof()
            while self.http.their_state is h11.SEND_BODY and await self.stream.receive_some(1 << 16):
                pass

    async def answer(self, request: h11.Request) -> None:
        """Have the application answer; that ends when the client leaves."""
        self.has_come, self.is_wanted = trio.Event(), trio.Event()
        self.body_ended, self.parts = False, 0
        self.is_head = request.method == b"HEAD"
        self.body_due = trio.current_time() + BODY
        async with trio.open_nursery() as nursery:
            self.answering = nursery.cancel_scope
            nursery.start_soon(self.read, nursery.cancel_scope)
            await self.server.application(self.scope_of(request), self.receive, self.send)
            nursery.cancel_scope.cancel()

    async def read(self, scope: trio.CancelScope) -> None:
        """Read what the application asks for, and then whether the client leaves."""
        while True:
            data = await self.stream.receive_some(1 << 16)
            self.take(data)
            self.has_come.set()
            if not data:
                scope.cancel()
                return
            await self.is_wanted.wait()
            self.is_wanted = trio.Event()

    async def receive(self) -> dict[str, Any]:
        """The next part of the body: `receive` of ASGI. There is no more when the client leaves.

        A body that is wrong or late ends the application, which could do nothing about it, and is refused.
        """
        if self.body_ended:
            await trio.sleep_forever()
        try:
            with trio.fail_at(self.body_due):
                data, self.body_ended = await self.body_part()
        except (trio.TooSlowError, h11.RemoteProtocolError) as error:
            self.fault = getattr(error, "error_status_hint", 408)
            logger.debug("a request that is not whole: %r", error)
            self.answering.cancel()
            await trio.sleep_forever()
        if self.body_ended:
            # From here on the reader looks for the client's end.
            self.is_wanted.set()
        return {"type": "http.request", "body": data, "more_body": not self.body_ended}

    async def body_part(self) -> tuple[bytes, bool]:
        """Return the bytes of the body that have arrived, and whether they are its end."""
        if self.http.they_are_waiting_for_100_continue:
            await self.send_events([h11.InformationalResponse(status_code=100, headers=[])])
        data = bytearray()
        while True:
            event = self.http.next_event()
            if isinstance(event, h11.Data):
                data += event.data
                self.parts += 1
                if self.parts > MOST_PARTS:
                    raise h11.RemoteProtocolError(f"the body has more than {MOST_PARTS} parts", 413)
            elif data or event is not h11.NEED_DATA:
                return bytes(data), event is not h11.NEED_DATA
            else:
                self.has_come = trio.Event()
                self.is_wanted.set()
                await self.has_come.wait()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """A part of the answer: `send` of ASGI. It waits while the client does not read."""
        if message["type"] == "http.response.start":
            close = [(b"connection", b"close")] if self.server.is_stopping else []
            headers = [*message.get("headers", ()), *close]
            await self.send_events([h11.Response(status_code=message["status"], headers=headers)])
            return
        data = b"" if self.is_head else message.get("body", b"")
        end = [] if message.get("more_body") else [h11.EndOfMessage()]
        await self.send_events([h11.Data(data=data), *end])

    async def send_events(self, events: Iterable[Any]) -> None:
        """Send events of HTTP in one go, which a client has to read within so many seconds."""
        with trio.fail_after(SLOW):
            parts: list[bytes] = [self.http.send(event) or b"" for event in events]
            await self.stream.send_all(b"".join(parts))

    def scope_of(self, request: h11.Request) -> dict[str, Any]:
        """A request as ASGI has it."""
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": self.stream.socket.getpeername()[:2],
            "server": self.stream.socket.getsockname()[:2],
            "state": {"is_gone": partial(is_gone, self.stream)},
        }


def why_not(request: h11.Request) -> int:
    """The status of a request that is not to be served; 0 for all others.

    A proxy may take another end of a request for the right one where its length is said twice, and what one
    client hides behind it for a request of another (RFC 9112, 6.1 and 11.2). An upgrade is not offered, so
    the header that asks for one means nothing.
    """
    names = {name for name, _ in request.headers}
    if names >= {b"content-length", b"transfer-encoding"}:
        return 400
    return 0 if request.http_version in {b"1.0", b"1.1"} else 505


def is_gone(stream: trio.SocketStream) -> bool:
    """Whether the other end sends nothing any more: a client that has left, or has shut down its side."""
    try:
        return stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_ESTABLISHED
    except OSError:
        return True
