"""Batches of a training: fetched in advance, and kept until their step is committed.

A caller may pass one iterator to several calls of `Trainer.steps`. Because an iterator cannot go back, a
`Source` keeps each fetched batch until its step is committed, and hands it to the next call after a failure.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import outcome
import trio

from ..actors import ParkingLot

__all__: list[str] = []

END = object()


async def next_of(iterator: Any) -> Any:
    """Return the next batch of an iterator, a plain one in a thread; `END` if there is none."""
    if not hasattr(iterator, "__anext__"):
        return await trio.to_thread.run_sync(next, iterator, END)
    try:
        return await iterator.__anext__()
    except StopAsyncIteration:
        return END


def iterator_of(batches: Any) -> Any:
    """Return the iterator of an iterable, plain or async."""
    return batches.__aiter__() if hasattr(batches, "__aiter__") else iter(batches)


class Source:
    """An iterator with its fetched, unused batches.

    Args:
        iterator: A plain iterator, read in a thread, or an async one.
        position: The number of its first batch in the training.
        begin_task: Starts a task that ends with the trainer.
    """

    def __init__(
        self, iterator: Any, position: int, begin_task: Callable[[Callable[[], Awaitable[None]]], None]
    ) -> None:
        self._position = position
        self._begin_task = begin_task
        # Batches, and errors of the iterator in batch order.
        self._ready: deque[Any] = deque()
        self._changed = ParkingLot()
        self._is_running = self._is_exhausted = False
        # The number of batches to fetch in advance; 0 ends the task.
        self._wanted = 0
        try:
            # Hold the iterator weakly: a caller who drops a generator expects it to end.
            self.find: Callable[[], Any] = weakref.ref(iterator)
        except TypeError:
            self.find = lambda: iterator

    @property
    def is_needed(self) -> bool:
        """Whether the iterator can be given again, and has batches."""
        return not self._is_exhausted and self.find() is not None

    @property
    def is_weak(self) -> bool:
        """Whether only others keep the iterator."""
        return isinstance(self.find, weakref.ref)

    async def batch(self, number: int, *, is_last: bool) -> Any:
        """Return the batch of a number, which stays until the next one is asked for.

        Args:
            number: Its number in the training; those before it are left out.
            is_last: Whether to fetch no batch in advance.

        Raises:
            StopAsyncIteration: There are no more.
            Exception: The iterator has raised it.
        """
        self._wanted = 1 if is_last else 2
        while True:
            self.leave_out(number)
            self._begin()
            if self._ready:
                first = self._ready[0]
                if not isinstance(first, outcome.Error):
                    return first
                # An error does not count as a batch of the training.
                self._ready.popleft()
                first.unwrap()
            if self._is_exhausted:
                raise StopAsyncIteration
            await self._changed.park()

    def leave_out(self, number: int) -> None:
        """Forget the batches before a number."""
        while self._ready and self._position < number and not isinstance(self._ready[0], outcome.Error):
            self._ready.popleft()
            self._position += 1

    def rest(self) -> None:
        """Stop fetching; a batch in progress is still kept."""
        self._wanted = 0
        self._changed.unpark_all()

    def _begin(self) -> None:
        self._changed.unpark_all()
        if not (self._is_running or self._is_exhausted):
            self._is_running = True
            self._begin_task(partial(self._run, self.find()))

    async def _run(self, iterator: Any) -> None:
        # One task asks an async generator as long as possible, because its cancel scopes belong to a task.
        try:
            while self._wanted and not self._is_exhausted:
                if len(self._ready) < self._wanted:
                    await self._fetch(iterator)
                    self._changed.unpark_all()
                else:
                    await self._changed.park()
        finally:
            self._is_running = False

    async def _fetch(self, iterator: Any) -> None:
        try:
            batch = await next_of(iterator)
        except Exception as error:  # noqa: BLE001  # raised where the batches are read
            self._ready.append(outcome.Error(error))
            return
        if batch is END:
            self._is_exhausted = True
        else:
            self._ready.append(batch)


class Sources:
    """The sources of a trainer, by the identities of their iterators.

    Args:
        begin_task: Starts a task that ends with the trainer.
    """

    def __init__(self, begin_task: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        self._begin_task = begin_task
        self._known: dict[int, tuple[Source, bool]] = {}

    def of(self, batches: Any, position: int) -> tuple[Source, Any]:
        """Return the source of some batches, and the iterator, which the caller keeps while it is used.

        Args:
            batches: An iterable or iterator, plain or async.
            position: The number of its first batch, if it is not known yet.
        """
        iterator = iterator_of(batches)
        entry = self._known.get(id(iterator))
        if entry is None or entry[0].find() is not iterator:
            entry = Source(iterator, position, self._begin_task), iterator is batches
        # An iterable may return the same iterator each time, so remember the iterator of the last call.
        self._known = {
            key: (source, is_given)
            for key, (source, is_given) in self._known.items()
            if source.is_needed and (is_given or source.is_weak)
        }
        self._known[id(iterator)] = entry
        return entry[0], iterator
