"""The parts of a `ContinuousBatcher`'s sequence, read as they are made."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import attrs
import outcome
import trio

from ..actors import opens, running_beside
from ..devices import track_progress
from ._submit import ItemT, Model, as_callable, outcome_of

__all__ = ["PartStream", "Streamed", "open_parts"]

PartT = TypeVar("PartT")


@attrs.define(eq=False, repr=False)
class PartStream(Generic[PartT]):
    """An async iterator over the parts of a sequence, for one task at a time. Made by `open_parts`.

    Attributes:
        unread: The parts that the reader has not read yet.
        on_read: Called when a part is read while the sequence is held back; None while no batcher fills it.
        is_held: Whether the sequence waits for its reader.
        report: Called with the number of parts read so far.
    """

    report: Callable[[float], object]
    unread: deque[PartT] = attrs.field(factory=deque[Any], init=False)
    on_read: Callable[[], object] | None = attrs.field(default=None, init=False)
    is_held: bool = attrs.field(default=False, init=False)
    _count: int = attrs.field(default=0, init=False)
    _results: list[outcome.Outcome[tuple[PartT, ...]]] = attrs.field(factory=list[Any], init=False)
    _parts: tuple[PartT, ...] | None = attrs.field(default=None, init=False)
    _has_parts: bool = attrs.field(default=False, init=False)
    _has_ended: bool = attrs.field(default=False, init=False)
    _is_read: bool = attrs.field(default=False, init=False)
    # A batch wakes many readers at each step. A `ParkingLot` would take half of the time for that.
    _reader: trio.lowlevel.Task | None = attrs.field(default=None, init=False)

    @property
    def parts(self) -> tuple[PartT, ...]:
        """All parts of the sequence.

        Raises:
            RuntimeError: The iteration has not ended.
        """
        if self._parts is None:
            raise RuntimeError("parts: the stream has not ended; iterate over it to its end")
        return self._parts

    def __aiter__(self) -> PartStream[PartT]:
        return self

    async def __anext__(self) -> PartT:
        """Return the next part; a cancellation loses no part.

        Raises:
            trio.BusyResourceError: Another task waits for the next part.
            Exception: Error of the batcher, after the parts before it.
        """
        if self._is_read:
            raise trio.BusyResourceError("another task reads this stream: its parts go to one reader")
        self._is_read = True
        try:
            if self.unread or self._has_ended:
                await trio.lowlevel.checkpoint()
            else:
                self._reader = trio.lowlevel.current_task()
                self._reader.custom_sleep_data = self
                await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            self._is_read = False
            # A task that drives the await by hand may have closed it.
            self._reader = None
        if self.unread:
            part = self.unread.popleft()
            self._count += 1
            self.report(self._count)
            if self.is_held and self.on_read is not None:
                self.is_held = False
                self.on_read()
            return part
        if self._results:
            self._parts = self._results.pop().unwrap()
        raise StopAsyncIteration

    def begin(self, on_read: Callable[[], object]) -> None:
        """Have a batcher fill it.

        Raises:
            RuntimeError: Another sequence fills it, or has given parts.
        """
        if self._has_parts or self.on_read is not None:
            raise RuntimeError(
                "the stream has a sequence already: a request is streamed from one place, once"
            )
        self.on_read = on_read

    def put(self, parts: Sequence[PartT]) -> None:
        """Give parts to the reader."""
        self._has_parts = True
        self.unread.extend(parts)
        self._wake()

    def end(self, result: outcome.Outcome[tuple[PartT, ...]]) -> None:
        """Give the reader the outcome, after the parts."""
        self._results.append(result)
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and reader.custom_sleep_data is self:
            trio.lowlevel.reschedule(reader)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED


@attrs.frozen(eq=False)
class Streamed(Generic[ItemT, PartT]):
    """An item of a `ContinuousBatcher` with parts that are read as they are made; made by `open_parts`.

    Patterns in front of the batcher pass it along. The batcher's own functions get the plain item.

    Attributes:
        item: The item.
        stream: Receives the parts.
    """

    item: ItemT
    stream: PartStream[PartT]


Streamable: TypeAlias = ItemT | Streamed[ItemT, PartT]


@opens("the parts are not open yet: async with open_parts(...) as parts: async for part in parts")
async def open_parts(
    batcher: Model[Streamed[ItemT, PartT], tuple[PartT, ...]], item: ItemT, /
) -> AsyncGenerator[PartStream[PartT]]:
    """Request a sequence from a batcher, and iterate over its parts as they are made.

    ``async with open_parts(batcher, prompt) as stream:``, and then ``async for token in stream:``. An error
    follows the parts before it. At the end of the iteration, ``stream.parts`` has all of them.

    A slow reader holds up only its own sequence: the batcher makes at most `buffer` parts in advance, and the
    parts of running steps. At the end of the block, and at the reader's deadline, the sequence leaves the
    batch before the next step.

    Args:
        batcher: A `ContinuousBatcher`, or an actor that leads to one, such as a `HotSwap`. A request must not
            be sent to two of them: the second one refuses it.
        item: The item.

    Raises:
        TypeError: `batcher` is not a model.
    """
    ask = as_callable(batcher)
    with track_progress("sequence", unit="parts") as report:
        stream: PartStream[PartT] = PartStream(report)

        async def generate() -> None:
            stream.end(await outcome_of(ask(Streamed(item, stream))))

        async with running_beside(generate):
            yield stream
