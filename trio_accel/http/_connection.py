"""The stream that Hypercorn gets for each connection, which protects the other connections.

Hypercorn shields its sends from cancellation, closes a stream during a send, and does not notice that a
client leaves while the application works. Therefore `Connection` closes the socket to end a slow send, sends
the end only after the data in flight, and reports when its client leaves. It also passes only checked
requests to Hypercorn, one at a time (`Framing`). Requests for probes do not reach Hypercorn, because it costs
many times what they cost.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import attrs
import trio

from ._framing import HEAD_BYTES, Framing, RefusedError

BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
_RECEIVED_BYTES = 1 << 16
# The size of an answer's parts. The client must read each within `Connection.stall`.
_SENT_BYTES = 1 << 16
# Short answers are sent together if they have fewer bytes.
_HELD_BYTES = 1 << 14
# The maximum bytes of later requests to read while a request is served.
_BACKLOG_BYTES = 1 << 16
_MAX_WATCHED = 32767.0  # the largest number of seconds that the kernel takes
_LINGER = 1.0  # seconds in which a client may read the end of an answer and still send
# The texts of refusals for which the phrase of the status does not name the remedy.
_REMEDIES = {
    431: f"the headers must have at most {HEAD_BYTES} bytes",
    505: "speak HTTP/1.1: HTTP/2 and WebSockets are not served",
}


def _watch(seconds: float) -> Iterable[tuple[int, int, int]]:
    """Return the socket options by which the kernel asks a silent client, and gives up after such a time."""
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    seconds = min(seconds, _MAX_WATCHED)
    for name, value in (
        ("TCP_KEEPIDLE", seconds / 2),
        ("TCP_KEEPINTVL", seconds / 4),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * seconds),
    ):
        # Not all platforms have all of them.
        if (option := getattr(socket, name, None)) is not None:
            yield socket.IPPROTO_TCP, option, math.ceil(value)


def ignore() -> None:
    """Do nothing."""


@attrs.define(eq=False)
class Connection:
    """The connection of one client.

    It has the members of a stream that Hypercorn uses, and lacks ``do_handshake``, by which Hypercorn
    recognises TLS.

    Attributes:
        stream: The stream.
        stall: The seconds in which the client must read each part of an answer.
        error_body: Makes the JSON object of an error from its status and its text.
        wait: The seconds until the headers of the next request must have arrived.
        short_answer: Returns the answer to the headers of a request that needs no application, or None.
        scope: The cancel scope of the connection's tasks.
        requests: The number of requests that the application has not finished.
        on_leave: Called when the client leaves or is disconnected.
        has_left: Whether the client has left or was disconnected.
        is_holding: Whether sent data waits for `flush`, so that several parts need one system call.
        replies: The answers of probes since bytes were received, by path. They also answer the same
            requests that had arrived before.
    """

    stream: trio.SocketStream
    stall: float
    error_body: Callable[[int, str], Mapping[str, object]]
    wait: float
    short_answer: Callable[[Connection, bytes], Awaitable[tuple[bytes, bool] | None]]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    requests: int = attrs.field(default=0, init=False)
    on_leave: Callable[[], None] = attrs.field(default=ignore, init=False)
    is_holding: bool = attrs.field(default=False, init=False)
    replies: dict[str, Any] = attrs.field(factory=dict[str, Any], init=False)
    _framing: Framing = attrs.field(factory=partial(Framing, joins_chunks=True), init=False)
    # Held by the send in flight. Hypercorn may close the connection, or answer 400, during another answer.
    _sending: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _receiving: trio.CancelScope | None = attrs.field(default=None, init=False)
    # Parts of the answer since `is_holding` was set.
    _held: list[bytes] = attrs.field(factory=list[bytes], init=False)
    # Whether Hypercorn has received a part of a request, and not ended its answer.
    _is_answering: bool = attrs.field(default=False, init=False)
    has_left: bool = attrs.field(default=False, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)
    # Whether the client has sent a request before the answer to an earlier one.
    _is_pipelining: bool = attrs.field(default=False, init=False)
    # The time for the answers to a pipelining client that has ended its sending side.
    _last_answers: trio.CancelScope | None = attrs.field(default=None, init=False)
    # When the connection is closed unless a request begins.
    _idle_until: float = attrs.field(default=math.inf, init=False)
    # Set when the end of the last answer was sent.
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        # The kernel ends the connection of a machine that has vanished, or that neither confirms nor takes
        # what was sent. A listener may also belong to a Unix socket.
        if self.stream.socket.family in {socket.AF_INET, socket.AF_INET6}:
            with suppress(OSError):
                for level, option, value in _watch(self.stall):
                    self.stream.setsockopt(level, option, value)

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket, from which Hypercorn reads both addresses."""
        return self.stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive checked bytes of one request; ``b""`` if the client has left or its request is refused.

        While a request is served, this reads on, so that the end of the connection is noticed. The bytes of
        the next request wait until `end_answer`. If they exceed the backlog for `stall` seconds, the client
        is disconnected, because its end could not be noticed.

        A client that ends its sending side has left, because a closed socket looks the same. If it has
        pipelined requests, it still gets their answers, each within `stall` of the part sent before.

        After the end of the last answer, this reads on for a moment and closes the socket, although the
        application may still work.

        Args:
            max_bytes: Ignored.

        Raises:
            trio.ClosedResourceError: The connection was closed here.
            trio.BrokenResourceError: The connection is broken.
        """
        try:
            while not self._is_closed:
                if taken := await self._take():
                    return taken
                data = await self._receive()
                if data:
                    self._framing.feed(data)
                elif data is not None and self._is_pipelining and not self._last_answers:
                    self._last_answers = trio.CancelScope()
                elif data is not None:
                    self._leave()
                    return b""
        except RefusedError as refused:
            # If Hypercorn has begun the request, it answers the early end of the body itself.
            if not self._is_answering:
                await self._refuse(refused.status)
            return b""
        except BROKEN:
            self._leave()
            raise
        await self._ended.wait()
        await self.linger()
        raise trio.ClosedResourceError("the connection is closed")

    async def _take(self) -> bytes:
        """Take received bytes of a request for Hypercorn, and answer those that need no application."""
        taken = b""
        while not self._is_closed and not (self._is_answering and self._framing.is_between):
            is_new = self._framing.is_between
            taken = self._framing.take()
            if is_new and taken and self._framing.is_between and await self._answer_shortly(taken):
                taken = b""
                continue
            self._is_answering = self._is_answering or (is_new and bool(taken))
            break
        self._note_pipelining()
        if self.replies:
            self.replies.clear()
            await self.flush()
        return taken

    async def _receive(self) -> bytes | bytearray | None:
        """Receive bytes; None if `_take` may have more, or the connection is closed."""
        with trio.CancelScope(deadline=self._idle_until) as self._receiving:
            if len(self._framing) >= _BACKLOG_BYTES:
                await trio.sleep(self.stall)
                self.cut("the client sends too many requests")
            if not self._last_answers:
                return await self.stream.receive_some(_RECEIVED_BYTES)
            if not (self._is_answering and self._framing.is_between):
                return b""
            with trio.move_on_after(self.stall) as self._last_answers:
                await trio.sleep_forever()
            return b""
        if trio.current_time() >= self._idle_until:
            await self.aclose()
        return None

    def _note_pipelining(self) -> None:
        """Note whether a further request has arrived during the answer to an earlier one."""
        if self._is_answering and not self._is_pipelining:
            self._is_pipelining = self._framing.has_head

    async def _answer_shortly(self, head: bytes) -> bool:
        """Answer a request without Hypercorn. Return whether it was one that needs no application.

        The answer is held until `_take` ends.
        """
        if (answer := await self.short_answer(self, head)) is None:
            return False
        data, is_last = answer
        self.is_holding = True
        self._is_pipelining = self._is_pipelining or self._framing.has_head
        self._held.append(data)
        if sum(map(len, self._held)) >= _HELD_BYTES or is_last:
            await self.flush()
        if is_last:
            await self.aclose()
        self.set_idle(True)
        return True

    def set_idle(self, is_idle: bool) -> None:
        """Begin or end the time in which the headers of the next request must arrive."""
        if not is_idle:
            self._idle_until = math.inf
        elif self._idle_until > -math.inf:
            # A connection that is to end does not begin to wait again.
            self._idle_until = trio.current_time() + self.wait
        if self._receiving is not None:
            self._receiving.deadline = self._idle_until

    def end_idle(self) -> None:
        """Close the connection if it waits for a request."""
        if self._idle_until < math.inf:
            self._idle_until = -math.inf
            if self._receiving is not None:
                self._receiving.deadline = self._idle_until

    def end_answer(self) -> None:
        """Let the next request begin, after the answer of the last one."""
        self._note_pipelining()
        self._is_answering = False
        if self.has_left:
            self._close()
        elif (len(self._framing) or self._last_answers) and self._receiving is not None:
            self._receiving.cancel()

    def _leave(self) -> None:
        """Note that the client has left, and close the socket, although the application may still work.

        A request that Hypercorn has and the application has not begun is still answered, within `stall`.
        """
        if not self.has_left:
            self.has_left = True
            self.on_leave()
            if self.requests or not self._is_answering:
                self._close()
            self.end_if_over()

    def _close(self) -> None:
        self._is_closed = True
        self._ended.set()
        if self._receiving is not None:
            self._receiving.cancel()
        self.stream.socket.close()

    def end_if_over(self) -> None:
        """End the tasks of the connection if no request may follow, because Hypercorn would wait."""
        is_over = self._is_closed or (self.has_left and not self._is_answering)
        if is_over and not self.requests:
            self.scope.cancel(reason="the client has left")

    async def _refuse(self, status: int) -> None:
        """Answer a request that Hypercorn does not get, and close the connection."""
        phrase = HTTPStatus(status).phrase
        body = json.dumps(self.error_body(status, _REMEDIES.get(status, phrase.lower())))
        head = f"HTTP/1.1 {status} {phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        with suppress(*BROKEN):
            await self.send_all(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        await self.aclose()

    async def send_all(self, data: bytes) -> None:
        """Send data, or hold it until `flush`.

        A client that does not read a part within `stall` seconds is disconnected, even if the caller is
        shielded from cancellation. The rest of the data is dropped then, without an error.
        """
        if self.is_holding:
            self._held.append(data)
            return
        async with self._sending:
            for begin in range(0, len(data), _SENT_BYTES):
                try:
                    with trio.move_on_after(self.stall) as sending:
                        await self.stream.send_all(memoryview(data)[begin : begin + _SENT_BYTES])
                except BROKEN:
                    self._leave()
                    raise
                if sending.cancelled_caught:
                    self.cut("the client does not read")
                    break
                if self._last_answers is not None:
                    self._last_answers.deadline = trio.current_time() + self.stall

    async def flush(self) -> None:
        """Send the held data, and hold no more; shielded from cancellation."""
        self.is_holding = False
        if data := b"".join(self._held):
            self._held.clear()
            # Shielded, because a partial answer would corrupt the next one. `stall` limits the time.
            with suppress(*BROKEN), trio.CancelScope(shield=True):
                await self.send_all(data)

    async def send_eof(self) -> None:
        """Do nothing, because Hypercorn calls this during a send and closes the stream afterwards."""
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Send the end, after the held data and the data in flight. The reader closes the socket."""
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        if self._receiving is not None:
            self._receiving.cancel()
        try:
            await self.flush()
            with suppress(*BROKEN):
                async with self._sending:
                    await self.stream.send_eof()
        finally:
            self._ended.set()
        self.end_if_over()

    async def linger(self) -> None:
        """Read the client's further data for up to a second, and close the socket.

        If the socket were closed with unread data, a reset would destroy the answer in transit.
        """
        with trio.move_on_after(_LINGER), suppress(*BROKEN):
            await self.stream.send_eof()
            while await self.stream.receive_some(_RECEIVED_BYTES):
                pass
        self._close()

    def cut(self, reason: str) -> None:
        """Close the socket, which also ends a shielded send, and everything that runs for the connection."""
        self.has_left = True
        self._close()
        self.on_leave()
        self.scope.cancel(reason=reason)


@attrs.frozen
class IdleTime:
    """The idle time of a connection, in place of Hypercorn's, which starts two tasks for each request.

    Attributes:
        connection: The connection.
        is_ending: Returns whether idle connections are closed at once.
    """

    connection: Connection
    is_ending: Callable[[], bool]

    async def restart(self, task_group: object, action: object) -> None:
        """Begin the idle time.

        Args:
            task_group: Ignored.
            action: Ignored.
        """
        self.connection.set_idle(True)
        if self.is_ending():
            self.connection.end_idle()

    async def stop(self) -> None:
        """End the idle time, because a request has begun."""
        self.connection.set_idle(False)
