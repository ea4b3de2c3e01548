"""HTTP for an application, one connection apart from the others: no client can end the service for all.

`hypercorn.trio.serve` would do, but for two things. What a connection raises ends the whole server there, and
a client that does not read holds up its end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any

import trio
from starlette.applications import Starlette

Serve = Callable[[trio.SocketStream], Awaitable[None]]

logger = logging.getLogger("service")


async def serve_http(
    application: Starlette, listener: trio.SocketListener, stop: trio.Event, *, grace: float = 5.0
) -> None:
    """Serve until `stop`, and then for so many seconds what has begun.

    Args:
        application: What answers.
        listener: Where clients connect; it is closed at the end.
        stop: Says that the end has come.
        grace: Seconds for the last requests.
    """
    context: Any = import_module("hypercorn.trio.worker_context").WorkerContext(None)
    server: Any = import_module("hypercorn.trio.tcp_server").TCPServer
    config: Any = import_module("hypercorn.config").Config()
    config.errorlog = logger
    wrapped: Any = import_module("hypercorn.app_wrappers").ASGIWrapper(application)
    streams: set[trio.SocketStream] = set()

    async def connected(stream: trio.SocketStream) -> None:
        streams.add(stream)
        try:
            await server(wrapped, config, context, {}, stream)
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
