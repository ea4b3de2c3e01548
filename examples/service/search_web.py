"""The service over HTTP: keys, requests at once, and which error is which status."""

from __future__ import annotations

import json
import logging
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
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import trio_accel as ta
from trio_accel import patterns

# Longer bodies are read in a thread: the longest take a twentieth of a second.
SHORT_BODY = 1 << 14
READERS = trio.CapacityLimiter(1)

# Errors that are no fault of the service's code: status, and what the client is told. The first that fits.
REFUSALS: dict[type[Exception], tuple[int, str]] = {
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


def application(service: Service, admin_key: str, *, show_errors: bool = False) -> Starlette:
    """The service as an ASGI application.

    Args:
        service: What is asked.
        admin_key: The key that replaces models.
        show_errors: Tell clients the texts of exceptions, which may say too much to strangers.
    """
    at_once = Counter[str]()

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

    return Starlette(
        routes=[
            *(Route(path, handler_of(endpoint), methods=["POST"]) for path, endpoint in ENDPOINTS.items()),
            Route("/admin/model", swap, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((RequestError, *REFUSALS), partial(refuse, show_errors)),
    )


async def refuse(show_errors: bool, request: Request, error: Exception) -> Response:
    """Tell a client why there is no other response, and after how many seconds to ask again."""
    if isinstance(error, RequestError):
        status, why, after = error.status, str(error), error.after
    else:
        status, why = next(found for kind, found in REFUSALS.items() if isinstance(error, kind))
        after = getattr(error, "retry_after", None)
        after = 1.0 if after is None and status == 503 else after
        if status == 409:
            logger.warning("%s", error)
        if show_errors:
            why = f"{why} ({type(error).__name__}: {error})"
    headers = {} if after is None else {"Retry-After": f"{max(after, 0.001):.3f}"}
    return JSONResponse({"error": why}, status, headers)


def tenant_of(service: Service, request: Request) -> str:
    """The key of a request, which is the name of its tenant."""
    key = request.headers.get("x-api-key", "")
    if key not in service.tenants:
        raise RequestError("x-api-key: there is no such key", 401)
    return key


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request."""
    body = await request.body()
    if len(body) <= SHORT_BODY:
        return fields_of(body)
    # One after another, so that several of them do not hold the loop together.
    reading = partial(fields_of, body)
    return await trio.to_thread.run_sync(reading, abandon_on_cancel=True, limiter=READERS)


def fields_of(body: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise RequestError("the body is no JSON object")
    return cast("dict[str, Any]", found)
