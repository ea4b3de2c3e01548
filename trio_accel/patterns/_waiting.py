"""Base of the patterns in which requests wait without a task: for a batch, a place or their turn."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import ActorContext, Buckets, DeferredReply, Reading, fast_path, handles
from ._submit import CallStatistics, ItemT, ResultT, Submit, TaskSubmitActor, count, end_with_incarnation

__all__ = ["WaitingStatistics"]

_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def buckets_of_waits() -> Buckets:
    """Make a spread of the seconds that requests wait."""
    return Buckets(_WAITS)


@attrs.frozen(kw_only=True)
class WaitingStatistics(CallStatistics):
    """Counts of calls, some of which wait; calls that left before their turn count as begun.

    Attributes:
        waiting: The number of waiting calls.
        refused: The number of calls that were never executed, because they were invalid or there was no room.
    """

    waiting: int = 0
    refused: int = 0

    @property
    def requests(self) -> int:
        """The total number of calls."""
        return self.waiting + self.begun + self.refused


@attrs.define(eq=False, kw_only=True)
class WaitingRequest(Generic[ItemT, ResultT]):
    """A request that waits, or that the model works on.

    Attributes:
        item: The item of the request.
        arrived: The time of arrival.
        cost: Its share of the bound on all concurrent requests.
        has_begun: Whether the model has got it.
        reply: Receives its outcome.
    """

    item: ItemT
    arrived: float = attrs.field(factory=trio.current_time)
    cost: float = 0.0
    has_begun: bool = False
    reply: DeferredReply[ResultT] = attrs.field(init=False)

    def was_begun(self) -> bool:
        """Return whether the model has got it by now."""
        return self.has_begun


EntryT = TypeVar("EntryT", bound=WaitingRequest[Any, Any])


@enable_ki_protection
def take(actor: QueueActor[Any, Any, Any], message: Any) -> DeferredReply[Any]:
    """Accept the current request without waiting; if it is invalid or there is no room, fail it."""
    entry = actor.make(message)
    entry.reply = actor.context.defer(on_cancel=partial(actor.leave, entry))
    try:
        actor.put(entry)
    except Exception as error:  # noqa: BLE001  # of a function of the program, or no room
        actor.refuse(entry, error)
    reply: DeferredReply[Any] = entry.reply
    return reply


class QueueActor(TaskSubmitActor[ItemT, ResultT], Generic[ItemT, ResultT, EntryT]):
    """An actor for `Submit` in which waiting requests do not have a task.

    A request is placed or refused as soon as it is sent, before the mailbox reaches it.
    """

    def __init__(self) -> None:
        self._waits = buckets_of_waits()
        # Refusals by tenant name; "" without a known name.
        self._refused_of = Counter[str]()

    @abstractmethod
    def make(self, message: Submit[ItemT]) -> EntryT:
        """Make the entry of a request."""

    @abstractmethod
    def put(self, entry: EntryT) -> None:
        """Place a request in the queue, or raise the reason why that is impossible."""

    @abstractmethod
    def leave(self, entry: EntryT) -> None:
        """Drop a request after its caller was cancelled."""

    @abstractmethod
    def _open(self) -> Iterable[EntryT]:
        """Return the requests that the end of the incarnation ends."""

    @abstractmethod
    async def _run(self) -> None:
        """Serve the waiting requests."""

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the tasks of one incarnation, and then end open requests, which later ones would not know."""
        try:
            async with super().lifespan(context):
                self._nursery.start_soon(self._run)
                yield
        finally:
            for entry in self._open():
                self._end(entry)

    def _end(self, entry: EntryT) -> None:
        end_with_incarnation(self.context, entry.reply, has_begun=entry.has_begun)

    # Submit is declared for all subclasses, and a method takes its own class.
    @handles(Submit, ki_protected=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    @fast_path(take)
    async def _serve(self, message: Submit[ItemT]) -> object:
        return await self.call(message.item)

    async def call(self, item: ItemT) -> DeferredReply[ResultT]:
        """Accept a request."""
        await trio.lowlevel.checkpoint()
        return take(self, Submit(item))

    def refuse(self, entry: EntryT, error: Exception) -> None:
        self._tally["refused"] += 1
        self._refused_of[""] += 1
        entry.reply.fail(error)

    def _begin(self, entry: EntryT) -> None:
        """Record that the model gets a request."""
        if not entry.has_begun:
            self._waits.add(trio.current_time() - entry.arrived)
        entry.has_begun = True

    def readings(self) -> Iterator[Reading]:
        """Yield the counts for metrics, with refusals and waits."""
        yield from super().readings()
        text = "Requests that a pattern has refused, by tenant where it knows tenants."
        for tenant, value in self._refused_of.items():
            yield count("refused_requests", text, value, tenant=tenant)
        text = "Seconds that a request has waited before the model got it."
        yield self._waits.reading("queue_wait_seconds", text)
