"""Continuous batching: a model processes sequences step by step; they join and leave between steps."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast, final

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import Reading, checked_options, must_be_count, must_be_positive
from ._batcher import (
    Batch,
    BatchActor,
    BatchResults,
    is_loss,
    is_request_error,
    shared_evenly,
    split_results,
)
from ._checks import ModelOutputError, NoRoomError
from ._fair_queue import FairQueue, Weights, weight_in
from ._parts import Streamable, Streamed
from ._places import LEVEL_ARRIVALS, SequenceSlots
from ._sequences import ContinuousStatistics, Last, Room, RunningSequence, SequenceEntry, StepResult
from ._submit import ItemT, Model, Submit, as_callable, count, outcome_of
from ._waiting import buckets_of_waits

__all__ = ["ContinuousBatcher"]

_logger = logging.getLogger("trio_accel.patterns")

PartT = TypeVar("PartT")

# The factor between the shares of adjacent priority levels, so that the lower level still gets a share.
_LEVEL = 4.0
_MAX_PRIORITY, _MAX_QUEUED = 8, 10**9
# Pauses in seconds, and the maximum number of steps in a row without a checkpoint.
_FIRST_PAUSE, _LONGEST_PAUSE, _MOST_STEPS = 0.01, 1.0, 8
_IS_OVER: Callable[[Any], bool] = attrgetter("is_over")


@attrs.define(eq=False)
class _Flight(Batch[SequenceEntry[ItemT, PartT]]):
    """A call of the step in its own task, while another one may run.

    Attributes:
        has_begun: Whether its task has called the step.
        landed: Set when the call has ended.
        results: Its outcome; None if it was cancelled.
    """

    has_begun: bool = attrs.field(default=False, init=False)
    landed: trio.Event = attrs.field(factory=trio.Event, init=False)
    results: outcome.Value[list[Any]] | outcome.Error | None = attrs.field(default=None, init=False)


@final
class ContinuousBatcher(
    BatchActor[Streamable[ItemT, PartT], tuple[PartT, ...], SequenceEntry[ItemT, PartT]],
    Generic[ItemT, PartT],
):
    """Processes many sequences at once, step by step; they join and leave between two steps.

    This is iteration-level scheduling (Yu et al., "Orca", OSDI 2022), as in servers of language models. The
    batcher does not know the model: a `step` takes the sequences of a batch, and returns the next parts of
    each. ``ask(Submit(item))`` replies with a tuple of all parts, and `open_parts` yields them as they are
    made.

    **Step.** ``async def step(batch: list[RunningSequence])`` returns one result per sequence: a list or a
    tuple of parts, which is empty while the prompt is processed; ``Last(parts)`` with the last ones; or
    ``outcome.Error(error)``, which only this sequence gets. One step runs at a time. A step is *idempotent*:
    after a failed call, it may be called again with the same sequences, or some of them, at the same
    positions. So it writes to the positions given by `done` and `chunk`, and changes `state` only when it
    succeeds.

    **Prompts** are processed in chunks. A step has at most `max_positions`. First, each sequence with a
    finished prompt gets one position. The prompts share the remaining positions evenly: a short one gets all
    that it wants, the others equal shares, and the earliest the rest. So a short prompt does not wait for a
    long one, and no prompt waits forever.

    **Places.** At most `max_sequences` are in the batch, with a total cost of at most `max_cost`. A sequence
    that does not fit waits, and so do all later ones, because small sequences do not overtake it. A sequence
    that can never fit is refused with `ValueError`.

    **Room.** If sequences grow, such as by pages of a cache, pass `room` instead of `cost`. A sequence joins
    when there is room for its prompt. A step without enough room raises `NoRoomError` before it changes
    anything. Then a sequence is **set aside**: the youngest of the lowest priority, from the tenant with the
    most room for its weight. It continues at its next part when there is room, and its reader sees a pause. A
    waiting sequence replaces a sequence of a tenant that has more places or room. The oldest sequence of the
    highest priority is never set aside, unless its reader does not read. A priority level precedes 1000 later
    arrivals of the level below, so nobody waits forever. If a sequence lacks room although all others were
    set aside, it gets the error of the step.

    **Turns.** Waiting tenants have shares by their weights; within a tenant, a level of `priority` has four
    times the share of the level below. The cost for these shares is the `length`. Sequences of one tenant and
    priority keep their order. See `FairScheduler` for the rule. Put other limits of a tenant in front of
    this.

    **Streams.** A sequence with `buffer` unread parts takes part in no step until its reader reads. It keeps
    its place, and the others continue. Set a deadline for your calls if readers may hang.

    **Steps in advance.** With ``steps_ahead=1`` the next step is called while one runs, so that the device
    never waits for the batcher. The next step has the sequences that continue if none of them ends. It lacks
    the last parts: `RunningSequence.steps_ahead` counts them, and the model takes them from the device. The
    batcher drops the parts of a sequence that has ended meanwhile. If a step fails, the batcher drops the
    later steps, and calls the failed step separately. A step that has run with the wrong parts raises a
    `NotExecutedError`, and is called again. While a prompt is processed, no step is called in advance. A
    sequence with `needs_parts` is not in a step called in advance, so next to others it is in every second
    step. A step must submit its work in call order, and read the fields of its sequences before it waits.

    **Cancellation.** A sequence with a cancelled caller leaves before the next step. If all callers of a step
    have left, the step is cancelled. `leave` is called once for each sequence that a step may have seen,
    however it ended, and while no step uses it.

    **Failure.** After a failure, a step is called again with halves of the batch, as in `Batcher`, so that
    only the bad sequence fails. A loss that no sequence caused does not end streams: a context lost for
    another reason, a model's actor that crashed or restarts, a full queue. Then the same step is called again
    after a short pause, for `patience` seconds from its first loss. After that, its sequences get the error.

    ``stop(drain=True)`` finishes all sequences; give the actor a `Policy` with a sufficient `grace`. If the
    incarnation ends otherwise, sequences in the batch fail with `ActorFailedError`, and waiting ones with
    `ActorStoppedError` or `ActorRestartingError`, because they were never begun. To replace the model, put a
    `HotSwap` in front with an `opening` that spawns a batcher. The new batcher gets new sequences, and old
    ones end in the old batcher.

    The step does not see the deadlines and context variables of the callers, because it works for several.

    Args:
        step: See above: an async callable, or an actor for `Submit`.
        length: The number of positions in an item's prompt, an integer from 1; by default 1.
        cost: The cost of an item, at least 0.
        max_cost: The maximum cost of all sequences in the batch.
        room: The room that sequences take while they grow.
        tenant: The tenant of an item, a hashable value; by default, all items belong to the tenant None.
        priority: The priority of an item, an integer from -8 to 8; by default 0.
        weights: The weights of the tenants, as in `FairScheduler`.
        max_sequences: The maximum number of sequences in the batch.
        max_positions: The maximum number of positions in a step; at least `max_sequences`.
        buffer: The number of unread parts at which a sequence waits for its reader.
        steps_ahead: The number of steps called while another one runs; 0 or more.
        capacity: The maximum number of sequences that wait for a place; one more is refused with
            `MailboxFullError`. None for no bound.
        leave: Called with a sequence that has ended, to release its resources. Its errors are logged.
        patience: The seconds from its first loss in which a step is called again; 0 for no second call.
        splits: The number of times that a batch is halved while no part has succeeded; with 0, it fails as an
            whole.
        divides: Whether an error may come from a single sequence.

    Raises:
        TypeError, ValueError: An argument is of another type, or out of range.
    """

    @checked_options
    def __init__(
        self,
        step: Model[list[RunningSequence[ItemT, PartT]], BatchResults[StepResult[PartT]]],
        *,
        length: Callable[[ItemT], int] | None = None,
        cost: Callable[[ItemT], float] | None = None,
        max_cost: float | None = None,
        room: Room[ItemT, PartT] | None = None,
        tenant: Callable[[ItemT], Hashable] | None = None,
        priority: Callable[[ItemT], int] | None = None,
        weights: Mapping[Any, float] | None = None,
        max_sequences: int = 64,
        max_positions: int = 512,
        buffer: int = 16,
        steps_ahead: int = 0,
        capacity: int | None = 1024,
        leave: Callable[[RunningSequence[ItemT, PartT]], object] | None = None,
        patience: float = 60.0,
        splits: int = 1,
        divides: Callable[[Exception], bool] = is_request_error,
    ) -> None:
        super().__init__(cost=cost, max_cost=max_cost, capacity=capacity, splits=splits, divides=divides)
        name = type(self).__name__
        self._step = as_callable(step)
        self._length, self._tenant, self._priority = length, tenant, priority
        self._most_sequences = must_be_count(f"{name}: max_sequences", max_sequences)
        # Each prompt in the batch has a position in each step.
        self._most_positions = must_be_count(f"{name}: max_positions", max_positions, minimum=max_sequences)
        self._buffer = must_be_count(f"{name}: buffer", buffer)
        self._steps_ahead = must_be_count(f"{name}: steps_ahead", steps_ahead, minimum=0)
        if inspect.iscoroutinefunction(leave):
            raise TypeError(f"{name}: leave must not be async: it is called where nothing may wait")
        self._leaves_by = leave
        self._patience = must_be_positive(f"{name}: patience", patience, allows_zero=True)
        self._weights = weights if isinstance(weights, Weights) else Weights(weights)
        # The capacity is the only bound.
        self._queue = FairQueue[SequenceEntry[ItemT, PartT]](
            self._weights, max_queued=_MAX_QUEUED, max_tenants=_MAX_QUEUED
        )
        # The sequence whose turn it is, while the batch lacks room for its cost.
        self._next: SequenceEntry[ItemT, PartT] | None = None
        # Sequences with a place, in the order in which they got it; and sequences set aside.
        self._running: dict[SequenceEntry[ItemT, PartT], None] = {}
        self._aside: dict[SequenceEntry[ItemT, PartT], None] = {}
        if room is not None and cost is not None:
            raise ValueError(f"{name}: room takes the place of cost: give one of them")
        self._room, self._places = room, None
        if room is not None:
            args = self._running, self._aside, self._queue, self._weights, self._most_sequences
            self._places = SequenceSlots[ItemT, PartT](*args, room)
        self._batch = Batch[SequenceEntry[ItemT, PartT]]([])
        # Calls of the step that run, in their order.
        self._flights = deque[_Flight[ItemT, PartT]]()
        self._firsts = buckets_of_waits()

    def statistics(self) -> ContinuousStatistics:
        """Return the counts since its incarnation began."""
        room, aside = self._room, sum(entry.is_aside for entry in self._aside)
        return ContinuousStatistics(
            waiting=self._waiting,
            in_flight=sum(not entry.reply.is_done for entry in self._running) + aside,
            cost=self._cost_with() if room is None else room.total - room.free,
            aside=aside,
            **self._tally,
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics: counts, batch sizes, waits, and current numbers."""
        yield from super().readings()
        statistics = self.statistics()
        yield count("parts", "Parts that sequences have given.", statistics.parts)
        text = "Sequences of a batcher by whether steps go through them."
        running = statistics.in_flight - statistics.aside
        for state, value in (
            ("running", running),
            ("waiting", statistics.waiting),
            ("set_aside", statistics.aside),
        ):
            yield Reading(name="sequences", kind="gauge", help=text, value=value, labels=(("state", state),))
        yield count("sequences_set_aside", "How often a sequence was set aside.", statistics.set_aside)
        text = "Cost of the sequences that steps go through."
        yield Reading(name="sequence_cost", kind="gauge", help=text, value=statistics.cost)
        text = "Seconds from the request for a sequence to its first part."
        yield self._firsts.reading("time_to_first_part_seconds", text)

    @property
    def _waiting(self) -> int:
        beside = sum(not entry.is_aside for entry in self._aside)
        return self._queue.queued + (self._next is not None) + beside

    def make(self, message: Submit[Streamable[ItemT, PartT]]) -> SequenceEntry[ItemT, PartT]:
        item: Any = message.item
        stream: Any = None
        if isinstance(message.item, Streamed):
            item, stream = item.item, item.stream
        return SequenceEntry(item=item, sequence=RunningSequence(item, length=1), stream=stream)

    def put(self, entry: SequenceEntry[ItemT, PartT]) -> None:
        path, sequence, item = self.context.path, entry.sequence, entry.item
        if self._length is not None:
            sequence.length = must_be_count(
                f"{path}: the length of a prompt", self._length(item), maximum=_MAX_QUEUED
            )
        entry.cost = self._cost_of(item)
        if (room := self._room) is not None and (demand := room.demand(sequence)) > room.total:
            problem = f"the item wants {demand:g} to begin, and there are {room.total:g} in all"
            raise ValueError(f"{path}: {problem}; it can never be served")
        tenant = None if self._tenant is None else self._tenant(item)
        priority = 0 if self._priority is None else self._priority(item)
        must_be_count(f"{path}: a priority", priority, minimum=-_MAX_PRIORITY, maximum=_MAX_PRIORITY)
        weight = weight_in(self._weights, tenant, path)
        if self._waiting >= self._capacity:
            raise self._full()
        if entry.stream is not None:
            entry.stream.begin(self._bell.unpark_all)
        # A higher level multiplies the tenant's weight, so divide the cost by the same factor.
        cost = sequence.length / _LEVEL**priority
        entry.tenant, entry.weight = tenant, weight
        entry.queued = self._queue.put(entry, tenant, cost, weight, level=priority)
        entry.rank = entry.queued.number - priority * LEVEL_ARRIVALS
        self._admit()
        self._bell.unpark_all()

    @enable_ki_protection
    def leave(self, entry: SequenceEntry[ItemT, PartT]) -> None:
        self._tally["cancelled"] += 1
        entry.reply.cancelled()
        entry.is_over = True
        if entry.queued is not None:
            self._queue.withdraw(entry.queued)
        elif entry is self._next:
            self._next = None
            self._queue.finish()
        if not entry.steps:
            self._release(entry)
        for batch in (self._batch, *self._flights):
            batch.end_if_alone(entry)
        self._bell.unpark_all()

    async def _run(self) -> None:
        while True:
            # D183: readers run during the next step. But a caller with its last part may call again, and the
            # step may lack a checkpoint.
            is_one_done = any(map(_IS_OVER, self._batch.entries))
            if self._tally["steps"] % _MOST_STEPS == 0 or is_one_done:
                await trio.lowlevel.checkpoint()
            self._admit()
            while self._steps_ahead and len(self._flights) <= self._steps_ahead:
                if self._flights and not self._flights[-1].has_begun:
                    # Calls of the step begin in their order.
                    await trio.lowlevel.checkpoint()
                elif entries := self._next_batch(True):
                    self._flights.append(_Flight(entries))
                    self._nursery.start_soon(self._fly, self._flights[-1])
                else:
                    break
            if self._flights:
                await self._land()
                continue
            self._batch = Batch(self._next_batch())
            if self._batch.entries:
                await self._go_through(self._batch)
            else:
                await self._bell.park()

    async def _fly(self, flight: _Flight[ItemT, PartT]) -> None:
        """Call the step for a flight, in a task of its own."""
        flight.has_begun = True
        try:
            with flight.scope:
                flight.entries = [entry for entry in flight.entries if not (entry.is_over or entry.is_moving)]
                if flight.entries:
                    flight.results = await outcome_of(self._call(flight.entries))
        finally:
            flight.landed.set()

    async def _land(self) -> None:
        """Wait for the earliest flight, and give its sequences the results."""
        flight = self._batch = self._flights[0]
        await flight.landed.wait()
        self._end_step(self._flights.popleft().entries)
        results = flight.results
        if not isinstance(results, outcome.Error):
            if results is not None:
                self._give(flight.entries, results.value)
            return
        # D221: later flights started from parts that do not exist.
        while self._flights:
            await self._flights[0].landed.wait()
            self._end_step(self._flights.popleft().entries)
        self._batch = Batch(flight.entries)
        # A step called in advance may find room by now.
        await self._go_through(self._batch, None if isinstance(results.error, NoRoomError) else results)

    def _cost_with(self, *entries: SequenceEntry[ItemT, PartT]) -> float:
        """Return the cost of the sequences in the batch, and of others."""
        # Sum everything each time, because a running difference would not return to exactly 0.
        return math.fsum(entry.cost for entry in (*self._running, *entries))

    @enable_ki_protection
    def _admit(self) -> None:
        """Give sequences places in the order of their turns, as long as places are free."""
        if self._places is not None:
            if self._queue.queued or self._aside or self._places.leaving:
                self._admit_growing(self._places)
            return
        while len(self._running) < self._most_sequences:
            if self._next is None:
                queued = self._queue.take()
                if queued is None:
                    return
                self._next = queued.value
                self._next.queued = None
            entry = self._next
            if self._cost_with(entry) > self._most_cost:
                return
            self._next = None
            self._running[entry] = None

    def _admit_growing(self, slots: SequenceSlots[ItemT, PartT]) -> None:
        while (entry := slots.take(self._tally["steps"])) is not None:
            if entry.is_aside:
                entry.is_moving, entry.steps = True, 1
                self._nursery.start_soon(self._bring_back, entry)
        for entry in slots.leaving:
            if not entry.steps:
                entry.steps = 1
                self._nursery.start_soon(self._set_aside, entry)

    def _next_batch(self, is_ahead: bool = False) -> list[SequenceEntry[ItemT, PartT]]:
        """Return the sequences of the next step, with their chunks: all with readers that have room.

        Args:
            is_ahead: Whether other steps may run. If so, and a prompt is to be processed or waits for leaving
                sequences, the result is empty.
        """
        batch, prompts = list[SequenceEntry[ItemT, PartT]](), list[RunningSequence[ItemT, PartT]]()
        for entry in self._running:
            sequence, stream = entry.sequence, entry.stream
            if entry.is_over or entry.is_moving or (sequence.needs_parts and entry.steps):
                continue
            if stream is not None and len(stream.unread) + entry.steps >= self._buffer:
                stream.is_held = True
                continue
            batch.append(entry)
            sequence.chunk = 1
            if sequence.done < sequence.length:
                prompts.append(sequence)
        if is_ahead and (prompts or (self._places is not None and self._places.leaving)):
            return []
        remaining = [sequence.length - sequence.done for sequence in prompts]
        shares = shared_evenly(self._most_positions - (len(batch) - len(prompts)), remaining)
        for sequence, share in zip(prompts, shares, strict=True):
            sequence.chunk = share
        return batch

    async def _go_through(
        self, batch: Batch[SequenceEntry[ItemT, PartT]], results: outcome.Error | None = None
    ) -> None:
        with batch.scope:
            error = await self._launch(batch.entries, results)
            if error is not None:
                await self._halve(batch.entries, error)

    async def _launch(
        self, entries: list[SequenceEntry[ItemT, PartT]], failed: outcome.Error | None = None
    ) -> Exception | None:
        # This is called again after a loss.
        attempt, end = 0, math.inf
        while entries := [
            entry for entry in entries if not (entry.is_over or entry.is_moving or entry.is_aside)
        ]:
            try:
                results = failed or await outcome_of(self._call(entries))
            finally:
                if failed is None:
                    self._end_step(entries)
            failed = None
            if isinstance(results, outcome.Value):
                self._give(entries, results.value)
                break
            error = cast("Exception", results.error)
            if self._places is not None and isinstance(error, NoRoomError):
                entries = await self._make_room(self._places, entries, error)
                continue
            end = min(end, trio.current_time() + self._patience)
            if not await self._may_go_better(error, attempt, end):
                return error
            attempt += 1
            self._tally["repeated"] += 1
        return None

    async def _may_go_better(self, error: Exception | None, attempt: int, end: float) -> bool:
        """Return whether lost work may be called again, after a pause."""
        if error is None or trio.current_time() >= end or not is_loss(error):
            await trio.lowlevel.checkpoint_if_cancelled()
            return False
        await trio.sleep(min(_FIRST_PAUSE * 2.0**attempt, _LONGEST_PAUSE))
        return True

    async def _make_room(
        self,
        slots: SequenceSlots[ItemT, PartT],
        entries: list[SequenceEntry[ItemT, PartT]],
        error: NoRoomError,
    ) -> list[SequenceEntry[ItemT, PartT]]:
        """Set a sequence aside because a step lacks room, and return the sequences that the step keeps."""
        moving = [entry for entry in self._running if entry.is_moving]
        if any(entry.steps for entry in moving):
            # It releases room, or fails because there is none.
            await self._bell.park()
            return entries
        for victim in [*moving, *slots.by_turn()]:
            victim.is_moving, victim.steps = True, 1
            if await self._set_aside(victim):
                return [entry for entry in entries if entry is not victim]
        # None can be set aside. Sequences that need no more room continue.
        if len(entries) > 1:
            newest = max(entries, key=lambda entry: entry.rank)
            return [entry for entry in entries if entry is not newest]
        self._fail((slots.by_turn() or entries)[:1], error)
        return entries

    async def _set_aside(self, entry: SequenceEntry[ItemT, PartT]) -> bool:
        """Release the resources of a sequence; return whether that succeeded."""
        error = await self._moved(entry, cast("Room[ItemT, PartT]", self._room).set_aside)
        if not entry.is_over and error is None:
            self._leave_place(entry)
            entry.since = self._tally["steps"]
            self._tally["set_aside"] += 1
        entry.is_stuck = error is not None
        return entry.is_over or error is None

    async def _bring_back(self, entry: SequenceEntry[ItemT, PartT]) -> None:
        # It takes its room at once. If there is none after all, another attempt may follow as soon.
        entry.is_aside = False
        error = await self._moved(entry, cast("Room[ItemT, PartT]", self._room).bring_back, _FIRST_PAUSE)
        if not entry.is_over and error is not None:
            self._leave_place(entry)

    @enable_ki_protection
    def _leave_place(self, entry: SequenceEntry[ItemT, PartT]) -> None:
        del self._running[entry]
        self._aside[entry] = None
        entry.is_aside = True

    async def _moved(
        self,
        entry: SequenceEntry[ItemT, PartT],
        call: Callable[[RunningSequence[ItemT, PartT]], Awaitable[None]],
        pause: float = 0.0,
    ) -> Exception | None:
        """Set a sequence aside or bring it back; return why that failed. Another error ends it."""
        error: Exception | None = None
        try:
            end = trio.current_time() + self._patience
            for attempt in itertools.count():
                result = await outcome_of(call(entry.sequence))
                error = None if isinstance(result, outcome.Value) else cast("Exception", result.error)
                if isinstance(error, NoRoomError):
                    await trio.sleep(pause)
                is_final = error is None or entry.is_over or isinstance(error, NoRoomError)
                if is_final or not await self._may_go_better(error, attempt, end):
                    break
        finally:
            entry.is_moving = False
            if self._places is not None and entry in self._places.leaving:
                self._places.leaving.remove(entry)
            self._end_step([entry])
            self._bell.unpark_all()
        if error is not None and not isinstance(error, NoRoomError):
            self._fail([entry], error)
        return error

    async def _call(self, entries: list[SequenceEntry[ItemT, PartT]]) -> list[StepResult[PartT]]:
        self._tally["steps"] += 1
        self._sizes.add(len(entries))
        for entry in entries:
            if not entry.has_begun:
                self._begin(entry)
            entry.sequence.steps_ahead = entry.steps
            entry.steps += 1
        return split_results(await self._step([entry.sequence for entry in entries]), len(entries))

    @enable_ki_protection
    def _end_step(self, entries: list[SequenceEntry[ItemT, PartT]]) -> None:
        """Record that a call of the step has ended, just before its results are given."""
        for entry in entries:
            entry.steps -= 1
            if entry.is_over and not entry.steps:
                self._release(entry)

    @enable_ki_protection
    def _give(self, entries: list[SequenceEntry[ItemT, PartT]], results: list[StepResult[PartT]]) -> None:
        """Give sequences their results from a step, unless their callers have left."""
        count = 0
        for entry, result in zip(entries, results, strict=True):
            if entry.is_over:
                continue
            # Checking the classes of `outcome` takes longer than the rest, and most results are lists.
            parts: object = result
            if not isinstance(parts, list | tuple):
                if isinstance(result, outcome.Error) and isinstance(result.error, Exception):
                    self._fail([entry], result.error)
                    continue
                parts = result.parts if isinstance(result, Last) else result
            if not isinstance(parts, list | tuple):
                text = f"the step returned {type(parts).__name__} for a sequence; let it return a list of "
                self._fail([entry], ModelOutputError(f"{text}parts, Last(parts) or outcome.Error(error)"))
                continue
            sequence = entry.sequence
            sequence.done += sequence.chunk
            if parts:
                if not sequence.parts:
                    self._firsts.add(trio.current_time() - entry.arrived)
                sequence.parts.extend(parts)
                count += len(parts)
                if entry.stream is not None:
                    entry.stream.put(parts)
            if isinstance(result, Last):
                self._tally["answered"] += entry.reply.set(tuple(sequence.parts))
                self._release(entry)
        self._tally["parts"] += count

    @enable_ki_protection
    def _release(self, entry: SequenceEntry[ItemT, PartT]) -> None:
        # It has ended, and leaves its place once no step uses it.
        entry.is_over = True
        if entry.stream is not None:
            entry.stream.on_read = None
        sequences = self._aside if entry in self._aside else self._running
        if entry.steps or entry not in sequences:
            return
        del sequences[entry]
        for peer in self._running if self._places is not None else ():
            peer.is_stuck = False
        self._queue.finish()
        if self._leaves_by is not None and entry.has_begun:
            try:
                self._leaves_by(entry.sequence)
            except Exception:  # of an unknown function; the others continue
                _logger.exception("%s: `leave` failed for a sequence that has ended", self.context.path)

    def _open(self) -> Iterable[SequenceEntry[ItemT, PartT]]:
        waiting = [queued.value for queued in self._queue]
        return [*waiting, *([] if self._next is None else [self._next]), *self._running, *self._aside]

    @enable_ki_protection
    def _end(self, entry: SequenceEntry[ItemT, PartT]) -> None:
        super()._end(entry)
        entry.steps = 0
        self._release(entry)
