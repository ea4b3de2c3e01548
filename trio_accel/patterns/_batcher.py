"""Requests that come one by one go through a model together."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias, final

import attrs
import trio

from ..actors import (
    ActorContext,
    DeferredReply,
    MailboxFullError,
    Overflow,
    Reading,
    Spread,
    handles,
    quick,
)
from ._batches import (
    BatchLimits,
    BatchModel,
    BatchQueue,
    BatchResults,
    BatchRun,
    Blame,
    Counts,
    Entry,
    may_be_one_request,
)
from ._numbers import must_be_count, must_be_positive
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
    readings_of,
)

__all__ = ["Batcher", "BatcherStatistics"]

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
        limits = BatchLimits(
            size=must_be_count("Batcher: max_size", max_size),
            cost=_check_cost(max_cost, cost),
            wait=must_be_positive("Batcher: max_wait", max_wait, allows_zero=True),
            is_adaptive=adaptive,
        )
        self._model: BatchModel[ItemT, ResultT] = as_callable(model)
        self._limits = limits
        self._most_running = must_be_count("Batcher: max_in_flight", max_in_flight)
        self._bucket, self._cost = bucket, cost
        self._capacity, self._overflow = capacity, overflow
        self._blame = Blame(splits=must_be_count("Batcher: splits", splits, least=0), divides=divides)
        self._queue: BatchQueue[ItemT, ResultT] = BatchQueue(limits)
        self._running: dict[BatchRun[ItemT, ResultT], None] = {}
        # Tasks that run batches. While calls wait, and not all runners are busy, one of them leads: it waits
        # until a batch is due, with the only timer. The others are parked.
        self._runners = 0
        self._parked = trio.lowlevel.ParkingLot()
        self._is_led = False
        self._timer: trio.CancelScope | None = None
        self._bell = trio.Event()
        self._counts = Counts()
        self._sizes, self._waits = Spread([2.0**power for power in range(11)]), Spread(WAITS)

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
                entry.cost = self._cost_of(item, self._cost)
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
        yield self._sizes.reading("batch_size", "Requests in a batch when the model gets it.")
        yield self._waits.reading(*QUEUE_WAIT)

    def _cost_of(self, item: ItemT, function: Callable[[ItemT], float]) -> float:
        cost = function(item)
        if not 0 <= cost <= sys.float_info.max:
            raise ValueError(
                f"{self.context.path}: the cost of an item must be a number from 0, got {cost!r}"
            )
        if cost > self._limits.cost:
            raise ValueError(
                f"{self.context.path}: the item costs {cost:g}, and a batch at most {self._limits.cost:g}; "
                "it fits into none"
            )
        return cost

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
                self._bell.set()
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
                run = BatchRun(self._model, entries, self._blame, self._counts)
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
            self._bell = trio.Event()
            with trio.CancelScope(deadline=self._queue.due(now, is_idle=is_idle)) as self._timer:
                await self._bell.wait()
            self._timer = None
        return []

    def _expect(self, timer: trio.CancelScope, due: float, now: float) -> None:
        """See to it that the batch which is due next is launched then."""
        if due <= now:
            self._bell.set()
        elif due < timer.deadline:
            timer.deadline = due

    def _fail_all(self, context: ActorContext) -> None:
        """Fail all open calls: later incarnations do not know of them."""
        for entry in self._queue.entries:
            end_with_incarnation(context, entry.reply, has_begun=False)
        for run in self._running:
            for entry in run.entries:
                end_with_incarnation(context, entry.reply, has_begun=True)


def _check_cost(max_cost: float | None, cost: object) -> float:
    """Return the highest cost of a batch; infinity if costs do not count."""
    if (max_cost is None) is not (cost is None):
        raise ValueError("Batcher: cost and max_cost go together: give both, or none")
    return math.inf if max_cost is None else must_be_positive("Batcher: max_cost", max_cost)


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
