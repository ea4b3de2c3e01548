"""Requests that wait for a batch, and a batch on its way through the model."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar, cast

import attrs
import outcome
import trio

from ..actors import ActorError, DeferredReply
from ..backends.base import (
    CompletionTimeoutError,
    ContextLostError,
    DeviceLostError,
    QueueFullError,
    Refused,
)
from ._outputs import ModelOutputError
from ._servants import outcome_of

__all__ = ["BatchResults", "may_be_one_request"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@attrs.frozen(kw_only=True)
class BatchLimits:
    """How large a batch may be, and how long it may wait.

    Attributes:
        size: The most requests.
        cost: The highest sum of their costs.
        wait: The most seconds that the first request waits for others.
        is_adaptive: Whether it waits less where that brings nothing.
    """

    size: int
    cost: float
    wait: float
    is_adaptive: bool


@attrs.define(eq=False)
class Entry(Generic[ItemT, ResultT]):
    """A request that waits, or is in a batch.

    Attributes:
        item: The model's input.
        arrived: When it came.
        key: Requests of one key go together.
        cost: Its part of the cost of a batch.
        reply: Takes its outcome.
        on_leave: Called when its asker leaves the batch; None while it is in no batch.
    """

    item: ItemT
    arrived: float
    key: Hashable = None
    cost: float = 0.0
    reply: DeferredReply[ResultT] = attrs.field(init=False)
    on_leave: Callable[[], None] | None = attrs.field(default=None, init=False)


class _Bucket(Generic[ItemT, ResultT]):
    """The requests of one key, in order of arrival."""

    __slots__ = ("cost", "entries")

    def __init__(self) -> None:
        # Any of them may leave, and a full one is taken from in front.
        self.entries: OrderedDict[Entry[ItemT, ResultT], None] = OrderedDict()
        self.cost: float = 0.0

    def take(self, limits: BatchLimits) -> list[Entry[ItemT, ResultT]]:
        """Take the first ones, as many as fit."""
        taken: list[Entry[ItemT, ResultT]] = []
        cost = 0.0
        for entry in self.entries:
            cost += entry.cost
            if len(taken) == limits.size or cost > limits.cost:
                break
            taken.append(entry)
        for entry in taken:
            self.drop(entry)
        return taken

    def drop(self, entry: Entry[ItemT, ResultT]) -> None:
        """Take one out."""
        del self.entries[entry]
        self.cost -= entry.cost


class BatchQueue(Generic[ItemT, ResultT]):
    """Requests by key. A batch is put together when it is launched, not before.

    So a request that leaves makes room for a later one. A batch is due when it is full, when its first
    request has waited for long enough, or when the model has nothing to do and the batch is as large as the
    one before.

    Invariant: each bucket has at least one entry.

    Attributes:
        count: Requests that wait.
        last_size: Requests in the last batch.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._buckets: dict[Hashable, _Bucket[ItemT, ResultT]] = {}
        self.count: int = 0
        self.last_size: int = 1

    @property
    def entries(self) -> list[Entry[ItemT, ResultT]]:
        """All that wait."""
        return [entry for bucket in self._buckets.values() for entry in bucket.entries]

    def add(self, entry: Entry[ItemT, ResultT]) -> None:
        """Take a request in.

        Raises:
            TypeError: Its key is not hashable.
        """
        bucket = self._buckets.get(entry.key)
        if bucket is None:
            bucket = self._buckets[entry.key] = _Bucket()
        bucket.entries[entry] = None
        bucket.cost += entry.cost
        self.count += 1

    def remove(self, entry: Entry[ItemT, ResultT]) -> None:
        """Take a request out that leaves."""
        bucket = self._buckets[entry.key]
        bucket.drop(entry)
        self._drop_if_empty(entry.key, bucket)
        self.count -= 1

    def oldest(self) -> Entry[ItemT, ResultT]:
        """Return the request that has waited for longest."""
        return min((_first(bucket) for bucket in self._buckets.values()), key=lambda entry: entry.arrived)

    def take(self, now: float, *, is_idle: bool) -> list[Entry[ItemT, ResultT]]:
        """Take the batch that is to be launched now: of those that are due, the one that began first.

        Args:
            now: Trio's time.
            is_idle: Whether the model has nothing to do.

        Returns:
            Its requests in order of arrival; none if no batch is due.
        """
        due = [bucket for bucket in self._buckets.values() if self._due(bucket, now, is_idle=is_idle) <= now]
        if not due:
            return []
        bucket = min(due, key=lambda bucket: _first(bucket).arrived)
        taken = bucket.take(self._limits)
        self._drop_if_empty(taken[0].key, bucket)
        self.last_size = len(taken)
        self.count -= self.last_size
        return taken

    def due(self, now: float, *, is_idle: bool) -> float:
        """Tell when the next batch is to be launched, if no request comes; infinity if none waits."""
        return min(
            (self._due(bucket, now, is_idle=is_idle) for bucket in self._buckets.values()), default=math.inf
        )

    def due_with(self, entry: Entry[ItemT, ResultT], now: float, *, is_idle: bool) -> float:
        """Tell when the bucket of a request that waits is to be launched."""
        return self._due(self._buckets[entry.key], now, is_idle=is_idle)

    def _due(self, bucket: _Bucket[ItemT, ResultT], now: float, *, is_idle: bool) -> float:
        limits = self._limits
        enough = self.last_size if is_idle and limits.is_adaptive else limits.size
        if len(bucket.entries) >= enough or bucket.cost >= limits.cost:
            return now
        return _first(bucket).arrived + limits.wait

    def _drop_if_empty(self, key: Hashable, bucket: _Bucket[ItemT, ResultT]) -> None:
        if not bucket.entries:
            del self._buckets[key]


