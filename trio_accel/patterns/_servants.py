"""What all blueprints have in common: one request, what a model is, calls in tasks, and counting them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

import attrs
import outcome
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

__all__ = ["Call", "CallStatistics", "GetStatistics", "Model", "Servant", "TaskServant", "as_callable"]

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
        return lambda item: servant.ask(Call(item))
    if not callable(model):
        raise TypeError(f"a model is an async callable or the address of a servant, not {model!r}")
    if inspect.iscoroutinefunction(model):
        return model

    async def call(item: ItemT) -> ResultT:
        """Call what may return something that can be awaited; only its result tells."""
        work: object = model(item)
        if not inspect.isawaitable(work):
            name = getattr(model, "__name__", type(model).__name__)
            raise TypeError(
                f"the model {name} returned {type(work).__name__}, and must be async: write `async def "
                f"{name}(...)`, with `await trio.to_thread.run_sync(...)` where it computes in Python"
            )
        return await cast("Awaitable[ResultT]", work)

    return call


async def outcome_of(work: Awaitable[ResultT]) -> outcome.Value[ResultT] | outcome.Error:
    """Wait for a model, and catch what it fails with: that is the outcome of a call.

    A model that was cancelled may have failed too, and a nursery of it tells both in one group. Left in the
    task, the failure would end the actor, once the cancellation is caught. So the outcome is the failure.

    Raises:
        BaseException: Nothing but cancellations, or what is no `Exception`.
    """
    try:
        return outcome.Value(await work)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the asker's
        return outcome.Error(error)
    except BaseExceptionGroup as group:
        # A group of exceptions is an exception, which its types do not say.
        rest = cast("BaseException | None", group.split(trio.Cancelled)[1])
        if not isinstance(rest, Exception):
            raise
        return outcome.Error(rest)


def end_with_incarnation(context: ActorContext, reply: DeferredReply[Any], *, has_begun: bool) -> None:
    """Fail a request that is open when the incarnation ends, as no later one knows of it.

    One that may have been executed is failed by the runtime if the actor ends for good.
    """
    path = context.path
    if not has_begun:
        kind = ActorStoppedError if context.is_stopping else ActorRestartingError
        reply.fail(kind(f"{path} ended before the request was begun: it was never executed", path=path))
    elif not (context.is_stopping or reply.is_done):
        reply.fail_as_crash(RuntimeError("the incarnation of the actor ended meanwhile"))


@attrs.frozen(kw_only=True)
class CallStatistics:
    """What became of calls: ``begun == in_flight + answered + failed + cancelled``, at any time.

    Attributes:
        begun: Calls that were begun.
        in_flight: Those that have not ended.
        answered: Those with a result.
        failed: Those that ended with an error.
        cancelled: Those that were cancelled, and have ended without a result or an error.
    """

    begun: int
    in_flight: int
    answered: int
    failed: int
    cancelled: int


@attrs.define(eq=False)
class Tally:
    """Counts each call that is made in a block, ``with tally:``; any number of blocks at once."""

    begun: int = 0
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0

    def __enter__(self) -> None:
        self.begun += 1
        self.in_flight += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.in_flight -= 1
        if error is None:
            self.answered += 1
        elif _is_cancellation(error):
            self.cancelled += 1
        else:
            self.failed += 1


def _is_cancellation(error: BaseException) -> bool:
    """Whether nothing but a cancellation has ended a call; an error beside it is what its asker gets."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


class TaskServant(Servant[ItemT, ResultT]):
    """A servant that serves each call in a task of its own, so that no call holds its mailbox.

    The reply is deferred. An error of `answer` is the asker's, as it is, and the actor lives on. The task has
    the asker's deadline and context variables. When the asker is cancelled, its task is too.
    ``stop(drain=True)`` waits for all calls. If the incarnation ends otherwise (it crashed, or its supervisor
    restarts siblings together), the calls in progress fail with `ActorFailedError`, and those in the mailbox
    are served by the next one.
    """

    _nursery: trio.Nursery
    _tally: Tally

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the tasks of one incarnation."""
        self._tally = Tally()
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    async def answer(self, item: ItemT) -> ResultT:
        """Serve one item, beside others: between two checkpoints each has the actor to itself."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it serves a call")

    async def call(self, item: ItemT) -> ResultT | DeferredReply[ResultT]:
        """Start the task of one item."""
        reply = self.start(partial(self._answer_counted, item))
        await trio.lowlevel.checkpoint()
        return reply

    def statistics(self) -> object:
        """What became of its calls since its incarnation began: `CallStatistics`."""
        return CallStatistics(**attrs.asdict(self._tally))

    def start(
        self, work: Callable[[], Awaitable[ResultT]], *, has_begun: Callable[[], bool] = lambda: True
    ) -> DeferredReply[ResultT]:
        """Start a task for the request that the running handler serves, which returns what this returns.

        The task has the context variables and the deadline of the asker.

        Args:
            work: Gives the reply, or raises the error that is the reply.
            has_begun: Whether the request may have been executed, in part or in full. If not when the
                incarnation ends, it fails with `ActorStoppedError` or `ActorRestartingError`.
        """
        scope = trio.CancelScope(deadline=self.context.deadline)
        reply: DeferredReply[ResultT] = self.context.defer(on_cancel=scope.cancel)
        self._nursery.start_soon(self._answer, work, has_begun, scope, reply)
        return reply

    async def _answer_counted(self, item: ItemT) -> ResultT:
        with self._tally:
            return await self.answer(item)

    async def _answer(
        self,
        work: Callable[[], Awaitable[ResultT]],
        has_begun: Callable[[], bool],
        scope: trio.CancelScope,
        reply: DeferredReply[ResultT],
    ) -> None:
        try:
            with scope:
                result = await outcome_of(work())
                if isinstance(result, outcome.Value):
                    reply.set(result.value)
                else:
                    reply.fail(cast("Exception", result.error))
            if scope.cancelled_caught and reply.is_cancelled:
                reply.cancelled()
            elif scope.cancelled_caught:
                # The asker has moved its deadline since it asked.
                reply.fail(trio.TooSlowError("the deadline with which it was asked has passed"))
        finally:
            if not reply.is_done:
                end_with_incarnation(self.context, reply, has_begun=has_begun())
