"""Requests that wait for a batch: which of them go together, and when."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import attrs

from ..actors import DeferredReply

__all__ = ["BatchLimits", "BatchQueue", "Entry"]

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
        item: What the model is given.
        arrived: When it came.
        key: Requests of one key go together.
        cost: Its part of the cost of a batch.
        reply: Where its outcome goes.
        on_leave: What its batch wants to hear of; None while it is in none.
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
        """The request that has waited for longest."""
        return min((_first(bucket) for bucket in self._buckets.values()), key=_arrived)

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
        """When the next batch is to be launched, if no request comes; infinity if none waits."""
        return min(
            (self._due(bucket, now, is_idle=is_idle) for bucket in self._buckets.values()), default=math.inf
        )

    def due_with(self, entry: Entry[ItemT, ResultT], now: float, *, is_idle: bool) -> float:
        """When the bucket of a request that waits is to be launched."""
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


def _arrived(entry: Entry[ItemT, ResultT]) -> float:
    return entry.arrived
