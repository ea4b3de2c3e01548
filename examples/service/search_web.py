"""The service over HTTP: keys, deadlines, and which error is which status."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio
from search_model import WIDTHS
from search_service import MOST_TEXTS, Service, Task
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import trio_accel as ta
from trio_accel import patterns

LONGEST_BODY = 1 << 20
LONGEST_TEXT = 10_000
# Seconds that a request may take; it may ask for less.
DEADLINE = 10.0

# Errors that are no fault of the service's code: status, and what the client is told. The first that fits.
REFUSALS: dict[type[Exception], tuple[int, str]] = {
    ClientDisconnect: (400, "the request is not complete"),
    patterns.RateLimitError: (429, ""),
    patterns.CircuitOpenError: (503, "the device does not work at the moment"),
    ta.MailboxFullError: (503, "too many requests of this key wait"),
    patterns.SwapFailedError: (409, ""),
    patterns.ModelRetiredError: (503, "the model was replaced: try again"),
    ta.AccelError: (503, "the device was lost: try again"),
    ta.ActorError: (503, "a part of the service was restarted: try again"),
}

Handler = Callable[[Service, Request], Awaitable[Response]]


class BadRequestError(Exception):
    """What the client sent is not what it should be.

    Attributes:
        status: Of the response.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def application(service: Service, recorder: ta.telemetry.Recorder, admin_key: str) -> Starlette:
    """The service as an ASGI application."""

    def route(path: str, handler: Handler, method: str) -> Route:
        async def serve(request: Request) -> Response:
            return await answer(service, request, handler)

        return Route(path, serve, methods=[method])

    async def swap(service: Service, request: Request) -> Response:
        if request.headers.get("x-api-key") != admin_key:
            raise BadRequestError("this needs the administrator's key", 403)
        version = text_of(await body_of(request), "model")
        if version not in WIDTHS:
            raise BadRequestError(f"model: there are {', '.join(WIDTHS)}, and no {version[:40]!r}")
        done = await service.swap(version)
        return JSONResponse({"model": done.version, "previous": done.previous, "seconds": done.load_time})

    async def metrics(service: Service, request: Request) -> Response:
        text = ta.telemetry.exposition(recorder)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            route("/embed", embed, "POST"),
            route("/similar", similar, "POST"),
            route("/admin/model", swap, "POST"),
            route("/metrics", metrics, "GET"),
            route("/health", health, "GET"),
            route("/ready", ready, "GET"),
        ]
    )


async def answer(service: Service, request: Request, handler: Handler) -> Response:
    """Serve one request by its deadline, and tell the client what went wrong."""
    try:
        with deadline_of(request).scope():
            return await handler(service, request)
        return refuse(504, "the deadline has passed")
    except BadRequestError as error:
        return refuse(error.status, str(error))
    except tuple(REFUSALS) as error:
        status, why = next(found for kind, found in REFUSALS.items() if isinstance(error, kind))
        after = getattr(error, "retry_after", 1.0 if status == 503 else None)
        return refuse(status, why or str(error), after)


def refuse(status: int, why: str, after: float | None = None) -> Response:
    """A response that says why there is no other, and after how many seconds to ask again."""
    headers = {} if after is None else {"Retry-After": f"{max(after, 0.001):.3f}"}
    return JSONResponse({"error": why}, status, headers)


async def embed(service: Service, request: Request) -> Response:
    """``{"texts": ["...", ...]}`` becomes ``{"model": "v1", "vectors": [[...], ...]}``."""
    tenant = tenant_of(service, request)
    texts: object = (await body_of(request)).get("texts")
    if not isinstance(texts, list):
        raise BadRequestError("texts must be a list")
    given = cast("list[object]", texts)
    if not 1 <= len(given) <= MOST_TEXTS:
        raise BadRequestError(f"texts must have 1 to {MOST_TEXTS} texts")
    tasks = [Task("embed", checked(text)) for text in given]
    answers = await service.ask(tenant, tasks)
    if len({answer.model for answer in answers}) > 1:
        # The model was replaced between two of them, and vectors of two models have nothing in common.
        answers = await service.ask(tenant, tasks)
    model, *others = {answer.model for answer in answers}
    if others:
        return refuse(503, "the model is being replaced", 0.1)
    return JSONResponse({"model": model, "vectors": [answer.value for answer in answers]})


async def similar(service: Service, request: Request) -> Response:
    """``{"text": "...", "count": 5}`` becomes the nearest sentences of the guide."""
    tenant = tenant_of(service, request)
    body = await body_of(request)
    count = body.get("count", 5)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 50:
        raise BadRequestError("count must be a whole number from 1 to 50")
    [found] = await service.ask(tenant, [Task("similar", text_of(body, "text"), count)])
    rows = [{"text": text, "page": page, "cosine": cosine} for text, page, cosine in found.value]
    return JSONResponse({"model": found.model, "sentences": rows})


async def health(service: Service, request: Request) -> Response:
    """200 as long as the program answers at all."""
    await trio.lowlevel.checkpoint()
    return JSONResponse({"status": "alive", "process": os.getpid()})


async def ready(service: Service, request: Request) -> Response:
    """200 while the device has a context, and 503 while it is being replaced."""
    with trio.move_on_after(0.5):
        statistics = await service.device.statistics()
        return JSONResponse(
            {"status": "ready", "generation": statistics.generation, "worker": statistics.pid}
        )
    return refuse(503, "the device is being rebuilt", 0.1)


def deadline_of(request: Request) -> patterns.Deadline:
    """When a request has to be answered."""
    try:
        return patterns.Deadline.from_header(request.headers.get("x-deadline"), at_most=DEADLINE)
    except ValueError as error:
        raise BadRequestError(f"x-deadline: {error}") from None


def tenant_of(service: Service, request: Request) -> str:
    """The key of a request, which is the name of its tenant."""
    key = request.headers.get("x-api-key", "")
    if key not in service.tenants:
        raise BadRequestError("x-api-key: there is no such key", 401)
    return key


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY:
            raise BadRequestError(f"the body has more than {LONGEST_BODY} bytes", 413)
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise BadRequestError("the body is no JSON object")
    return cast("dict[str, Any]", found)


def text_of(body: dict[str, Any], name: str) -> str:
    """A text in the body of a request."""
    if name not in body:
        raise BadRequestError(f"{name} is missing")
    return checked(body[name], name)


def checked(value: object, name: str = "each of texts") -> str:
    """The value, which must be a text that is not too long."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise BadRequestError(f"{name} must be a text of at most {LONGEST_TEXT} characters")
    return value
