"""The fields of requests, and the errors that name an unsupported field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from constraints import OBJECT, Grammar, Grammars
from errors import ApiError, shown, unsupported
from pydantic import BaseModel, Field, ValidationError
from text import Text
from tools import Choice, Name, Named, Tool, Tools, calls_as_text, grammar_of, instruction

__all__ = ["Asked", "AskedChat", "AskedEmbeddings", "AskedText", "checked"]

LONGEST_BODY = 1 << 20
# The maximum numbers of messages in a chat or parts in a message, of prompts, and of calls in a message. A
# body has space for 100 000, but longer lists are not read.
MOST_LISTED, MOST_PROMPTS, MOST_CALLS = 8192, 128, 128
LONGEST_STOP = 1000
MOST_LIKELY, MOST_LIKELY_IN_TEXTS = 20, 5
# The bound makes Pydantic read the text, so that it refuses a lone surrogate.
Written: TypeAlias = Annotated[str, Field(max_length=LONGEST_BODY)]
Stop: TypeAlias = Annotated[str, Field(max_length=LONGEST_STOP)]
# Without `fail_fast`, a list reports an error for each element.
Stops: TypeAlias = Annotated[list[Stop], Field(max_length=4, fail_fast=True)]
Tokens: TypeAlias = Annotated[list[int], Field(min_length=1, fail_fast=True)]
ManyTexts: TypeAlias = Annotated[list[Written], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
ManyTokens: TypeAlias = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
Given: TypeAlias = Written | ManyTexts | Tokens | ManyTokens
_GIVEN = f"a text, tokens, or a list of at most {MOST_PROMPTS} of them"
_AskedT = TypeVar("_AskedT", bound=BaseModel)


def number(least: int, most: int, default: float | None, kind: str = "a number") -> Any:
    """Return a field for a number in a range."""
    return Field(default, ge=least, le=most, description=f"{kind} from {least} to {most}")


def listed(given: Given) -> list[str] | list[list[int]]:
    """Return prompts as a list."""
    if isinstance(given, str):
        return [given]
    found: Any = [given] if isinstance(given[0], int) else given
    return found  # type: ignore[no-any-return]


class Part(BaseModel, strict=True):
    """A part of a message."""

    type: Literal["text"]
    text: Written


class Called(BaseModel, strict=True):
    """A called function."""

    name: Name
    arguments: Written


class Call(BaseModel, strict=True):
    """A call by a model."""

    id: Written
    type: Literal["function"]
    function: Called


Parts: TypeAlias = Annotated[list[Part], Field(max_length=MOST_LISTED, fail_fast=True)]
Calls: TypeAlias = Annotated[list[Call], Field(max_length=MOST_CALLS, fail_fast=True)]


class Message(BaseModel, strict=True):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="one of system, developer, user, assistant, tool"
    )
    content: Written | Parts | None = Field(
        None,
        description=f"a text, or at most {MOST_LISTED} parts with only text: images, audio and files "
        "are not supported here; only an assistant's content may be null",
    )
    tool_calls: Calls | None = Field(
        None, description=f"at most {MOST_CALLS} calls of functions, each with id, type, name and arguments"
    )
    tool_call_id: Written | None = Field(None, description="the id of a call, a text")
    # An assistant's message has these null fields in an answer, which clients send back.
    audio: None = None
    function_call: None = None

    def known(self, where: str, text: Text) -> dict[str, Any]:
        """Return the message in the form that templates expect."""
        if self.content is None and self.role != "assistant":
            raise _wrong(Message, f"{where}.content", "content", None)
        if self.role == "tool" and self.tool_call_id is None:
            raise _wrong(Message, f"{where}.tool_call_id", "tool_call_id", None)
        if self.tool_calls and self.role != "assistant":
            raise ApiError(f"{where}.tool_calls must be in a message of an assistant", f"{where}.tool_calls")
        parts = self.content if isinstance(self.content, list) else None
        content = "".join(part.text for part in parts) if parts is not None else self.content or ""
        role = "system" if self.role == "developer" else self.role
        made: dict[str, Any] = {"role": role, "content": cast("str", content)}
        if self.tool_calls and text.has_tools:
            made["tool_calls"] = [_known_call(call) for call in self.tool_calls]
        elif self.tool_calls:
            # Put the calls into the text, because the template would omit them.
            said = calls_as_text([call.function.model_dump() for call in self.tool_calls])
            made["content"] = "\n".join(filter(None, (made["content"], said)))
        return made


def _known_call(call: Call) -> dict[str, Any]:
    """Return a call in the form that templates expect: with arguments as an object, unless they were cut."""
    try:
        arguments: object = json.loads(call.function.arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # raises an error for a lone surrogate
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


class JsonSchema(BaseModel, strict=True):
    """A schema with a name."""

    name: Name
    wanted: dict[str, Any] = Field({}, alias="schema")
    description: Written | None = None
    strict: bool | None = None


class Format(BaseModel, strict=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Asked(BaseModel, extra="forbid", strict=True):
    """A request. The description of a field states its valid values."""

    model: str
    stream: bool = Field(False, description="true or false")
    stream_options: dict[Literal["include_usage"], Literal[False, True]] = Field(
        {}, description="an object with only include_usage"
    )
    stop: Stop | Stops = Field(
        [], description=f"a text, or a list of at most 4 stop strings, of at most {LONGEST_STOP} letters each"
    )
    temperature: float = number(0, 2, 1)
    top_p: float = number(0, 1, 1)
    seed: int | None = number(-(1 << 63), (1 << 63) - 1, None, "an integer")
    max_tokens: int | None = number(1, 1 << 31, None, "an integer")
    # These are not supported, and must have the values without an effect.
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    presence_penalty: Literal[0] = 0
    store: Literal[False] = False


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
    max_completion_tokens: int | None = number(1, 1 << 31, None, "an integer")
    modalities: list[Literal["text"]] = Field([], max_length=1, fail_fast=True)
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int = number(0, MOST_LIKELY, 0, "with logprobs, an integer")
    response_format: Format = Field(
        Format(type="text"),
        description="an object whose type is text, json_object, or json_schema, with a json_schema of name "
        "and schema",
    )
    tools: Tools = Field(
        [],
        description="a list of at most 128 tools of the type function, each with a function that has a name "
        "of at most 64 letters, digits, _ and -",
    )
    tool_choice: Choice = Field(
        "auto", description="none, auto, required, or the type function and a function with a name"
    )
    # A single call is returned, whether several are allowed or not.
    parallel_tool_calls: bool = Field(True, description="true or false")

    def most(self) -> int | None:
        """Return the maximum number of tokens to make."""
        return self.max_completion_tokens or self.max_tokens

    def likely(self) -> int | None:
        """Return the number of alternatives with logarithms for each token; None for no logarithms."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs requires logprobs to be true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def prompts(self, text: Text, most: int) -> list[list[int]]:
        """Return the tokens of the prompt. Blocking."""
        messages = [message.known(f"messages[{place}]", text) for place, message in enumerate(self.messages)]
        tools = self.offered()
        if tools and not text.has_tools:
            messages = _instructed(messages, instruction(tools))
            tools = []
        return [text.chat(messages, most, [tool.model_dump(exclude_none=True) for tool in tools])]

    def offered(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        if isinstance(self.tool_choice, Named):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return [] if self.tool_choice == "none" else self.tools

    def is_free(self) -> bool:
        """Return whether the answer may be a text although there are tools."""
        return self.tool_choice == "auto"

    def grammar(self, grammars: Grammars, text: Text) -> Grammar | None:
        """Return the required form of the answer; None for any form. Blocking."""
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ApiError("tools must have different names, got a name twice", "tools")
        if tools := self.offered():
            if self.is_free() and not text.has_tools:
                what = "tool_choice must be required, none or a function: this model's template lacks tools"
                raise ApiError(f"{what}, so the model cannot choose on its own", "tool_choice")
            if self.is_free() and self.response_format.type != "text":
                raise ApiError("response_format must be text if tool_choice is auto", "response_format")
            return grammars.lark(grammar_of(tools, self.is_free()))
        if isinstance(self.tool_choice, Named):
            raise ApiError(f"tool_choice must name one of the tools, which are {shown(names)}", "tool_choice")
        if self.tool_choice == "required":
            raise ApiError("tool_choice required needs tools, got none", "tool_choice")
        wanted = self.response_format
        if wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return grammars.json(OBJECT)
        if wanted.json_schema is None:
            raise _wrong(AskedChat, "response_format", "response_format", wanted.type)
        return grammars.json(wanted.json_schema.wanted)


def _instructed(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    """Add an instruction to the system message, or put a system message with it before the others."""
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n{said}"}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]


class AskedText(Asked):
    """A request for the continuation of a text."""

    kind: ClassVar = ("cmpl-", "text_completion", "text_completion")
    source: ClassVar = "prompt"
    default: ClassVar = 16
    prompt: Given = Field(description=_GIVEN)
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    logprobs: int | None = number(0, MOST_LIKELY_IN_TEXTS, None, "an integer")

    def most(self) -> int | None:
        """Return the maximum number of tokens to make."""
        return self.max_tokens

    def likely(self) -> int | None:
        """Return the number of alternatives with logarithms for each token; None for no logarithms."""
        return self.logprobs

    def prompts(self, text: Text, most: int) -> list[list[int]]:
        """Return the tokens of the prompts. Blocking."""
        return [text.encode(one, most) if isinstance(one, str) else one for one in listed(self.prompt)]

    def offered(self) -> Sequence[Tool]:
        """Return the tools that the answer may call."""
        return ()

    def is_free(self) -> bool:
        """Return whether the answer may be a text although there are tools."""
        return True

    def grammar(self, grammars: Grammars, text: Text) -> Grammar | None:
        """Return the required form of the answer; None for any form."""
        return None


class AskedEmbeddings(BaseModel, extra="forbid", strict=True):
    """A request for embeddings."""

    model: str
    input: Given = Field(description=_GIVEN)
    encoding_format: Literal["float", "base64"] = Field("float", description="float or base64")
    dimensions: int | None = Field(None, ge=1)


def checked(kind: type[_AskedT], fields: dict[str, Any]) -> _AskedT:
    """Check the fields of a request. An error names the first wrong field, its value and valid values."""
    # An unknown field is reported first, because the client may want another interface.
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None:
        raise unsupported(unknown, "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
    name, *place = map(str, found["loc"])
    got = None if found["type"] == "missing" else found["input"]
    if name == "messages" and place:
        part = (place[1:] or ["role"])[0]
        raise _wrong(Message, f"messages[{place[0]}].{part}", part, got)
    raise _wrong(kind, name, name, got)


def _wrong(kind: type[BaseModel], name: str, field: str, got: object) -> ApiError:
    """Return the error for a field with a wrong value."""
    said = kind.model_fields[field].description
    if said is None:
        return unsupported(name, "unsupported_value")
    return ApiError(f"{name} must be {said}, got {shown(got)}", name, "empty_array" if got == [] else None)