def _first(bucket: _Bucket[ItemT, ResultT]) -> Entry[ItemT, ResultT]:
    return next(iter(bucket.entries))


ResultT_co = TypeVar("ResultT_co", covariant=True)

# A loss is that of the whole batch, whatever its requests are.
_OF_ALL = (ActorError, CompletionTimeoutError, ContextLostError, DeviceLostError, QueueFullError)


class BatchResults(Protocol[ResultT_co]):
    """Result of a model of batches: a list, a NumPy array or an `AccelRef`, among others."""

    def __len__(self) -> int:
        """As many as there were items."""
        ...

    def __getitem__(self, index: int, /) -> ResultT_co:
        """Return the result of one item."""
        ...


BatchModel = Callable[[list[ItemT]], Awaitable[BatchResults[ResultT]]]


def may_be_one_request(error: Exception) -> bool:
    """Tell whether a batch may have failed because of one of its requests; the default of `Batcher.divides`.

    Not so for a device that was lost or hung, a context that was lost to something else, an actor that
    crashed, stopped or has no room (`ActorError`), a device that takes no more (`QueueFullError`), and
    results that are none (`ModelOutputError`). Of a group, each member counts.
    """
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.subgroup((*_OF_ALL, ModelOutputError)) is None
    if isinstance(error, ContextLostError):
        return error.is_to_blame
    return not isinstance(error, (*_OF_ALL, ModelOutputError))


@attrs.frozen(kw_only=True)
class Blame:
    """How a batch that fails is divided.

    Attributes:
        splits: How often a batch is halved of which no part has succeeded.
        divides: Whether an error may be that of one request.
    """

    splits: int
    divides: Callable[[Exception], bool]


@attrs.define
class Counts:
    """Counts of all batches.

    Attributes:
        requests: Calls that came.
        answered: Calls with a result.
        failed: Calls that were given an error of the model.
        cancelled: Calls whose askers have gone.
        refused: Calls that were never executed.
        batches: Batches that were launched.
        batched: Calls in these.
        launches: How often the model was called.
    """

    requests: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    batches: int = 0
    batched: int = 0
    launches: int = 0


