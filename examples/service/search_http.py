"""HTTP for an application, one connection apart from the others: no client can end the service for all.

`hypercorn.trio.serve` would do, but for some things. What a connection raises ends the whole server there, a
client that does not read holds up its end, and the number of connections has no bound.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import trio
from starlette.applications import Starlette

# Beyond these, a connection is refused.
MOST_CONNECTIONS = 256
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
    wrapped = wrappers.ASGIWrapper(application)
    streams: set[trio.SocketStream] = set()

    async def connected(stream: trio.SocketStream) -> None:
        try:
            await hypercorn.TCPServer(wrapped, config, context, {"is_gone": partial(is_gone, stream)}, stream)
        except Exception:
            logger.exception("a connection failed")
        finally:
            streams.discard(stream)
            stream.socket.close()

    def take(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SLOW)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(client))
        if is_gone(stream):
            stream.socket.close()
        elif len(streams) >= MOST_CONNECTIONS:
            with stream.socket, suppress(OSError):
                client.send(FULL)
        else:
            streams.add(stream)
            connections.start_soon(connected, stream)

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting, listener:
            accepting.start_soon(accept, listener, take)
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


async def accept(listener: trio.SocketListener, take: Callable[[socket.socket], None]) -> None:
    """Hand over clients as they come.

    `trio.serve_listeners` takes one client in each round of the loop, and a round is long while many
    connections are served: a new client would wait behind all who have come before it.
    """
    with socket.socket(fileno=os.dup(listener.socket.fileno())) as accepting:
        accepting.setblocking(False)
        while True:
            await trio.lowlevel.wait_readable(accepting)
            try:
                for _ in range(MOST_CONNECTIONS):
                    take(accepting.accept()[0])
            except BlockingIOError:
                pass
            except OSError:
                # There are too many descriptors, as `trio.serve_listeners` says.
                logger.exception("a connection cannot be accepted")
                await trio.sleep(0.1)


def is_gone(stream: trio.SocketStream) -> bool:
    """Whether the other end sends nothing any more: a client that has left, or has shut down its side."""
    try:
        return stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_ESTABLISHED
    except OSError:
        return True
