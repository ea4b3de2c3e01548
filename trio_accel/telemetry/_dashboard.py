"""A page that shows a running system, served by the program itself (D128)."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from time import perf_counter
from typing import TYPE_CHECKING

import attrs
import trio

from ..actors import Actor, ActorContext, ActorSystem, Event, is_number, opens
from ..backends.base.kit.modules import import_ahead, import_extra
from ._past import INTERVAL, Past, busiest_first
from ._recorder import Recorder, check_system, record
from ._snapshot import SystemSnapshot

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Dashboard", "open_dashboard"]

# The bounds of an interval, and the seconds that a reader's first snapshot waits for device counts.
_SHORTEST_SECONDS, _LONGEST_SECONDS, _COUNT_SECONDS = 0.1, 60.0, 0.5
_HOST = "127.0.0.1"
# The names of this machine for itself. Any other name in a request means that a foreign page sends it.
_HOSTS = [_HOST, "localhost"]
_READERS = 16
# A browser opens up to six at once, and closes most of them.
_CONNECTIONS = 64
# Seconds for the headers of a request, and in which a browser takes a part of its answer.
_HEAD_SECONDS, _SEND_SECONDS = 5.0, 10.0
# The maximum share of the program's time for snapshots, so that snapshots of large trees are less frequent.
_LARGEST_SHARE = 0.1
# The same while no page is open.
_UNSEEN_SHARE = 0.01
# The number of messages on the page: the types with the highest rates.
_OPERATIONS = 40
# The placeholder in the page for its first snapshot.
_FIRST = b"<!--first-->"
_KINDS = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
# The page may only contact this program, whatever a name or an error in it contains.
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
    """A served page. Made by `open_dashboard`.

    Attributes:
        url: The address for a browser on this machine.
        recorder: The recorder to show.
    """

    url: str
    recorder: Recorder


@opens("the page is not served yet: async with ta.open_dashboard(system) as dashboard")
async def open_dashboard(
    system: ActorSystem, *, port: int = 0, interval: float = 0.5, errors: bool = False
) -> AsyncGenerator[Dashboard]:
    """Serve a page that shows a system, for the body of the ``async with``.

    The page shows the supervision tree, devices, messages with their latency, and the last failures. It is
    read-only. It is served only to this machine (127.0.0.1), so everybody who can log in there can see it. At
    most 16 pages and 64 requests are served at once: others are refused. Of connections without a request,
    the oldest of more than 64 is closed. A browser that leaves, or reads slowly, does not delay others.
    `trio_accel.http.serve` is the server.

    The server is an actor of the system, named ``dashboard``. It ends with the body, and its supervisor
    restarts it if it fails.

    Args:
        system: The system to show. It is recorded meanwhile, as by `record`.
        port: The TCP port; 0 for any free one.
        interval: Seconds between two snapshots, from 0.1 to 60. Changes of actors are sent at once.
        errors: Whether the page shows the texts and tracebacks of errors, which may contain the program's
            data. Otherwise it shows their types.

    Raises:
        NotSupportedError: Starlette or Hypercorn is not installed: ``pip install '.[dashboard]'`` in a
            checkout.
        OSError: The port is taken.
        ValueError: The port or the interval is out of range; or the system has a dashboard already.
    """
    check_system("open_dashboard", system)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"open_dashboard: port must be an integer from 0 to 65535, got {port!r}")
    if not is_number(interval, _SHORTEST_SECONDS, _LONGEST_SECONDS):
        raise ValueError(
            f"interval must be a number of seconds from {_SHORTEST_SECONDS:g} to {_LONGEST_SECONDS:g}, "
            f"got {str(interval)[:40]}"
        )
    modules = (
        "starlette.applications",
        "starlette.endpoints",
        "starlette.middleware.trustedhost",
        "hypercorn.trio.tcp_server",
    )
    await trio.to_thread.run_sync(import_ahead, ("trio_accel.http", *modules))
    for module in modules:
        import_extra(module, "dashboard")
    with socket.create_server((_HOST, port)) as listener, record(system) as recorder:
        feed = _Feed(recorder, interval, shows_errors=errors)
        with system.subscribe(feed.request_snapshot, messages=False):
            server = await system.spawn(DashboardActor, listener, feed, name="dashboard")
            try:
                yield Dashboard(f"http://{_HOST}:{listener.getsockname()[1]}/", recorder)  # noqa: ASYNC119  # `opens` makes a context manager of it
            finally:
                server.cancel("the dashboard is closed")
                with trio.CancelScope(shield=True):
                    await server.wait_terminated()


class DashboardActor(Actor):
    """Serves the page; after a failure, its supervisor restarts it at the same address."""

    def __init__(self, listener: socket.socket, feed: _Feed) -> None:
        self._listener = listener
        self._feed = feed
        self._application = _application(feed)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Serve during the body."""
        from ..http import Limits, serve

        # The server closes its listener, but the next incarnation needs the socket, which listens already.
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        limits = Limits(
            requests=_CONNECTIONS, connections=_CONNECTIONS, wait=_HEAD_SECONDS, stall=_SEND_SECONDS
        )
        async with trio.open_nursery() as nursery:
            start = partial(serve, self._application, listeners=[listener], signals=(), limits=limits)
            await nursery.start(start)
            nursery.start_soon(self._feed.run)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel(reason="the dashboard is closed")


class _Feed:
    """Snapshots for all open pages. Without any, snapshots are made only for the charts."""

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
        self._requested = trio.Event()

    def request_snapshot(self, event: Event) -> None:
        """Make the next snapshot due, because something has happened to an actor."""
        self._requested.set()

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
            # A newly opened page may have caused a snapshot a moment ago.
            await trio.sleep_until(self._due)
            self._requested = trio.Event()
            began = trio.current_time()
            self.newest()
            self._news.unpark_all()
            with trio.move_on_at(began + self._interval):
                await self._requested.wait()

    async def _wait_for_reader(self) -> None:
        while not self._readers:
            began = perf_counter()
            # Do not query devices.
            self.past.add(self._recorder.snapshot(asks=False))
            pause = max(INTERVAL, (perf_counter() - began) / _UNSEEN_SHARE)
            with trio.move_on_after(pause):
                while not self._readers:
                    self._requested = trio.Event()
                    await self._requested.wait()

    async def send_all(self, send: Send) -> None:
        """Send snapshots as server-sent events, until the page is closed and this is cancelled.

        A slow page misses some.
        """
        self._readers += 1
        try:
            # So that the first snapshot has the memory of devices that answer.
            with trio.move_on_after(_COUNT_SECONDS):
                await self._recorder.refresh()
            headers = {**_HEADERS, "Content-Type": "text/event-stream"}
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            # The first one is sent at once, because no other task runs before this one waits for it.
            self._requested.set()
            while True:
                await self._news.park()
                body = f"data: {self._text}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._readers -= 1

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of pages is open."""
        return self._readers >= _READERS


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
                await feed.send_all(self.send)

    def file(name: str) -> Route:
        content = (page / name).read_bytes()

        async def read(request: Request) -> Response:
            # The page begins with the current state. Escape "<", so that it cannot end the script.
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
