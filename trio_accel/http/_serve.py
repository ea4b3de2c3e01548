"""The server: Hypercorn for each connection, with limits around the application."""

from __future__ import annotations

import atexit
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache, partial
from math import inf
from typing import Any, cast

import trio

from ..actors import named_arguments, single
from ..backends.base.kit.modules import import_ahead, import_extra
from ..devices import System
from ..devices.base._lobby import accepted
from ._checks import Part, checks_of
from ._connection import Connection, IdleTime
from ._edge import Application, Edge, ErrorBody
from ._framing import HEAD_BYTES
from ._lifespan import Lifespan
from ._limits import Limits
from ._probes import Exposes, probes_of

__all__ = ["serve"]

_logger = logging.getLogger("trio_accel.http")
# Connections that the kernel holds until they are accepted.
_BACKLOG = 1024
# The seconds at the end of the grace for the end of the lifespan, the system and the interpreter, half of
# them for the lifespan; of a short grace, this part.
_CLOSING, _PART = 1.0, 0.25
_LIMITS = Limits()


def _error_of(status: int, text: str) -> dict[str, object]:
    return {"error": text}


@named_arguments
async def serve(
    app: Application,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    listeners: Sequence[trio.SocketListener] | None = None,
    system: System | None = None,
    recorder: Exposes | None = None,
    checks: Iterable[Part] = (),
    limits: Limits = _LIMITS,
    error_body: ErrorBody = _error_of,
    signals: Iterable[int] = (signal.SIGINT, signal.SIGTERM),
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI application by HTTP/1.1 until a signal ends it, such as Starlette's or FastAPI's.

    A single client cannot end the service for others, and every resource that a client may take has a limit.
    The body of a request is read completely before the application is called. When a client leaves, the task
    of its request is cancelled, but not the application's work after its answer. A client that ends its
    sending side has also left, unless it pipelines requests: then it gets the remaining answers, if each
    part follows within `Limits.stall` seconds.

    A signal closes the listeners and lets open requests end. `serve` cuts the rest early enough for the
    program to end within `Limits.grace` seconds of the signal: 1 s before, or a quarter of a grace below 4 s.
    The lifespan gets half of that time. While the application starts, a signal cancels its start, and `serve`
    then returns. Two things take longer: a device with a running operation closes after
    `DeviceOptions.close_grace` seconds and about one more, and a handler in a thread, such as a ``def`` of
    FastAPI, cannot be cancelled. Further signals change nothing.

    WebSockets and HTTP/2 are refused with 505, and the offer ``Upgrade: h2c`` is ignored. TLS, HTTP/2 and
    limits by address are the work of a proxy.

    Args:
        app: The application. Its lifespan runs around all requests.
        host: Name or address to listen at. ``"0.0.0.0"`` accepts other machines.
        port: TCP port; 0 for any free port.
        listeners: Open listeners in place of `host` and `port`. They are closed at the end.
        system: Answers ``/health``, which is 503 if a device has failed for good or a program has ended,
            because only a restart helps. Answers ``/ready``, which is 503 in these cases, if a device waits
            to be opened again or does not answer within 0.5 s, and if a cluster of the system has no node.
            The bodies of both name the part and the reason. These routes precede the application's routes,
            and need no free place.
        recorder: Answers ``/metrics`` from a `trio_accel.telemetry.Recorder`.
        checks: More parts that ``/ready`` asks: each `Check` of your own, and devices, clusters and trainers
            that do not belong to `system`.
        limits: The limits for clients.
        error_body: Makes the JSON of each error that `serve` answers itself, such as 413, 503 and 504. It
            gets the status and a text. Without it, the JSON is ``{"error": text}``.
        signals: Signals that end the service. Trio receives them in the main thread only: pass ``()`` in
            another thread, or to serve until this is cancelled.
        task_status: Gets the port of the first listener when the application has started. ``nursery.start``
            returns it.

    Raises:
        OSError: The port is taken, or the address is not of this machine.
        NotSupportedError: Hypercorn is not installed: ``pip install '.[http]'`` in a checkout.
        TypeError, ValueError: An argument is wrong.
        Exception: The error of the application's lifespan.

    If this is cancelled, all connections are cut at once.
    """
    _check(app=app, host=host, listeners=listeners, system=system, recorder=recorder)
    _check(limits=limits, error_body=error_body)
    _check_port(port)
    probes = probes_of(system, recorder, checks_of(checks))
    hypercorn = await _Hypercorn.load()
    if listeners is None:
        listeners = await _listen(host, port)
    edge = Edge(app, limits, probes, error_body)
    lifespan, ending = Lifespan(app), trio.Event()
    end, closing = inf, min(_CLOSING, _PART * limits.grace)
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as living:
            if signal_numbers := tuple(signals):
                await living.start(_receive_signals, signal_numbers, ending)
            with trio.CancelScope() as starting:
                living.start_soon(_cancel_at, ending, starting)  # noqa: ASYNC111  # to cancel it later changes nothing
                await living.start(lifespan.run)
            server = partial(hypercorn.serve, edge, lifespan.state)
            async with trio.open_nursery() as connections:
                try:
                    await _accept_until(ending, listeners, edge, server, connections, task_status)
                    _end_interpreter_quickly()
                    end = trio.current_time() + limits.grace
                    await hypercorn.end(edge, end - closing)
                finally:
                    edge.cut_all()
                    connections.cancel_scope.cancel(reason="the service ends")
            with trio.move_on_at(end - closing / 2):
                await lifespan.end()
            living.cancel_scope.cancel(reason="the service ends")
    except BaseExceptionGroup as group:
        # Nurseries group even one error. It is raised outside, where it keeps its context.
        failure = single(group)
    finally:
        _close(listeners)
    if failure is not None:
        raise failure


_MODULES = (
    "hypercorn.config",
    "hypercorn.trio.worker_context",
    "hypercorn.trio.tcp_server",
    "trio_accel.patterns",
)


class _Hypercorn:
    """The parts of Hypercorn that serve one connection, and their configuration."""

    def __init__(self) -> None:
        config = import_extra("hypercorn.config", "http").Config()
        config.keep_alive_max_requests = sys.maxsize
        config.h11_max_incomplete_size = HEAD_BYTES
        config.include_server_header = False
        config.accesslog, config.errorlog = None, _logger
        self._config = config
        self._context = import_extra("hypercorn.trio.worker_context", "http").WorkerContext(None)
        self._tcp_server = import_extra("hypercorn.trio.tcp_server", "http").TCPServer
        self._wrapper = import_extra("hypercorn.app_wrappers", "http").ASGIWrapper

    @classmethod
    async def load(cls) -> _Hypercorn:
        """Import Hypercorn and the patterns in a thread, because that takes half a second."""
        await trio.to_thread.run_sync(import_ahead, _MODULES)
        return cls()

    async def serve(self, edge: Edge, state: dict[str, Any], connection: Connection) -> None:
        """Serve the requests of a connection by an edge."""
        app = self._wrapper(partial(edge.answer, connection))
        server = self._tcp_server(app, self._config, self._context, state, connection)
        server.idle_task = IdleTime(connection, lambda: edge.is_ending)
        await server

    async def end(self, edge: Edge, deadline: float) -> None:
        """End connections without a request at once, and wait for the others until the deadline."""
        edge.is_ending = True
        seconds = deadline - trio.current_time()
        _logger.info("ending: %d requests are open, and have %.3g s", edge.requests, seconds)
        await self._context.terminated.set()
        edge.end_idle()
        with trio.move_on_at(deadline):
            await edge.wait_empty()


# For each argument a check, and the words of the error if it fails.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "app": (callable, "an ASGI application"),
    "host": (lambda host: isinstance(host, str), "a name or an address"),
    "listeners": (lambda value: value is None or _are_listeners(value), "one or more trio.SocketListener"),
    "system": (lambda system: system is None or isinstance(system, System), "an open system"),
    "recorder": (lambda recorder: recorder is None or hasattr(recorder, "exposition"), "a Recorder"),
    "limits": (lambda limits: isinstance(limits, Limits), "Limits(...)"),
    "error_body": (callable, "a function of a status and a text"),
}


def _check(**arguments: object) -> None:
    for name, value in arguments.items():
        is_right, kind = _ARGUMENTS[name]
        if not is_right(value):
            raise TypeError(f"serve: {name} must be {kind}, got {value!r}")


def _check_port(port: object) -> None:
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"serve: port must be an integer from 0 to 65535, got {port!r}")


def _are_listeners(value: object) -> bool:
    listeners = cast("Sequence[object]", value) if isinstance(value, Sequence) else ()
    return bool(listeners) and all(isinstance(listener, trio.SocketListener) for listener in listeners)


async def _listen(host: str, port: int) -> Sequence[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at port {port} of {host}: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"serve: host must be a name or an address, got {host!r:.80}") from error


@cache
def _end_interpreter_quickly() -> None:
    # An interpreter that ends looks through all objects, which takes up to a second and frees nothing that
    # the end of the process does not free. One registration is enough, however often a program serves.
    atexit.register(gc.freeze)


def _close(listeners: Iterable[trio.SocketListener]) -> None:
    for listener in listeners:
        listener.socket.close()


async def _receive_signals(
    signals: Iterable[int], ending: trio.Event, *, task_status: trio.TaskStatus[None]
) -> None:
    """Set the event at each signal. A signal that nobody takes would end the program later."""
    with trio.open_signal_receiver(*signals) as received:
        task_status.started()
        async for _ in received:
            ending.set()


async def _cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel(reason="a signal ends the service")


async def _accept_until(
    ending: trio.Event,
    listeners: Iterable[trio.SocketListener],
    edge: Edge,
    server: Callable[[Connection], Awaitable[None]],
    connections: trio.Nursery,
    task_status: trio.TaskStatus[int],
) -> None:
    """Accept connections, and then close the listeners."""
    names: list[Any] = [listener.socket.getsockname() for listener in listeners]
    async with trio.open_nursery() as accepting:
        # A signal may have cancelled the start of the application, which then cannot serve.
        for listener in () if ending.is_set() else listeners:
            accepting.start_soon(_accept, listener, edge, server, connections)
        _logger.info("serving at %s", names)
        # The name of a Unix socket is its path.
        task_status.started(0 if isinstance(names[0], (str, bytes)) else int(names[0][1]))
        await ending.wait()
        accepting.cancel_scope.cancel(reason="the service ends")
    _close(listeners)


async def _accept(
    listener: trio.SocketListener,
    edge: Edge,
    server: Callable[[Connection], Awaitable[None]],
    connections: trio.Nursery,
) -> None:
    while True:
        # The kernel keeps a client that waits. Each try closes an idle connection, if there is one.
        stream = await accepted(listener, edge.close_idle)
        connections.start_soon(edge.connect, stream, server)
