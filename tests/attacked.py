"""The application that tests attack, made by Starlette or FastAPI, and clients that speak by bytes."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trio_accel.http import serve

KINDS = ("starlette", "fastapi")


def resources() -> dict[str, int]:
    """Count the descriptors and the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {"files": len(os.listdir("/proc/self/fd")), "bytes": pages * os.sysconf("SC_PAGE_SIZE")}


class Seen:
    """The actions of the application, and events of its changes."""

    def __init__(self) -> None:
        self.running = self.served = self.cancelled = 0
        self.most = 0
        self.release = trio.Event()
        self._changed = trio.Event()

    def change(self, **by: int) -> None:
        for name, step in by.items():
            setattr(self, name, getattr(self, name) + step)
        self.most = max(self.most, self.running)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, is_so: Callable[[Seen], bool], seconds: float = 60.0) -> float:
        """Wait until something is so, and return the seconds that it took."""
        began = trio.current_time()
        with trio.fail_after(seconds):
            while not is_so(self):
                await self._changed.wait()
        return trio.current_time() - began


class Work:
    """Counts a request, and whether its task was cancelled."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        self.seen.change(running=1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.seen.change(running=-1, served=int(kind is None), cancelled=int(kind is not None))


class Handlers:
    """The routes: `ping` is at ``/ping``."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    async def ping(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def echo(self, request: Request) -> Response:
        with Work(self._seen):
            return Response(await request.body())

    async def text(self, request: Request) -> Response:
        return JSONResponse(json.loads(await request.body()))

    async def slow(self, request: Request) -> Response:
        with Work(self._seen):
            await trio.sleep_forever()

    async def hold(self, request: Request) -> Response:
        with Work(self._seen):
            await self._seen.release.wait()
            return PlainTextResponse("released")

    async def sse(self, request: Request) -> Response:
        """This many events, with a pause after each."""
        count, pause = int(request.query_params["n"]), float(request.query_params.get("s", "0"))

        async def events() -> AsyncIterator[str]:
            with Work(self._seen):
                for number in range(count):
                    yield f"data: {number}\n\n"  # noqa: ASYNC119  # it counts what begins and ends
                    # clock: the time that this work takes decides nothing
                    await trio.sleep(pause)
                yield "data: [DONE]\n\n"  # noqa: ASYNC119  # it counts what begins and ends

        return StreamingResponse(events(), media_type="text/event-stream")

    async def big(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            with Work(self._seen):
                for _ in range(800):
                    yield b"x" * 65536  # noqa: ASYNC119  # it counts what begins and ends

        return StreamingResponse(parts())

    async def boom(self, request: Request) -> Response:
        raise ZeroDivisionError("boom")

    async def boom_late(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            raise ZeroDivisionError("late")

        return StreamingResponse(parts())

    async def background(self, request: Request) -> Response:
        """Work after the answer."""

        async def work() -> None:
            with Work(self._seen):
                await self._seen.release.wait()

        return PlainTextResponse("later", background=BackgroundTask(work))

    async def state(self, request: Request) -> Response:
        """Descriptors and bytes of this process, and its requests in service."""
        return JSONResponse({**resources(), "running": self._seen.running, "cancelled": self._seen.cancelled})

    async def blocked(self, request: Request) -> Response:
        """A mistake: nothing else runs meanwhile."""
        # clock: the time that this work takes decides nothing
        time.sleep(float(request.query_params["s"]))  # noqa: ASYNC251  # this is the mistake
        return PlainTextResponse("awake")

    async def bad_length(self, request: Request) -> Response:
        return Response(b"abc", headers={"content-length": "5"})


def make(kind: str, seen: Seen, **options: Any) -> Any:
    """The application, with options of its framework."""
    handlers = Handlers(seen)
    routes = [(f"/{name}", getattr(handlers, name)) for name in vars(Handlers) if name[0] != "_"]
    methods = ["GET", "POST"]
    if kind == "starlette":
        return Starlette(
            routes=[Route(path, handler, methods=methods) for path, handler in routes], **options
        )
    app = FastAPI(**options)
    for path, handler in routes:
        app.add_api_route(path, handler, methods=methods, response_model=None)
    return app


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncGenerator[int, None]:
    """Serve an application at the port that this yields; with `signals`, the body sends one."""
    async with trio.open_nursery() as nursery:
        yield await nursery.start(functools.partial(serve, app, **{"port": 0, "signals": (), **options}))
        if not options.get("signals"):
            nursery.cancel_scope.cancel()


def get(path: str, *lines: str, version: str = "1.1") -> bytes:
    head = "".join(f"{line}\r\n" for line in lines)
    return f"GET {path} HTTP/{version}\r\nHost: a\r\n{head}\r\n".encode()


def post(path: str, body: bytes, *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *lines))
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode() + body


async def connect(port: int, data: bytes = b"") -> trio.SocketStream:
    """Open a connection and send bytes; it is closed if the server refuses them."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    try:
        await stream.send_all(data)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


@asynccontextmanager
async def connections(port: int, *requests: bytes) -> AsyncGenerator[list[trio.SocketStream]]:
    """Open one connection per request and send the request; close all connections after the body."""
    async with AsyncExitStack() as opened:
        yield [await opened.enter_async_context(await connect(port, each)) for each in requests]


async def read_all(stream: trio.SocketStream, seconds: float = 60.0) -> bytes:
    """Read until the server ends the connection, also by a reset."""
    found = b""
    async with stream:
        with trio.fail_after(seconds), suppress(trio.BrokenResourceError):
            async for part in stream:
                found += part
    return found


async def ask(port: int, data: bytes, seconds: float = 60.0) -> bytes:
    """Send bytes, and read until the server ends the connection."""
    return await read_all(await connect(port, data), seconds)


async def until_files(count: int, seconds: float = 60.0) -> None:
    """Wait until this process has at most this many descriptors, because the server closes last."""
    with trio.fail_after(seconds):
        while len(os.listdir("/proc/self/fd")) > count:  # noqa: ASYNC110  # the server's side has no event
            await trio.sleep(0.01)


async def status(port: int, data: bytes) -> int:
    """Send a request, and read the status of its answer."""
    async with await connect(port, data) as stream:
        with trio.fail_after(60):
            return int((await stream.receive_some()).split()[1])
