"""Batches of host arrays, copied to a device before the program needs them (D151)."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar, cast, overload

import numpy as np
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import Leavable, NotAwaited, named_arguments
from ...backends.base import HostArray
from ..base._refusals import what_to_do
from ..operations._operation import refuse_recording
from ..operations._ref import AccelRef, Device, check_device

__all__ = ["stream"]

HostT = TypeVar("HostT")
KeyT = TypeVar("KeyT")

_Batches: TypeAlias = Iterable[HostT] | AsyncIterable[HostT] | Callable[[], HostT | None]
_Call: TypeAlias = Callable[[], Awaitable[Any]]

# A marker for the end, because a batch may be None by mistake.
_END = object()


@overload
def stream(  # type: ignore[overload-overlap]  # an iterable without batches matches all overloads
    device: Device, batches: _Batches[HostArray], *, depth: int = 3
) -> AbstractAsyncContextManager[AsyncIterator[AccelRef]]: ...
@overload
def stream(  # type: ignore[overload-overlap]
    device: Device, batches: _Batches[tuple[HostArray, ...]], *, depth: int = 3
) -> AbstractAsyncContextManager[AsyncIterator[tuple[AccelRef, ...]]]: ...
@overload
def stream(
    device: Device, batches: _Batches[dict[KeyT, HostArray]], *, depth: int = 3
) -> AbstractAsyncContextManager[AsyncIterator[dict[KeyT, AccelRef]]]: ...
@named_arguments
def stream(device: Device, batches: Any, *, depth: int = 3) -> AbstractAsyncContextManager[Any]:
    """Iterate over batches on a device, which are read and copied in advance.

    ``async with ta.stream(device, batches) as ahead:``, and ``async for x in ahead:`` inside. A task reads
    the next batch, and copies it to the device, while your program works on the previous ones. So the data
    may be larger than the device: it holds `depth` batches in advance, and those to which your program still
    refers.

    Each array belongs to your program. Its memory is freed when you drop the last reference, or release it,
    and is reused for the next batches. The loop variable refers to its batch until it gets the next one. If
    you keep all arrays, you get `OutOfMemoryError`, and never wait for yourself.

    The source is called for a batch when the previous one is on the device. So it may fill the same memory
    again; memory of `Device.host_empty` is the fastest. An iterator or callable is called in a worker thread,
    one call at a time, and may block. An async iterator runs in a task, concurrently with your program.

    Leaving the block ends everything: a running call of the source is awaited, its iterator is closed
    (``close`` or ``aclose``, which has `DeviceOptions.close_grace` seconds), and batches copied in advance
    are freed. The same happens after ``break``, errors and cancellation. If you cancel the wait for a batch,
    none is lost. Several tasks may iterate; each batch is given to one of them.

    Args:
        device: The device.
        batches: An iterable or async iterable of batches, or a callable that returns the next batch, and None
            after the last. A batch is a NumPy array, or a tuple or dict of them, each of any shape and device
            dtype.
        depth: The maximum number of batches in advance of your program, on the device or in transit, at least
            1.

    Returns:
        A context manager for an async iterator over batches of the same structure, with arrays of the device.
        It raises errors of the source, after the batches before them; and errors of `Device.put`, which is
        repeated `DeviceOptions.retry` times. After an error it has ended. Inline, arrays copied in advance
        are lost with the context, like all others: using them raises `StaleRefError`.

    Raises:
        TypeError: `device` is not a device, `batches` is not a source of batches, or, later, an item is not a
            batch.
        ValueError: `depth` is not an integer of at least 1.
    """
    check_device("stream", device)
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"stream: depth must be an integer of at least 1, got {depth!r}")
    return _Prefetcher(device, _source_of(batches), depth)


def _source_of(batches: object) -> Iterable[Any] | AsyncIterable[Any]:
    """Return the source as an iterable.

    Raises:
        TypeError: It is not a source.
    """
    description = f"{type(batches).__name__}{what_to_do(batches, is_array=False)}"
    if inspect.isgeneratorfunction(batches) or inspect.isasyncgenfunction(batches):
        description = f"the generator function {batches.__name__}; call it: {batches.__name__}()"
    elif inspect.iscoroutinefunction(batches):
        description = f"the async function {batches.__name__}; write an async generator, and call it"
    elif not isinstance(batches, (str, bytes, Mapping, AccelRef, NotAwaited)):
        if isinstance(batches, (Iterable, AsyncIterable)):
            return cast("Iterable[Any]", batches)
        if callable(batches):
            return _called(batches)
    raise TypeError(
        "stream: batches must be an iterable or async iterable of NumPy arrays, or a callable that returns "
        f"the next one, got {description}"
    )


def _called(batches: Callable[[], Any]) -> Iterator[Any]:
    # `iter(batches, None)` would compare each array with None, element by element.
    while (batch := batches()) is not None:
        yield batch


class _Prefetcher(NotAwaited):
    """Reads batches in advance while it is open, and iterates over them."""

    what_to_do = "write `async with ta.stream(...) as ahead:`, and `async for x in ahead:` in it"

    def __init__(self, device: Device, source: Iterable[Any] | AsyncIterable[Any], depth: int) -> None:
        self._device = device
        self._source = source
        # One more batch is in transit, or waits for room in the channel.
        self._send, self._ready = trio.open_memory_channel[Any](depth - 1)
        self._manager: AbstractAsyncContextManager[trio.Nursery, bool | None] | None = None
        self._scope = trio.CancelScope()
        # The error that the program gets after the last batch, and an error while closing a source that it
        # has left.
        self._error: Exception | None = None
        self._end_error: Exception | None = None

    @enable_ki_protection
    async def __aenter__(self) -> Self:
        if self._manager is not None:
            raise RuntimeError("stream: it was opened before; call ta.stream() again")
        refuse_recording("stream", "iterate outside of the step, and replay the graph for each batch")
        self._manager = trio.open_nursery()
        nursery = await self._manager.__aenter__()
        nursery.start_soon(self._read)
        return self

    @enable_ki_protection
    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._manager is not None
        self._scope.cancel(reason="the program has left the stream")
        # The nursery does not get the body's error, because it would put it into a group. Python raises it.
        await self._manager.__aexit__(None, None, None)  # noqa: ASYNC102  # ends as soon as the source lets it
        # This drops the batches in the channel, and an error that the program has not reached, which refers
        # to this object.
        self._ready.close()
        self._error = None
        if error is None and self._end_error is not None:
            raise self._end_error

    def __aiter__(self) -> Self:
        if self._manager is None:
            raise TypeError(f"stream: it is not open; {self.what_to_do}")
        return self

    async def __anext__(self) -> Any:
        try:
            return await Leavable(self._ready.receive())
        except trio.EndOfChannel:
            error, self._error = self._error, None
        except trio.ClosedResourceError:
            raise RuntimeError(f"stream: its block has ended; {self.what_to_do}") from None
        if error is None:
            raise StopAsyncIteration
        try:
            raise error
        finally:
            # The error refers to this frame, so this frame must not refer to the error.
            del error

    @enable_ki_protection
    async def _read(self) -> None:
        """Copy batches to the device until the source ends, or the program has left."""
        close: _Call | None = None
        number = 0
        with self._send, self._scope:
            try:
                next_batch, close = await self._begin()
                while (batch := await next_batch()) is not _END:
                    # No variable refers to the sent batch, because only the program may own it.
                    await self._send.send(await self._put(batch, number))
                    del batch
                    number += 1
            except Exception as error:  # noqa: BLE001  # the program gets it in order
                error.add_note(f"stream: it was batch {number}")
                self._error = error
            finally:
                if close is not None:
                    await self._close(close)  # noqa: ASYNC102  # it shields itself

    async def _begin(self) -> tuple[_Call, _Call | None]:
        """Begin to iterate; return a function for the next batch or `_END`, and the closing function."""
        if isinstance(self._source, AsyncIterable):
            later: AsyncIterator[Any] = aiter(self._source)
            return partial(anext, later, _END), getattr(later, "aclose", None)
        # A blocking source must not occupy the threads of others.
        in_thread: Any = partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1))
        iterator: Iterator[Any] = await in_thread(iter, self._source)
        close = getattr(iterator, "close", None)
        return partial(in_thread, next, iterator, _END), None if close is None else partial(in_thread, close)

    async def _close(self, close: _Call) -> None:
        try:
            with trio.move_on_after(self._device.options.close_grace, shield=True):
                await close()
        except Exception as error:  # noqa: BLE001  # the program gets it, unless it has another
            self._error = self._error or error
            if self._scope.cancel_called:
                self._end_error = error

    async def _put(self, batch: object, number: int) -> Any:
        """Copy the arrays of a batch, all or none; return them in the same structure."""
        if isinstance(batch, np.ndarray):
            return await self._device.put(cast("HostArray", batch))
        if isinstance(batch, dict):
            named = cast("dict[object, object]", batch)
            return dict(zip(named, await self._put_all(named.values(), number), strict=True))
        if isinstance(batch, tuple):
            return tuple(await self._put_all(cast("tuple[object, ...]", batch), number))
        raise TypeError(
            f"stream: batch {number} must be a NumPy array, or a tuple or dict of them, got "
            f"{type(batch).__name__}{what_to_do(batch)}"
        )

    async def _put_all(self, items: Iterable[object], number: int) -> list[AccelRef]:
        refs: list[AccelRef] = []
        try:
            for item in items:
                if not isinstance(item, np.ndarray):
                    raise TypeError(  # noqa: TRY301
                        f"stream: each item of batch {number} must be a NumPy array, got "
                        f"{type(item).__name__}{what_to_do(item)}"
                    )
                refs.append(await self._device.put(cast("HostArray", item)))
        except BaseException:
            # A kept error would keep the memory.
            for ref in refs:
                ref.release()
            raise
        return refs
