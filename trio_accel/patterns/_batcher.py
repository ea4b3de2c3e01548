"""Requests that come one by one wait for a batch, and go through a model together."""

from __future__ import annotations

import copy
import math
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast, final

import attrs
import outcome
import trio

from ..actors import (
    ActorContext,
    ActorError,
    DeferredReply,
    MailboxFullError,
    Overflow,
    Reading,
    Spread,
    handles,
    quick,
)
from ..backends.base import CompletionTimeoutError, ContextLostError, DeviceLostError, QueueFullError, Refused
from ._checks import ModelOutputError, must_be_count, must_be_positive
from ._servants import (
    QUEUE_WAIT,
    REFUSED,
    WAITS,
    Call,
    ItemT,
    Model,
    ResultT,
    Servant,
    as_callable,
    count,
    end_with_incarnation,
    outcome_of,
    readings_of,
)

__all__ = ["BatchResults", "Batcher", "BatcherStatistics", "may_be_one_request"]


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

    def take(self, most: int, highest: float) -> list[Entry[ItemT, ResultT]]:
        """Take the first ones, as many as fit: so many, of such a cost."""
        taken: list[Entry[ItemT, ResultT]] = []
        cost = 0.0
        for entry in self.entries:
            cost += entry.cost
            if len(taken) == most or cost > highest:
                break
            taken.append(entry)
        for entry in taken:
            self.drop(entry)
        return taken

    def drop(self, entry: Entry[ItemT, ResultT]) -> None:
        """Take one out."""
        del self.entries[entry]
        self.cost -= entry.cost


@attrs.define(eq=False, kw_only=True)
class BatchQueue(Generic[ItemT, ResultT]):
    """Requests by key. A batch is put together when it is launched, not before.

    So a request that leaves makes room for a later one. A batch is due when it is full, when its first
    request has waited for long enough, or when the model has nothing to do and the batch is as large as the
    one before.

    Invariant: each bucket has at least one entry.

    Attributes:
        size: The most requests in a batch.
        cost: The highest sum of their costs.
        wait: The most seconds that the first request waits for others.
        is_adaptive: Whether it waits less where that brings nothing.
        count: Requests that wait.
        last_size: Requests in the last batch.
    """

    size: int
    cost: float
    wait: float
    is_adaptive: bool
    count: int = attrs.field(default=0, init=False)
    last_size: int = attrs.field(default=1, init=False)
    _buckets: dict[Hashable, _Bucket[ItemT, ResultT]] = attrs.field(factory=dict[Hashable, Any], init=False)

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
        taken = bucket.take(self.size, self.cost)
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
        enough = self.last_size if is_idle and self.is_adaptive else self.size
        if len(bucket.entries) >= enough or bucket.cost >= self.cost:
            return now
        return _first(bucket).arrived + self.wait

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
        """Return the number of items."""
        ...

    def __getitem__(self, index: int, /) -> ResultT_co:
        """Return the result of one item."""
        ...


SIZES = tuple(2.0**power for power in range(11))
"""Upper ends of the ranges of numbers of requests."""
BATCH_SIZE = "batch_size", "Requests in a batch when the model gets it."

BatchModel = Callable[[list[ItemT]], Awaitable[BatchResults[ResultT]]]


def may_be_one_request(error: Exception) -> bool:
    """Tell whether a batch may have failed because of one of its requests; the default of `Batcher.divides`.

    Not so for a device that was lost or hung, a context that was lost to something else, an actor that
    crashed, stopped or has no room (`ActorError`), a device that takes no more (`QueueFullError`), and
    results that are none (`ModelOutputError`). Each member of a group counts.
    """
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.subgroup((*_OF_ALL, ModelOutputError)) is None
    if isinstance(error, ContextLostError):
        return error.is_to_blame
    return not isinstance(error, (*_OF_ALL, ModelOutputError))


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


