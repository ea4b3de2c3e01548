"""The base of all patterns: requests, models, calls in tasks, counts; and many items through one model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

import attrs
import outcome
import trio

from ..actors import (
    Actor,
    ActorContext,
    ActorRestartingError,
    ActorStoppedError,
    DeferredReply,
    ItemRequest,
    Leavable,
    Reading,
    Ref,
    Request,
    Serves,
    handles,
    must_be_count,
    opens,
    running_beside,
)

__all__ = [
    "CallStatistics",
    "GetStatistics",
    "Model",
    "ResultStream",
    "Submit",
    "SubmitActor",
    "TaskSubmitActor",
    "as_callable",
    "open_results",
]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
ItemT_co = TypeVar("ItemT_co", covariant=True)
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


@attrs.frozen
class Submit(ItemRequest[ItemT_co], Request["SubmitActor[ItemT_co, object]", object]):
    """Request the result of one item.

    Attributes:
        item: The model's input.
    """

    item: ItemT_co


@attrs.frozen
class GetStatistics(Request["SubmitActor[Any, Any]", Any]):
    """Request the counts since the incarnation began: the result of `SubmitActor.statistics`."""


class SubmitActor(Actor, Serves[ItemT_contra, ResultT_co]):
    """Base of the actors that serve `Submit`, so that each of them can be the model of another."""

    async def call(self, item: ItemT_contra) -> ResultT_co | DeferredReply[ResultT_co]:
        """Serve one item: return its result, or defer the reply."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it serves a call")

    def statistics(self) -> object:
        """Return the counts so far, as a frozen record; None if it counts nothing."""
        return None

    def readings(self) -> Iterator[Reading]:
        """Yield the counts for metrics."""
        yield from ()

    @handles(GetStatistics)
    async def _serve_statistics(self, message: GetStatistics) -> object:
        return self.statistics()

    # Submit is declared for all subclasses, and a method takes its own class.
    @handles(Submit)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    async def _serve(self, message: Submit[ItemT_contra]) -> object:
        return await self.call(message.item)


Model: TypeAlias = Callable[[ItemT], Awaitable[ResultT]] | Ref[SubmitActor[ItemT, ResultT]]
"""A model: an async callable of one item, or the address of a `SubmitActor`."""


def as_callable(model: Model[ItemT, ResultT]) -> Callable[[ItemT], Awaitable[ResultT]]:
    """Return a model as an async callable; for an address, a callable that asks the actor.

    Raises:
        TypeError: The model is neither.
    """
    if isinstance(model, Ref):
        # pyright does not keep the type arguments of a union.
        actor: Ref[SubmitActor[ItemT, ResultT]] = model  # pyright: ignore[reportUnknownVariableType]
        return lambda item: actor.ask(Submit(item))
    if not callable(model):
        raise TypeError(f"a model is an async callable or the address of an actor, not {model!r}")
    if inspect.iscoroutinefunction(model):
        return model

    async def call(item: ItemT) -> ResultT:
        """Call the model, which must return an awaitable; only the result of the call shows that."""
        work: object = model(item)
        if not inspect.isawaitable(work):
            name = getattr(model, "__name__", type(model).__name__)
            raise TypeError(
                f"the model {name} returned {type(work).__name__}, and must be async: write `async def "
                f"{name}(...)`, with `await trio.to_thread.run_sync(...)` where it computes in Python"
            )
        return await cast("Awaitable[ResultT]", work)  # pyright: ignore[reportUnnecessaryCast]  # mypy wants it

    return call


def is_model(_: object, attribute: object, value: Any) -> None:
    """Check a model attribute."""
    as_callable(value)


async def outcome_of(work: Awaitable[ResultT]) -> outcome.Value[ResultT] | outcome.Error:
    """Wait for a model, and catch its error: either is the outcome of a call.

    A cancelled model may also have failed, and its nursery raises both in one group. The failure must not
    stay in the task, because it would end the actor once the cancellation is caught. So the failure is the
    outcome.

    Raises:
        BaseException: The group has only cancellations, or an error outside of `Exception`.
    """
    try:
        return outcome.Value(await work)
    except Exception as error:  # noqa: BLE001  # the caller gets it, whatever it is
        return outcome.Error(error)
    except BaseExceptionGroup as group:
        # A group of exceptions is an exception, but its types do not state that.
        rest = cast("BaseException | None", group.split(trio.Cancelled)[1])
        if not isinstance(rest, Exception):
            raise
        return outcome.Error(rest)


def count(name: str, help: str, value: float, **labels: str) -> Reading:  # noqa: A002  # as in metrics
    """Make the reading of a counter."""
    return Reading(name=name, kind="counter", help=help, value=value, labels=tuple(labels.items()))


