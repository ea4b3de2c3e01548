"""Serve a model. Ask it by `curl -d '[3, 4]' http://127.0.0.1:8000/predict`; Ctrl-C ends it."""

import argparse
import json
import logging
import signal
from functools import partial
from importlib import import_module
from typing import Any

import h11
import numpy as np
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import trio_accel as ta
from trio_accel.patterns import Batcher, Call, Deadline
from trio_accel.programs import Array, method

CENTRES = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
logger = logging.getLogger("service")
OPTIONS = ta.DeviceOptions(isolation="process", stuck_after=10.0, retry=1, spares=1, when_given_up="reopen")
CONNECTIONS: dict[trio.SocketStream, trio.CancelScope] = {}  # the oldest first
Predictions = Batcher[list[float], Array]


class Distances:
    """The model: a class of your own. Its arrays outlive the process that it runs in."""

    def __init__(self, centres: Array) -> None:
        self.centres = centres

    @method(refuses=(ValueError,))
    def predict(self, rows: list[list[float]]) -> Array:
        """How far each point is from each centre. A row that is no point raises a ValueError."""
        return ((np.reshape(rows, (len(rows), 1, 2)) - self.centres) ** 2).sum(axis=2) ** 0.5


async def predict(batcher: ta.Ref[Predictions], request: Request) -> JSONResponse:
    """Answer one request by its deadline."""
    try:
        with Deadline.from_header(request.headers.get("x-deadline"), at_most=5.0).scope():
            if len(body := await request.body()) > 500:
                return JSONResponse({"error": "the body has more than 500 bytes"}, 413)
            x, y = json.loads(body)
            return JSONResponse({"distances": (await batcher.ask(Call([float(x), float(y)]))).tolist()})
        return JSONResponse({"error": "the deadline has passed"}, 504)
    except (ValueError, TypeError, OverflowError):
        return JSONResponse({"error": "send two numbers, such as [3, 4]; x-deadline has seconds"}, 400)
    except (ta.AccelError, ta.ActorError):
        return JSONResponse({"error": "try again"}, 503, {"Retry-After": "1"})


async def main(port: int) -> None:
    """Serve until Ctrl-C."""
    listeners = await trio.open_tcp_listeners(port, host="127.0.0.1", backlog=64)
    async with ta.open_system("demo") as system, system.open_device("cpu", options=OPTIONS) as device:
        program = await ta.open_program(device, Distances, await device.put(CENTRES))

        async def model(rows: list[list[float]]) -> Array:
            return await (await program.ask(Distances.predict, rows)).to_host()

        async def health(request: Request) -> JSONResponse:
            pid = next((each.pid for each in system.tree().find(device.path).walk() if each.pid), None)
            status = str(device.outage or ("ended" if program.has_ended else "alive"))
            shown = {"status": status, "generation": device.generation, "pid": pid}
            return JSONResponse(shown, 200 if status == "alive" else 503)

        batcher = await system.spawn(Predictions, model, capacity=1000)
        routes = [Route("/predict", partial(predict, batcher), methods=["POST"]), Route("/health", health)]
        serve = partial(serve_client, Starlette(routes=routes), trio.CapacityLimiter(256))
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, serve, listeners)
                print(f"serving on port {listeners[0].socket.getsockname()[1]}", flush=True)
                await anext(signals)
                nursery.cancel_scope.cancel()


async def serve_client(app: Starlette, places: trio.CapacityLimiter, stream: trio.SocketStream) -> None:
    """Serve one request by HTTP/1.1. A client has 5 seconds for all of it, and holds no place before."""
    http, events, scope = h11.Connection(h11.SERVER, 4096), list[Any](), {"type": "http", "root_path": ""}

    async def receive() -> dict[str, Any]:
        kind = "request" if events or await stream.receive_some(65536) else "disconnect"
        body = b"".join(bytes(getattr(event, "data", b"")) for event in events)
        events.clear()
        return {"type": f"http.{kind}", "body": body}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"connection", b"close")]
            sent: list[Any] = [h11.Response(status_code=message["status"], headers=headers)]
        else:
            sent = [h11.Data(data=message["body"])] + [h11.EndOfMessage()] * (not message.get("more_body"))
        with trio.fail_after(10):
            await stream.send_all(b"".join(map(http.send, sent)))

    try:
        with trio.move_on_after(5) as CONNECTIONS[stream]:
            for oldest in list(CONNECTIONS.values())[:-512]:
                oldest.cancel()  # nothing, if its request has come
            while http.their_state in {h11.IDLE, h11.SEND_BODY} and len(events) < 100:
                while (event := http.next_event()) is h11.NEED_DATA:
                    http.receive_data(await stream.receive_some(1024))
                events.append(event)
        names = {name for event in events[:1] for name, _ in getattr(event, "headers", ())}
        twice = names >= {b"content-length", b"transfer-encoding"}  # a proxy may see two requests
        status = 400 if twice else 413 if events[99:] else 408 if http.their_state is h11.SEND_BODY else 503
        if events and not twice and isinstance(events[-1], h11.EndOfMessage) and places.available_tokens > 0:
            request = events.pop(0)
            path, _, query = request.target.decode().partition("?")
            asked = {"method": request.method.decode(), "path": path, "query_string": query}
            async with places:
                await app({**scope, **asked, "headers": request.headers}, receive, send)
        else:  # a client that has not said whole headers is told nothing
            await (Response(None, status)(scope, receive, send) if events else stream.aclose())
    except* (OSError, trio.TooSlowError, trio.BrokenResourceError, h11.ProtocolError) as ended:
        logger.debug("a connection ended: %r", ended.exceptions)
    except* Exception:
        logger.exception("a request failed")
    finally:
        del CONNECTIONS[stream]


if __name__ == "__main__":  # workers import the model by the name of this file
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any (default: 8000)")
    try:
        trio.run(import_module(__file__.rpartition("/")[2][:-3]).main, parser.parse_args().port)
    except OSError as error:
        raise SystemExit(str(error)) from None