class BatchRun(Generic[ItemT, ResultT]):
    """One batch on its way through the model."""

    def __init__(
        self,
        model: BatchModel[ItemT, ResultT],
        entries: list[Entry[ItemT, ResultT]],
        blame: Blame,
        counts: Counts,
    ) -> None:
        self._model = model
        self._blame = blame
        self._counts = counts
        self._scope = trio.CancelScope()
        self.entries: list[Entry[ItemT, ResultT]] = entries
        for entry in entries:
            entry.on_leave = self._look_who_waits

    async def run(self) -> None:
        """Give each request its outcome."""
        self._counts.batches += 1
        self._counts.batched += len(self.entries)
        with self._scope:
            error = await self._launch(self.entries)
            if error is not None:
                await self._divide(self.entries, error)

    def _look_who_waits(self) -> None:
        """End the call of the model if all askers have gone."""
        if all(entry.reply.is_done for entry in self.entries):
            self._scope.cancel(reason="all askers of the batch were cancelled")

    async def _divide(self, entries: list[Entry[ItemT, ResultT]], error: Exception) -> None:
        """Halve failed parts until the requests that fail are alone; see `Batcher` (D122)."""
        works, level = False, 0
        failed = [(entries, error)]
        while failed:
            await trio.lowlevel.checkpoint_if_cancelled()
            parts, failed = failed, list[tuple[list[Entry[ItemT, ResultT]], Exception]]()
            for part, of_part in parts:
                # A program that has refused the batch goes on: then it pays to look for the bad request.
                is_refusal = isinstance(of_part, Refused) or isinstance(of_part.__cause__, Refused)
                may_go_on = works or level < self._blame.splits or (self._blame.splits > 0 and is_refusal)
                if len(part) < 2 or not may_go_on or not self._divides(of_part):
                    self._fail(part, of_part)
                    continue
                middle = len(part) // 2
                for half in (part[:middle], part[middle:]):
                    waiting = [entry for entry in half if not entry.reply.is_done]
                    if not waiting:
                        continue
                    of_half = await self._launch(waiting)
                    if of_half is None:
                        works = True
                    else:
                        failed.append((waiting, of_half))
            level += 1

    def _divides(self, error: Exception) -> bool:
        try:
            return self._blame.divides(error)
        except Exception as bad:  # noqa: BLE001  # a stranger's function
            error.add_note(f"the function `divides` of the batcher failed for this error: {bad!r}")
            return False

    async def _launch(self, entries: list[Entry[ItemT, ResultT]]) -> Exception | None:
        """Call the model once, and reply; returns why there are no results."""
        self._counts.launches += 1
        results = await outcome_of(self._results(entries))
        if isinstance(results, outcome.Error):
            return cast("Exception", results.error)
        for entry, value in zip(entries, results.value, strict=True):
            if isinstance(value, outcome.Error) and isinstance(value.error, Exception):
                self._counts.failed += entry.reply.fail(value.error)
            else:
                self._counts.answered += entry.reply.set(value)
        return None

    async def _results(self, entries: list[Entry[ItemT, ResultT]]) -> list[ResultT]:
        return _one_for_each(await self._model([entry.item for entry in entries]), len(entries))

    def _fail(self, entries: list[Entry[ItemT, ResultT]], error: Exception) -> None:
        waiting = [entry for entry in entries if not entry.reply.is_done]
        for number, entry in enumerate(waiting):
            # D122: several tasks that raise one exception object would write to one traceback.
            self._counts.failed += entry.reply.fail(_copy(error) if number else error)


def _one_for_each(results: BatchResults[ResultT], count: int) -> list[ResultT]:
    """Take the results of a batch apart.

    Raises:
        ModelOutputError: There is not exactly one for each request.
    """
    kind, cause = type(results), None
    is_sequence = hasattr(kind, "__getitem__") and not issubclass(kind, (str, bytes, bytearray, Mapping))
    length, values = -1, list[ResultT]()
    try:
        length = len(results) if is_sequence else -1
        values += [results[index] for index in range(count)] if length == count else []
    except Exception as error:  # noqa: BLE001  # a stranger's class
        is_sequence, cause = False, error
    if not is_sequence:
        raise ModelOutputError(
            f"the model returned {kind.__name__} for {count} item(s), which is no sequence of results; "
            "let it return a list, an array or an AccelRef with one result for each item"
        ) from cause
    if length != count:
        raise ModelOutputError(
            f"the model returned {length} result(s) for {count} item(s); "
            "let it return one for each item, in the order of the items"
        )
    return values


def _copy(error: Exception) -> Exception:
    """Return a copy of an exception, or itself where it cannot be copied."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  # a stranger's class
        return error
    if type(copied) is not type(error):
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)
