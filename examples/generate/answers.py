"""Answers to requests for text: complete, or as server-sent events."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import attrs
import trio
from asked import AskedChat, AskedText
from constraints import ConstraintError
from errors import TOLD, told_of
from generation import Generation, Prompt
from model import Token
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from text import Shown, Text
from tools import CallReader

import trio_accel as ta

__all__ = ["Answer"]

# The maximum number of a tenant's texts in progress or waiting.
MOST_OPEN = 1024

_Fields: TypeAlias = dict[str, Any]
_Tokens: TypeAlias = ta.patterns.PartStream[int]


@attrs.frozen(kw_only=True)
class Piece:
    """A part of one text.

    Attributes:
        index: The index of the text.
        text: The new text that can be shown.
        tokens: The tokens since the previous part.
        reason: Why the text has ended; None if it continues.
    """

    index: int
    text: str
    tokens: Sequence[int] = ()
    reason: str | None = None


class Answer:
    """The answer to a request: a response of Starlette."""

    def __init__(
        self, generation: Generation, asked: AskedChat | AskedText, prompts: Sequence[Prompt]
    ) -> None:
        self.generation, self.asked, self.prompts = generation, asked, prompts
        self.made = 0
        name, whole, part = asked.kind
        self.head = {
            "id": name + secrets.token_hex(12),
            "object": part if asked.stream else whole,
            "created": int(time.time()),
            "model": asked.model,
        }
        self._choices = [_choice_of(asked, generation.loaded.text) for _ in prompts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate the texts, and send them. When the client leaves, the sequences leave the batch."""
        with self._counted():
            await self._answer(scope, receive, send)

    @contextmanager
    def _counted(self) -> Generator[None]:
        """Count the texts of a tenant while they are made, so that no tenant fills the whole queue."""
        open_, tenant = self.generation.open, self.prompts[0].tenant
        if open_[tenant] + len(self.prompts) > MOST_OPEN:
            raise TOLD[ta.MailboxFullError]
        open_[tenant] += len(self.prompts)
        try:
            yield
        finally:
            open_[tenant] -= len(self.prompts)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.pieces() as pieces:
            first = await anext(pieces)  # an error up to here is sent as a response, not as an event
            if self.asked.stream:
                async with aclosing(self.events(first, pieces)) as events:
                    headers = {"Cache-Control": "no-store"}
                    stream = StreamingResponse(events, 200, headers, "text/event-stream")
                    return await stream(scope, receive, send)
            self._choices[first.index].add(first)
            async for piece in pieces:
                self._choices[piece.index].add(piece)
        choices = [{"index": index, **choice.whole()} for index, choice in enumerate(self._choices)]
        await JSONResponse({**self.head, "choices": choices, "usage": self.usage()})(scope, receive, send)
        return None

    @asynccontextmanager
    async def pieces(self) -> AsyncGenerator[AsyncIterator[Piece]]:
        """Yield the parts of all texts, as they arrive."""
        if len(self.prompts) == 1:
            async with self._open(0) as tokens, aclosing(self.texts(0, tokens)) as pieces:
                yield pieces
            return
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            sending, receiving = trio.open_memory_channel[Piece | Exception](0)
            async with sending:
                for index in range(len(self.prompts)):
                    nursery.start_soon(self._send, index, sending.clone())
            try:
                async with receiving, aclosing(_raised(receiving)) as pieces:
                    yield pieces
            # Raise it after the nursery, which would put it into a group.
            except Exception as error:  # noqa: BLE001
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _send(self, index: int, sending: trio.MemorySendChannel[Piece | Exception]) -> None:
        async with sending:
            try:
                async with self._open(index) as tokens, aclosing(self.texts(index, tokens)) as pieces:
                    async for piece in pieces:
                        await sending.send(piece)
            except (ta.AccelError, ta.ActorError, ConstraintError) as error:
                await sending.send(error)

    def _open(self, index: int) -> AbstractAsyncContextManager[_Tokens]:
        return ta.patterns.open_parts(self.generation.batcher, self.prompts[index])

    async def texts(self, index: int, tokens: _Tokens) -> AsyncGenerator[Piece, None]:
        """Yield the parts of a text, at least one."""
        prompt, stop, made = self.prompts[index], self.asked.stop, 0
        shown = Shown(self.generation.loaded.text, [stop] if isinstance(stop, str) else stop)
        async for token in tokens:
            made, self.made = made + 1, self.made + 1
            text = shown.push(token)
            yield Piece(index=index, text=text, tokens=[token], reason="stop" if shown.is_stopped else None)
            if shown.is_stopped:
                return
        yield Piece(index=index, text=shown.finish(), reason="length" if made == prompt.most else "stop")

    async def events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncGenerator[str, None]:
        """Yield the texts as server-sent events."""
        try:
            for fields in self._choices[first.index].parts(first):
                yield self.event(first.index, fields)
            async for piece in pieces:
                for fields in self._choices[piece.index].parts(piece):
                    yield self.event(piece.index, fields)
            if self.asked.stream_options.get("include_usage"):
                yield _event({**self.head, "choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"
        except (ta.AccelError, ta.ActorError, ConstraintError) as error:
            yield _event(told_of(error).form())

    def event(self, index: int, fields: _Fields) -> str:
        """Return a part of an answer as a server-sent event."""
        return _event({**self.head, "choices": [{"index": index, **fields}]})

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens in the prompts and in the answers."""
        prompt = sum(one.length() for one in self.prompts)
        return {"prompt_tokens": prompt, "completion_tokens": self.made, "total_tokens": prompt + self.made}


async def _raised(
    receiving: trio.MemoryReceiveChannel[Piece | Exception],
) -> AsyncGenerator[Piece, None]:
    """Yield the received pieces, and raise received errors."""
    async for piece in receiving:
        if isinstance(piece, Exception):
            raise piece
        yield piece


def _event(said: _Fields) -> str:
    """Return fields as a server-sent event."""
    return f"data: {json.dumps(said)}\n\n"


class _Text:
    """A choice of an answer to a prompt."""

    def __init__(self, asked: AskedText, text: Text) -> None:
        self._most, self._text = asked.likely(), text
        self._pieces: list[Piece] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, piece: Piece) -> None:
        """Add a part of the text."""
        self._pieces.append(piece)

    def whole(self) -> _Fields:
        """Return the complete choice."""
        tokens = [token for piece in self._pieces for token in piece.tokens]
        return self._fields("".join(piece.text for piece in self._pieces), tokens, self._pieces[-1].reason)

    def parts(self, piece: Piece) -> list[_Fields]:
        """Return the choice in each event for a part."""
        if not piece.text and piece.reason is None and self._most is None:
            return []
        return [self._fields(piece.text, piece.tokens, piece.reason)]

    def _fields(self, text: str, tokens: Sequence[int], reason: str | None) -> _Fields:
        likely = None if self._most is None else self._likely(tokens, self._most)
        return {"text": text, "logprobs": likely, "finish_reason": reason}

    def _likely(self, tokens: Sequence[int], most: int) -> _Fields:
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
        others: list[dict[str, float]] = []
        for token in tokens:
            assert isinstance(token, Token)
            made["tokens"].append(self._name(token))
            made["token_logprobs"].append(token.likely.own)
            made["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._text.bytes_of(token)))
            best = {self._name(other): number for other, number in token.likely.others[:most]}
            others.append({**best, self._name(token): token.likely.own})
        return {**made, "top_logprobs": others if most else None}

    def _name(self, token: int) -> str:
        found = self._text.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:  # a replacement would give other bytes the same name
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class _Message:
    """A choice of an answer in a chat."""

    def __init__(self, asked: AskedChat, text: Text) -> None:
        self._most, self._text = asked.likely(), text
        self._calls = CallReader(asked.is_free()) if asked.offered() else None
        self._has_begun = False
        self._deltas: list[_Fields] = []
        self._likely: list[_Fields] = []
        self._reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Add a part of the message."""
        self._deltas += self._read(piece)
        self._likely += self._likely_of(piece)

    def whole(self) -> _Fields:
        """Return the complete choice."""
        calls: list[_Fields] = []
        said = [delta["content"] for delta in self._deltas if delta.get("content") is not None]
        for call in (call for delta in self._deltas for call in delta.get("tool_calls", ())):
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message: _Fields = {"role": "assistant", "content": None if calls else "".join(said)}
        if calls:
            message["tool_calls"] = calls
        likely = None if self._most is None else {"content": self._likely}
        return {"message": message, "logprobs": likely, "finish_reason": self._reason}

    def parts(self, piece: Piece) -> list[_Fields]:
        """Return the choice in each event for a part."""
        deltas, likely = self._read(piece), self._likely_of(piece)
        if not self._has_begun:
            self._has_begun = True
            first = deltas.pop(0) if deltas and "content" in deltas[0] else {}
            content = None if self._calls else ""
            deltas.insert(0, {"role": "assistant", "content": content, **first})
        if likely and not deltas:
            deltas = [{"content": ""}]
        said: list[_Fields] = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if likely:
            said[0]["logprobs"] = {"content": likely}
        if piece.reason is not None:
            said.append({"delta": {}, "logprobs": None, "finish_reason": self._reason})
        return said

    def _read(self, piece: Piece) -> list[_Fields]:
        self._reason = piece.reason
        if self._calls is None:
            return [{"content": piece.text}] if piece.text else []
        deltas = self._calls.push(piece.text)
        if piece.reason is not None:
            deltas += self._calls.finish()
            if self._calls.is_whole:
                self._reason = "tool_calls"
        return deltas

    def _likely_of(self, piece: Piece) -> list[_Fields]:
        if self._most is None:
            return []
        made: list[_Fields] = []
        for token in piece.tokens:
            assert isinstance(token, Token)
            others = token.likely.others[: self._most]
            best = [self._entry(other, number) for other, number in others]
            made.append({**self._entry(token, token.likely.own), "top_logprobs": best})
        return made

    def _entry(self, token: int, number: float) -> _Fields:
        found = self._text.bytes_of(token)
        return {"token": found.decode(errors="replace"), "logprob": number, "bytes": list(found)}


def _choice_of(asked: AskedChat | AskedText, text: Text) -> _Text | _Message:
    return _Message(asked, text) if isinstance(asked, AskedChat) else _Text(asked, text)
