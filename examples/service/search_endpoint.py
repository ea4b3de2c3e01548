"""What the service answers: the body of a request becomes tasks of the model, and their results an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import attrs
from search_batch import MOST_TASKS, Answer
from search_model import Task

LONGEST_TEXT = 10_000

# Has tasks done for the tenant who asks, all or none.
Ask = Callable[[Sequence[Task]], Awaitable[list[Answer]]]


class RequestError(Exception):
    """A request that cannot be served, with the reason for its client.

    Attributes:
        status: Of the response.
        after: Seconds after which to ask again.
    """

    def __init__(self, message: str, status: int = 400, after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.after = after


async def embed(ask: Ask, body: dict[str, Any]) -> dict[str, object]:
    """``{"texts": ["...", ...]}`` becomes ``{"model": "v1", "vectors": [[...], ...]}``."""
    texts: object = body.get("texts")
    if not isinstance(texts, list):
        raise RequestError("texts must be a list")
    given = cast("list[object]", texts)
    if not 1 <= len(given) <= MOST_TASKS:
        raise RequestError(f"texts must have 1 to {MOST_TASKS} texts")
    tasks = [Task("embed", checked(text)) for text in given]
    answers = await ask(tasks)
    if len({answer.model for answer in answers}) > 1:
        # The model was replaced between two of them, and vectors of two models have nothing in common.
        answers = await ask(tasks)
    model, *others = {answer.model for answer in answers}
    if others:
        raise RequestError("the model is being replaced", 503, 0.1)
    return {"model": model, "vectors": [answer.value for answer in answers]}


async def similar(ask: Ask, body: dict[str, Any]) -> dict[str, object]:
    """``{"text": "...", "count": 5}`` becomes the nearest sentences."""
    count = body.get("count", 5)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 50:
        raise RequestError("count must be a whole number from 1 to 50")
    [found] = await ask([Task("similar", text_of(body, "text"), count)])
    rows = [{"text": text, "page": page, "cosine": cosine} for text, page, cosine in found.value]
    return {"model": found.model, "sentences": rows}


@attrs.frozen
class Endpoint:
    """The answer at a path.

    Attributes:
        serve: Makes the answer of the fields of a body.
        fields: The fields that it is given; a body may have more, which are ignored.
    """

    serve: Callable[[Ask, dict[str, Any]], Awaitable[dict[str, object]]]
    fields: Sequence[str]


ENDPOINTS = {"/embed": Endpoint(embed, ("texts",)), "/similar": Endpoint(similar, ("text", "count"))}


def text_of(body: dict[str, Any], name: str) -> str:
    """A text in the body of a request."""
    if name not in body:
        raise RequestError(f"{name} is missing")
    return checked(body[name], name)


def checked(value: object, name: str = "each of texts") -> str:
    """The value, which must be a text that is not too long."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise RequestError(f"{name} must be a text of at most {LONGEST_TEXT} characters")
    return value
