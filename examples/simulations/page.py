"""An HTTP page with the newest picture of a simulation, which continues until Ctrl-C."""

from __future__ import annotations

import io
from argparse import Namespace

import numpy as np
import trio
from PIL import Image
from simulation import Simulation, to_host
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import trio_accel as ta
from trio_accel import http

SECONDS = 0.04  # from one frame to the next
PAGE = """<!doctype html><title>simulation</title><link rel="icon" href="data:,">
<body style="background: black; text-align: center"><script>
const next = () => setTimeout(() => { document.images[0].src = `frame.png?${Date.now()}` }, 40)
</script><img alt="the newest frame" src="frame.png" style="height: 90vh" onload="next()" onerror="next()">"""


class Newest:
    """The newest frame of a simulation, and a page that shows it."""

    def __init__(self) -> None:
        self.png = b""
        self.is_there = trio.Event()

    async def page(self, _: Request) -> Response:
        """Return the page, which requests frame after frame."""
        return HTMLResponse(PAGE)

    async def frame(self, _: Request) -> Response:
        """Return the newest frame."""
        await self.is_there.wait()
        return Response(self.png, 200, {"Cache-Control": "no-store"}, media_type="image/png")

    async def make(self, arguments: Namespace, simulation: Simulation) -> None:
        """Make frames until cancelled. With faults, kill the worker at three frames, which nobody sees."""
        options = ta.DeviceOptions(isolation="process", retry=1)
        async with (
            ta.open_system("page") as system,
            system.open_device(arguments.backend, options=options) as device,
        ):
            state, step = await simulation.start(device, arguments.size, arguments.seed)
            graph, number, at = await ta.graphs.capture(device, step, *state), 0, trio.current_time()
            while True:
                if arguments.faults and number in {5, 10, 15}:
                    ta.testing.inject_fault(device, simulation.operation, kill=True)
                state = await graph(*state)
                picture = simulation.picture(*await to_host(state))
                self.png = await trio.to_thread.run_sync(png_of, picture)
                self.is_there.set()
                number, at = number + 1, max(at + SECONDS, trio.current_time())
                await trio.sleep_until(at)


def png_of(picture: np.ndarray) -> bytes:
    """Return a picture as a PNG file."""
    Image.fromarray(picture).save(file := io.BytesIO(), "png")
    return file.getvalue()


async def serve(arguments: Namespace, simulation: Simulation) -> int:
    """Serve the page until Ctrl-C, and return the exit code."""
    newest = Newest()
    app = Starlette(routes=[Route("/", newest.page), Route("/frame.png", newest.frame)])
    listeners = await trio.open_tcp_listeners(arguments.port, host="127.0.0.1")
    print(f"open http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", flush=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(newest.make, arguments, simulation)
        await http.serve(app, listeners=listeners)
        nursery.cancel_scope.cancel()
    return 0
