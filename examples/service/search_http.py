"""HTTP for an application, one connection apart from the others: no client can end the service for all.

`hypercorn.trio.serve` would do, but for some things. What a connection raises ends the whole server there, a
client that does not read holds up its end, and the number of connections has no bound.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import attrs
import trio
from starlette.applications import Starlette

# Beyond these, a connection is refused.
MOST_CONNECTIONS = 256
# Connections that the kernel keeps until they are taken, one in each round of the loop. A new client waits
# for all before it, and a flood is held up by the kernel: where there is no room, a client tries again later.
BACKLOG = 64
# Milliseconds after which a client that does not read is given up.
SLOW = 10_000
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
TCP_ESTABLISHED = 1

# Hypercorn's annotations know servers with TLS only.
hypercorn: Any = import_module("hypercorn.trio.tcp_server")
wrappers: Any = import_module("hypercorn.app_wrappers")
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
    context, config = hypercorn.WorkerContext(None), hypercorn.Config()
    config.errorlog = logger
    # HTTP/2, which Hypercorn would begin where a client asks for it, ends by this with the connection.
    config.h2_max_header_list_size = -1
    wrapped = wrappers.ASGIWrapper(application)
    streams: set[trio.SocketStream] = set()

    async def connected(stream: trio.SocketStream) -> None:
        streams.add(stream)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SLOW)
            if len(streams) > MOST_CONNECTIONS:
                with suppress(OSError), trio.move_on_after(0.1):
                    await stream.socket.send(FULL)
            elif not is_gone(stream):
                with trio.CancelScope() as scope:
                    state = {"is_gone": partial(is_gone, stream)}
                    await hypercorn.TCPServer(wrapped, config, context, state, Client(stream, scope))
        except Exception:
            logger.exception("a connection failed")
        finally:
            streams.discard(stream)
            stream.socket.close()

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accept = partial(trio.serve_listeners, handler_nursery=connections)
            accepting.start_soon(accept, connected, [listener])
            await stop.wait()
            accepting.cancel_scope.cancel()
        # A connection that waits for its next request ends now, and the others after their response.
        await context.terminated.set()
        with trio.move_on_after(grace):
            while streams:  # noqa: ASYNC110  # each tells nobody but itself
                await trio.sleep(0.01)
        for stream in streams:
            # The server shields what it sends, and a client need not read it.
            stream.socket.close()
        connections.cancel_scope.cancel()


@attrs.frozen
class Client:
    """The stream of a client: when its end is read, what was begun for it is cancelled.

    Hypercorn itself would go on, and would keep an idle connection for 5 seconds after its end.
    """

    stream: trio.SocketStream
    scope: trio.CancelScope

    async def receive_some(self, most: int) -> bytes:
        """As the stream does."""
        data = b""
        try:
            data = await self.stream.receive_some(most)
        finally:
            if not data:
                self.scope.cancel()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def is_gone(stream: trio.SocketStream) -> bool:
    """Whether the other end sends nothing any more: a client that has left, or has shut down its side."""
    try:
        return stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_ESTABLISHED
    except OSError:
        return True