def end_with_incarnation(context: ActorContext, reply: DeferredReply[Any], *, has_begun: bool) -> None:
    """Fail an open request at the end of its incarnation: later ones do not know of it.

    If the actor ends for good, the runtime fails requests that may have been executed.
    """
    path = context.path
    if not has_begun:
        kind = ActorStoppedError if context.is_stopping else ActorRestartingError
        reply.fail(kind(f"{path} ended before the request was begun: it was never executed", path=path))
    elif not (context.is_stopping or reply.is_done):
        reply.fail_as_crash(RuntimeError("the incarnation of the actor ended meanwhile"))


@attrs.frozen(kw_only=True)
class CallStatistics:
    """Counts of calls.

    Attributes:
        in_flight: The number of unfinished calls.
        answered: The number of calls with a result.
        failed: The number of calls with an error.
        cancelled: The number of cancelled calls, without a result or an error.
    """

    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def begun(self) -> int:
        """The total number of calls begun."""
        return self.in_flight + self.answered + self.failed + self.cancelled


class Tally(Counter[str]):
    """Counts calls by the names of `CallStatistics`.

    Each call is one block, ``with tally:``; any number of blocks at once.
    """

    def __enter__(self) -> None:
        self["in_flight"] += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self["in_flight"] -= 1
        if error is None:
            self["answered"] += 1
        else:
            self["cancelled" if _is_cancellation(error) else "failed"] += 1


