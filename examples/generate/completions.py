"""The interface of OpenAI's completions over HTTP: what clients may ask, and what they are answered."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import attrs
import trio
from generation import Generation, Prompt
from model import Sampling
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from text import Shown

import trio_accel as ta

LONGEST_BODY = 1 << 20
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that are not here, with values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tools": ([],),
    "top_logprobs": (0,),
}
IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
USED = frozenset({"model", "stream", "stream_options", "stop", "temperature", "top_p", "seed", "max_tokens"})
TEXTS = IGNORED | {"model", "prompt", "stop"}


class ApiError(Exception):
    """An error that a client is told, in the interface's form."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.error = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@attrs.frozen(kw_only=True, eq=False)
class Asked:
    """A request that can be served."""

    prompt: Prompt
    stop: list[str]
    stream: bool
    usage: bool
    is_chat: bool


def application(
    generation: Generation, recorder: ta.telemetry.Recorder, keys: Mapping[str, float]
) -> Starlette:
    """Make the service as an ASGI application.

    Args:
        generation: What goes on with prompts.
        recorder: Its metrics.
        keys: Shares by the keys of clients; without any, every client is served.
    """
    device = generation.model.caches[0].device

    async def complete(is_chat: bool, request: Request) -> Response:
        key = key_of(request, keys)
        if request.method == "HEAD":  # which comes with GET: nobody would get the text
            raise HTTPException(405)
        body = await body_of(request) if request.method == "POST" else query_of(request, generation)
        answer = Answer(generation, asked := await read(body, generation, key, is_chat))
        return Events(answer) if asked.stream else JSONResponse(await answer.whole())

    async def models(request: Request) -> Response:
        key_of(request, keys)
        model = {"id": generation.loaded.name, "object": "model", "created": 0, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(request: Request) -> Response:
        text = ta.telemetry.exposition(recorder)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(request: Request) -> Response:
        if outage := device.outage:
            raise outage
        used = generation.pages.used
        return JSONResponse({"status": "alive", "process": os.getpid(), "pages": used})

    async def ready(request: Request) -> Response:
        with trio.move_on_after(0.5):
            seen = await device.statistics()
            return JSONResponse({"status": "ready", "generation": seen.generation})
        raise ApiError("the device is being rebuilt", status=503)

    errors: tuple[type[Exception], ...] = (ApiError, ta.AccelError, ta.ActorError, HTTPException, Exception)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", partial(complete, True), methods=["POST"]),
            Route("/v1/completions", partial(complete, False), methods=["GET", "POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys(errors, refuse),
    )


async def refuse(request: Request, error: Exception) -> Response:
    """Tell a client why there is no answer."""
    told = told_of(error)
    headers = {"Retry-After": "1"} if told.status == 503 else None
    return JSONResponse(told.error, told.status, headers)


def told_of(error: Exception) -> ApiError:
    """Return the error that a client is told of another one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.detail, status=error.status_code)
    if isinstance(error, ta.MailboxFullError):
        return ApiError("too many requests wait: try again later", status=503, code="overloaded")
    if isinstance(error, (ta.AccelError, ta.ActorError)):
        return ApiError("the model was lost, and is made again: try again", status=503)
    return ApiError("the service has a fault", status=500)


class Answer:
    """The answer to a request while it is made."""

    def __init__(self, generation: Generation, asked: Asked) -> None:
        self._generation, self._asked = generation, asked
        self._made, self._reason = 0, "stop"
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if asked.is_chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + ".chunk" * (asked.stream and asked.is_chat),
            "created": int(time.time()),
            "model": generation.loaded.name,
        }

    async def make(self, show: Callable[[str], Awaitable[None]]) -> None:
        """Make the text, and show each part. When it is cancelled, the sequence leaves the batch."""
        shown = Shown(self._generation.loaded.text, self._asked.stop)
        async with ta.patterns.open_parts(self._generation.batcher, self._asked.prompt) as tokens:
            async for token in tokens:
                self._made += 1
                await show(shown.push(token))
                if shown.is_stopped:
                    return
        await show(shown.finish())
        if self._made == self._asked.prompt.most and not shown.is_stopped:
            self._reason = "length"

    async def whole(self) -> dict[str, Any]:
        """Make the answer in one piece."""
        parts: list[str] = []

        async def show(text: str) -> None:
            parts.append(text)
            await trio.lowlevel.checkpoint()

        await self.make(show)
        text = "".join(parts)
        said = {"message": {"role": "assistant", "content": text}} if self._asked.is_chat else {"text": text}
        return {**self._choice(said, self._reason), "usage": self._usage()}

    def part(self, text: str, **more: str) -> dict[str, Any]:
        """An event with a part of the text."""
        said = {"delta": {**more, "content": text}} if self._asked.is_chat else {"text": text}
        return self._choice(said, None)

    def end(self) -> list[dict[str, Any]]:
        """The events behind the text."""
        last = self._choice({"delta": {}} if self._asked.is_chat else {"text": ""}, self._reason)
        usage: dict[str, Any] = {**self._head, "choices": [], "usage": self._usage()}
        return [last, usage] if self._asked.usage else [last]

    def _choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]}

    def _usage(self) -> dict[str, int]:
        prompt = len(self._asked.prompt.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._made,
            "total_tokens": prompt + self._made,
        }


class Events(Response):
    """Sends an answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events: `Response` of Starlette. The server cancels it when the client leaves."""
        has_begun = False

        async def event(*events: object) -> None:
            nonlocal has_begun
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            has_begun = True
            body = "".join(f"data: {one if one == '[DONE]' else json.dumps(one)}\n\n" for one in events)
            await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

        async def show(text: str) -> None:
            if text or not has_begun:
                await event(self._answer.part(text, **({} if has_begun else {"role": "assistant"})))

        try:
            await self._answer.make(show)
            await event(*self._answer.end(), "[DONE]")
        except (ta.AccelError, ta.ActorError) as error:
            if not has_begun:
                raise
            await event(told_of(error).error)
        await send({"type": "http.response.body", "body": b""})


def key_of(request: Request, keys: Mapping[str, float]) -> str:
    """The key of a request, which is the name of its tenant."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if keys and key not in keys:
        raise ApiError("there is no such key", status=401, code="invalid_api_key")
    return key if keys else ""


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY:
            raise ApiError(f"the body has more than {LONGEST_BODY} bytes", status=413)
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise ApiError("the body is no JSON object")
    # A field that is null counts as absent.
    return {name: value for name, value in cast("dict[str, Any]", found).items() if value is not None}


def query_of(request: Request, generation: Generation) -> dict[str, Any]:
    """The parameters behind a path, as `EventSource` asks: texts as they are, and any other value as JSON."""
    found: dict[str, Any] = {"model": generation.loaded.name, **request.query_params}
    for name in found.keys() - TEXTS:
        with suppress(ValueError, RecursionError):  # The check of the field tells of what is no JSON.
            found[name] = json.loads(found[name])
    return found


async def read(body: dict[str, Any], generation: Generation, tenant: str, is_chat: bool) -> Asked:
    """Read a request, and name the field that cannot be served."""
    text, config = generation.loaded.text, generation.loaded.config
    check_fields(body, is_chat)
    if body.get("model") != generation.loaded.name:
        what = f"the model {body.get('model')!r:.80} does not exist, only {generation.loaded.name!r}"
        raise ApiError(what, param="model", status=404, code="model_not_found")
    prompt = listed(body.get("prompt"))
    if not is_chat and prompt and all(type(one) is int for one in prompt):
        tokens: list[int] = prompt
        if not 0 <= min(tokens) <= max(tokens) < config.words:
            raise ApiError(f"tokens must be 0 to {config.words - 1}", param="prompt")
    elif is_chat:
        tokens = await trio.to_thread.run_sync(text.chat, messages_of(body))
    else:
        text_alone = text_of(prompt[0] if len(prompt) == 1 else body.get("prompt"), "prompt")
        tokens = await trio.to_thread.run_sync(text.encode, text_alone)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    room = generation.most - len(tokens)
    default = max(min(256 if is_chat else 16, room), 1)
    most = number(body, name, 1, 1 << 31, default, whole=True)
    if not tokens or most > room:
        what = f"a prompt must have a token, and with what is made at most {generation.most}, "
        what += f"got {len(tokens)} and {most}"
        raise ApiError(what, param="messages" if is_chat else "prompt", code="context_length_exceeded")
    sampling = Sampling(
        temperature=number(body, "temperature", 0, 2, 1),
        top_p=number(body, "top_p", 0, 1, 1),
        seed=number(body, "seed", -(1 << 63), (1 << 63) - 1, secrets.randbits(63), whole=True),
    )
    stop = [text_of(one, "stop") for one in listed(body.get("stop", []), whole=body.get("stop"))]
    if len(stop) > 4:
        raise ApiError("there can be at most 4 stop strings", param="stop")
    options: Any = body.get("stream_options", {})
    usage = options == {"include_usage": True}
    if options not in ({}, {"include_usage": True}, {"include_usage": False}):
        raise ApiError("stream_options can have include_usage alone", param="stream_options")
    made = Prompt(tokens=tokens, most=int(most), sampling=sampling, tenant=tenant)
    return Asked(prompt=made, stop=stop, stream=flag(body, "stream"), usage=usage, is_chat=is_chat)


def check_fields(body: dict[str, Any], is_chat: bool) -> None:
    """Refuse what is not there by name."""
    used = USED | ({"messages", "max_completion_tokens"} if is_chat else {"prompt"})
    for name, value in body.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ApiError(
                f"{name} is not supported here: leave it out", param=name, code="unsupported_value"
            )
        if name not in used | NEUTRAL.keys() | IGNORED:
            what = f"{name[:80]} is not supported here: leave it out"
            raise ApiError(what, param=name[:80], code="unsupported_parameter")


def messages_of(body: dict[str, Any]) -> list[dict[str, str]]:
    """The messages of a chat."""
    messages = listed(body.get("messages"))
    if not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    found: list[dict[str, str]] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        role, content = (fields(message).get(name) for name in ("role", "content"))
        if not isinstance(role, str) or role not in ROLES:
            raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        parts = [fields(part) for part in listed(content, whole={"type": "text", "text": content})]
        if any(part.get("type") != "text" for part in parts):
            raise ApiError(f"{where}.content can have text alone", param=f"{where}.content")
        text = "".join(text_of(part.get("text"), f"{where}.content") for part in parts)
        found.append({"role": ROLES[role], "content": text})
    return found


def fields(value: object) -> dict[str, Any]:
    """An object as it is; anything else has no fields."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def listed(value: object, whole: object = None) -> list[Any]:
    """A list as it is, and anything else as a list of `whole`, if there is one."""
    if isinstance(value, list):
        return list(cast("Iterable[Any]", value))
    return [] if whole is None else [whole]


def text_of(value: object, name: str) -> str:
    """A text that can be written in UTF-8."""
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ApiError(f"{name} must be a text, got {value!r:.60}", param=name)
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    """A truth value; false where there is none."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {value!r:.60}", param=name)
    return value


def number(
    body: dict[str, Any], name: str, least: float, most: float, default: float, *, whole: bool = False
) -> Any:
    """A number in a range."""
    value = body.get(name, default)
    is_number = type(value) is int or (type(value) is float and not whole)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ApiError(f"{name} must be {kind} from {least} to {most}, got {value!r:.60}", param=name)
    return value
