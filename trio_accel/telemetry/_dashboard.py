"""A page that shows a running system, served by the program itself (D128)."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from time import perf_counter
from typing import TYPE_CHECKING

import attrs
import trio

from ..actors import Actor, ActorContext, Event, System, is_number, opens
from ..backends.base.kit.modules import import_extra
from ..devices.base._lobby import Admit, Lobby
from ._past import INTERVAL, Past, busiest_first
from ._recorder import Recorder, check_system, record
from ._snapshot import SystemSnapshot

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    _Serve = Callable[[Starlette, trio.SocketStream, bytes], Awaitable[None]]

__all__ = ["Dashboard", "open_dashboard"]

_logger = logging.getLogger("trio_accel.telemetry.dashboard")

# Bounds of an interval, and how long the first snapshot of a reader waits for the counts of devices.
_SHORTEST_SECONDS, _LONGEST_SECONDS, _COUNT_SECONDS = 0.1, 60.0, 0.5
_HOST = "127.0.0.1"
# Names of this machine for itself: another one in a request is a page from elsewhere that asks.
_HOSTS = [_HOST, "localhost"]
_READERS = 16
# A browser opens up to six at once, and closes most of them.
_CONNECTIONS = 64
_REFUSAL = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_FULL = _REFUSAL % b"503 Service Unavailable"
_TOO_LONG = _REFUSAL % b"431 Request Header Fields Too Large"
# Seconds and bytes of the headers of a request, and seconds in which a browser takes a part of its answer.
_HEAD_SECONDS, _HEAD_BYTES, _SEND_SECONDS = 5.0, 16384, 10.0
_HEAD_END = re.compile(rb"\n\r?\n")
# Hypercorn would begin HTTP/2, or a WebSocket, where a client asks for it. The time of h11 grows with the
# square of the number of spaces before an illegal byte.
_REFUSED = re.compile(rb"(?i)^\s*PRI |\nupgrade[ \t]*:|[\0\f\v]|\r(?!\n)")
# Snapshots take at most about this share of the program's time: of a large tree they come less often.
_LARGEST_SHARE = 0.1
# The same while no page is open.
_UNSEEN_SHARE = 0.01
# Messages that are sent to the page: those with the highest rates.
_OPERATIONS = 40
# Stands in the page for its first snapshot.
_FIRST = b"<!--first-->"
_KINDS = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
# The page asks this program alone, whatever a name or an error in it says.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@attrs.frozen
class Dashboard:
    """A page that is being served. Made by `open_dashboard`.

    Attributes:
        url: Where a browser of this machine finds it.
        recorder: The recorder to show.
    """

    url: str
    recorder: Recorder


@opens("the page is not served yet: async with ta.open_dashboard(system) as dashboard")
async def open_dashboard(
    system: System, *, port: int = 0, interval: float = 0.5, errors: bool = False
) -> AsyncGenerator[Dashboard]:
    """Serve a page that shows a system, for the body of the ``async with``.

    The page shows the supervision tree, devices, messages with their latency, and the last failures. It is
    for reading only. It is served to this machine alone (127.0.0.1), so everybody who can log in there can
    see it. At most 16 pages are served at once, on at most 64 connections: others are refused. Of connections
    without a request, the oldest of more than 64 is closed. A browser that leaves, or reads slowly, holds up
    nothing.

    The server is an actor of the system, named ``dashboard``. It ends with the body, and its supervisor
    restarts it if it fails.

    Args:
        system: The system to show. It is recorded meanwhile, as by `record`.
        port: TCP port; 0 for any that is free.
        interval: Seconds between two snapshots, from 0.1 to 60. Changes of actors are sent at once.
        errors: Whether the page shows the texts and tracebacks of errors, in which there may be data of the
            program. Without that, it shows their types.

    Raises:
        NotSupportedError: Starlette or Hypercorn is not installed: ``pip install '.[dashboard]'`` in a
            checkout.
        OSError: The port is taken.
        ValueError: The port or the interval is out of range; or the system has a dashboard already.
    """
    check_system("open_dashboard", system)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"open_dashboard: port must be a whole number from 0 to 65535, got {port!r}")
    if not is_number(interval, _SHORTEST_SECONDS, _LONGEST_SECONDS):
        raise ValueError(
            f"interval must be a number of seconds from {_SHORTEST_SECONDS:g} to {_LONGEST_SECONDS:g}, "
            f"got {str(interval)[:40]}"
        )
    serve = _server()
    with socket.create_server((_HOST, port)) as listener, record(system) as recorder:
        feed = _Feed(recorder, interval, shows_errors=errors)
        with system.subscribe(feed.hurry, messages=False):
            server = await system.spawn(DashboardActor, serve, listener, feed, name="dashboard")
            try:
                yield Dashboard(f"http://{_HOST}:{listener.getsockname()[1]}/", recorder)  # noqa: ASYNC119  # `opens` makes a context manager of it
            finally:
                server.cancel("the dashboard is closed")
                with trio.CancelScope(shield=True):
                    await server.wait_terminated()


def _server() -> _Serve:
    """Serve one connection with an application, to its end."""
    import_extra("starlette.applications", "dashboard")
    config = import_extra("hypercorn.config", "dashboard").Config()
    # One request for each connection: the headers of that one are looked at.
    config.keep_alive_max_requests = 0
    server = import_extra("hypercorn.trio.tcp_server", "dashboard").TCPServer
    worker_context = import_extra("hypercorn.trio.worker_context", "dashboard").WorkerContext
    wrapper = import_extra("hypercorn.app_wrappers", "dashboard").ASGIWrapper
    config.accesslog = None
    config.errorlog = _logger
    config.errorlog.setLevel(logging.WARNING)
    config.include_server_header = False

    async def serve(application: Starlette, stream: trio.SocketStream, head: bytes) -> None:
        await server(wrapper(application), config, worker_context(None), {}, _Begun(stream, head))

    return serve


async def _read_head(stream: trio.SocketStream) -> bytes:
    """Read the headers of a request; headers of `_HEAD_BYTES` or more come without their end."""
    head, end = b"", None
    while end is None and len(head) < _HEAD_BYTES:
        # The end may have begun in the last bytes before.
        begin = max(0, len(head) - 2)
        head += await stream.receive_some(_HEAD_BYTES - len(head)) or b"\n\n"
        end = _HEAD_END.search(head, begin)
    return head if end is None else head[: end.end()]


class _Begun:
    """A stream of which the first bytes were read, and whose reader may be slow but not too slow."""

    def __init__(self, stream: trio.SocketStream, head: bytes) -> None:
        self._stream, self._head = stream, head

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    async def receive_some(self, most: int) -> bytes:
        head, self._head = self._head, b""
        # The bytes after the headers have no use. Only their end has: the browser has left.
        while not head and await self._stream.receive_some(most):
            pass
        return head

    async def send_eof(self) -> None:
        # It would meet what is being sent. The closing that follows does the same.
        await trio.lowlevel.checkpoint()

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(_SEND_SECONDS) as sending:
            await self._stream.send_all(data)
        if sending.cancelled_caught:
            await trio.aclose_forcefully(self._stream)


class DashboardActor(Actor):
    """Serves the page; restarted by its supervisor, at the same address, should that fail."""

    def __init__(self, serve: _Serve, listener: socket.socket, feed: _Feed) -> None:
        self._serve = serve
        self._listener = listener
        self._feed = feed
        self._application = _application(feed)
        self._streams: set[trio.SocketStream] = set()

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Serve meanwhile."""
        # A listener closes its socket, which the next incarnation needs, so it gets a copy.
        again = trio.socket.from_stdlib_socket(self._listener.dup())
        async with trio.SocketListener(again) as listener, trio.open_nursery() as nursery:
            # The socket listens already.
            lobby = Lobby(self._connected, max_strangers=_CONNECTIONS, seconds=_HEAD_SECONDS)
            nursery.start_soon(lobby.run, listener)  # noqa: ASYNC113
            nursery.start_soon(self._feed.run)
            try:
                yield
            finally:
                # The server shields what it sends, and a browser need not read it.
                for stream in self._streams:
                    stream.socket.close()
                nursery.cancel_scope.cancel(reason="the dashboard is closed")

    async def _connected(self, stream: trio.SocketStream, admit: Admit) -> None:
        """Serve the request of one connection. No error of it ends the others, or the program."""
        head = await _read_head(stream)
        admit()
        is_full = len(self._streams) >= _CONNECTIONS
        self._streams.add(stream)
        try:
            async with stream:
                if is_full:
                    await stream.send_all(_FULL)
                elif not _HEAD_END.search(head):
                    await stream.send_all(_TOO_LONG)
                elif not _REFUSED.search(head):
                    await self._serve(self._application, stream, head)
        finally:
            self._streams.discard(stream)