@attrs.define(eq=False)
class BatchRun(Generic[ItemT, ResultT]):
    """One batch on its way through the model; for `splits` and `divides` see `Batcher`."""

    _model: BatchModel[ItemT, ResultT]
    entries: list[Entry[ItemT, ResultT]]
    _splits: int
    _divides: Callable[[Exception], bool]
    _counts: Counts
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    def __attrs_post_init__(self) -> None:
        for entry in self.entries:
            entry.on_leave = self._look_who_waits

    async def run(self) -> None:
        """Give each request its outcome."""
        self._counts.batches += 1
        self._counts.batched += len(self.entries)
        with self._scope:
            error = await self._launch(self.entries)
            if error is not None:
                await halve(
                    self.entries,
                    error,
                    launch=self._launch,
                    fail=self._fail,
                    splits=self._splits,
                    divides=self._divides,
                )

    def _look_who_waits(self) -> None:
        """End the call of the model if all askers have gone."""
        if all(entry.reply.is_done for entry in self.entries):
            self._scope.cancel(reason="all askers of the batch were cancelled")

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
        return one_for_each(await self._model([entry.item for entry in entries]), len(entries))

    def _fail(self, entries: list[Entry[ItemT, ResultT]], error: Exception) -> None:
        for entry, one in error_for_each(entries, error):
            self._counts.failed += entry.reply.fail(one)


class Asked(Protocol):
    """What has a reply to give."""

    @property
    def reply(self) -> DeferredReply[Any]:
        """Takes its outcome."""
        ...


AskedT = TypeVar("AskedT", bound=Asked)


async def halve(
    batch: list[AskedT],
    error: Exception,
    *,
    launch: Callable[[list[AskedT]], Awaitable[Exception | None]],
    fail: Callable[[list[AskedT], Exception], None],
    splits: int,
    divides: Callable[[Exception], bool],
) -> None:
    """Halve the parts of a batch that failed until the requests that fail are alone; see `Batcher` (D122).

    Args:
        batch: Its requests.
        error: Why it failed.
        launch: Has the model work on some of them, and replies; returns why there are no results.
        fail: Gives some of them an error.
        splits: See `Batcher`.
        divides: The same.
    """
    works, level = False, 0
    failed = [(batch, error)]
    while failed:
        await trio.lowlevel.checkpoint_if_cancelled()
        parts, failed = failed, list[tuple[list[AskedT], Exception]]()
        for part, of_part in parts:
            # A program that has refused the batch goes on: then it pays to look for the bad request.
            is_refusal = isinstance(of_part, Refused) or isinstance(of_part.__cause__, Refused)
            may_go_on = works or level < splits or (splits > 0 and is_refusal)
            if len(part) < 2 or not may_go_on or not _is_of_one(of_part, divides):
                fail(part, of_part)
                continue
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]):
                waiting = [one for one in half if not one.reply.is_done]
                if not waiting:
                    continue
                of_half = await launch(waiting)
                if of_half is None:
                    works = True
                else:
                    failed.append((waiting, of_half))
        level += 1


def _is_of_one(error: Exception, divides: Callable[[Exception], bool]) -> bool:
    try:
        return divides(error)
    except Exception as bad:  # noqa: BLE001  # a stranger's function
        error.add_note(f"the function `divides` of the batcher failed for this error: {bad!r}")
        return False


def error_for_each(batch: list[AskedT], error: Exception) -> Iterator[tuple[AskedT, Exception]]:
    """Yield those that still wait, each with an error of its own.

    D122: several tasks that raise one exception object would write to one traceback.
    """
    for number, one in enumerate([one for one in batch if not one.reply.is_done]):
        yield one, _copy(error) if number else error


def one_for_each(results: BatchResults[ResultT], count: int) -> list[ResultT]:
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


ModelOfBatches: TypeAlias = Model[list[ItemT], BatchResults[ResultT]]


@attrs.frozen(kw_only=True)
class BatcherStatistics:
    """Counts of a `Batcher` since its incarnation began: the reply of `GetStatistics`.

    ``requests == waiting + in_flight + answered + failed + cancelled + refused``, at any time.

    Attributes:
        requests: Calls that came.
        waiting: Calls that are in no batch yet.
        in_flight: Calls in batches that the model has, whose askers wait.
        answered: Calls with a result.
        failed: Calls that were given an error of the model.
        cancelled: Calls whose askers have gone.
        refused: Calls that were never executed: no room, or an item that fits into no batch.
        batches: Batches that were launched.
        batches_running: Batches that the model has now.
        batched: Calls in all batches that were launched: divided by `batches`, the mean size of a batch.
        launches: How often the model was called: more often than there were batches, if some were divided.
        last_size: Calls in the last batch that was launched; 1 before the first.
    """

    requests: int
    waiting: int
    in_flight: int
    answered: int
    failed: int
    cancelled: int
    refused: int
    batches: int
    batches_running: int
    batched: int
    launches: int
    last_size: int


