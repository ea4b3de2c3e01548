"""The agent over HTTP: each answer is a stream of server-sent events."""

from __future__ import annotations

import json
import uuid
from functools import partial

import trio
from server_sent_events import Events
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import trio_accel as ta
from trio_accel.agents import StepEvent, Workflow
from trio_accel.cluster import FencedError, SqliteStore, StoreError

__all__ = ["application"]

LONGEST = 1000


def application(flow: Workflow, store: SqliteStore) -> Starlette:
    """Return the application. A question with an earlier question's key continues that answer."""

    async def ask(request: Request) -> Response:
        try:
            question, key = _read(await request.body())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            told = f"send a JSON object with question, and optionally key, of at most {LONGEST} bytes each"
            return JSONResponse({"error": told}, 400)
        if key in flow.runs:
            return JSONResponse({"error": "a question with this key is being answered"}, 409)
        return Events(partial(_events, flow, store, key, question))

    async def picture(request: Request) -> Response:
        return PlainTextResponse(flow.mermaid())

    return Starlette(routes=[Route("/ask", ask, methods=["POST"]), Route("/workflow", picture)])


def _read(body: bytes) -> tuple[str, str]:
    """Return the question and the key in a body; raise an error for anything else."""
    given = json.loads(body)
    question, key = given["question"], given.get("key", uuid.uuid4().hex)
    # Lone surrogates raise a ValueError, and values other than strings an AttributeError.
    if not (0 < len(question.encode()) <= LONGEST and 0 < len(key.encode()) <= LONGEST):
        raise ValueError(f"question and key must have 1 to {LONGEST} bytes")
    return question, key


async def _events(
    flow: Workflow, store: SqliteStore, key: str, question: str, into: trio.MemorySendChannel[object]
) -> None:
    send, receive = trio.open_memory_channel[StepEvent](0)

    async def answer() -> None:
        try:
            found = await flow.run(store=store, key=key, events=send, question=question)
            seconds = {name: round(step.seconds, 3) for name, step in found.steps.items()}
            await into.send({"answer": found.results["answer"].text, "seconds": seconds})
        except (ValueError, FencedError, StoreError, ta.AccelError, ta.ActorError) as error:
            await into.send({"error": type(error).__name__})

    async with into, trio.open_nursery() as nursery:
        await into.send({"key": key})
        nursery.start_soon(answer)
        async for event in receive:
            if event.kind == "told" and event.value:
                await into.send({"text": event.value})
            elif event.step == "sources" and event.kind in {"finished", "kept"}:
                pages = [{"page": one.page, "title": one.title} for one in event.value]
                await into.send({"sources": pages})
