"""The service over HTTP: keys, deadlines, clients that leave, and which error is which status."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import trio
from search_batch import AT_ONCE, Service
from search_endpoint import ENDPOINTS, Endpoint, RequestError, text_of
from search_model import VERSIONS
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import trio_accel as ta
from trio_accel import patterns

LONGEST_BODY = 1 << 20
# Longer bodies are read in a thread: the longest take a twentieth of a second.
SHORT_BODY = 1 << 14
READERS = trio.CapacityLimiter(1)
# Seconds that a request may take; it may ask for less.
DEADLINE = 10.0

# Errors that are no fault of the service's code: status, and what the client is told. The first that fits.
REFUSALS: dict[type[Exception], tuple[int, str]] = {
    ClientDisconnect: (400, "the request is not complete"),
    patterns.RateLimitError: (429, "this key asks too much"),
    patterns.CircuitOpenError: (503, "the device does not work at the moment"),
    ta.MailboxFullError: (503, "too many requests of this key wait"),
    patterns.SwapFailedError: (409, "the model was not replaced: the log says why"),
    patterns.ModelRetiredError: (503, "the model was replaced: try again"),
    ta.DeviceLostError: (503, "the device was given up, and is opened again: try again later"),
    ta.AccelError: (503, "the device was lost: try again"),
    ta.ActorError: (503, "a part of the service was restarted: try again"),
}

Handler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger("service")


def application(
    service: Service, recorder: ta.telemetry.Recorder, admin_key: str, *, show_errors: bool = False
) -> Starlette:
    """The service as an ASGI application.

    Args:
        service: What is asked.
        recorder: Its metrics.
        admin_key: The key that replaces models.
        show_errors: Tell clients the texts of exceptions, which may say too much to strangers.
    """
    at_once = Counter[str]()

    def route(path: str, handler: Handler, method: str) -> Route:
        return Route(path, partial(answer, handler, show_errors), methods=[method])

    def handler_of(endpoint: Endpoint) -> Handler:
        async def handler(request: Request) -> Response:
            tenant = tenant_of(service, request)
            if at_once[tenant] >= AT_ONCE:
                raise RequestError(f"this key has {AT_ONCE} requests under way", 429, 0.1)
            at_once[tenant] += 1
            try:
                body = await body_of(request)
                fields = {name: body[name] for name in endpoint.fields if name in body}
                return JSONResponse(await endpoint.serve(partial(service.ask, tenant), fields))
            finally:
                at_once[tenant] -= 1

        return handler

    async def swap(request: Request) -> Response:
        given = request.headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(), admin_key.encode()):
            raise RequestError("this needs the administrator's key", 403)
        version = text_of(await body_of(request), "model")
        if version not in VERSIONS:
            raise RequestError(f"model: there are {', '.join(VERSIONS)}, and no {version[:40]!r}")
        done = await service.swap(version)
        return JSONResponse({"model": done.version, "previous": done.previous, "seconds": done.load_time})

    async def metrics(request: Request) -> Response:
        text = ta.telemetry.exposition(recorder)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def ready(request: Request) -> Response:
        # 200 while the device has a context, and 503 while it is being replaced.
        with trio.move_on_after(0.5):
            seen = await service.device.statistics()
            return JSONResponse({"status": "ready", "generation": seen.generation, "worker": seen.pid})
        raise RequestError("the device is being rebuilt", 503, 0.1)

    return Starlette(
        routes=[
            *(route(path, handler_of(endpoint), "POST") for path, endpoint in ENDPOINTS.items()),
            route("/admin/model", swap, "POST"),
            route("/metrics", metrics, "GET"),
            route("/health", partial(health, service.device), "GET"),
            route("/ready", ready, "GET"),
        ]
    )


async def answer(handler: Handler, show_errors: bool, request: Request) -> Response:
    """Serve one request by its deadline, and tell the client what went wrong."""
    try:
        with deadline_of(request).scope():
            return await handler(request)
        return refuse(504, "the deadline has passed")
    except RequestError as error:
        return refuse(error.status, str(error), error.after)
    except tuple(REFUSALS) as error:
        status, why = next(found for kind, found in REFUSALS.items() if isinstance(error, kind))
        if status == 409:
            logger.warning("%s", error)
        if show_errors:
            why = f"{why} ({type(error).__name__}: {error})"
        after = getattr(error, "retry_after", None)
        return refuse(status, why, 1.0 if after is None and status == 503 else after)


def refuse(status: int, why: str, after: float | None = None) -> Response:
    """A response that says why there is no other, and after how many seconds to ask again."""
    headers = {} if after is None else {"Retry-After": f"{max(after, 0.001):.3f}"}
    return JSONResponse({"error": why}, status, headers)


async def health(device: ta.Device, request: Request) -> Response:
    """200 while requests are taken, also if they wait for the next context; asks no actor."""
    if outage := device.outage:
        raise outage
    return JSONResponse({"status": "alive", "process": os.getpid()})


def deadline_of(request: Request) -> patterns.Deadline:
    """When a request has to be answered."""
    try:
        return patterns.Deadline.from_header(request.headers.get("x-deadline"), at_most=DEADLINE)
    except ValueError as error:
        raise RequestError(f"x-deadline: {error}") from None


def tenant_of(service: Service, request: Request) -> str:
    """The key of a request, which is the name of its tenant."""
    key = request.headers.get("x-api-key", "")
    if key not in service.tenants:
        raise RequestError("x-api-key: there is no such key", 401)
    return key


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        ClientDisconnect: The client has gone: nothing is to be asked for it.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY:
            raise RequestError(f"the body has more than {LONGEST_BODY} bytes", 413)
    if request.state.is_gone():
        raise ClientDisconnect
    if len(body) <= SHORT_BODY:
        return fields_of(body)
    # One after another, so that several of them do not hold the loop together.
    reading = partial(fields_of, body)
    return await trio.to_thread.run_sync(reading, abandon_on_cancel=True, limiter=READERS)


def fields_of(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a body."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise RequestError("the body is no JSON object")
    return cast("dict[str, Any]", found)