@final
class Batcher(Servant[ItemT, ResultT]):
    """Collect calls, and put them through a model together.

    A batch is launched when it is full, or when its first call has waited for `max_wait` seconds. At most
    `max_in_flight` batches run at once. The next one fills meanwhile, and is launched as soon as one of those
    ends. So a call that finds nothing before it is launched after its wait, or after its wait and the rest of
    one launch.

    **Adaptive wait.** While no batch runs, the model has nothing to do, and a batch waits less: until it has
    as many calls as the batch before. So a task that asks alone, again and again, is never kept waiting, and
    neither are many tasks that ask again when they have their replies. The first batch of all is launched at
    once. A batch that is launched so has what other tasks ask for in the same turn of the loop, too.

    **Cancellation.** A call whose asker is cancelled leaves at once, and makes room for a later one. If its
    batch runs, its result is dropped. When all askers of a batch have gone, the model's call is cancelled.
    So a model that hangs keeps its place until then: give the asks a deadline.

    **Failure.** A batch that fails is halved, and both halves are launched. As soon as one part of the batch
    has succeeded, the model works, and parts that fail are halved on until the calls that fail are alone. If
    no part succeeds, halving ends after `splits` steps, and all calls get the error of their part. So one bad
    call among n fails alone, after 2·⌈log2(n)⌉ more launches at most. A model that always fails is called
    three times in all. A batch that a program refuses (`trio_accel.programs.Refused`) is halved to the end:
    the program works. A call may be executed several times for that: use ``splits=0`` where that does harm.
    The parts take the place of the batch in `max_in_flight`.

    Some errors are not those of one call: a lost context that the batch is not to blame for, a lost device,
    or an actor that crashed (see `may_be_one_request`). All calls of the batch get such an error at once, and
    nothing is executed again. The same is so for a model that returns too few or too many results
    (`ModelOutputError`). Errors go to the askers, as they are; the actor lives on. A model that knows which
    item is bad returns ``outcome.Error(error)`` in its
    place: the others are not executed again.

    ``stop(drain=True)`` waits for all calls. If the incarnation ends otherwise, the calls of running batches
    fail with `ActorFailedError`. Those that wait for a batch fail with `ActorStoppedError` or
    `ActorRestartingError`: they were never executed. Those in the mailbox are served by the next one.

    The model sees neither the deadlines nor the context variables of the askers: it works for several.

    Args:
        model: Takes a list of items, and returns a result for each in the same order: an async callable, or
            a servant. A sequence, a NumPy array and an `AccelRef` are results; the replies are its elements.
        max_size: The most calls in a batch.
        max_wait: The most seconds that a call waits for others, if the model has room.
        max_in_flight: The most batches that run at once. 1 for a model that must not be called twice at once.
        adaptive: Whether a batch waits less where that brings nothing.
        bucket: The key of an item: items of different keys are never in one batch.
        cost: The cost of an item, at least 0, such as its tokens or bytes.
        max_cost: The highest cost of a batch. A call whose item costs more fails alone, with `ValueError`.
        capacity: The most calls that wait for a batch; no bound without it, as each asker waits in any case.
        overflow: Rule beyond that. ``REJECT`` and ``DROP_NEWEST``: the call is refused with
            `MailboxFullError`; ``DROP_OLDEST``: the one is that has waited for longest. ``WAIT`` goes without
            a `capacity`.
        splits: How often a batch is halved of which no part has succeeded; 0: it fails as a whole.
        divides: Whether an error may be that of one call, so that it is worth while to halve the batch.

    Raises:
        TypeError, ValueError: An argument is of another type, or out of range.
    """

    def __init__(
        self,
        model: ModelOfBatches[ItemT, ResultT],
        *,
        max_size: int = 32,
        max_wait: float = 0.005,
        max_in_flight: int = 2,
        adaptive: bool = True,
        bucket: Callable[[ItemT], Hashable] | None = None,
        cost: Callable[[ItemT], float] | None = None,
        max_cost: float | None = None,
        capacity: int | None = None,
        overflow: Overflow = Overflow.WAIT,
        splits: int = 1,
        divides: Callable[[Exception], bool] = may_be_one_request,
    ) -> None:
        _check_overflow(capacity, overflow)
        self._queue: BatchQueue[ItemT, ResultT] = BatchQueue(
            size=must_be_count("Batcher: max_size", max_size),
            cost=check_max_cost("Batcher", max_cost, cost),
            wait=must_be_positive("Batcher: max_wait", max_wait, allows_zero=True),
            is_adaptive=adaptive,
        )
        self._model: BatchModel[ItemT, ResultT] = as_callable(model)
        self._most_running = must_be_count("Batcher: max_in_flight", max_in_flight)
        self._bucket, self._cost = bucket, cost
        self._capacity, self._overflow = capacity, overflow
        self._splits, self._divides = must_be_count("Batcher: splits", splits, least=0), divides
        self._running: dict[BatchRun[ItemT, ResultT], None] = {}
        # Tasks that run batches. While calls wait, and not all runners are busy, one of them leads: it waits
        # until a batch is due, with the only timer. The others are parked.
        self._runners = 0
        self._parked = trio.lowlevel.ParkingLot()
        self._is_led = False
        self._timer: trio.CancelScope | None = None
        self._bell = trio.lowlevel.ParkingLot()
        self._counts = Counts()
        self._sizes, self._waits = Spread(SIZES), Spread(WAITS)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the tasks that run the batches."""
        context.show_readings(self.readings)
        try:
            async with trio.open_nursery() as self._nursery:
                yield
                self._nursery.cancel_scope.cancel(reason="the batcher ends")
        finally:
            self._fail_all(context)

    def _attempt(self, message: Call[ItemT]) -> DeferredReply[ResultT]:
        return self._take(message.item)

    # Call is declared for all servants, and a method takes its own class.
    @handles(Call, ki_protected=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    @quick(_attempt)
    async def _serve(self, message: Call[ItemT]) -> ResultT | DeferredReply[ResultT]:
        return await self.call(message.item)

    async def call(self, item: ItemT) -> ResultT | DeferredReply[ResultT]:
        """Take a call in."""
        await trio.lowlevel.checkpoint()
        return self._take(item)

    def _take(self, item: ItemT) -> DeferredReply[ResultT]:
        """Take the call in that is being served, without waiting; if something is wrong with it, fail it."""
        now = trio.current_time()
        entry: Entry[ItemT, ResultT] = Entry(item, now)
        entry.reply = reply = self.context.defer(on_cancel=partial(self._leave, entry))
        self._counts.requests += 1
        try:
            if self._bucket is not None:
                entry.key = self._bucket(item)
            if self._cost is not None:
                entry.cost = cost_of(self.context.path, self._cost(item), self._queue.cost, "a batch")
            hash(entry.key)  # before another call has to make room for it
            self._make_room()
            self._queue.add(entry)
        except Exception as error:  # noqa: BLE001  # of a function of the program, or no room
            self._refuse(entry, error)
            return reply
        if self._timer is not None:
            self._expect(self._timer, self._queue.due_with(entry, now, is_idle=not self._running), now)
        elif not self._is_led:
            self._call_leader()
        return reply

    def statistics(self) -> BatcherStatistics:
        """Return the counts since its incarnation began."""
        running = (entry for run in self._running for entry in run.entries)
        return BatcherStatistics(
            waiting=self._queue.count,
            in_flight=sum(not entry.reply.is_done for entry in running),
            batches_running=len(self._running),
            last_size=self._queue.last_size,
            **attrs.asdict(self._counts),
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the counts that metrics show, with sizes of batches and waits for them."""
        yield from readings_of(self._counts)
        yield count(*REFUSED, self._counts.refused, tenant="")
        yield self._sizes.reading(*BATCH_SIZE)
        yield self._waits.reading(*QUEUE_WAIT)

    def _make_room(self) -> None:
        """Refuse the newest call or the oldest one if too many wait.

        Raises:
            MailboxFullError: It is the newest.
        """
        if self._capacity is None or self._queue.count < self._capacity:
            return
        path = self.context.path
        full = MailboxFullError(f"{path}: {self._capacity} calls wait for a batch already", path=path)
        if self._overflow is not Overflow.DROP_OLDEST:
            raise full
        oldest = self._queue.oldest()
        self._queue.remove(oldest)
        self._refuse(oldest, full)

    def _refuse(self, entry: Entry[ItemT, ResultT], error: Exception) -> None:
        self._counts.refused += 1
        entry.reply.fail(error)

    def _leave(self, entry: Entry[ItemT, ResultT]) -> None:
        """Let a call go whose asker was cancelled."""
        self._counts.cancelled += 1
        entry.reply.cancelled()
        if entry.on_leave is None:
            self._queue.remove(entry)
            if not self._queue.count:
                self._bell.unpark_all()
        else:
            entry.on_leave()

    def _call_leader(self) -> None:
        """Have a runner wait for the next batch, if one has nothing to do or may be started."""
        if self._parked:
            self._is_led = True
            self._parked.unpark()
        elif self._runners < self._most_running:
            self._is_led = True
            self._runners += 1
            self._nursery.start_soon(self._run_batches)

    async def _run_batches(self) -> None:
        """Lead, run the batch, and lead again if no other runner does; parked when idle."""
        while True:
            entries = await self._next_batch()
            self._is_led = False
            if entries:
                self._sizes.add(len(entries))
                now = trio.current_time()
                for entry in entries:
                    self._waits.add(now - entry.arrived)
                run = BatchRun(self._model, entries, self._splits, self._divides, self._counts)
                self._running[run] = None
                if self._queue.count:
                    # D122: another runner leads while this one runs its batch: no hand-over between tasks.
                    self._call_leader()
                await run.run()
                del self._running[run]
            if self._timer is not None:
                # The model may have nothing to do now: then the waiting batch is due earlier.
                now = trio.current_time()
                self._expect(self._timer, self._queue.due(now, is_idle=not self._running), now)
            if self._is_led or not self._queue.count:
                await self._parked.park()
            else:
                self._is_led = True
                # The model may have no checkpoint of its own, and other tasks must run.
                await trio.lowlevel.checkpoint()

    async def _next_batch(self) -> list[Entry[ItemT, ResultT]]:  # noqa: ASYNC910  # its caller checkpoints
        """Wait until a batch is due, and take it; none if all calls have left meanwhile."""
        while self._queue.count:
            now, is_idle = trio.current_time(), not self._running
            entries = self._queue.take(now, is_idle=is_idle)
            if entries:
                return entries
            with trio.CancelScope(deadline=self._queue.due(now, is_idle=is_idle)) as self._timer:
                await self._bell.park()
            self._timer = None
        return []

    def _expect(self, timer: trio.CancelScope, due: float, now: float) -> None:
        """See to it that the batch which is due next is launched then."""
        if due <= now:
            self._bell.unpark_all()
        elif due < timer.deadline:
            timer.deadline = due

    def _fail_all(self, context: ActorContext) -> None:
        """Fail all open calls: later incarnations do not know of them."""
        for entry in self._queue.entries:
            end_with_incarnation(context, entry.reply, has_begun=False)
        for run in self._running:
            for entry in run.entries:
                end_with_incarnation(context, entry.reply, has_begun=True)


