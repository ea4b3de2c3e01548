"""Batching: single requests wait for a batch, and a model works on them together."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast, final

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import (
    ActorError,
    Buckets,
    MailboxFullError,
    Reading,
    checked_options,
    copied,
    must_be_count,
    must_be_positive,
)
from ..backends.base import CompletionTimeoutError, ContextLostError, DeviceLostError, QueueFullError, Refused
from ._checks import ModelOutputError
from ._limits import is_transient
from ._submit import ItemT, Model, ResultT, Submit, as_callable, outcome_of
from ._waiting import EntryT, QueueActor, WaitingRequest, WaitingStatistics

__all__ = ["BatchResults", "Batcher", "BatcherStatistics", "is_request_error"]

ResultT_co = TypeVar("ResultT_co", covariant=True)


@attrs.define(eq=False, kw_only=True)
class BatchEntry(WaitingRequest[ItemT, ResultT]):
    """A request that waits for a batch, or is in one.

    Attributes:
        key: Requests of one key go together.
    """

    key: Hashable = None


@attrs.define(eq=False, kw_only=True)
class BatchQueue(Generic[ItemT, ResultT]):
    """Requests by key. A batch is assembled when it is launched, not earlier.

    So a request that leaves makes room for a later one. A batch is due when it is full, when its first
    request has waited long enough, or when the model is idle and the batch is as large as the previous one.

    Invariant: each bucket has at least one entry.

    Attributes:
        size: The maximum number of requests in a batch.
        cost: The maximum sum of their costs.
        wait: The maximum seconds that the first request waits for others.
        is_adaptive: Whether it waits less if waiting longer gains nothing.
        count: The number of waiting requests.
        last_size: The number of requests in the last batch.
    """

    size: int
    cost: float
    wait: float
    is_adaptive: bool
    count: int = attrs.field(default=0, init=False)
    last_size: int = attrs.field(default=1, init=False)
    # Any request of a key may leave, and many are taken from in front.
    _buckets: dict[Hashable, OrderedDict[BatchEntry[ItemT, ResultT], None]] = attrs.field(
        factory=dict[Hashable, Any], init=False
    )
    _costs: dict[Hashable, float] = attrs.field(factory=dict[Hashable, float], init=False)

    @property
    def entries(self) -> list[BatchEntry[ItemT, ResultT]]:
        """All waiting requests."""
        return [entry for bucket in self._buckets.values() for entry in bucket]

    def add(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        """Add a request.

        Raises:
            TypeError: Its key is not hashable.
        """
        self._buckets.setdefault(entry.key, OrderedDict())[entry] = None
        self._costs[entry.key] = self._costs.get(entry.key, 0.0) + entry.cost
        self.count += 1

    def remove(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        """Remove a request."""
        del self._buckets[entry.key][entry]
        self._costs[entry.key] -= entry.cost
        self.count -= 1
        if not self._buckets[entry.key]:
            del self._buckets[entry.key], self._costs[entry.key]

    def take(self, now: float, *, is_idle: bool) -> list[BatchEntry[ItemT, ResultT]]:
        """Take the batch to launch now: the due batch with the earliest first request.

        Args:
            now: Trio's time.
            is_idle: Whether no batch runs.

        Returns:
            Its requests in order of arrival; empty if no batch is due.
        """
        due = [key for key in self._buckets if self.due_of(key, is_idle=is_idle) <= now]
        taken: list[BatchEntry[ItemT, ResultT]] = []
        cost = 0.0
        first = min(due, key=self._arrived, default=None)
        for entry in self._buckets.get(first, ()) if due else ():
            cost += entry.cost
            if len(taken) == self.size or cost > self.cost:
                break
            taken.append(entry)
        for entry in taken:
            self.remove(entry)
        self.last_size = len(taken) or self.last_size
        return taken

    def due(self, *, is_idle: bool) -> float:
        """Return when the next batch is due, if no request arrives; infinity if none waits."""
        return min((self.due_of(key, is_idle=is_idle) for key in self._buckets), default=math.inf)

    def due_of(self, key: Hashable, *, is_idle: bool) -> float:
        """Return when the requests of a key are due; minus infinity for now."""
        enough = self.last_size if is_idle and self.is_adaptive else self.size
        if len(self._buckets[key]) >= enough or self._costs[key] >= self.cost:
            return -math.inf
        return self._arrived(key) + self.wait

    def _arrived(self, key: Hashable) -> float:
        return next(iter(self._buckets[key])).arrived


# These failures concern the whole batch, whatever its requests are.
_OF_ALL = (ActorError, CompletionTimeoutError, ContextLostError, DeviceLostError, QueueFullError)


class BatchResults(Protocol[ResultT_co]):
    """The result of a batch model: a list, a NumPy array or an `AccelRef`, among others."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def __getitem__(self, index: int, /) -> ResultT_co:
        """Return the result of one item."""
        ...


