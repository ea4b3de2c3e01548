"""Methods that yield: their items, read one by one as they are made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import trio

from ..actors import ActorStoppedError, Leavable, bind_arguments, opens, running_beside
from ..backends.base import AccelError, ContextLostError
from ..backends.base.contract.program_definition import build
from ..devices import AccelRef, Device, ProgressReport, track_progress
from ._messages import arrays_in
from ._method import SEVERAL, ProgramMethod

__all__ = ["ItemStream"]

T_co = TypeVar("T_co", covariant=True)

_logger = logging.getLogger("trio_accel.programs")

END: Final = object()
"""What stands behind the last item."""
CLOSE: Final = -1
"""Number of the item by which a generator is closed."""

# The number of losses without an item in between after which a resuming stream ends.
_MOST_LOSSES = 8


@attrs.define(eq=False, repr=False)
class ItemStream(AsyncIterator[T_co]):
    """Items of a method that yields; one task reads them at a time. Made by `Program.stream`."""

    _items: trio.MemoryReceiveChannel[T_co]
    _failures: list[Exception]
    _is_read: bool = attrs.field(default=False, init=False)

    async def __anext__(self) -> T_co:
        """Return the next item; a cancellation loses none.

        Raises:
            trio.BusyResourceError: Another task is reading.
            trio.ClosedResourceError: The block has ended.
            Exception: The error of the method, after the items that it has yielded before.
        """
        if self._is_read:
            raise trio.BusyResourceError("another task reads this stream; open one for each reader")
        self._is_read = True
        try:
            return await Leavable(self._items.receive())
        except trio.EndOfChannel:
            pass
        except trio.ClosedResourceError:
            raise trio.ClosedResourceError("the block of this stream has ended") from None
        finally:
            self._is_read = False
        if self._failures:
            raise self._failures.pop()
        raise StopAsyncIteration


@attrs.define(eq=False)
class Items:
    """Requests the items of a stream (D185), from one generator after the other if its method resumes.

    Args:
        method: The method.
        bound: Its arguments.
        device: The device that it runs on.
        next_number: Returns the next generator number.
        ask: Makes an item, from the arguments and the numbers of generator and item; `END` after the last
            one.
        leave: Called with the number and the arguments of a generator that could not be closed in time.
    """

    _method: ProgramMethod
    _bound: inspect.BoundArguments
    _device: Device
    _next_number: Callable[[], int]
    _ask: Callable[[inspect.BoundArguments, tuple[int, int]], Awaitable[Any]]
    _leave: Callable[[int, inspect.BoundArguments], None]
    _count: int = 0
    _items: list[object] = attrs.field(factory=list[object])
    # The numbers of the current generator, if there may be one, and of its next item.
    _position: tuple[int, int] | None = None

    @opens("the stream is not open yet: async with program.stream(...) as items: async for item in items")
    async def open(self) -> AsyncGenerator[ItemStream[Any]]:
        """Make items concurrently with the block, in advance; close the generator at the end."""
        send, receive = trio.open_memory_channel[Any](self._method.prefetch - 1)
        failures: list[Exception] = []
        has_failed = True
        try:
            with track_progress(self._method.full_name, unit="items") as report:
                async with running_beside(partial(self._feed, send, failures, report)):
                    yield ItemStream(receive, failures)
            has_failed = False
        finally:
            receive.close()
            try:
                await self._close()  # noqa: ASYNC102  # it shields itself, for a bounded time
            except Exception:
                if not has_failed:
                    raise
                _logger.exception("%s failed while its stream was closed", self._method.full_name)

    async def _feed(
        self, send: trio.MemorySendChannel[Any], failures: list[Exception], report: ProgressReport
    ) -> None:
        async with send:
            try:
                await self._put()
                while (item := await self._next()) is not END:
                    report(self._count)
                    await send.send(item)
            except Exception as error:  # noqa: BLE001  # the reader's
                failures.append(error)

    async def _put(self) -> None:
        """Copy the NumPy arrays among the arguments to the device, once for all items."""
        for name, value in self._bound.arguments.items():
            depth = -1 if self._bound.signature.parameters[name].kind in SEVERAL else 0
            tree, arrays = arrays_in(f"{self._method.full_name}: {name}", value, depth=depth)
            if not all(isinstance(array, AccelRef) for _, array in arrays):
                put = self._device.put
                refs = [array if isinstance(array, AccelRef) else await put(array) for _, array in arrays]
                self._bound.arguments[name] = build(tree, refs)

    async def _next(self) -> Any:
        """Make the next item, after a loss by a new generator if the method resumes."""
        losses = 0
        while True:
            try:
                return await self._make()
            except ContextLostError as error:
                losses += 1
                if not self._method.resumes or error.is_to_blame or losses > _MOST_LOSSES:
                    raise

    async def _make(self) -> Any:
        if self._position is None:
            self._position = self._next_number(), 0
            if self._count:
                count = self._method.resumes == "count"
                self._bound.arguments["resume"] = self._count if count else list(self._items)
        try:
            item = await self._ask(self._bound, self._position)
        except Exception:
            # Whatever has failed, the generator has ended.
            self._position = None
            raise
        if item is END:
            self._position = None
            return END
        self._position = self._position[0], self._position[1] + 1
        self._count += 1
        if self._method.resumes is True:
            self._items.append(item)
        return item

    async def _close(self) -> None:
        """Close the generator, if there may be one; takes a bounded time, also if an item does not end."""
        if self._position is None:
            await trio.lowlevel.checkpoint()
            return
        number, _ = self._position
        with trio.move_on_after(self._device.options.close_grace, shield=True) as scope:
            # If it was lost, or the program is closed, there is none.
            with suppress(AccelError, ActorStoppedError):
                await self._ask(self._bound, (number, CLOSE))
        if scope.cancelled_caught:
            self._leave(number, self._bound)


def bind_items(
    method: ProgramMethod, args: Sequence[object], kwargs: Mapping[str, object]
) -> inspect.BoundArguments:
    """Assign the arguments of a stream to its parameters.

    Raises:
        TypeError: They do not fit, or the method does not yield.
    """
    if not method.yields:
        raise TypeError(
            f"{method.full_name} does not yield: write await program.ask(...), which has its result"
        )
    if method.resumes and "resume" in kwargs:
        raise TypeError(f"{method.full_name}: resume is the stream's own argument, given after a loss")
    return bind_arguments(method.full_name, method.signature, args, kwargs)
