"""Shares of a model by tenant, in proportion to their weights.

The queue is start-time fair: it says which request is next, without a clock and without an actor.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import (
    ActorContext,
    ActorError,
    DeferredReply,
    MailboxFullError,
    NotExecutedError,
    Reading,
    Request,
    Spread,
    handles,
    quick,
)
from ._checks import must_be_count, must_be_positive
from ._limits import KeyedStates, RateLimit
from ._servants import (
    QUEUE_WAIT,
    REFUSED,
    WAITS,
    Call,
    ItemT,
    Model,
    ResultT,
    TaskServant,
    as_callable,
    count,
    end_with_incarnation,
)

__all__ = ["FairCall", "FairScheduler", "FairStatistics", "UnknownTenantError", "Weights"]

TenantT = TypeVar("TenantT", bound=Hashable)
ValueT = TypeVar("ValueT")

# Tags are whole numbers of this part of a unit. As floats, a small step would be lost in a large tag, and its
# tenant be served for ever.
_UNIT = 2.0**128
# Tenants that metrics tell apart, and characters of their names.
_MOST_NAMED, _LONGEST_NAME, _OTHERS = 100, 100, "(other)"
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6
_MOST_COST = 1e9
# D123: refusals that a tenant gets at once, and after these so many together. One takes 16 us of the loop.
_REFUSALS_AT_ONCE, _REFUSALS_A_SECOND, _REFUSALS = 4096, 2000, 20


class Weights(UserDict[Hashable, float]):
    """Weights of tenants, which may be changed at any time.

    A change counts from the next request on that is handed to the model. Several schedulers may share them.

    Args:
        weights: Weights by tenant, from 1e-6 to 1e6.
        default: Weight of a tenant that has none; None refuses such tenants.

    Raises:
        ValueError: A weight is zero, negative, NaN, infinite or out of range.
        TypeError: A weight is no number.
    """

    def __init__(
        self, weights: Mapping[TenantT, float] | None = None, *, default: float | None = 1.0
    ) -> None:
        super().__init__()
        self._default = None if default is None else _weight("the default weight", default)
        for tenant, weight in (weights or {}).items():
            self[tenant] = weight

    def __repr__(self) -> str:
        return f"Weights({self.data!r}, default={self._default!r})"

    # The operators of a dictionary would take weights unchecked, and forget the default.
    __or__ = __ror__ = __ior__ = None  # type: ignore[assignment]

    def __setitem__(self, tenant: Hashable, weight: float) -> None:
        super().__setitem__(tenant, _weight(f"the weight of {tenant!r}", weight))

    def of(self, tenant: Hashable) -> float | None:
        """Return the weight of a tenant, or the default; None if it is refused."""
        return self.data.get(tenant, self._default)


def _weight(what: str, value: float) -> float:
    return must_be_positive(what, value, minimum=_LEAST_WEIGHT, maximum=_MOST_WEIGHT)


def must_be_cost(value: float) -> float:
    """Return the cost of a request: above 0, at most 1e9.

    Raises:
        ValueError: It is zero, negative, NaN, infinite or more.
        TypeError: It is no number.
    """
    return must_be_positive("the cost of a request", value, maximum=_MOST_COST)


class QueueFull(Exception):  # noqa: N818  # it never leaves the scheduler, which makes an error of it
    """There is no room for a request."""


@attrs.define(eq=False)
class _Flow(Generic[ValueT]):
    """State of a tenant.

    Attributes:
        tenant: Its key.
        queue: Its requests by number, oldest first.
        finish: Finish tag of its last request that was taken.
        period: Busy period that the tag is of.
        is_listed: Whether the heap has an entry of it.
    """

    tenant: Hashable
    queue: OrderedDict[int, Queued[ValueT]] = attrs.field(factory=lambda: OrderedDict())  # noqa: PLW0108
    finish: int = 0
    period: int = 0
    is_listed: bool = False

    @property
    def head(self) -> Queued[ValueT]:
        return next(iter(self.queue.values()))


@attrs.define(eq=False)
class Queued(Generic[ValueT]):
    """A request in the queue.

    Attributes:
        value: The value that was put.
        flow: State of its tenant.
        cost: Its cost.
        weight: Weight of its tenant at its arrival.
        number: Place among all arrivals.
        arrived_at: Virtual time of its arrival.
    """

    value: ValueT
    flow: _Flow[ValueT]
    cost: float
    weight: float
    number: int
    arrived_at: int


class FairQueue(Generic[ValueT]):
    """Start-time fair queueing: SFQ (Goyal, Vin and Cheng, SIGCOMM 1996).

    A request has the start tag ``S = max(v(arrival), F of its tenant's request before)`` and the finish tag
    ``F = S + cost / weight``. The least start tag is next, of equal ones the first that arrived. Virtual time
    ``v`` is the start tag of what was taken last, where several run at once too: SFQ(D) (Jin, Chase and Kaur,
    SIGMETRICS 2004). So a tenant that was idle starts where the others are.

    The paper gives tags at arrival. Here they are given to the first of each tenant, which comes to the same:
    behind a request that is queued, ``F`` is above ``v``. So a request that is withdrawn leaves no trace.

    A busy period ends when nothing is queued and all that was taken is finished. The paper then sets ``v`` to
    the last finish tag, which no tag is above. Here all tags become 0.

    Args:
        weights: Weights of the tenants.
        max_queued: The most requests of a tenant.
        max_tenants: The most tenants that are remembered. While so many have requests waiting, a further one
            is refused, unless it has a weight of its own.
    """

    def __init__(self, weights: Weights, *, max_queued: int, max_tenants: int) -> None:
        self._weights = weights
        self._max_queued = max_queued
        self._max_tenants = max_tenants
        self._flows: KeyedStates[_Flow[ValueT]] = KeyedStates(_Flow, self._debt, max_tenants)
        # Start tag and number of the first request of each tenant; or of one before it that was withdrawn.
        self._heads: list[tuple[int, int, _Flow[ValueT]]] = []
        # Entries of tenants that have nothing queued any more.
        self._stale = 0
        self._virtual = 0
        self._period = 0
        self._arrivals = 0
        self._backlogged = 0
        self.queued: int = 0
        self.in_flight: int = 0

    @property
    def tenants(self) -> int:
        """The number of tenants that are remembered."""
        return len(self._flows)

    def __iter__(self) -> Iterator[Queued[ValueT]]:
        """Yield all queued requests, in order of arrival."""
        entries = [entry for flow in self._flows for entry in flow.queue.values()]
        return iter(sorted(entries, key=lambda entry: entry.number))

    def has(self, tenant: Hashable) -> bool:
        """Tell whether a request of a tenant is queued."""
        flow = self._flows.find(tenant)
        return flow is not None and bool(flow.queue)

    def put(self, value: ValueT, tenant: Hashable, cost: float, weight: float) -> Queued[ValueT]:
        """Put a request behind those of its tenant.

        Raises:
            QueueFull: The tenant has too many, or too many tenants have some.
        """
        flow = self._flows.find(tenant)
        if flow is None:
            if self._backlogged >= self._max_tenants and tenant not in self._weights:
                raise QueueFull(f"requests of {self._backlogged} tenants are waiting, the most there may be")
            flow = self._flows.get(tenant)
        if len(flow.queue) >= self._max_queued:
            raise QueueFull(f"{self._max_queued} requests of tenant {tenant!r} are waiting, its most")
        self._arrivals += 1
        entry = Queued(value, flow, cost, weight, self._arrivals, self._virtual)
        if not flow.queue:
            self._backlogged += 1
            if flow.is_listed:
                # The heap still has the tenant's old entry, whose tag is not above the new one's: `take`
                # corrects it.
                self._stale -= 1
            else:
                heapq.heappush(self._heads, self._place(entry))
                flow.is_listed = True
        flow.queue[entry.number] = entry
        self.queued += 1
        return entry

    def withdraw(self, entry: Queued[ValueT]) -> None:
        """Take a request out that is still queued."""
        flow = entry.flow
        del flow.queue[entry.number]
        self.queued -= 1
        if not flow.queue:
            self._backlogged -= 1
            self._stale += 1
            if 2 * self._stale > len(self._heads):
                self._drop_stale()
        self._end_period_if_idle()

    def take(self) -> Queued[ValueT] | None:
        """Take the next request; None if there is none. `finish` is called when it is done."""
        heads = self._heads
        while heads:
            start, number, flow = heads[0]
            if not flow.queue:
                heapq.heappop(heads)
                flow.is_listed = False
                self._stale -= 1
                continue
            entry = flow.head
            if entry.number != number:
                # The request in front has gone, so the next one may have a later place.
                heapq.heapreplace(heads, self._place(entry))
                continue
            self._take(start, entry)
            return entry
        return None

    def finish(self) -> None:
        """Note that a request that was taken is done."""
        self.in_flight -= 1
        self._end_period_if_idle()

    def _take(self, start: int, entry: Queued[ValueT]) -> None:
        flow = entry.flow
        del flow.queue[entry.number]
        self.queued -= 1
        self.in_flight += 1
        self._virtual = start
        # A tenant that has lost its weight meanwhile counts with the one at the request's arrival.
        weight = self._weights.of(flow.tenant) or entry.weight
        # D123: tags are whole numbers. As floats, steps of a tenant with a large weight were lost beside a
        # large tag, and it was served for ever.
        flow.finish = start + max(1, int(entry.cost / weight * _UNIT))
        flow.period = self._period
        if flow.queue:
            heapq.heapreplace(self._heads, self._place(flow.head))
        else:
            heapq.heappop(self._heads)
            flow.is_listed = False
            self._backlogged -= 1

    def _place(self, entry: Queued[ValueT]) -> tuple[int, int, _Flow[ValueT]]:
        flow = entry.flow
        finish = flow.finish if flow.period == self._period else 0
        return max(entry.arrived_at, finish), entry.number, flow

    def _end_period_if_idle(self) -> None:
        if not self.queued and not self.in_flight:
            self._period += 1
            self._virtual = 0
            # The entries that are left are of the period that ended.
            self._drop_stale()

    def _drop_stale(self) -> None:
        for _, _, flow in self._heads:
            flow.is_listed = bool(flow.queue)
        self._heads = [head for head in self._heads if head[2].queue]
        heapq.heapify(self._heads)
        self._stale = 0

    def _debt(self, flow: _Flow[ValueT]) -> float:
        if flow.queue:
            return math.inf
        return flow.finish - self._virtual if flow.period == self._period else 0


def _hashable(call: FairCall[Any], attribute: attrs.Attribute[Hashable], value: Hashable) -> None:
    hash(value)


@attrs.frozen
class FairCall(Request["FairScheduler[Any, Any]", Any], Generic[ItemT]):
    """Ask a `FairScheduler` for the result of one item, on behalf of a tenant.

    Attributes:
        item: The model's input.
        tenant: Its tenant, such as an API key; anything that can be hashed.
        cost: Its cost, above 0 and at most 1e9, in a unit of your own: items, tokens, milliseconds.
    """

    item: ItemT
    tenant: Hashable = attrs.field(kw_only=True, validator=_hashable)
    cost: float = attrs.field(default=1.0, kw_only=True, converter=must_be_cost)


@attrs.frozen(kw_only=True)
class FairStatistics:
    """Counts of a `FairScheduler` since its incarnation began.

    ``requests == waiting + in_flight + answered + failed + cancelled + refused``, at any time.

    Attributes:
        requests: Requests that came.
        waiting: Requests that wait.
        in_flight: Requests that the model works on.
        answered: Requests with a result.
        failed: Requests that were given an error of the model.
        cancelled: Requests whose askers were cancelled, while they waited or in flight.
        refused: Requests without room, of tenants without a weight, or whose tenant or cost is not valid.
        waiting_of: Requests that wait, of each tenant that has some.
        cost_of: Cost of requests that were handed to the model, of each tenant with a weight of its own.
        cost_of_others: The same of all others together.
        tenants: How many tenants are remembered.
    """

    requests: int
    waiting: int
    in_flight: int
    answered: int
    failed: int
    cancelled: int
    refused: int
    waiting_of: Mapping[Hashable, int]
    cost_of: Mapping[Hashable, float]
    cost_of_others: float
    tenants: int


class UnknownTenantError(ActorError, NotExecutedError, LookupError):
    """The tenant has no weight, and there is no default; the request was never executed."""

    may_go_elsewhere = False


@attrs.define(eq=False)
class _Turn(Generic[ItemT]):
    """A request that waits, or is with the model. It has a task only from its turn on.

    Attributes:
        item: The model's input.
        tenant: Its tenant.
        deadline: When its asker gives up.
        arrived: When it came.
        reply: Where its outcome goes.
        entry: Its place in the queue; None if it waits for its refusal.
        scope: The scope of its task; None before its turn.
        has_begun: Whether the model was called.
    """

    item: ItemT
    deadline: float
    tenant: Hashable = None
    arrived: float = attrs.field(factory=trio.current_time, init=False)
    reply: DeferredReply[Any] = attrs.field(init=False)
    entry: Queued[_Turn[ItemT]] | None = attrs.field(default=None, init=False)
    scope: trio.CancelScope | None = attrs.field(default=None, init=False)
    has_begun: bool = attrs.field(default=False, init=False)


_Refused: TypeAlias = OrderedDict[_Turn[ItemT], Exception]


class FairScheduler(TaskServant[ItemT, ResultT]):
    """Hands requests to a model so that each tenant gets its share, however much the others ask for.

    While several tenants have requests waiting, the costs of the requests that the model gets are in
    proportion to their weights. Nothing is held back: a tenant alone gets everything. One that returns from
    idle starts where the others are, without credit for its absence. Requests of one tenant keep their order.

    The rule is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). While two tenants have requests
    waiting, what they got, as ``cost / weight``, differs by at most one request of each.

    A request gets its place in the queue, or is refused, when it is asked: however many a tenant asks for at
    once, those of others do not stand behind them in the mailbox.

    A refused asker that asks again at once takes the loop from others. So beyond 4096 refusals, a tenant gets
    2000 a second. The askers wait that long for theirs. 32 cancelled askers leave in each turn of the
    loop.

    It is asked with `FairCall`, or with `Call`, whose tenant and cost `tenant_of` and `cost_of` tell. The
    model runs with the context variables and the deadline of its asker. Its errors are replies. A cancelled
    asker leaves the queue at once, and its tenant is not charged. If its request runs, the asker waits until
    the model has unwound, and the tenant is charged.

    When the actor stops without a drain, or restarts, requests that wait fail with `ActorStoppedError` or
    `ActorRestartingError`: they were never executed. Those that run fail with `ActorFailedError`.

    Args:
        model: The model.
        max_in_flight: How many requests the model works on at once. The more, the later a share takes effect:
            give as many as the model needs to be busy.
        weights: Weights of the tenants. A `Weights` object may be changed while the scheduler runs, and has
            the rule for other tenants. With any other mapping, those have the weight 1.
        max_queued: The most requests of one tenant that wait. One more is refused with `MailboxFullError`.
        max_tenants: The most tenants that are remembered. While so many have requests waiting, a further one
            is refused with `MailboxFullError`, unless it has a weight of its own.
        tenant_of: Tenant of a `Call`, from its item; without it, `Call` is of the tenant None.
        cost_of: Cost of a `Call`, from its item; without it, 1.

    Raises:
        ValueError: A weight or a limit is out of range.
        TypeError: `model` is no model, or a number is of another type.
    """

    def __init__(
        self,
        model: Model[ItemT, ResultT],
        *,
        max_in_flight: int = 1,
        weights: Mapping[TenantT, float] | None = None,
        max_queued: int = 64,
        max_tenants: int = 10_000,
        tenant_of: Callable[[ItemT], Hashable] | None = None,
        cost_of: Callable[[ItemT], float] | None = None,
    ) -> None:
        self._model = as_callable(model)
        self._max_in_flight = must_be_count("max_in_flight", max_in_flight)
        self._weights = weights if isinstance(weights, Weights) else Weights(weights)
        self._queue: FairQueue[_Turn[ItemT]] = FairQueue(
            self._weights,
            max_queued=must_be_count("max_queued", max_queued),
            max_tenants=must_be_count("max_tenants", max_tenants),
        )
        self._tenant_of = tenant_of
        self._cost_of = cost_of
        self._refused_at_once = RateLimit(_REFUSALS_A_SECOND, burst=_REFUSALS_AT_ONCE)
        self._refused_later = defaultdict[Hashable, _Refused[ItemT]](OrderedDict)
        self._leavers = Leavers()
        self._requests = self._refused = 0
        self._refused_of = Counter[str]()
        self._waits = Spread(WAITS)
        self._costs: dict[Hashable, float] = {}
        self._cost_of_others = 0.0

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the tasks of one incarnation. Requests that wait at its end have none."""
        async with super().lifespan(context):
            self._nursery.start_soon(self._leavers.run)
            try:
                yield
            finally:
                self._end_waiting()

    def _attempt(self, message: Call[ItemT] | FairCall[ItemT]) -> DeferredReply[ResultT]:
        """Take a request, or refuse it, in the task that asks: none waits for its turn to wait."""
        if isinstance(message, FairCall):
            return self._admit(message.item, lambda _: (message.tenant, message.cost))
        return self._admit(message.item, self._said_of)

    async def call(self, item: ItemT) -> DeferredReply[ResultT]:
        """Serve an item that was asked for with `Call`."""
        await trio.lowlevel.checkpoint()
        return self._admit(item, self._said_of)

    # Call is declared for all servants, and a method takes its own class.
    @handles(Call, ki_protected=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    @quick(_attempt)
    async def _serve(self, message: Call[ItemT]) -> DeferredReply[ResultT]:
        return await self.call(message.item)

    @handles(FairCall, ki_protected=True)
    @quick(_attempt)
    async def _serve_fair(self, message: FairCall[ItemT]) -> DeferredReply[ResultT]:
        await trio.lowlevel.checkpoint()
        return self._attempt(message)

    def statistics(self) -> FairStatistics:
        """Tell what was done."""
        queue = self._queue
        return FairStatistics(
            requests=self._requests,
            waiting=queue.queued,
            in_flight=queue.in_flight,
            answered=self._tally.answered,
            failed=self._tally.failed,
            cancelled=self._tally.cancelled,
            refused=self._refused,
            waiting_of=Counter(entry.flow.tenant for entry in queue),
            cost_of=dict(self._costs),
            cost_of_others=self._cost_of_others,
            tenants=queue.tenants,
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the counts that metrics show, with waits, and refusals by tenants that have a weight."""
        yield from super().readings()
        for tenant, value in self._refused_of.items():
            yield count(*REFUSED, value, tenant=tenant)
        yield self._waits.reading(*QUEUE_WAIT)

    def _said_of(self, item: ItemT) -> tuple[Hashable, float]:
        tenant = None if self._tenant_of is None else self._tenant_of(item)
        hash(tenant)
        return tenant, must_be_cost(1.0 if self._cost_of is None else self._cost_of(item))

    @enable_ki_protection
    def _admit(
        self, item: ItemT, said_of: Callable[[ItemT], tuple[Hashable, float]]
    ) -> DeferredReply[ResultT]:
        """Give a request its place in the queue, in the order of the mailbox; or refuse it."""
        self._requests += 1
        turn = _Turn(item, self.context.deadline)
        try:
            turn.tenant, cost = said_of(item)
            turn.entry = self._queue.put(turn, turn.tenant, cost, self._weight_of(turn.tenant))
        except Exception as error:  # noqa: BLE001  # the asker's, whatever its item makes of `said_of`
            return self._refuse(turn, error)
        turn.reply = self.context.defer(on_cancel=partial(self._end_cancelled, turn))
        self._hand_over()
        return turn.reply

    def _refuse(self, turn: _Turn[ItemT], error: Exception) -> DeferredReply[ResultT]:
        self._refused += 1
        # Keys of strangers have no end, and may be secrets: these are one tenant here.
        name = str(turn.tenant)[:_LONGEST_NAME] if turn.tenant in self._weights else _OTHERS
        self._refused_of[name if len(self._refused_of) < _MOST_NAMED else _OTHERS] += 1
        # Tenants that have no requests here share a pace: their keys have no end.
        key = turn.tenant if self._queue.has(turn.tenant) else None
        # An asker that is refused at once asks again at once, and thousands of them leave the loop to nothing
        # else.
        if key not in self._refused_later and self._refused_at_once.try_acquire(key):
            turn.reply = self.context.defer()
            turn.reply.fail(self._told(error))
            return turn.reply
        if not self._refused_later:
            self._nursery.start_soon(self._give_refusals)
        refused = self._refused_later[key]
        refused[turn] = error
        turn.reply = self.context.defer(on_cancel=partial(self._end_cancelled, turn, refused))
        return turn.reply

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, QueueFull):
            error = MailboxFullError(f"{self.context.path}: {error}", path=self.context.path)
        return error

    async def _give_refusals(self) -> None:
        while self._refused_later:
            await trio.sleep(_REFUSALS / _REFUSALS_A_SECOND)
            for key, refused in tuple(self._refused_later.items()):
                for _ in range(len(refused) if self.context.is_stopping else min(len(refused), _REFUSALS)):
                    turn, error = refused.popitem(last=False)
                    turn.reply.fail(self._told(error))
                if not refused:
                    del self._refused_later[key]

    @enable_ki_protection
    def _end_cancelled(self, turn: _Turn[ItemT], refused: _Refused[ItemT] | None = None) -> None:
        """Let a cancelled asker go, without a task of its own, unless the model has its request."""
        if turn.scope is not None:
            turn.scope.cancel()
            return
        if refused is not None:
            del refused[turn]
        elif turn.entry is not None:
            self._queue.withdraw(turn.entry)
            self._tally.cancelled += 1
        self._leavers.let_go(turn.reply, turn.tenant)

    @enable_ki_protection
    def _end_waiting(self) -> None:
        for entry in self._queue:
            self._queue.withdraw(entry)
            self._tally.cancelled += 1
            end_with_incarnation(self.context, entry.value.reply, has_begun=False)
        for refused in self._refused_later.values():
            for turn in refused:
                end_with_incarnation(self.context, turn.reply, has_begun=False)
        self._refused_later.clear()

    def _weight_of(self, tenant: Hashable) -> float:
        weight = self._weights.of(tenant)
        if weight is None:
            text = f"tenant {tenant!r} has no weight, and {self.context.path} has no default"
            raise UnknownTenantError(text, path=self.context.path)
        return weight

    async def _answer_in_turn(self, turn: _Turn[ItemT]) -> ResultT:
        try:
            with self._tally:
                # Requests that end with the incarnation leave their turns to others that end with it, too.
                await trio.lowlevel.checkpoint_if_cancelled()
                turn.has_begun = True
                return await self._model(turn.item)
        finally:
            self._leave()

    @enable_ki_protection
    def _leave(self) -> None:
        self._queue.finish()
        self._hand_over()

    @enable_ki_protection
    def _hand_over(self) -> None:
        """Let so many requests have their turn as the model has room for, each in a task."""
        while self._queue.in_flight < self._max_in_flight:
            entry = self._queue.take()
            if entry is None:
                return
            tenant = entry.flow.tenant
            if tenant in self._weights:
                self._costs[tenant] = self._costs.pop(tenant, 0.0) + entry.cost
                # Tenants count with the others whose weights are gone, the longest unused first.
                while len(self._costs) > len(self._weights):
                    gone = next(one for one in self._costs if one not in self._weights)
                    self._cost_of_others += self._costs.pop(gone)
            else:
                self._cost_of_others += entry.cost
            self._begin(entry.value)

    def _begin(self, turn: _Turn[ItemT]) -> None:
        self._waits.add(trio.current_time() - turn.arrived)
        turn.scope = trio.CancelScope(deadline=turn.deadline)
        self.start_for(turn.reply, turn.scope, partial(self._answer_in_turn, turn), lambda: turn.has_begun)


# D123: so many leave in one turn of the loop. One that leaves and asks again takes 30 us of it.
_IN_A_TURN = 32


class Leavers:
    """Cancelled askers, of which a few go in each turn of the loop.

    Thousands of askers whose deadlines pass together, and who ask again, would make one turn of the loop as
    long as all of them take. Each request of others needs several turns. Here the turns stay short, and no
    time is lost: the loop goes on with the next turn at once. Tenants take turns, too.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[DeferredReply[Any]]] = OrderedDict()
        # The number that may still go in this turn; 0 while some wait.
        self._room: float = _IN_A_TURN
        self._has_come = trio.Event()

    def let_go(self, reply: DeferredReply[Any], tenant: Hashable) -> None:
        """Give an asker its cancellation, now or in one of the next turns."""
        self._has_come.set()
        if self._room:
            self._room -= 1
            reply.cancelled()
            return
        self._waiting.setdefault(tenant, deque()).append(reply)

    async def run(self) -> None:
        """Begin each turn anew while askers leave; runs until it is cancelled, and then lets all go."""
        try:
            while True:
                await self._has_come.wait()
                await trio.lowlevel.checkpoint()
                self._go_on()
        finally:
            while self._waiting:
                self._go_on()
            # No later turn begins here.
            self._room = math.inf

    def _go_on(self) -> None:
        self._room = _IN_A_TURN
        while self._room and self._waiting:
            self._room -= 1
            tenant, replies = self._waiting.popitem(last=False)
            replies.popleft().cancelled()
            if replies:
                # The tenant goes behind the others.
                self._waiting[tenant] = replies
        if self._waiting:
            self._room = 0
        elif self._room == _IN_A_TURN:
            self._has_come = trio.Event()