BatchModel = Callable[[list[ItemT]], Awaitable[BatchResults[ResultT]]]
ModelOfBatches: TypeAlias = Model[list[ItemT], BatchResults[ResultT]]


def is_request_error(error: Exception) -> bool:
    """Return whether a single request may have made a batch fail; the default of `Batcher.divides`.

    A single request is not to blame for a lost or hung device, a context lost for another reason, an actor
    that crashed, stopped or has a full mailbox (`ActorError`), a full device queue (`QueueFullError`), and
    invalid results (`ModelOutputError`). Each member of a group counts.
    """
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.subgroup((*_OF_ALL, ModelOutputError)) is None
    if isinstance(error, ContextLostError):
        return error.is_to_blame
    return not isinstance(error, (*_OF_ALL, ModelOutputError))


def is_loss(error: Exception) -> bool:
    """Return whether no sequence caused an error, so that the same step may succeed a moment later."""
    if isinstance(error, ExceptionGroup):
        return all(map(is_loss, cast("ExceptionGroup[Exception]", error).exceptions))
    return is_transient(error) and not (isinstance(error, ContextLostError) and error.is_to_blame)


@attrs.define(eq=False)
class Batch(Generic[EntryT]):
    """Requests that the model gets together."""

    entries: list[EntryT]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    def end_if_alone(self, entry: EntryT) -> None:
        """Cancel the model's call if it has this request, and all its callers have left."""
        if entry in self.entries and all(member.reply.is_done for member in self.entries):
            self.scope.cancel(reason="all askers of the batch were cancelled")