def cost_of(path: str, cost: float, most: float, where: str) -> float:
    """Return the cost of an item, if it may be one.

    Raises:
        ValueError: It is none, or the item can never be served.
    """
    if not 0 <= cost <= sys.float_info.max:
        raise ValueError(f"{path}: the cost of an item must be a number from 0, got {cost!r}")
    if cost > most:
        raise ValueError(f"{path}: the item costs {cost:g}, and {where} at most {most:g}; it fits into none")
    return cost


def check_max_cost(name: str, max_cost: float | None, cost: object) -> float:
    """Return the highest cost of what a pattern has at once; infinity if costs do not count."""
    if (max_cost is None) is not (cost is None):
        raise ValueError(f"{name}: cost and max_cost go together: give both, or none")
    return math.inf if max_cost is None else must_be_positive(f"{name}: max_cost", max_cost)


def _check_overflow(capacity: int | None, overflow: Overflow) -> None:
    if not isinstance(overflow, Overflow):
        raise TypeError(f"Batcher: overflow must be an Overflow, got {overflow!r}")
    if capacity is None and overflow is not Overflow.WAIT:
        raise ValueError(f"Batcher: overflow={overflow} needs a capacity")
    if capacity is not None:
        must_be_count("Batcher: capacity", capacity)
        if overflow is Overflow.WAIT:
            raise ValueError(
                "Batcher: with overflow=WAIT each call waits in any case; leave the capacity out, or say "
                "what happens beyond it: overflow=Overflow.REJECT"
            )