class _Feed:
    """Snapshots for all pages that are open. While there are none, they are made for the charts alone."""

    def __init__(self, recorder: Recorder, interval: float, *, shows_errors: bool) -> None:
        self._recorder = recorder
        self._interval = interval
        self._shows_errors = shows_errors
        self._text = ""
        self.past: Past = Past()
        # The time when the next one may be made, on Trio's clock.
        self._due = 0.0
        self._readers = 0
        self._news = trio.lowlevel.ParkingLot()
        self._hurry = trio.Event()

    def hurry(self, event: Event) -> None:
        """Something has happened to an actor: the next snapshot is due."""
        self._hurry.set()

    def newest(self) -> str:
        """Return the last snapshot, or another one if that may be made already."""
        if trio.current_time() >= self._due:
            began = perf_counter()
            snapshot = self._recorder.snapshot()
            self.past.add(snapshot)
            self._text = _for_page(snapshot, shows_errors=self._shows_errors)
            pause = max(_SHORTEST_SECONDS, (perf_counter() - began) / _LARGEST_SHARE)
            self._due = trio.current_time() + pause
        return self._text

    async def run(self) -> None:
        """Make snapshots."""
        while True:
            await self._wait_for_reader()
            # Somebody who opens a page may have had one made a moment ago.
            await trio.sleep_until(self._due)
            self._hurry = trio.Event()
            began = trio.current_time()
            self.newest()
            self._news.unpark_all()
            with trio.move_on_at(began + self._interval):
                await self._hurry.wait()

    async def _wait_for_reader(self) -> None:
        while not self._readers:
            began = perf_counter()
            # Devices are left alone.
            self.past.add(self._recorder.snapshot(asks=False))
            pause = max(INTERVAL, (perf_counter() - began) / _UNSEEN_SHARE)
            with trio.move_on_after(pause):
                while not self._readers:
                    self._hurry = trio.Event()
                    await self._hurry.wait()

    async def send_all(self, receive: Receive, send: Send) -> None:
        """Send snapshots as server-sent events until the page is closed; a slow one misses some."""
        self._readers += 1
        try:
            # So that the first snapshot has the memory of devices that answer.
            with trio.move_on_after(_COUNT_SECONDS):
                await self._recorder.refresh()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_wait_closed, receive, nursery.cancel_scope)
                headers = {**_HEADERS, "Content-Type": "text/event-stream"}
                raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                # The first one comes at once: no other task runs before this one waits for it.
                self._hurry.set()
                while True:
                    await self._news.park()
                    body = f"data: {self._text}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._readers -= 1

    @property
    def is_full(self) -> bool:
        """Whether as many pages are open as may be."""
        return self._readers >= _READERS