def _is_cancellation(error: BaseException) -> bool:
    """Return whether only a cancellation has ended a call; another error would be the caller's outcome."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


class TaskSubmitActor(SubmitActor[ItemT, ResultT]):
    """An actor that serves each call in its own task, so that no call blocks its mailbox.

    The reply is deferred. The caller gets an error of `answer` unchanged, and the actor lives on. The task
    has the caller's deadline and context variables. When the caller is cancelled, so is its task.
    ``stop(drain=True)`` waits for all calls. If the incarnation ends otherwise (it crashed, or its supervisor
    restarts siblings together), the calls in progress fail with `ActorFailedError`, and the next incarnation
    serves the calls in the mailbox.
    """

    _nursery: trio.Nursery
    _tally: Tally

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the tasks of one incarnation."""
        self._tally = Tally()
        context.show_readings(self.readings)
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    async def answer(self, item: ItemT) -> ResultT:
        """Serve one item, concurrently with others: tasks of the actor switch only at checkpoints."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it serves a call")

    async def call(self, item: ItemT) -> ResultT | DeferredReply[ResultT]:
        """Start the task of one item."""
        reply = self.start(partial(self._answer_counted, item))
        await trio.lowlevel.checkpoint()
        return reply

    def statistics(self) -> object:
        """Return the counts of its calls since its incarnation began: `CallStatistics`."""
        return CallStatistics(**self._tally)

    def readings(self) -> Iterator[Reading]:
        """Yield the counts of its calls by outcome."""
        text = "Requests of a pattern by what became of them."
        for ending in ("answered", "failed", "cancelled"):
            yield count("requests", text, self._tally[ending], outcome=ending)

    def start(
        self, work: Callable[[], Awaitable[ResultT]], *, has_begun: Callable[[], bool] = lambda: True
    ) -> DeferredReply[ResultT]:
        """Start a task for the request that the running handler serves; the handler returns this result.

        The task has the context variables and the deadline of the caller.

        Args:
            work: Returns the reply, or raises the error for the caller.
            has_begun: Whether the request may have been executed, in part or in full. If not when the
                incarnation ends, it fails with `ActorStoppedError` or `ActorRestartingError`.
        """
        scope = trio.CancelScope(deadline=self.context.deadline)
        reply: DeferredReply[ResultT] = self.context.defer(on_cancel=scope.cancel)
        self._nursery.start_soon(self._answer, work, has_begun, scope, reply)
        return reply

    def start_for(
        self,
        reply: DeferredReply[ResultT],
        scope: trio.CancelScope,
        work: Callable[[], Awaitable[ResultT]],
        has_begun: Callable[[], bool],
    ) -> None:
        """Start the task of a request that was deferred before, as `start` does.

        Args:
            reply: The deferred reply, with an `on_cancel` hook that cancels `scope`.
            scope: The scope of the task, with the caller's deadline.
            work: See `start`.
            has_begun: See `start`.
        """
        # Only one task can enter a context, and the caller's task may have entered this one.
        context = reply.context.copy()
        context.run(self._nursery.start_soon, self._answer, work, has_begun, scope, reply)

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
                # The caller has changed its deadline since the request.
                reply.fail(trio.TooSlowError("the deadline with which it was asked has passed"))
        finally:
            if not reply.is_done:
                end_with_incarnation(self.context, reply, has_begun=has_begun())


T_co = TypeVar("T_co", covariant=True)
Items: TypeAlias = Iterable[ItemT] | AsyncIterable[ItemT]
Result: TypeAlias = outcome.Value[ResultT] | outcome.Error


@attrs.define(eq=False, repr=False)
class ResultStream(Generic[T_co]):
    """An async iterator over results, for one task at a time. Made by `open_results`."""

    # Each item has a channel for its outcome: in the order of the items.
    _slots: trio.MemoryReceiveChannel[trio.MemoryReceiveChannel[Result[Any]]]
    _room: trio.Semaphore
    _gives_outcomes: bool
    # Taken out and not given yet: a cancelled `__anext__` loses no result.
    _next: trio.MemoryReceiveChannel[Result[Any]] | None = attrs.field(default=None, init=False)
    # The error of the iteration over the items.
    failed: Exception | None = attrs.field(default=None, init=False)

    def __aiter__(self) -> ResultStream[T_co]:
        return self

    async def __anext__(self) -> T_co:
        """Return the next result; a cancellation loses no result.

        Raises:
            Exception: The error of this item, if `outcomes` is False. The next call returns the next result.
                Or the error of the iteration over the items, which ends this iteration.
        """
        if self._next is None:
            try:
                self._next = await Leavable(self._slots.receive())
            except trio.EndOfChannel:
                failed, self.failed = self.failed, None
                if failed is None:
                    raise StopAsyncIteration from None
                raise failed from failed.__cause__
        result = await Leavable(self._next.receive())
        self._next = None
        self._room.release()
        return cast("T_co", result if self._gives_outcomes else result.unwrap())


@overload
def open_results(
    model: Model[ItemT, ResultT], items: Items[ItemT], /, *, limit: int = 64, outcomes: Literal[False] = False
) -> AbstractAsyncContextManager[ResultStream[ResultT]]: ...


@overload
def open_results(
    model: Model[ItemT, ResultT], items: Items[ItemT], /, *, limit: int = 64, outcomes: Literal[True]
) -> AbstractAsyncContextManager[ResultStream[Result[ResultT]]]: ...


def open_results(
    model: Model[Any, Any], items: Items[Any], /, *, limit: int = 64, outcomes: bool = False
) -> AbstractAsyncContextManager[ResultStream[Any]]:
    """Send many items to a model at once, and iterate over the results in the order of the items.

    ``async with open_results(pipeline, items) as results:``, and then ``async for result in results:``. At
    most `limit` results are unread or pending at a time. So a slow reader holds up the items, which may be
    endless. Actors get the items in their order.

    A failed item raises its error in its turn, which ends a loop over the results. With `outcomes`, each
    result is an `outcome.Value` or an `outcome.Error`, and the loop continues, as a service needs, because
    the next item belongs to somebody else. At the end of the block, unfinished requests are cancelled.

    Args:
        model: An async callable, or the address of an actor for `Submit`, such as a `Pipeline`.
        items: The items, taken one by one. An error of the iteration follows the results before it.
        limit: The maximum number of unread or pending results; more than a pipeline holds, to keep it busy.
        outcomes: Whether results are outcomes.

    Raises:
        ValueError: `limit` is below 1.
        TypeError: `model` is not a model, or `items` is not iterable.
    """
    ask = as_callable(model)
    room = trio.Semaphore(must_be_count("open_results: limit", limit))
    if not isinstance(items, Iterable | AsyncIterable):
        raise TypeError(
            f"open_results: items must be an iterable or an async iterable, got {type(items).__name__}"
        )
    source = items.__aiter__() if isinstance(items, AsyncIterable) else _as_async(items)

    @opens(
        "the results are not open yet: async with open_results(...) as results: async for result in results"
    )
    async def opened() -> AsyncGenerator[ResultStream[Any]]:
        send, receive = trio.open_memory_channel[trio.MemoryReceiveChannel[Result[Any]]](limit)
        stream = ResultStream[Any](receive, room, outcomes)

        async def ask_for(item: Any, slot: trio.MemorySendChannel[Result[Any]]) -> None:
            slot.send_nowait(await outcome_of(ask(item)))

        async def feed() -> None:
            async with trio.open_nursery() as nursery, send:
                while True:
                    # It checkpoints, so each task runs up to its request before the next one is started.
                    await room.acquire()
                    try:
                        item = await anext(source)
                    except StopAsyncIteration:
                        break
                    except Exception as error:  # noqa: BLE001  # the reader's
                        stream.failed = error
                        break
                    slot, its_result = trio.open_memory_channel[Result[Any]](1)
                    send.send_nowait(its_result)
                    nursery.start_soon(ask_for, item, slot)

        async with running_beside(feed):
            yield stream

    return opened()


class _as_async(AsyncIterator[Any]):  # noqa: N801  # used as a function
    """Iterate over plain items asynchronously."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> Any:  # noqa: ASYNC910  # its caller has done so
        for item in self._items:
            return item
        raise StopAsyncIteration
