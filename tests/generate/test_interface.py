"""`examples/generate`: calls of the public `openai` client, unchanged: each works, or is refused by name."""

from __future__ import annotations

import base64
import json
import select
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from pydantic import BaseModel, Field
from serving import HELLO, RANDOM, Serving, chat, openai, post, serving, until

from openai.types import Completion, CreateEmbeddingResponse, Model  # isort: skip
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # isort: skip

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("generate"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Serving]:
    with serving(*RANDOM) as running:
        yield running
        assert running.pages() == 0


@pytest.fixture
def service(running: Serving) -> Iterator[Serving]:
    yield running
    running.close_clients()


class Place(BaseModel):
    name: str = Field(max_length=8)
    rank: int = Field(ge=1, le=99)


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "wait"}}
NAMED = {"type": "function", "function": {"name": "find"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"name":"a"}'}}
LOOP = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]},
]


def part(kind: str, **fields: Any) -> Any:
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


def text(client: Any, prompt: Any = "ab", **options: Any) -> Any:
    given = {"model": "random", "max_tokens": 6, "temperature": 0, **options}
    return client.completions.create(prompt=prompt, **given)


def embed(client: Any, given: Any = "Hello", **options: Any) -> Any:
    return client.embeddings.create(model="random-encoder", input=given, **options)


def schema(**fields: Any) -> Any:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": fields}}}


def joined(parts: Any) -> tuple[str, Any]:
    """The text of a chat stream, and its last reason; each part is one of the public types."""
    found = [ChatCompletionChunk.model_validate(part.model_dump()) for part in parts]
    said = [choice for part in found for choice in part.choices]
    assert said[0].delta.role == "assistant"
    return "".join(choice.delta.content or "" for choice in said), said[-1].finish_reason


def called(answer: Any) -> Any:
    """The arguments of the call in an answer."""
    [choice] = ChatCompletion.model_validate(answer.model_dump()).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "find")
    return Place.model_validate_json(call.function.arguments)


def called_in_parts(parts: Any) -> Any:
    """The arguments of the call in a stream."""
    found = [ChatCompletionChunk.model_validate(part.model_dump()).choices[0] for part in parts]
    calls = [call for choice in found for call in choice.delta.tool_calls or []]
    assert (calls[0].id or "").startswith("call_")
    assert calls[0].function is not None
    assert calls[0].function.name == "find"
    assert {call.index for call in calls} == {0}
    assert found[-1].finish_reason == "tool_calls"
    assert len(calls) > 5
    return Place.model_validate_json(
        "".join((call.function and call.function.arguments) or "" for call in calls)
    )


def is_chat(answer: Any, reason: str = "length") -> Any:
    [choice] = ChatCompletion.model_validate(answer.model_dump()).choices
    return choice.finish_reason == reason and choice.message.content


def is_place(content: str) -> Place:
    return Place.model_validate_json(content)


def has_likely(found: Any, count: int, others: int) -> bool:
    entries = found.content
    assert all(len(one.top_logprobs) == others and one.logprob <= 0 for one in entries)
    if others:
        # Greedily, the likeliest is chosen.
        assert all(one.top_logprobs[0].logprob == one.logprob for one in entries)
    assert all(bytes(one.bytes).decode(errors="replace") == one.token for one in entries)
    return len(entries) == count


def has_text_likely(answer: Any) -> bool:
    [choice] = Completion.model_validate(answer.model_dump()).choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs
    assert found.top_logprobs
    assert found.text_offset
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
    pairs = zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    return all(
        number == best[token] == max(best.values()) and len(best) == 3 for token, number, best in pairs
    )


def in_both_forms(client: Any) -> bool:
    given = ["Hello", "Hello, you", "é"]
    rows = [np.array(one.embedding) for one in embed(client, given, encoding_format="float").data]
    raw = embed(client, given, encoding_format="base64").data
    coded = [np.frombuffer(base64.b64decode(one.embedding), "<f4") for one in raw]
    assert all(np.allclose(one, other) for one, other in zip(rows, coded, strict=True))
    assert all(abs(np.linalg.norm(row) - 1) < 1e-5 for row in rows)
    return not np.allclose(rows[0], rows[1])


def without_client(client: Any, body: Any, **options: Any) -> Any:
    """The answers of an async client."""

    async def main() -> Any:
        # The client runs on asyncio.
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0) as other:
            return await body(other)

    import asyncio

    return asyncio.run(main())


