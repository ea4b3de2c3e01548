"""Errors in the form of OpenAI's interface."""

from __future__ import annotations

import reprlib
from typing import Any

import attrs
from constraints import ConstraintError, NoCompilerError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import trio_accel as ta

__all__ = ["TOLD", "ApiError", "error_body", "refuse", "shown", "told_of", "unsupported"]

# How to get the same result without an unsupported field.
WAYS = {
    "n": "send a request for each answer",
    "best_of": "send a request for each answer, and choose",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use response_format",
    "guided_regex": "use response_format, with a schema that has a pattern",
    "input": "use messages in /v1/chat/completions, or prompt in /v1/completions",
    "dimensions": "cut the embedding yourself",
}
# The alternatives to unsupported paths, by prefix.
OTHERS = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/batches": "send requests concurrently, which run in one batch",
    "/v1/images": "this service writes only text",
    "/v1/audio": "this service writes only text",
    "/v1/files": "send texts in messages",
}
PATHS = "the paths are /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models"


@attrs.frozen
class ApiError(Exception):
    """An error for a client."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400

    def form(self) -> dict[str, Any]:
        """Return the error as the interface describes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body for an error of `serve` itself, such as a too large request."""
    return ApiError(message, status=status).form()


LOST = ApiError("the model was lost, and is being restored: try again", status=503)
# The clients' errors. The first class that matches an error counts.
TOLD: dict[type[Exception], ApiError] = {
    ta.MailboxFullError: ApiError("too many requests wait: try again later", None, "overloaded", 503),
    ta.AccelError: LOST,
    ta.ActorError: LOST,
    Exception: ApiError("internal error of the service", status=500),
}


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a client with the reason for a failure."""
    told = told_of(error, request.url.path)
    headers = {"Retry-After": "1"} if told.status == 503 else dict(getattr(error, "headers", None) or {})
    return JSONResponse(told.form(), told.status, headers)


def told_of(error: Exception, path: str = "") -> ApiError:
    """Return the client's error for another error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConstraintError):
        return unusable_schema(error)
    if isinstance(error, HTTPException):
        name = shown(path)
        if error.status_code == 404:
            way = next((way for other, way in OTHERS.items() if path.startswith(other)), PATHS)
            return ApiError(f"{name} does not exist here: {way}", None, "unknown_url", 404)
        methods = (error.headers or {}).get("Allow", "another method")
        return ApiError(f"{error.detail}: {name} takes {methods}", status=error.status_code)
    return next(told for kind, told in TOLD.items() if isinstance(error, kind))


def unusable_schema(error: ConstraintError, param: str = "response_format") -> ApiError:
    """Return the error for an unusable schema."""
    if isinstance(error, NoCompilerError):
        return ApiError(f"{param} is not supported here, because {error}", param, "unsupported_parameter")
    return ApiError(f"{param} has a schema that cannot be used: {error}", param, "invalid_json_schema")


def unsupported(name: str, code: str) -> ApiError:
    """Return the error for an unsupported field, which names the alternative."""
    name = name[:80] if name.isprintable() else repr(name[:80])
    return ApiError(f"{name} is not supported here: {WAYS.get(name, 'leave it out')}", name, code)


def shown(value: object) -> str:
    """Return the beginning of a value, without reading the rest."""
    return f"{SHORT.repr(value):.60}"


SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80
