"""Cached results of a model: calls with equal keys share one computation at a time."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import attrs
import trio

from .._names import later
from ..actors import ParkingLot, checked_options, copied, must_be_count, must_be_positive
from ..devices import AccelRef

if TYPE_CHECKING:
    from .. import patterns
else:
    patterns = later("trio_accel.patterns")

__all__ = ["Cache", "HitStatistics"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@attrs.frozen(kw_only=True)
class HitStatistics:
    """Counts of a `Cache`'s calls, and of its values.

    Attributes:
        hits: Calls that got a cached value.
        shared: Calls that waited for the computation of another call with an equal key.
        computed: Calls of the model, including failed and cancelled ones.
        evicted: Values removed because there were too many, or too many bytes.
        entries: The current number of values, including expired values not requested since.
        nbytes: The current total cost of the values.
    """

    hits: int
    shared: int
    computed: int
    evicted: int
    entries: int
    nbytes: float


@attrs.frozen(eq=False)
class _CacheEntry:
    """A value with its cost, its arrays on devices, and the time of its end."""

    value: Any
    cost: float
    arrays: tuple[AccelRef, ...]
    ends: float

    def is_good(self) -> bool:
        return trio.current_time() < self.ends and all(array.is_usable for array in self.arrays)


@attrs.define(eq=False)
class _Computation:
    """A computation for one key, and the calls that wait for its end, in order.

    Attributes:
        task: The task that computes; None while the next waiting one is about to.
        is_done: Whether there is a value or an error.
    """

    task: trio.lowlevel.Task | None = None
    waiting: ParkingLot = attrs.field(factory=ParkingLot)
    is_done: bool = False
    value: Any = None
    error: Exception | None = None


class Cache(Generic[ItemT, ResultT]):
    """A model that remembers results, itself an async callable: ``Cache(model, max_entries=10_000)``.

    * **Equal keys share a computation.** Calls with the key of a running computation wait for it, and get its
      value or a copy of its error. If the computing call is cancelled, the call that has waited longest
      computes, and the others wait on.
    * **The least recently used value leaves first**, when there are more than `max_entries`, or more bytes
      than `max_bytes`. A single value with a higher cost is returned and not cached.
    * **Errors are not cached.** The next call computes again.
    * **Device arrays are cached by reference**, also in tuples, lists and mappings. If one was released, lost
      or damaged, or its device was closed (`AccelRef.is_usable`), the next call computes again. An evicted
      array is not released: its memory is freed with its last reference. A view keeps the whole array.

    All calls get the same object, so do not change a value. Use the object in only one Trio run.

    Args:
        model: An async callable of one item, or the address of an actor.
        max_entries: The maximum number of values.
        max_bytes: The maximum total cost of the values; by default unlimited.
        key: Returns the hashable key of an item; by default the item. Items with equal keys must have equal
            results. Note that ``1 == 1.0 == True``.
        cost: Returns the cost of a result. By default bytes: `nbytes` of arrays, otherwise `sys.getsizeof`,
            added up in tuples, lists and mappings.
        ttl: Seconds for which a value is cached, from the end of its computation.

    Raises:
        ValueError: A number is zero, negative or NaN.
        TypeError: `model` is not a model, or an option has a wrong type.
    """

    @checked_options
    def __init__(
        self,
        model: patterns.Model[ItemT, ResultT],
        *,
        max_entries: int,
        max_bytes: int | None = None,
        key: Callable[[ItemT], Hashable] | None = None,
        cost: Callable[[ResultT], float] | None = None,
        ttl: float = math.inf,
    ) -> None:
        self._ask = patterns.as_callable(model)
        self._most = must_be_count("Cache: max_entries", max_entries)
        self._most_bytes = math.inf if max_bytes is None else must_be_count("Cache: max_bytes", max_bytes)
        self._key_of = key
        self._cost_of = cost or _bytes_of
        self._ttl = ttl if ttl == math.inf else must_be_positive("Cache: ttl", ttl)
        # The least recently used one is the first.
        self._kept: dict[Hashable, _CacheEntry] = {}
        self._running: dict[Hashable, _Computation] = {}
        self._nbytes = 0.0
        self._counts = Counter[str]()

    def __repr__(self) -> str:
        return f"<Cache: {len(self._kept)} of {self._most} values, {self._nbytes:g} bytes>"

    async def __call__(self, item: ItemT) -> ResultT:
        """Return the cached result of an item, or compute it.

        Raises:
            TypeError: The key is not hashable.
            ModelOutputError: The model returned None, usually because of a forgotten ``return``. Nothing is
                cached.
            RuntimeError: The model asks for the key that it computes in the same task, and would wait for
                itself.
            Exception: The error of the model, of `key` or of `cost`.
        """
        key = self._key(item)
        entry = self._kept.pop(key, None)
        if entry is not None and entry.is_good():
            self._kept[key] = entry
            self._counts["hits"] += 1
            await trio.lowlevel.checkpoint()
            return cast("ResultT", entry.value)
        if entry is not None:
            self._nbytes -= entry.cost
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Computation()
        else:
            if running.task is trio.lowlevel.current_task():
                raise RuntimeError(
                    f"Cache: the computation of {key!r} asks for {key!r}, so it would never end"
                )
            self._counts["shared"] += 1
            await running.waiting.park()
        if not running.is_done:
            await self._compute(running, key, item)
        elif running.error is not None:
            raise copied(running.error)
        return cast("ResultT", running.value)

    def forget(self, item: ItemT) -> None:
        """Drop the value of an item.

        A running computation is not kept either: calls that wait for it get its value, and later ones compute
        again.

        Raises:
            TypeError: The key cannot be hashed.
        """
        key = self._key(item)
        self._running.pop(key, None)
        if (entry := self._kept.pop(key, None)) is not None:
            self._nbytes -= entry.cost

    def statistics(self) -> HitStatistics:
        """Return the counts so far."""
        counts = {name: self._counts[name] for name in ("hits", "shared", "computed", "evicted")}
        return HitStatistics(**counts, entries=len(self._kept), nbytes=self._nbytes)

    def _key(self, item: ItemT) -> Hashable:
        key = item if self._key_of is None else self._key_of(item)
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"Cache: a key must be hashable, got {type(key).__name__} ({error}); give key= a function "
                "that makes one of an item"
            ) from None
        return key

    async def _compute(self, running: _Computation, key: Hashable, item: ItemT) -> None:
        self._counts["computed"] += 1
        running.task = trio.lowlevel.current_task()
        try:
            running.value = value = await self._ask(item)
            cost = self._cost(value)
            running.is_done = True
            if self._running.get(key) is running:
                self._keep(key, value, cost)
        except Exception as error:
            running.error, running.is_done = error, True
            raise
        finally:
            running.task = None
            is_over = running.is_done or not running.waiting
            if is_over and self._running.get(key) is running:
                del self._running[key]
            # After a cancelled computation, the longest waiting call computes.
            (running.waiting.unpark_all if is_over else running.waiting.unpark)()

    def _cost(self, value: ResultT) -> float:
        if value is None:
            raise patterns.ModelOutputError("Cache: the model returned None, and must return a value to keep")
        return must_be_positive("Cache: the cost of a value", self._cost_of(value), allows_zero=True)

    def _keep(self, key: Hashable, value: ResultT, cost: float) -> None:
        if cost > self._most_bytes:
            return
        arrays = tuple(leaf for leaf in _leaves(value) if isinstance(leaf, AccelRef))
        self._kept[key] = _CacheEntry(value, cost, arrays, trio.current_time() + self._ttl)
        self._nbytes += cost
        while len(self._kept) > self._most or self._nbytes > self._most_bytes:
            self._nbytes -= self._kept.pop(next(iter(self._kept))).cost
            self._counts["evicted"] += 1


def _leaves(value: object) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and mappings."""
    if isinstance(value, Mapping):
        value = tuple(cast("Mapping[object, object]", value).values())
    if isinstance(value, (tuple, list)):
        for part in cast("tuple[object, ...]", value):
            yield from _leaves(part)
    else:
        yield value


def _bytes_of(value: object) -> int:
    return sum(leaf.nbytes if hasattr(leaf, "nbytes") else sys.getsizeof(leaf) for leaf in _leaves(value))
