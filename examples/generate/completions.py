"""The interface of OpenAI's completions over HTTP: what clients may ask, and what they are answered."""

from __future__ import annotations

import json
import reprlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

import attrs
import trio
from generation import Generation, Prompt
from model import Sampling
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from text import Shown, Text, TooLongError

import trio_accel as ta

LONGEST_BODY = 1 << 20
# Fields of an object, and messages of a chat or parts of a message. A body has room for 100 000 of them,
# which are not looked at.
MOST_FIELDS, MOST_LISTED = 1024, 8192
LONGEST_STOP = 1000
# Threads that read requests. A thread goes on when its client has left, so strangers can hold these alone.
READERS = 2
# Pydantic reads a text that has a bound: a lone surrogate is refused.
Written: TypeAlias = Annotated[str, Field(max_length=LONGEST_BODY)]
Stop: TypeAlias = Annotated[str, Field(max_length=LONGEST_STOP)]
# A list with `fail_fast` has one error, where others have one for each of their elements.
Stops: TypeAlias = Annotated[list[Stop], Field(max_length=4, fail_fast=True)]
OneText: TypeAlias = Annotated[list[Written], Field(min_length=1, max_length=1, fail_fast=True)]
Tokens: TypeAlias = Annotated[list[int], Field(min_length=1, fail_fast=True)]
# Fields that mean nothing here.
IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
# These parameters of a query are texts as they are; any other value is JSON.
TEXTS = IGNORED | {"model", "prompt", "stop"}


@attrs.frozen
class ApiError(Exception):
    """An error that a client is told."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400

    def form(self) -> dict[str, Any]:
        """The error as the interface has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


LOST = ApiError("the model was lost, and is made again: try again", status=503)
# Clients are told the text of the first class that fits an error.
TOLD: dict[type[Exception], ApiError] = {
    ta.MailboxFullError: ApiError("too many requests wait: try again later", None, "overloaded", 503),
    ta.AccelError: LOST,
    ta.ActorError: LOST,
    Exception: ApiError("the service has a fault", status=500),
}


def number(least: int, most: int, default: float | None, kind: str = "a number") -> Any:
    """A field with a number in a range."""
    return Field(default, ge=least, le=most, description=f"{kind} from {least} to {most}")


class Part(BaseModel, strict=True):
    """A part of a message."""

    type: Literal["text"]
    text: Written


Parts: TypeAlias = Annotated[list[Part], Field(max_length=MOST_LISTED, fail_fast=True)]