class BatchActor(QueueActor[ItemT, ResultT, EntryT]):
    """An actor for `Submit` with a batch model; for the arguments see `Batcher`."""

    def __init__(
        self,
        *,
        cost: Callable[[Any], float] | None,
        max_cost: float | None,
        capacity: int | None,
        splits: int,
        divides: Callable[[Exception], bool],
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if (max_cost is None) is not (cost is None):
            raise ValueError(f"{name}: cost and max_cost go together: give both, or none")
        self._cost = cost
        self._most_cost = math.inf if max_cost is None else must_be_positive(f"{name}: max_cost", max_cost)
        self._capacity = math.inf if capacity is None else must_be_count(f"{name}: capacity", capacity)
        self._splits, self._divides = must_be_count(f"{name}: splits", splits, minimum=0), divides
        self._sizes = Buckets([2.0**power for power in range(11)])
        # Rung when there may be something to do for the task that launches.
        self._bell = trio.lowlevel.ParkingLot()

    @abstractmethod
    async def _launch(self, entries: list[EntryT]) -> Exception | None:
        """Have the model work on requests, and reply; return the error if there are no results."""

    def _cost_of(self, item: object) -> float:
        """Return the cost of an item.

        Raises:
            ValueError: It is none, or the item can never be served.
        """
        if self._cost is None:
            return 0.0
        path, cost = self.context.path, self._cost(item)
        if not 0 <= cost <= sys.float_info.max:
            raise ValueError(f"{path}: the cost of an item must be a number from 0, got {cost!r}")
        if cost > self._most_cost:
            problem = f"the item costs {cost:g}, and there are at most {self._most_cost:g} at once"
            raise ValueError(f"{path}: {problem}; it can never be served")
        return cost

    def _full(self) -> MailboxFullError:
        path = self.context.path
        return MailboxFullError(f"{path}: {self._capacity} requests wait already", path=path)

    async def _go_through(self, batch: Batch[EntryT]) -> None:
        """Give each request of a batch its outcome."""
        with batch.scope:
            error = await self._launch(batch.entries)
            if error is not None:
                await self._halve(batch.entries, error)

    async def _halve(self, batch: list[EntryT], error: Exception) -> None:
        """Halve the failed parts of a batch until the failing requests are separate (D122)."""
        works, level = False, 0
        failed = [(batch, error)]
        while failed:
            await trio.lowlevel.checkpoint_if_cancelled()
            parts, failed = failed, list[tuple[list[EntryT], Exception]]()
            for part, of_part in parts:
                # A program that refuses a batch still works, so the search for the bad request pays.
                is_refusal = isinstance(of_part, Refused) or isinstance(of_part.__cause__, Refused)
                may_go_on = works or level < self._splits or (self._splits > 0 and is_refusal)
                if len(part) < 2 or not may_go_on or not self._is_of_one(of_part):
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

    def _is_of_one(self, error: Exception) -> bool:
        try:
            return self._divides(error)
        except Exception as bad:  # noqa: BLE001  # a stranger's function
            error.add_note(f"the function `divides` of the batcher failed for this error: {bad!r}")
            return False

    @enable_ki_protection
    def _fail(self, entries: list[EntryT], error: Exception) -> None:
        """Fail the waiting requests, each with an error object of its own.

        D122: several tasks that raise one exception object would write to one traceback.
        """
        for number, entry in enumerate([entry for entry in entries if not entry.reply.is_done]):
            self._tally["failed"] += entry.reply.fail(copied(error) if number else error)
            self._release(entry)

    def _release(self, entry: EntryT) -> None:
        """Release a request that has its outcome."""

    def readings(self) -> Iterator[Reading]:
        """Yield the counts that metrics show, with sizes of batches."""
        yield from super().readings()
        yield self._sizes.reading("batch_size", "Requests in a batch when the model gets it.")


def shared_evenly(total: int, requests: Sequence[int]) -> list[int]:
    """Share positions: small requests get all they want, others share equally, the first the rest (D183)."""
    shares, remaining = [0] * len(requests), total
    by_size = sorted(range(len(requests)), key=requests.__getitem__)
    for rank, index in enumerate(by_size):
        level, rest = divmod(remaining, len(requests) - rank)
        if requests[index] > level:
            for number, position in enumerate(sorted(by_size[rank:])):
                shares[position] = level + (number < rest)
            break
        shares[index] = requests[index]
        remaining -= requests[index]
    return shares


def split_results(results: BatchResults[ResultT], count: int) -> list[ResultT]:
    """Split the results of a batch.

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
            f"the model returned {kind.__name__} for {count} item(s), which is not a sequence of results; "
            "let it return a list, an array or an AccelRef with one result for each item"
        ) from cause
    if length != count:
        raise ModelOutputError(
            f"the model returned {length} result(s) for {count} item(s); "
            "let it return one for each item, in the order of the items"
        )
    return values


@attrs.frozen(kw_only=True)
class BatcherStatistics(WaitingStatistics):
    """Counts of a `Batcher` since its incarnation began: the reply of `GetStatistics`.

    Attributes:
        batches: The number of launched batches.
        batches_running: The number of batches that the model works on now.
        batched: The number of calls in all launched batches; divided by `batches`, the mean batch size.
        launches: The number of model calls; it exceeds the number of batches if some were divided.
        last_size: The number of calls in the last launched batch; 1 before the first.
    """

    batches: int = 0
    batches_running: int = 0
    batched: int = 0
    launches: int = 0
    last_size: int = 1


@final
class Batcher(BatchActor[ItemT, ResultT, BatchEntry[ItemT, ResultT]]):
    """Collects calls, and puts them through a model together.

    A batch is launched when it is full, or when its first call has waited for `max_wait` seconds. At most
    `max_in_flight` batches run at once. The next one fills meanwhile, and is launched as soon as a running
    batch ends. So a call that is the first of its batch is launched after its wait, or after its wait and the
    rest of one launch.

    **Adaptive wait.** While no batch runs, the model is idle, so a batch waits only until it has as many
    calls as the previous batch. So a single task that calls again and again never waits, and neither do many
    tasks that call again after their replies. The very first batch is launched at once. Such a batch includes
    the calls that other tasks make in the same turn of the loop.

    **Cancellation.** If the caller of a call is cancelled, the call leaves at once, and makes room for a
    later one. If its batch runs, its result is dropped. When all callers of a batch have left, the model's
    call is cancelled. Until then, a hanging model keeps its place, so set a deadline for your calls.

    **Failure.** A failed batch is halved, and both halves are launched. As soon as a part of the batch
    succeeds, the model is known to work, so failed parts are halved further until the failing calls are
    separate. If no part succeeds, halving ends after `splits` steps, and all calls get the error of their
    part. So a single bad call among n fails alone, after at most 2·⌈log2(n)⌉ more launches. A model that
    always fails is called three times in all. A batch that a program refuses (`trio_accel.programs.Refused`)
    is halved to the end, because the program works. Therefore a call may be executed several times: use
    ``splits=0`` if that does harm. The parts use the slot of their batch in `max_in_flight`.

    Some errors do not concern a single call: a lost context that the batch did not cause, a lost device, or a
    crashed actor (see `is_request_error`). All calls of the batch get such an error at once, and nothing is
    executed again. The same happens if a model returns too few or too many results (`ModelOutputError`).
    Callers get errors unchanged, and the actor lives on. If a model knows which item is bad, it returns
    ``outcome.Error(error)`` in place of the result, so that the others are not executed again.

    ``stop(drain=True)`` waits for all calls. If the incarnation ends otherwise, the calls of running batches
    fail with `ActorFailedError`. Calls that wait for a batch fail with `ActorStoppedError` or
    `ActorRestartingError`, because they were never executed. The next incarnation serves calls in the
    mailbox.

    The model does not see the deadlines and context variables of the callers, because it works for several.

    Args:
        model: Takes a list of items, and returns a result for each in the same order: an async callable, or
            an actor for `Submit`. Results may be a sequence, a NumPy array or an `AccelRef`; the replies are
            its elements.
        max_size: The maximum number of calls in a batch.
        max_wait: The maximum seconds that a call waits for others, if the model has room.
        max_in_flight: The maximum number of batches that run at once. Use 1 for a model that does not allow
            concurrent calls.
        adaptive: Whether a batch waits less if waiting longer gains nothing.
        bucket: The key of an item: items with different keys never share a batch.
        cost: The cost of an item, at least 0, such as its tokens or bytes.
        max_cost: The maximum cost of a batch. A call with a more expensive item fails separately, with
            `ValueError`.
        capacity: The maximum number of calls that wait for a batch; one more is refused with
            `MailboxFullError`. None for no bound.
        splits: The number of times that a batch is halved while no part has succeeded; with 0, it fails as a
            whole.
        divides: Whether an error may come from a single call, so that halving the batch is worthwhile.

    Raises:
        TypeError, ValueError: An argument is of another type, or out of range.
    """

    @checked_options
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
        splits: int = 1,
        divides: Callable[[Exception], bool] = is_request_error,
    ) -> None:
        super().__init__(cost=cost, max_cost=max_cost, capacity=capacity, splits=splits, divides=divides)
        self._queue: BatchQueue[ItemT, ResultT] = BatchQueue(
            size=must_be_count("Batcher: max_size", max_size),
            cost=self._most_cost,
            wait=must_be_positive("Batcher: max_wait", max_wait, allows_zero=True),
            is_adaptive=adaptive,
        )
        self._model: BatchModel[ItemT, ResultT] = as_callable(model)
        self._most_running = must_be_count("Batcher: max_in_flight", max_in_flight)
        self._bucket = bucket
        self._running: dict[Batch[BatchEntry[ItemT, ResultT]], None] = {}
        # The time when a task checks for a due batch, if no request arrives.
        self._due = math.inf
        # Tasks that go through batches.
        self._runners = 1

    def make(self, message: Submit[ItemT]) -> BatchEntry[ItemT, ResultT]:
        return BatchEntry(item=message.item)

    def put(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        entry.key = None if self._bucket is None else self._bucket(entry.item)
        entry.cost = self._cost_of(entry.item)
        if self._queue.count >= self._capacity:
            raise self._full()
        self._queue.add(entry)
        due = self._queue.due_of(entry.key, is_idle=not self._running)
        if due < self._due:
            self._due = due
            self._wake()

    def leave(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        self._tally["cancelled"] += 1
        entry.reply.cancelled()
        if not entry.has_begun:
            self._queue.remove(entry)
        for batch in self._running:
            batch.end_if_alone(entry)

    def _open(self) -> Iterable[BatchEntry[ItemT, ResultT]]:
        return [*self._queue.entries, *(entry for batch in self._running for entry in batch.entries)]

    def _wake(self) -> None:
        """Have a task wait for the next due batch, unless all tasks are working on one."""
        if self._bell:
            self._bell.unpark()
        elif self._runners < self._most_running:
            self._runners += 1
            self._nursery.start_soon(self._run)

    async def _run(self) -> None:
        """Wait for batches, and work on them, forever."""
        while True:
            entries = await self._next_batch()
            batch = Batch(entries)
            self._running[batch] = None
            if self._queue.count:
                # D122: another task waits for the others. For a single caller none is woken.
                self._wake()
            self._sizes.add(len(entries))
            self._tally["batches"] += 1
            self._tally["batched"] += len(entries)
            for entry in entries:
                self._begin(entry)
            await self._go_through(batch)
            del self._running[batch]
            if self._queue.count:
                # The model may lack a checkpoint, and other tasks must run.
                await trio.lowlevel.checkpoint()

    async def _next_batch(self) -> list[BatchEntry[ItemT, ResultT]]:  # noqa: ASYNC910  # its caller checkpoints
        """Wait until a batch is due, and take it."""
        while True:
            self._due = math.inf
            if not self._queue.count:
                # A single caller gets here each time, and a scope would take a fifth of its time.
                await self._bell.park()
                continue
            is_idle = not self._running
            entries = self._queue.take(trio.current_time(), is_idle=is_idle)
            if entries:
                return entries
            self._due = self._queue.due(is_idle=is_idle)
            with trio.CancelScope(deadline=self._due):
                await self._bell.park()

    async def _launch(self, entries: list[BatchEntry[ItemT, ResultT]]) -> Exception | None:
        self._tally["launches"] += 1
        results = await outcome_of(self._results(entries))
        if isinstance(results, outcome.Error):
            return cast("Exception", results.error)
        for entry, value in zip(entries, results.value, strict=True):
            if isinstance(value, outcome.Error) and isinstance(value.error, Exception):
                self._tally["failed"] += entry.reply.fail(value.error)
            else:
                self._tally["answered"] += entry.reply.set(value)
        return None

    async def _results(self, entries: list[BatchEntry[ItemT, ResultT]]) -> list[ResultT]:
        return split_results(await self._model([entry.item for entry in entries]), len(entries))

    def statistics(self) -> BatcherStatistics:
        """Return the counts since its incarnation began."""
        running = (entry for batch in self._running for entry in batch.entries)
        return BatcherStatistics(
            waiting=self._queue.count,
            in_flight=sum(not entry.reply.is_done for entry in running),
            batches_running=len(self._running),
            last_size=self._queue.last_size,
            **self._tally,
        )