async def _wait_closed(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel(reason="the page was closed")


def _for_page(snapshot: SystemSnapshot, *, shows_errors: bool) -> str:
    shown = attrs.evolve(snapshot, operations=tuple(busiest_first(snapshot.operations)[:_OPERATIONS]))
    if not shows_errors:
        actors = [
            row if row.last_error is None else attrs.evolve(row, last_error=_type_of(row.last_error))
            for row in shown.actors
        ]
        failures = [
            attrs.evolve(row, error=_type_of(row.error), traceback="Its text is shown with errors=True.")
            for row in shown.failures
        ]
        shown = attrs.evolve(shown, actors=tuple(actors), failures=tuple(failures))
    return shown.to_json()


def _type_of(error: str) -> str:
    return error.partition(":")[0]


def _application(feed: _Feed) -> Starlette:
    from starlette.applications import Starlette  # of an extra
    from starlette.datastructures import Headers
    from starlette.endpoints import HTTPEndpoint
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    page = resources.files("trio_accel.telemetry") / "page"

    class Events(HTTPEndpoint):
        async def dispatch(self) -> None:
            if self.scope["method"] != "GET":
                await self.method_not_allowed(Request(self.scope))
            if feed.is_full:
                refusal = PlainTextResponse(f"{_READERS} pages are open already\n", 503, _HEADERS)
                await refusal(self.scope, self.receive, self.send)
            else:
                await feed.send_all(self.receive, self.send)

    def file(name: str) -> Route:
        content = (page / name).read_bytes()

        async def read(request: Request) -> Response:
            # The page begins with what is so now. In the text of a script, no sign may end it.
            first = feed.newest().replace("<", "\\u003c").encode() if _FIRST in content else b""
            return Response(content.replace(_FIRST, first), headers=_HEADERS, media_type=_KINDS[name])

        return Route("/" if name == "index.html" else f"/{name}", read)

    async def past(request: Request) -> Response:
        return Response(feed.past.to_json(), headers=_HEADERS, media_type="application/json")

    def own_origin(application: ASGIApp) -> ASGIApp:
        async def check(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            # A page of another origin names its own.
            is_own = headers.get("origin") in (None, f"http://{headers.get('host')}")
            refusal = PlainTextResponse("only the page itself may read this\n", 403, _HEADERS)
            await (application if is_own else refusal)(scope, receive, send)

        return check

    return Starlette(
        routes=[Route("/events", Events), Route("/past", past), *map(file, _KINDS)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS), Middleware(own_origin)],
    )
