"""Stream results as server-sent events. Watch them with `curl -N http://127.0.0.1:8000/`; Ctrl-C stops it."""

import argparse
import json
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import trio_accel as ta
from trio_accel import linalg
from trio_accel.http import run, serve

# Proxies close a connection after about a minute of silence.
KEEP_ALIVE = 15.0
Source = Callable[["trio.MemorySendChannel[object]"], Awaitable[None]]


class Events(Response):
    """A response with an event for each value of a source, which `serve` cancels when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, source: Source) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self.source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the source ends; see Starlette's `Response`."""
        # Do not buffer, so that the source computes an event only after the client has taken the last one.
        into, out = trio.open_memory_channel[object](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.source, into)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                text = ": still here\n\n"
                with trio.move_on_after(KEEP_ALIVE):
                    try:
                        text = f"data: {json.dumps(await out.receive())}\n\n"
                    except trio.EndOfChannel:
                        break
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def eigenvalue(matrix: ta.AccelRef, into: trio.MemorySendChannel[object]) -> None:
    """Estimate the largest eigenvalue by power iteration, and send each better estimate."""
    async with into:
        x, last = await matrix.device.put(np.ones(matrix.shape[0])), 0.0
        while True:
            x = await (matrix @ x)
            norm = float(await linalg.nrm2(x).item())
            x = await linalg.scal(1 / norm, x)
            await into.send({"estimate": norm})
            if abs(norm - last) < 1e-12 * norm:
                return
            last = norm


async def main(port: int) -> None:
    """Serve until Ctrl-C."""
    async with ta.open_system("demo") as system, system.open_device("cpu") as device:
        matrix = await device.put(np.array([[2.0, 1.0], [1.0, 3.0]]))

        async def events(request: Request) -> Events:
            return Events(partial(eigenvalue, matrix))

        app = Starlette(routes=[Route("/", events)])
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(partial(serve, app, port=port))
            print(f"serving on port {bound}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any free port (default: 8000)")
    run(main, parser.parse_args().port)