async def async_stream(client: Any) -> str:
    given = {"model": "random", "max_tokens": 8, "temperature": 0}
    parts = await client.chat.completions.create(messages=HELLO, stream=True, **given)
    return "".join([part.choices[0].delta.content or "" async for part in parts])


def helper(client: Any, **options: Any) -> Any:
    with client.chat.completions.stream(model="random", messages=HELLO, max_tokens=90, **options) as stream:
        return stream.get_final_completion()


WORKS: dict[str, Callable[[Any], Any]] = {
    "a chat": lambda c: is_chat(chat(c)),
    "a chat in parts": lambda c: joined(chat(c, stream=True)) == (is_chat(chat(c)), "length"),
    "a chat in parts, with usage": lambda c: (
        list(chat(c, stream=True, stream_options={"include_usage": True}))[-1].usage.completion_tokens == 8
    ),
    "a stop string": lambda c: is_chat(chat(c, stop=[chat(c).choices[0].message.content[-2:]]), "stop"),
    "seed, temperature, top_p": lambda c: (
        is_chat(chat(c, seed=5, temperature=1.5, top_p=0.9))
        == is_chat(chat(c, seed=5, temperature=1.5, top_p=0.9))
    ),
    "max_completion_tokens": lambda c: is_chat(chat(c, max_tokens=None, max_completion_tokens=3)),
    "fields that mean nothing": lambda c: is_chat(chat(c, user="me", metadata={"a": "b"}, n=1, tools=[])),
    "parts of text": lambda c: is_chat(chat(c, **part("text", text="Hello"))) == is_chat(chat(c)),
    "a developer's message": lambda c: is_chat(chat(c, [{"role": "developer", "content": "Be."}, *HELLO])),
    "a tool's message": lambda c: is_chat(chat(c, LOOP)),
    "an assistant's content that is null": lambda c: is_chat(chat(c, LOOP[:2])),
    "an answer that is sent back": lambda c: is_chat(
        chat(c, [*HELLO, chat(c).choices[0].message.model_dump(), *HELLO])
    ),
    "tool_choice none": lambda c: is_chat(chat(c, tools=[TOOL], tool_choice="none")) == is_chat(chat(c)),
    "tool_choice required": lambda c: called(chat(c, tools=[TOOL], tool_choice="required", max_tokens=90)),
    "a named tool": lambda c: called(chat(c, tools=[OTHER, TOOL], tool_choice=NAMED, max_tokens=90)),
    "a tool in parts": lambda c: (
        called_in_parts(chat(c, tools=[TOOL], tool_choice="required", max_tokens=90, stream=True, seed=1))
        == called(chat(c, tools=[TOOL], tool_choice="required", max_tokens=90, seed=1))
    ),
    "one call at a time": lambda c: called(
        chat(c, tools=[TOOL], tool_choice="required", max_tokens=90, parallel_tool_calls=False)
    ),
    "a tool of Pydantic's, by the helper": lambda c: (
        helper(c, tools=[openai.pydantic_function_tool(Place)], tool_choice="required")
        .choices[0]
        .message.tool_calls[0]
        .function.parsed_arguments.rank
    ),
    "a call that is cut": lambda c: (
        chat(c, tools=[TOOL], tool_choice="required", max_tokens=40).choices[0].finish_reason == "length"
    ),
    "json_object": lambda c: isinstance(
        json.loads(is_chat(chat(c, response_format={"type": "json_object"}, max_tokens=90), "stop")), dict
    ),
    "json_schema": lambda c: is_place(is_chat(chat(c, response_format=JSON, max_tokens=90), "stop")),
    "json_schema in parts": lambda c: is_place(
        joined(chat(c, response_format=JSON, max_tokens=90, temperature=1.5, seed=3, stream=True))[0]
    ),
    "json_schema that is cut": lambda c: is_chat(chat(c, response_format=JSON, max_tokens=5), "length"),
    "parse": lambda c: (
        c.chat.completions.parse(model="random", messages=HELLO, max_tokens=90, response_format=Place)
        .choices[0]
        .message.parsed.rank
        > 0
    ),
    "the helper for streams": lambda c: helper(c, response_format=Place).choices[0].message.parsed.rank,
    "logprobs": lambda c: has_likely(chat(c, logprobs=True).choices[0].logprobs, 8, 0),
    "top_logprobs": lambda c: has_likely(chat(c, logprobs=True, top_logprobs=20).choices[0].logprobs, 8, 20),
    "logprobs in parts": lambda c: (
        sum(
            len(part.choices[0].logprobs.content)
            for part in chat(c, logprobs=True, top_logprobs=1, stream=True)
            if part.choices[0].logprobs
        )
        == 8
    ),
    "logprobs of JSON": lambda c: is_place(
        chat(c, response_format=JSON, max_tokens=90, logprobs=True).choices[0].message.content
    ),
    "a text": lambda c: Completion.model_validate(text(c).model_dump()).choices[0].text,
    "a text in parts": lambda c: (
        "".join(part.choices[0].text for part in text(c, stream=True)) == text(c).choices[0].text
    ),
    "tokens as a prompt": lambda c: text(c, [100, 101]).usage.prompt_tokens == 2,
    "a list of prompts": lambda c: (
        [(one.index, one.text) for one in text(c, ["ab", "b", "ab"]).choices]
        == [(n, text(c, prompt).choices[0].text) for n, prompt in enumerate(("ab", "b", "ab"))]
    ),
    "a list of lists of tokens": lambda c: len(text(c, [[100], [101, 102]]).choices) == 2,
    "a list of prompts in parts": lambda c: (
        {one.choices[0].index for one in text(c, ["ab", "b", "c"], stream=True)} == {0, 1, 2}
    ),
    "logprobs of a text": lambda c: has_text_likely(text(c, logprobs=3)),
    "logprobs of a text, 0": lambda c: text(c, logprobs=0).choices[0].logprobs.top_logprobs is None,
    "models": lambda c: [Model.model_validate(one.model_dump()).id for one in c.models.list()] == MODELS,
    "a model": lambda c: [c.models.retrieve(name).id for name in MODELS] == MODELS,
    "an embedding": lambda c: (
        len(CreateEmbeddingResponse.model_validate(embed(c).model_dump()).data[0].embedding) == 64
    ),
    "embeddings in both forms": in_both_forms,
    "an embedding of tokens": lambda c: len(embed(c, [[100, 101], [5]]).data) == 2,
    "128 embeddings": lambda c: len(embed(c, ["Hello"] * 128).data) == 128,
    "dimensions that it has": lambda c: len(embed(c, dimensions=64).data[0].embedding) == 64,
    "an async client": lambda c: (
        without_client(
            c, lambda other: other.chat.completions.create(model="random", messages=HELLO, max_tokens=3)
        ).usage.completion_tokens
    ),
    "an async stream": lambda c: without_client(c, async_stream) == is_chat(chat(c)),
    "a raw response": lambda c: (
        c.chat.completions.with_raw_response.create(model="random", messages=HELLO, max_tokens=2).status_code
        == 200
    ),
}
MODELS = ["random", "random-encoder"]
A_MEGABYTE = "x" * 1_000_000
BODY = {"model": "random", "messages": HELLO}


