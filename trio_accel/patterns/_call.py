"""What all blueprints have in common: one request, and what a model is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeAlias, TypeVar, cast

import attrs
import trio

from ..actors import (
    Actor,
    ActorContext,
    ActorRestartingError,
    ActorStoppedError,
    DeferredReply,
    Ref,
    Request,
    handles,
)

__all__ = [
    "Call",
    "GetStatistics",
    "Model",
    "Servant",
    "as_callable",
    "refuse_unbegun",
    "without_cancellation",
]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@attrs.frozen
class Call(Request["Servant[Any, Any]", Any], Generic[ItemT]):
    """Ask a servant for the result of one item.

    Attributes:
        item: What the model is given.
    """

    item: ItemT


@attrs.frozen
class GetStatistics(Request["Servant[Any, Any]", Any]):
    """Ask a servant what it has counted since its incarnation began: its `Servant.statistics`."""


class Servant(Actor, Generic[ItemT, ResultT]):
    """Base of the actors that serve `Call`: each of them can be the model of another."""

    async def call(self, item: ItemT) -> ResultT | DeferredReply[ResultT]:
        """Serve one item: return its result, or defer the reply."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it serves a call")

    def statistics(self) -> object:
        """Tell what was counted so far, as a frozen record; None if it counts nothing."""
        return None

    @handles(GetStatistics)
    async def _serve_statistics(self, message: GetStatistics) -> object:
        return self.statistics()

    @handles(Call)
    async def _serve(self, message: Call[ItemT]) -> ResultT | DeferredReply[ResultT]:
        return await self.call(message.item)


Model: TypeAlias = Callable[[ItemT], Awaitable[ResultT]] | Ref[Servant[ItemT, ResultT]]
"""What does the work: an async callable of one item, or the address of a servant."""


def as_callable(model: Model[ItemT, ResultT]) -> Callable[[ItemT], Awaitable[ResultT]]:
    """Return the async callable that a model is, or one that asks the servant.

    Raises:
        TypeError: The model is neither.
    """
    if isinstance(model, Ref):
        # pyright does not keep the type arguments of a union.
        servant: Ref[Servant[ItemT, ResultT]] = model  # pyright: ignore[reportUnknownVariableType]

        async def ask(item: ItemT) -> ResultT:
            result: ResultT = await servant.ask(Call(item))
            return result

        return ask
    if not callable(model):
        raise TypeError(f"a model is an async callable or the address of a servant, not {model!r}")
    return model


def without_cancellation(group: BaseExceptionGroup[BaseException]) -> Exception:
    """What a model has failed with that was cancelled too, as a nursery of it tells both in one group.

    It is the outcome of a call. Left in the task, it would end the actor, once the cancellation is caught.

    Raises:
        BaseExceptionGroup: The group itself: there is nothing but cancellations, or what is no `Exception`.
    """
    # A group of exceptions is an exception, which its types do not say.
    rest = cast("BaseException | None", group.split(trio.Cancelled)[1])
    if not isinstance(rest, Exception):
        raise group
    return rest


def refuse_unbegun(context: ActorContext, reply: DeferredReply[Any]) -> None:
    """Fail a request that the incarnation has not begun when it ends, as no later one knows of it."""
    path = context.path
    kind = ActorStoppedError if context.is_stopping else ActorRestartingError
    reply.fail(kind(f"{path} ended before the request was begun: it was never executed", path=path))