class Message(BaseModel, strict=True):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="one of system, developer, user, assistant"
    )
    content: Written | Parts = Field(
        description=f"a text, or at most {MOST_LISTED} parts that have text alone"
    )

    def known(self) -> dict[str, str]:
        """The message as templates know it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": "".join(parts)}


class Asked(BaseModel, extra="forbid", strict=True):
    """A request. The description of a field says what its value must be."""

    model: str
    stream: bool = Field(False, description="true or false")
    stream_options: dict[Literal["include_usage"], Literal[False, True]] = Field(
        {}, description="an object with include_usage alone"
    )
    stop: Stop | Stops = Field(
        [], description=f"a text, or a list of at most 4 stop strings, of at most {LONGEST_STOP} letters each"
    )
    temperature: float = number(0, 2, 1)
    top_p: float = number(0, 1, 1)
    seed: int | None = number(-(1 << 63), (1 << 63) - 1, None, "a whole number")
    max_tokens: int | None = number(1, 1 << 31, None, "a whole number")
    # These are not here, and have the values that ask for nothing.
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    frequency_penalty: Literal[0] = 0
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    logprobs: Literal[False] = False
    parallel_tool_calls: bool = True
    presence_penalty: Literal[0] = 0
    response_format: dict[Literal["type"], Literal["text"]] = Field({"type": "text"}, min_length=1)
    store: Literal[False] = False
    tools: list[Any] = Field([], max_length=0)
    top_logprobs: Literal[0] = 0


class AskedChat(Asked):
    """A request for the next message of a chat."""

    kind: ClassVar = ("chatcmpl-", "chat.completion", "chat.completion.chunk")
    source: ClassVar = "messages"
    default: ClassVar = 256
    messages: list[Message] = Field(
        min_length=1,
        max_length=MOST_LISTED,
        fail_fast=True,
        description=f"a list of at least one message and at most {MOST_LISTED}",
    )
    max_completion_tokens: int | None = number(1, 1 << 31, None, "a whole number")

    def most(self) -> int | None:
        """The most tokens that are made."""
        return self.max_completion_tokens or self.max_tokens

    def tokens(self, text: Text, most: int) -> list[int]:
        """The tokens of the prompt. Blocking."""
        return text.chat([message.known() for message in self.messages], most)

    def said(self, where: str, **fields: str) -> dict[str, Any]:
        """A part of the answer."""
        return {where: fields}


class AskedText(Asked):
    """A request for what comes behind a text."""

    kind: ClassVar = ("cmpl-", "text_completion", "text_completion")
    source: ClassVar = "prompt"
    default: ClassVar = 16
    prompt: Written | OneText | Tokens = Field(description="a text")

    def most(self) -> int | None:
        """The most tokens that are made."""
        return self.max_tokens

    def tokens(self, text: Text, most: int) -> list[int]:
        """The tokens of the prompt. Blocking."""
        given = cast("list[Any]", [self.prompt] if isinstance(self.prompt, str) else self.prompt)
        return text.encode(given[0], most) if isinstance(given[0], str) else given

    def said(self, where: str, **fields: str) -> dict[str, Any]:
        """A part of the answer."""
        return {"text": fields.get("content", "")}


def application(generation: Generation, keys: Mapping[str, float]) -> Starlette:
    """Make the service as an ASGI application.

    Args:
        generation: What goes on with prompts.
        keys: Shares by the keys of clients; without any, every client is served.
    """
    readers = trio.CapacityLimiter(READERS)

    async def complete(kind: type[AskedChat | AskedText], request: Request) -> Answer:
        key = key_of(request, keys)
        if request.method == "HEAD":  # which comes with GET: nobody would get the text
            raise HTTPException(405)
        given = await request.body() if request.method == "POST" else request.query_params
        reading = partial(read, kind, given, generation, key)
        return await trio.to_thread.run_sync(reading, abandon_on_cancel=True, limiter=readers)

    async def models(request: Request) -> Response:
        key_of(request, keys)
        model = {"id": generation.loaded.name, "object": "model", "created": 0, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", partial(complete, AskedChat), methods=["POST"]),
            Route("/v1/completions", partial(complete, AskedText), methods=["GET", "POST"]),
            Route("/v1/models", models),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, *TOLD), refuse),
    )


async def refuse(request: Request, error: Exception) -> Response:
    """Tell a client why there is no answer."""
    told = told_of(error)
    return JSONResponse(told.form(), told.status, {"Retry-After": "1"} if told.status == 503 else None)


def told_of(error: Exception) -> ApiError:
    """Return the error that a client is told of another one."""
    if isinstance(error, HTTPException):
        return ApiError(error.detail, status=error.status_code)
    others = (told for kind, told in TOLD.items() if isinstance(error, kind))
    return error if isinstance(error, ApiError) else next(others)


class Answer:
    """The answer to a request: a response of Starlette."""

    def __init__(self, generation: Generation, asked: AskedChat | AskedText, prompt: Prompt) -> None:
        self.generation, self.asked, self.prompt = generation, asked, prompt
        self.made, self.reason = 0, "stop"
        name, whole, part = asked.kind
        self.head = {
            "id": name + secrets.token_hex(12),
            "object": part if asked.stream else whole,
            "created": int(time.time()),
            "model": asked.model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the text, and send it. When the client leaves, the sequence leaves the batch."""
        open_tokens = ta.patterns.open_parts(self.generation.batcher, self.prompt)
        async with open_tokens as tokens, aclosing(self.texts(tokens)) as texts:
            first = await anext(texts)  # an error before it is no event, but an answer of its own
            if self.asked.stream:
                async with aclosing(self.events(first, texts)) as events:
                    headers = {"Cache-Control": "no-store"}
                    stream = StreamingResponse(events, 200, headers, "text/event-stream")
                    return await stream(scope, receive, send)
            text = first + "".join([text async for text in texts])
        whole = self.choice(self.reason, "message", role="assistant", content=text)
        await JSONResponse({**whole, "usage": self.usage()})(scope, receive, send)
        return None

    async def texts(self, tokens: ta.patterns.PartStream[int]) -> AsyncGenerator[str, None]:
        """The parts of the text: one at least."""
        stop = self.asked.stop
        shown = Shown(self.generation.loaded.text, [stop] if isinstance(stop, str) else stop)
        async for token in tokens:
            self.made += 1
            yield shown.push(token)
            if shown.is_stopped:
                return
        yield shown.finish()
        if self.made == self.prompt.most and not shown.is_stopped:
            self.reason = "length"

    async def events(self, first: str, texts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The text as server-sent events."""
        try:
            yield event(self.choice(None, "delta", role="assistant", content=first))
            async for text in texts:
                if text:
                    yield event(self.choice(None, "delta", content=text))
            yield event(self.choice(self.reason, "delta"))
            if self.asked.stream_options.get("include_usage"):
                yield event({**self.head, "choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"
        except (ta.AccelError, ta.ActorError) as error:
            yield event(told_of(error).form())

    def choice(self, reason: str | None, where: str, **fields: str) -> dict[str, Any]:
        """An answer, or a part of it."""
        said = self.asked.said(where, **fields)
        return {**self.head, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]}

    def usage(self) -> dict[str, int]:
        """Tokens that were read and made."""
        prompt = self.prompt.length()
        return {"prompt_tokens": prompt, "completion_tokens": self.made, "total_tokens": prompt + self.made}


def event(said: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(said)}\n\n"


def key_of(request: Request, keys: Mapping[str, float]) -> str:
    """The key of a request, which is the name of its tenant."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if keys and key not in keys:
        raise ApiError("there is no such key", code="invalid_api_key", status=401)
    return key if keys else ""


def fields_of(body: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    try:
        found: object = json.loads(body, object_pairs_hook=object_of)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise ApiError("the body is no JSON object")
    # A field that is null counts as absent.
    return {name: value for name, value in cast("dict[str, Any]", found).items() if value is not None}


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its fields, of which there are not too many."""
    if len(pairs) > MOST_FIELDS:
        raise ApiError(f"an object must have at most {MOST_FIELDS} fields, got {len(pairs)}")
    return dict(pairs)


def parameters_of(query: QueryParams, name: str) -> dict[str, Any]:
    """The parameters behind a path, as `EventSource` asks."""
    found: dict[str, Any] = {"model": name, **object_of(query.multi_items())}
    for field in found.keys() - TEXTS:
        with suppress(ValueError, RecursionError):  # The check of the field tells of what is no JSON.
            found[field] = json.loads(found[field], object_pairs_hook=object_of)
    return found


def read(
    kind: type[AskedChat | AskedText], given: bytes | QueryParams, generation: Generation, tenant: str
) -> Answer:
    """Read a request, and name the field that cannot be served. Blocking: a large one takes a second."""
    text, name, words = generation.loaded.text, generation.loaded.name, generation.loaded.config.words
    body = fields_of(given) if isinstance(given, bytes) else parameters_of(given, name)
    if body.get("model") != name:
        what = f"the model {shown(body.get('model'))} does not exist, only {name!r}"
        raise ApiError(what, "model", "model_not_found", 404)
    asked = checked(kind, {field: value for field, value in body.items() if field not in IGNORED})
    try:
        tokens = asked.tokens(text, generation.most)
    except TooLongError as error:
        raise too_long(asked, generation, f"at least {error.least}", asked.most() or 1) from None
    if tokens and not 0 <= min(tokens) <= max(tokens) < words:
        raise ApiError(f"tokens must be 0 to {words - 1}", asked.source)
    room = generation.most - len(tokens)
    most = asked.most() or max(min(asked.default, room), 1)
    if not tokens or most > room:
        raise too_long(asked, generation, f"{len(tokens)}", most)
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    sampling = Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=seed)
    return Answer(generation, asked, Prompt(tokens=tokens, most=most, sampling=sampling, tenant=tenant))


def too_long(asked: AskedChat | AskedText, generation: Generation, got: str, most: int) -> ApiError:
    """Make the error of a prompt that has no token, or does not fit with what is made."""
    what = (
        f"a prompt must have a token, and with what is made at most {generation.most}, got {got} and {most}"
    )
    return ApiError(what, asked.source, "context_length_exceeded")


def checked(kind: type[AskedChat | AskedText], fields: dict[str, Any]) -> AskedChat | AskedText:
    """Check the fields of a request, and name the first that is wrong, what it must be, and what has come."""
    # A field that is not here comes first: it may say that another interface was meant.
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None:
        told = unknown[:80] if unknown.isprintable() else repr(unknown[:80])
        raise ApiError(f"{told} is not supported here: leave it out", told, "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
    name, *place = map(str, found["loc"])
    field = kind.model_fields[name]
    if name == "messages" and place:
        part = (place[1:] or ["role"])[0]
        name, field = f"messages[{place[0]}].{part}", Message.model_fields[part]
    if field.description is None:
        raise ApiError(f"{name} is not supported here: leave it out", name, "unsupported_value")
    got = None if found["type"] == "missing" else found["input"]
    raise ApiError(f"{name} must be {field.description}, got {shown(got)}", name)


def shown(value: object) -> str:
    """The beginning of a value; the rest of it is not looked at."""
    return f"{SHORT.repr(value):.60}"


SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80