@attrs.frozen
class Refused:
    call: Callable[[Any], Any]
    param: str | None
    says: str
    status: int = 400
    code: str | None = None


REFUSED: dict[str, Refused] = {
    "n": Refused(lambda c: chat(c, n=2), "n", "send a request for each answer"),
    "n beyond the places": Refused(lambda c: chat(c, n=1000), "n", "n is not supported here"),
    "best_of": Refused(lambda c: text(c, best_of=2), "best_of", "send a request"),
    "echo": Refused(lambda c: text(c, echo=True), "echo", "echo is not supported"),
    "suffix": Refused(lambda c: text(c, suffix="x"), "suffix", "suffix is not supported"),
    "presence_penalty": Refused(lambda c: chat(c, presence_penalty=1), "presence_penalty", "not supported"),
    "frequency_penalty": Refused(lambda c: chat(c, frequency_penalty=1), "frequency_penalty", "not supp"),
    "logit_bias": Refused(lambda c: chat(c, logit_bias={"5": 1}), "logit_bias", "not supported"),
    "store": Refused(lambda c: chat(c, store=True), "store", "not supported"),
    "reasoning_effort": Refused(lambda c: chat(c, reasoning_effort="low"), "reasoning_effort", "not supp"),
    "prediction": Refused(
        lambda c: chat(c, prediction={"type": "content", "content": ""}), "prediction", "not supported"
    ),
    "web_search_options": Refused(lambda c: chat(c, web_search_options={}), "web_search_options", "not supp"),
    "an image": Refused(
        lambda c: chat(c, **part("image_url", image_url={"url": "x"})), "messages[0].content", "images, audio"
    ),
    "audio": Refused(
        lambda c: chat(c, **part("input_audio", input_audio={})), "messages[0].content", "images, audio"
    ),
    "a file": Refused(lambda c: chat(c, **part("file", file={})), "messages[0].content", "images, audio"),
    "answers in audio": Refused(lambda c: chat(c, modalities=["audio"]), "modalities", "not supported"),
    "functions": Refused(lambda c: chat(c, functions=[{"name": "f"}]), "functions", "use tools"),
    "function_call": Refused(lambda c: chat(c, function_call="none"), "function_call", "use tool_choice"),
    "tools by the model's choice": Refused(
        lambda c: chat(c, tools=[TOOL]), "tool_choice", "must be required, none or a function"
    ),
    "tool_choice without tools": Refused(
        lambda c: chat(c, tool_choice="required"), "tool_choice", "needs tools, got none"
    ),
    "a tool that there is not": Refused(
        lambda c: chat(c, tools=[OTHER], tool_choice=NAMED), "tool_choice", "which are ['wait']"
    ),
    "a tool without a name": Refused(
        lambda c: chat(c, tools=[{"type": "function", "function": {"name": ""}}]), "tools", "a name"
    ),
    "two tools of one name": Refused(
        lambda c: chat(c, tools=[TOOL, TOOL], tool_choice="required"), "tools", "different names"
    ),
    "129 tools": Refused(lambda c: chat(c, tools=[TOOL] * 129), "tools", "at most 128 tools"),
    "a tool of another type": Refused(
        lambda c: chat(c, tools=[{"type": "code_interpreter"}]), "tools", "of the type function"
    ),
    "a tool's schema that cannot be used": Refused(
        lambda c: chat(
            c,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            tool_choice="required",
        ),
        "tools",
        "Unimplemented keys",
    ),
    "a tool's message without its call": Refused(
        lambda c: chat(c, [*HELLO, {"role": "tool", "content": "x"}]), "messages[1].tool_call_id", "the id of"
    ),
    "a user's call": Refused(
        lambda c: chat(c, [{"role": "user", "content": "", "tool_calls": [CALL]}]),
        "messages[0].tool_calls",
        "must be in a message of an assistant",
    ),
    "a pattern that explodes": Refused(
        lambda c: chat(c, **schema(type="string", pattern="^(a{1000}b{1000}){1000}$")),
        "response_format",
        "too many expressions",
    ),
    "a schema without end": Refused(
        lambda c: chat(c, **schema(**{"$ref": "#"})), "response_format", "it never ends"
    ),
    "a schema that is too large": Refused(
        lambda c: chat(c, **schema(enum=[A_MEGABYTE[:20_000]])), "response_format", "at most 16384 letters"
    ),
    "json_schema without a schema": Refused(
        lambda c: chat(c, response_format={"type": "json_schema"}), "response_format", "of name and schema"
    ),
    "logprobs of a chat that are no flag": Refused(
        lambda c: chat(c, logprobs=3), "logprobs", "logprobs must be true or false"
    ),
    "21 top_logprobs": Refused(
        lambda c: chat(c, logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20, got 21"
    ),
    "top_logprobs alone": Refused(lambda c: chat(c, top_logprobs=2), "top_logprobs", "requires logprobs"),
    "logprobs beyond the vocabulary": Refused(
        lambda c: text(c, logprobs=100_000), "logprobs", "from 0 to 5, got 100000"
    ),
    "10 000 prompts": Refused(lambda c: text(c, ["a"] * 10_000), "prompt", "a list of at most 128"),
    "a prompt without tokens among others": Refused(
        lambda c: text(c, ["a", ""]), "prompt", "must have at least one token", code="empty_string"
    ),
    "a prompt without tokens": Refused(
        lambda c: text(c, ""), "prompt", "must have at least one token", code="empty_string"
    ),
    "no prompts": Refused(lambda c: text(c, []), "prompt", "prompt must be", code="empty_array"),
    "no messages": Refused(lambda c: chat(c, []), "messages", "at least one", code="empty_array"),
    "a prompt that is too long": Refused(
        lambda c: text(c, "a" * 5000), "prompt", "at most 4800", code="context_length_exceeded"
    ),
    "responses": Refused(
        lambda c: c.responses.create(model="random", input="Hi"), None, "use /v1/chat/completions", 404
    ),
    "images": Refused(lambda c: c.images.generate(prompt="x"), None, "writes only text", 404),
    "speech": Refused(
        lambda c: c.audio.speech.create(model="random", voice="x", input="x"), None, "writes only text", 404
    ),
    "files": Refused(lambda c: c.files.list(), None, "send texts in messages", 404),
    "batches": Refused(lambda c: c.batches.list(), None, "send requests concurrently", 404),
    "moderations": Refused(lambda c: c.moderations.create(input="x"), None, "the paths are /v1/chat/", 404),
    "fine-tuning": Refused(lambda c: c.fine_tuning.jobs.list(), None, "the paths are /v1/chat/", 404),
    "a model that there is not": Refused(
        lambda c: c.models.retrieve("gpt-4"), "model", "only 'random' and 'random-encoder'", 404
    ),
    "a chat with the encoder": Refused(
        lambda c: chat(c, model="random-encoder"), "model", "only 'random'", 404
    ),
    "an embedding of nothing": Refused(
        lambda c: embed(c, ""), "input", "1 to 64 tokens, got 0", code="empty_string"
    ),
    "embeddings of nothing": Refused(
        lambda c: embed(c, []), "input", "input must be a text", code="empty_array"
    ),
    "an embedding of an empty text among others": Refused(
        lambda c: embed(c, ["a", ""]), "input", "input[1]", code="empty_string"
    ),
    "an embedding of a text that is too long": Refused(
        lambda c: embed(c, "a" * 100), "input", "got 100", code="context_length_exceeded"
    ),
    "an embedding of a long text": Refused(lambda c: embed(c, A_MEGABYTE), "input", "got 1000000"),
    "an embedding of tokens that there are not": Refused(
        lambda c: embed(c, [5, 100_000]), "input", "tokens from 0 to 999"
    ),
    "other dimensions": Refused(lambda c: embed(c, dimensions=32), "dimensions", "must be 64 or absent"),
    "another form of embeddings": Refused(
        lambda c: embed(c, encoding_format="hex"), "encoding_format", "float or base64"
    ),
}
DONE: dict[str, str] = {}


@pytest.mark.parametrize("name", WORKS)
def test_a_call_that_works(service: Serving, name: str) -> None:
    assert WORKS[name](service.client())
    DONE[name] = "works"


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_refused_by_name(service: Serving, name: str) -> None:
    row = REFUSED[name]
    with pytest.raises(openai.APIStatusError) as caught:
        row.call(service.client())
    assert row.says in caught.value.message
    assert (caught.value.status_code, caught.value.param) == (row.status, row.param)
    assert caught.value.type == "invalid_request_error"
    assert row.code in {None, caught.value.code}
    DONE[name] = "is refused"


def test_how_many_calls_are_served() -> None:
    found = list(DONE.values())
    if len(found) < len(WORKS) + len(REFUSED):
        pytest.skip("other calls did not run, or failed")
    print(f"{found.count('works')} calls work, {found.count('is refused')} are refused by name")
    assert len(found) >= 43
    assert found.count("works") >= 40


def soon(client: Any, **headers: str) -> Any:
    return chat(client, max_tokens=4000, extra_headers={"X-Deadline": "0.01", **headers})


# Errors of the server, outside the code of the service, and of the service: all have one form.
TYPED: dict[str, tuple[Callable[[Any], Any], type[Any], int, str]] = {
    "a large body": (
        lambda c: chat(c, [{"role": "user", "content": A_MEGABYTE + A_MEGABYTE}]),
        openai.APIStatusError,
        413,
        "the body must have at most 1048576 bytes",
    ),
    "a deadline": (soon, openai.InternalServerError, 504, "the deadline has passed"),
    "a deadline that is none": (
        lambda c: soon(c, **{"X-Deadline": "soon"}),
        openai.BadRequestError,
        400,
        "x-deadline must be seconds, such as 1.5, got 'soon'",
    ),
    "large headers": (
        lambda c: soon(c, X="y" * 20_000),
        openai.APIStatusError,
        431,
        "the headers must have at most 16384 bytes",
    ),
    "a method": (
        lambda c: c.get("/chat/completions", cast_to=object),
        openai.APIStatusError,
        405,
        "Method Not Allowed: '/v1/chat/completions' takes POST",
    ),
    "a path": (
        lambda c: c.get("/x", cast_to=object),
        openai.NotFoundError,
        404,
        "'/v1/x' does not exist here",
    ),
}


def has_form(error: Any) -> bool:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    assert error.response.json() == {"error": error.body}
    assert list(error.body) == ["message", "type", "param", "code"]
    return bool(error.type == kind)


@pytest.mark.parametrize("name", TYPED)
def test_each_error_has_the_form_and_the_class_of_its_kind(service: Serving, name: str) -> None:
    call, kind, status, says = TYPED[name]
    with pytest.raises(kind) as caught:
        call(service.client())
    assert type(caught.value) is kind
    assert caught.value.status_code == status
    assert says in caught.value.body["message"]
    assert has_form(caught.value)


def test_a_full_service_reports_when_to_ask_again(service: Serving) -> None:
    asked = b"GET /v1/completions?prompt=a&max_tokens=4000 HTTP/1.1\r\nHost: x\r\n\r\n"
    held = [service.send(asked) for _ in range(256)]
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            # Until the last of them has its place, this one is served.
            until(lambda: not chat(service.client(), max_tokens=1), 20)
    finally:
        for sock in held:
            sock.close()
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
    assert caught.value.body["message"] == "too many requests"
    assert has_form(caught.value)
    until(lambda: service.pages() == 0, 20)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": ["a", "b", "c"], "max_tokens": 1000},
        {
            "messages": HELLO,
            "max_tokens": 4000,
            **schema(type="array", items={"type": "integer"}, minItems=2000),
        },
        {"messages": HELLO, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20},
    ],
)
def test_a_client_that_leaves_gives_all_pages_back(service: Serving, options: dict[str, Any]) -> None:
    client = service.client()
    create = client.completions.create if "prompt" in options else client.chat.completions.create
    stream = create(model="random", temperature=1.0, stream=True, **options)
    next(iter(stream))
    assert service.pages() > 0
    stream.close()
    until(lambda: service.pages() == 0, 2.0)


