"""Many items through one model: bounded in number, with results in their order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

import attrs
import outcome
import trio

from ._numbers import must_be_count
from ._servants import ItemT, Model, ResultT, as_callable, outcome_of, running_beside

__all__ = ["ResultStream", "open_results"]

T_co = TypeVar("T_co", covariant=True)
Items: TypeAlias = Iterable[ItemT] | AsyncIterable[ItemT]
Result: TypeAlias = outcome.Value[ResultT] | outcome.Error


@attrs.define(eq=False)
class _Slot:
    """One item that was taken: its place in the order, and its outcome as soon as it has one."""

    ended: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Value[Any] | outcome.Error | None = None
    # Whether there is no item, as the iteration over them has failed.
    is_end: bool = False

    def set(self, result: outcome.Value[Any] | outcome.Error) -> None:
        self.result = result
        self.ended.set()


@attrs.define(eq=False, repr=False)
class ResultStream(Generic[T_co]):
    """An async iterator over results, for one task at a time. Made by `open_results`."""

    _slots: trio.MemoryReceiveChannel[_Slot]
    _room: trio.Semaphore
    _gives_outcomes: bool
    # Taken out of the channel and not given yet: a cancelled `__anext__` loses no result.
    _next: _Slot | None = attrs.field(default=None, init=False)

    def __aiter__(self) -> ResultStream[T_co]:
        return self

    async def __anext__(self) -> T_co:
        """Return the next result; a cancellation loses none.

        Raises:
            Exception: The error of this item, where no outcomes were asked for. The next call returns the
                result behind it. Or the error of the items' iteration, which ends with it.
        """
        if self._next is None:
            try:
                self._next = await self._slots.receive()
            except trio.EndOfChannel:
                raise StopAsyncIteration from None
        slot = self._next
        await slot.ended.wait()
        self._next = None
        self._room.release()
        assert slot.result is not None  # it has ended
        is_plain = slot.is_end or not self._gives_outcomes
        return cast("T_co", slot.result.unwrap() if is_plain else slot.result)


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
    """Ask a model for each of many items at once, and iterate over the results in the order of the items.

    ``async with open_results(pipeline, items) as results:``, and then ``async for result in results:``. At
    most `limit` items have been taken whose results were not read. So a slow reader holds up the items, and
    these may be endless. Servants get the items in their order.

    An item that fails raises its error at its place, which ends a loop over the results. With `outcomes`,
    each result is an `outcome.Value` or an `outcome.Error`, and the loop goes on: for a service, where the
    next item is somebody else's. At the end of the block, what is still asked for is cancelled.

    Args:
        model: An async callable, or the address of a servant, such as a `Pipeline`.
        items: They are taken one by one. An error of the iteration comes behind the results before it.
        limit: The most items that are taken and not read; more than a pipeline holds, to keep it busy.
        outcomes: Whether results are outcomes.

    Raises:
        ValueError: `limit` is below 1.
        TypeError: `model` is no model, or `items` cannot be iterated over.
    """
    ask = as_callable(model)
    room = trio.Semaphore(must_be_count("open_results: limit", limit))
    if not isinstance(items, Iterable | AsyncIterable):
        raise TypeError(
            f"open_results: items must be an iterable or an async iterable, got {type(items).__name__}"
        )
    source = items.__aiter__() if isinstance(items, AsyncIterable) else _as_async(items)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[ResultStream[Any], None]:
        send, receive = trio.open_memory_channel[_Slot](limit)

        async def ask_for(item: Any, slot: _Slot) -> None:
            slot.set(await outcome_of(ask(item)))

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
                        end = _Slot(is_end=True)
                        end.set(outcome.Error(error))
                        send.send_nowait(end)
                        break
                    slot = _Slot()
                    send.send_nowait(slot)
                    nursery.start_soon(ask_for, item, slot)

        async with running_beside(feed):
            yield ResultStream(receive, room, outcomes)

    return opened()


class _as_async(AsyncIterator[Any]):  # noqa: N801  # used as a function
    """Iterate over what is at hand."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> Any:  # noqa: ASYNC910  # its caller has done so
        for item in self._items:
            return item
        raise StopAsyncIteration
