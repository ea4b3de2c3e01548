"""Tools that a model may call: a client's tools, the form of a call, and the reading of a call in a text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field
from schemas import MAX_SCHEMA, ConstraintError, checked_schema
from text import CALL

__all__ = ["CallReader", "Choice", "Named", "Tool", "Tools", "calls_as_text", "grammar_of", "instruction"]

_MOST_TOOLS = 128
Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(BaseModel, strict=True):
    """A function of the client."""

    name: Name
    description: Annotated[str, Field(max_length=1 << 20)] | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(BaseModel, strict=True):
    """A tool, which must be a function."""

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel, strict=True):
    """The name of a function."""

    name: Name


class Named(BaseModel, strict=True):
    """The choice of a function."""

    type: Literal["function"]
    function: FunctionName


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=_MOST_TOOLS, fail_fast=True)]
Choice: TypeAlias = Literal["none", "auto", "required"] | Named


def grammar_of(tools: Sequence[Tool], is_free: bool) -> str:
    """Return the grammar of a call, for `Grammars.lark`.

    Each call is an object with the name and the arguments, in this order, so that it can be read in parts.

    Args:
        tools: The tools that may be called.
        is_free: Whether a text may replace a call, which is then enclosed by the texts `CALL`.

    Raises:
        ConstraintError: The schema of a function cannot be used.
    """
    size, lines = 0, ["start: text | marked" if is_free else "start: call"]
    if is_free:
        lines += [r"text: /([^<](.|\n)*)?/", f"marked: {json.dumps(CALL[0])} call {json.dumps(CALL[1])}"]
    lines.append("call: " + " | ".join(f"call{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        try:
            schema = checked_schema({"type": "object", **tool.function.parameters})
        except ConstraintError as error:
            raise ConstraintError(f"the function {tool.function.name!r}: {error}") from None
        size += len(schema)
        head = json.dumps(f'{{"name":"{tool.function.name}","arguments":')
        lines += [f'call{number}: {head} arguments{number} "}}"', f"arguments{number}: %json {schema}"]
    if size > MAX_SCHEMA:
        raise ConstraintError(f"all functions together must have at most {MAX_SCHEMA} letters, got {size}")
    return "\n".join(lines)


def instruction(tools: Sequence[Tool]) -> str:
    """Return the instruction about tools for a model with a template that does not support them."""
    functions = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in tools]
    said = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return f"Answer with a call of one of these functions, as JSON with its name and arguments:\n{said}"


def calls_as_text(calls: Sequence[dict[str, Any]]) -> str:
    """Return calls in the form in which a model writes them."""
    return "\n".join(
        f'{{"name":{json.dumps(call["name"])},"arguments":{call["arguments"]}}}' for call in calls
    )


class CallReader:
    """A reader of a tool call in a text that arrives in parts.

    Args:
        is_free: Whether the text may be something else than a call: see `grammar_of`.
    """

    _HEAD = re.compile(r'\{"name":"([^"]+)","arguments":')

    def __init__(self, is_free: bool) -> None:
        self._head, self._end = (CALL[0], "}" + CALL[1]) if is_free else ("", "}")
        self._is_free, self._is_text = is_free, False
        self._held = self._arguments = ""
        self.id = ""
        """The id of the call, once it has begun."""
        self.is_whole = False
        """Whether the call is complete."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add a part of the text, and return the resulting changes of the message."""
        self._held += text
        if self._is_free and not self.id and self._held and self._held[0] != self._head[0]:
            self._is_text = True
        if self._is_text:
            return self._said()
        made: list[dict[str, Any]] = []
        if not self.id:
            found = self._HEAD.match(self._held, len(self._head))
            if found is None:
                return []
            self.id, self._held = f"call_{secrets.token_hex(12)}", self._held[found.end() :]
            made.append(self._call(id=self.id, type="function", function={"name": found[1], "arguments": ""}))
        # Hold back text that may be the end marker.
        cut = max(len(self._held) - len(self._end), 0)
        return made + self._more(cut)

    def finish(self) -> list[dict[str, Any]]:
        """Return the rest of the text, if it was cut."""
        if not self.id:
            return self._said()
        try:
            json.loads(self._arguments)
        except ValueError:
            return self._more(len(self._held))
        self.is_whole = self._held == self._end
        return []

    def _more(self, count: int) -> list[dict[str, Any]]:
        more, self._held = self._held[:count], self._held[count:]
        self._arguments += more
        return [self._call(function={"arguments": more})] if more else []

    def _said(self) -> list[dict[str, Any]]:
        said, self._held = self._held, ""
        return [{"content": said}] if said else []

    def _call(self, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, **fields}]}
