"""The application that tests attack, made by Starlette or FastAPI, and clients that speak by bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trio_accel.http import Limits, serve

KINDS = ("starlette", "fastapi")


class Seen:
    """What the application has done, and events of its changes."""

    def __init__(self) -> None:
        self.running = self.served = self.cancelled = 0
        self.most = 0
        self._changed = trio.Event()

    def change(self, **by: int) -> None:
        for name, step in by.items():
            setattr(self, name, getattr(self, name) + step)
        self.most = max(self.most, self.running)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, is_so: Callable[[Seen], bool], seconds: float = 10.0) -> float:
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


def make(kind: str, seen: Seen) -> Any:
    """The application."""

    async def ping(request: Request) -> Response:
        return PlainTextResponse("ok")

    async def echo(request: Request) -> Response:
        with Work(seen):
            return Response(await request.body())

    async def text(request: Request) -> Response:
        return JSONResponse(json.loads(await request.body()))

    async def slow(request: Request) -> Response:
        with Work(seen):
            await trio.sleep(float(request.query_params.get("s", "60")))
            return PlainTextResponse("slow")

    async def sse(request: Request) -> Response:
        count, pause = int(request.query_params["n"]), float(request.query_params.get("s", "0"))

        async def events() -> AsyncIterator[str]:
            with Work(seen):
                for number in range(count):
                    yield f"data: {number}\n\n"
                    await trio.sleep(pause)
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def big(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            with Work(seen):
                for _ in range(800):
                    yield b"x" * 65536

        return StreamingResponse(parts())

    async def boom(request: Request) -> Response:
        raise ZeroDivisionError("boom")

    async def boom_late(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            raise ZeroDivisionError("late")

        return StreamingResponse(parts())

    async def background(request: Request) -> Response:
        async def work() -> None:
            with Work(seen):
                await trio.sleep(0.05)

        return PlainTextResponse("later", background=BackgroundTask(work))

    async def bad_length(request: Request) -> Response:
        return Response(b"abc", headers={"content-length": "5"})

    handlers = (ping, echo, text, slow, sse, big, boom, boom_late, background, bad_length)
    methods = ["GET", "POST"]
    if kind == "fastapi":
        app = FastAPI()
        for handler in handlers:
            app.add_api_route(f"/{handler.__name__}", handler, methods=methods, response_model=None)
        return app
    return Starlette(routes=[Route(f"/{handler.__name__}", handler, methods=methods) for handler in handlers])


@asynccontextmanager
async def serving(app: Any, *, limits: Limits = Limits(), **more: Any) -> AsyncGenerator[int, None]:
    """Serve an application at the port that this yields."""
    start = functools.partial(serve, app, port=0, limits=limits, signals=(), **more)
    async with trio.open_nursery() as nursery:
        yield await nursery.start(start)
        nursery.cancel_scope.cancel()


def get(path: str, *lines: str, version: str = "1.1") -> bytes:
    head = "".join(f"{line}\r\n" for line in lines)
    return f"GET {path} HTTP/{version}\r\nHost: a\r\n{head}\r\n".encode()


def post(path: str, body: bytes, *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *lines))
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode() + body


async def connect(port: int, data: bytes = b"") -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(data)
    return stream


async def read_all(stream: trio.SocketStream, seconds: float = 10.0) -> bytes:
    """Read until the server ends the connection; a reset ends it, too."""
    found = b""
    with trio.fail_after(seconds):
        try:
            async for part in stream:
                found += part
        except trio.BrokenResourceError:
            pass
    await stream.aclose()
    return found


async def ask(port: int, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes, and read until the server ends the connection."""
    return await read_all(await connect(port, data), seconds)


async def status(port: int, data: bytes) -> int:
    """Send a request, and read the status of its answer."""
    async with await connect(port, data) as stream:
        with trio.fail_after(10):
            return int((await stream.receive_some()).split()[1])
