"""A connection as Hypercorn sees it: a stream that cannot harm the other connections.

Hypercorn shields what it sends from cancellation, closes a stream while it sends, and does not notice that
a client leaves while the application works. Therefore `Connection` ends slow sends by closing the socket,
closes in order, and reports when its client leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus

import attrs
import trio

from ._framing import HEAD_BYTES, Framing, RefusedError

BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
_RECEIVED_BYTES = 1 << 16
# Bytes that a client has to read within the time of a part.
_SENT_BYTES = 1 << 16
# The maximum bytes of later requests to read while a request is served.
_BACKLOG_BYTES = 1 << 16
# Seconds in which a client may read the end of an answer and still send.
_LINGER = 1.0
# Texts of refusals that name the remedy, unlike the phrases of their statuses.
_REMEDIES = {
    431: f"the headers must have at most {HEAD_BYTES} bytes",
    505: "speak HTTP/1.1: HTTP/2 and WebSockets are not served",
}


def ignore() -> None:
    """Do nothing."""


@attrs.define(eq=False)
class Connection:
    """The connection of one client.

    It has what Hypercorn uses of a stream, and lacks ``do_handshake``, by which Hypercorn recognises TLS.

    Attributes:
        stream: The stream.
        stall: The seconds in which the client must read each part of an answer.
        error_body: Makes the JSON of an error from its status and its text.
        scope: Ends the connection.
        requests: The number of requests that the application has not finished.
        on_leave: Called when the client leaves, or is disconnected.
        is_holding: Whether sent data waits for `flush`, so that several parts need one system call.
    """

    stream: trio.SocketStream
    stall: float
    error_body: Callable[[int, str], Mapping[str, object]]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    requests: int = attrs.field(default=0, init=False)
    on_leave: Callable[[], None] = attrs.field(default=ignore, init=False)
    is_holding: bool = attrs.field(default=False, init=False)
    _framing: Framing = attrs.field(factory=Framing, init=False)
    # Held by the send in flight. Hypercorn may close the connection, or answer 400, during another answer.
    _sending: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _receiving: trio.CancelScope | None = attrs.field(default=None, init=False)
    # Parts of the answer since `is_holding` was set.
    _held: list[bytes] = attrs.field(factory=list[bytes], init=False)
    # Whether Hypercorn has a request without the end of its answer.
    _is_answering: bool = attrs.field(default=False, init=False)
    _has_left: bool = attrs.field(default=False, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket. Hypercorn asks it for both addresses."""
        return self.stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive checked bytes of one request; ``b""`` when the client has left or its request is refused.

        While a request is served, the next one waits here, so that the end of the connection is still seen.
        """
        try:
            while not self._is_closed:
                if not (self._is_answering and self._framing.is_between):
                    is_new = self._framing.is_between
                    if taken := self._framing.take():
                        self._is_answering = self._is_answering or is_new
                        return taken
                data: bytes | bytearray | None = None
                with trio.CancelScope() as self._receiving:
                    if len(self._framing) >= _BACKLOG_BYTES:
                        await trio.sleep_forever()
                    data = await self.stream.receive_some(_RECEIVED_BYTES)
                if data:
                    self._framing.feed(data)
                elif data is not None:
                    self._leave()
                    return b""
        except RefusedError as refused:
            # In the middle of a request, Hypercorn answers the early end of the body.
            if not self._is_answering:
                await self._refuse(refused.status)
            return b""
        except BROKEN:
            self._leave()
            raise
        raise trio.ClosedResourceError("the connection is closed")

    def end_answer(self) -> None:
        """Let the next request begin."""
        self._is_answering = False
        if len(self._framing) and self._receiving is not None:
            self._receiving.cancel()

    def _leave(self) -> None:
        self._has_left = True
        self.on_leave()
        self.end_if_over()

    def end_if_over(self) -> None:
        """End the tasks of the connection if no request may follow, because Hypercorn would wait.

        A request that Hypercorn has and the application has not begun is still answered.
        """
        is_over = self._is_closed or (self._has_left and not self._is_answering)
        if is_over and not self.requests:
            self.scope.cancel(reason="the client has left")

    async def _refuse(self, status: int) -> None:
        phrase = HTTPStatus(status).phrase
        body = json.dumps(self.error_body(status, _REMEDIES.get(status, phrase.lower())))
        head = f"HTTP/1.1 {status} {phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        with suppress(*BROKEN):
            await self.send_all(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        await self.aclose()

    async def send_all(self, data: bytes) -> None:
        """Send; a client that does not read is disconnected."""
        if self.is_holding:
            self._held.append(data)
            return
        async with self._sending:
            for begin in range(0, len(data), _SENT_BYTES):
                with trio.move_on_after(self.stall) as sending:
                    await self.stream.send_all(memoryview(data)[begin : begin + _SENT_BYTES])
                if sending.cancelled_caught:
                    self.cut("the client does not read")
                    break

    async def flush(self) -> None:
        """Send the held data, and hold no more."""
        self.is_holding = False
        if data := b"".join(self._held):
            self._held.clear()
            # A part of an answer would harm the next one. The time to send it has a limit.
            with suppress(*BROKEN), trio.CancelScope(shield=True):
                await self.send_all(data)

    async def send_eof(self) -> None:
        """Do nothing, because Hypercorn calls this during a send and closes the stream afterwards."""
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Send the end, after the data in flight. `linger` closes the socket."""
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        if self._receiving is not None:
            self._receiving.cancel()
        await self.flush()
        with suppress(*BROKEN):
            async with self._sending:
                await self.stream.send_eof()
        self.end_if_over()

    async def linger(self) -> None:
        """Read what the client still sends, because a reset would destroy the answer on its way."""
        with trio.move_on_after(_LINGER), suppress(*BROKEN):
            await self.stream.send_eof()
            while await self.stream.receive_some(_RECEIVED_BYTES):
                pass

    def cut(self, reason: str) -> None:
        """Close the socket, which also ends a shielded send, and everything that runs for the connection."""
        self._is_closed = True
        self.stream.socket.close()
        self.on_leave()
        self.scope.cancel(reason=reason)