@pytest.mark.parametrize(
    "value", ["[" * 5000, '{"a":' * 900 + "1" + "}" * 900, '{"items":' * 300 + "{}" + "}" * 300]
)
def test_deeply_nested_schemas(service: Serving, value: str) -> None:
    body = json.dumps({**BODY, **schema(x=5)}).replace('{"x": 5}', value)
    status, answer = post(service, "/v1/chat/completions", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    tools = json.dumps({**BODY, "tools": [TOOL], "tool_choice": "required"})
    tools = tools.replace(json.dumps(SCHEMA), value)
    status, answer = post(service, "/v1/chat/completions", tools)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_tool_sees_the_arguments_of_calls_before(service: Serving) -> None:
    """Without a template for tools, calls are in the text of the message."""
    client = service.client()
    whole = chat(client, LOOP)
    said = '{"name":"find","arguments":{"name":"a"}}'
    same = [*HELLO, {"role": "assistant", "content": said}, LOOP[2]]
    assert chat(client, same).choices == whole.choices
    assert chat(client, same).usage == whole.usage


def test_values_of_logprobs_sum_to_less_than_one(service: Serving) -> None:
    [choice] = chat(service.client(), logprobs=True, top_logprobs=20, max_tokens=3).choices
    for entry in choice.logprobs.content:
        values = [one.logprob for one in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert 0 < np.exp(values).sum() <= 1


def test_a_key_with_too_many_requests_does_not_lock_others_out() -> None:
    many = json.dumps({"model": "random", "prompt": ["a"] * 128, "max_tokens": 4000, "stream": True})
    with serving(*RANDOM, "--sequences", "4", GENERATE_KEYS="gold=3, free") as service:
        key = "Authorization: bearer gold"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: {len(many)}\r\n\r\n"
        clients = [service.send((head + many).encode()) for _ in range(9)]
        try:
            # Eight of them are served, slowly, and the ninth should come later.
            until(lambda: any(b" 503 " in head for head in heads_of(clients)), 20)
            assert is_answered(service.client("free"))
            # Keys are secrets.
            assert "gold" not in service.get("/metrics")
        finally:
            for sock in clients:
                sock.close()
        until(lambda: service.pages() == 0, 20)


def heads_of(clients: list[socket.socket]) -> list[bytes]:
    """The first bytes of the begun answers."""
    found, _, _ = select.select(clients, [], [], 0.1)
    return [sock.recv(40, socket.MSG_PEEK) for sock in found]


def is_answered(client: Any) -> bool:
    return bool(chat(client, max_tokens=1).choices[0].finish_reason == "length")
