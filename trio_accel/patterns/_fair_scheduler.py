"""Shares of a model by tenant, in proportion to their weights."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import (
    DeferredReply,
    MailboxFullError,
    Request,
    checked_options,
    fast_path,
    handles,
    must_be_count,
    must_be_positive,
)
from ._fair_queue import FairQueue, Queued, QueueFull, Weights, weight_in
from ._limits import RateLimit
from ._submit import ItemT, Model, ResultT, Submit, as_callable
from ._waiting import QueueActor, WaitingRequest, WaitingStatistics, take

__all__ = ["FairScheduler", "FairStatistics", "FairSubmit"]

TenantT = TypeVar("TenantT", bound=Hashable)

# The number of tenants with separate metrics, and the maximum length of their names.
_MOST_NAMED, _LONGEST_NAME, _OTHER_TENANTS = 100, 100, "(other)"
_MOST_COST = 1e9
# D123: a tenant gets this number of refusals at once, and then groups of `_REFUSALS`. One takes 16 us.
_REFUSALS_AT_ONCE, _REFUSALS_A_SECOND, _REFUSALS = 4096, 2000, 20


def must_be_cost(value: float) -> float:
    """Return the cost of a request: above 0, at most 1e9.

    Raises:
        ValueError: It is zero, negative, NaN, infinite or more.
        TypeError: It is not a number.
    """
    return must_be_positive("the cost of a request", value, maximum=_MOST_COST)


def _hashable(call: FairSubmit[Any], attribute: attrs.Attribute[Hashable], value: Hashable) -> None:
    hash(value)


@attrs.frozen
class FairSubmit(Request["FairScheduler[Any, Any]", Any], Generic[ItemT]):
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
class FairStatistics(WaitingStatistics):
    """Counts of a `FairScheduler` since its incarnation began.

    Attributes:
        waiting_of: The number of waiting requests, by tenant.
        cost_of: The total cost of requests handed to the model, by tenant with its own weight.
        cost_of_others: The total cost of all other tenants.
        tenants: The number of remembered tenants.
    """

    waiting_of: Mapping[Hashable, int]
    cost_of: Mapping[Hashable, float]
    cost_of_others: float
    tenants: int


@attrs.define(eq=False, kw_only=True)
class _TenantRequest(WaitingRequest[ItemT, Any]):
    """A request that waits, or is with the model. It gets a task only when its turn comes.

    Attributes:
        said: The tenant and cost, if the caller gave them.
        deadline: The deadline of the caller.
        tenant: The tenant.
        entry: The entry in the queue; None if it is refused.
        refused: The group of requests that wait for their refusals with it; None if it does not.
        scope: The scope of its task; None before its turn.
    """

    said: FairSubmit[ItemT] | None
    deadline: float
    tenant: Hashable = None
    entry: Queued[_TenantRequest[ItemT]] | None = None
    refused: OrderedDict[_TenantRequest[ItemT], Exception] | None = None
    scope: trio.CancelScope | None = None


class FairScheduler(QueueActor[ItemT, ResultT, _TenantRequest[ItemT]], Generic[ItemT, ResultT]):
    """Hands requests to a model so that each tenant gets its share, however much the others request.

    While several tenants have waiting requests, the model gets requests with costs in proportion to the
    tenants' weights. Nothing is held back: a single active tenant gets everything. A tenant that was idle
    starts where the others are, without credit for its absence. Requests of one tenant keep their order.

    The rule is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). While two tenants have waiting
    requests, their service, as ``cost / weight``, differs by at most one request of each.

    A request is queued or refused as soon as it is made. So if a tenant makes many requests at once, the
    requests of others do not wait for them in the mailbox.

    A refused caller that calls again at once takes time of the loop from others. So after 4096 refusals, a
    tenant gets 2000 a second, and the callers wait for theirs. In each turn of the loop, 32 cancelled callers
    leave.

    Submit it with `FairSubmit`, or with `Submit`, for which `tenant_of` and `cost_of` give the tenant and the
    cost. The model runs with the context variables and the deadline of its caller. Its errors are replies. A
    cancelled caller leaves the queue at once, and its tenant is not charged. If its request runs, the caller
    waits until the model has unwound, and the tenant is charged.

    When the actor stops without a drain, or restarts, waiting requests fail with `ActorStoppedError` or
    `ActorRestartingError`, because they were never executed. Running requests fail with `ActorFailedError`.

    Args:
        model: The model.
        max_in_flight: The number of requests that the model works on at once. The larger it is, the later a
            share takes effect, so use the least number that keeps the model busy.
        weights: The weights of the tenants. A `Weights` object may be changed while the scheduler runs, and
            defines the weight of other tenants. With any other mapping, they have the weight 1.
        max_queued: The maximum number of waiting requests per tenant. One more is refused with
            `MailboxFullError`.
        max_tenants: The maximum number of remembered tenants. While the requests of `max_tenants` tenants
            wait, another tenant is refused with `MailboxFullError`, unless `weights` names it.
        tenant_of: Returns the tenant for the item of a `Submit`; by default None.
        cost_of: Returns the cost for the item of a `Submit`; by default 1.

    Raises:
        ValueError: A weight or a limit is out of range.
        TypeError: `model` is not a model, or a number has another type.
    """

    @checked_options
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
        super().__init__()
        self._model = as_callable(model)
        self._max_in_flight = must_be_count("max_in_flight", max_in_flight)
        self._weights = weights if isinstance(weights, Weights) else Weights(weights)
        self._queue: FairQueue[_TenantRequest[ItemT]] = FairQueue(
            self._weights,
            max_queued=must_be_count("max_queued", max_queued),
            max_tenants=must_be_count("max_tenants", max_tenants),
        )
        self._tenant_of = tenant_of
        self._cost_of = cost_of
        self._refused_at_once = RateLimit(_REFUSALS_A_SECOND, burst=_REFUSALS_AT_ONCE)
        self._refused_later: dict[Hashable, OrderedDict[_TenantRequest[ItemT], Exception]] = defaultdict(
            OrderedDict
        )
        self._leavers = Leavers()
        self._costs: dict[Hashable, float] = {}
        self._cost_of_others = 0.0

    @handles(FairSubmit, ki_protected=True)
    @fast_path(take)
    async def _serve_fair(self, message: FairSubmit[ItemT]) -> DeferredReply[ResultT]:
        await trio.lowlevel.checkpoint()
        return take(self, message)

    def statistics(self) -> FairStatistics:
        """Return the counts."""
        queue = self._queue
        return FairStatistics(
            waiting=queue.queued,
            waiting_of=Counter(entry.flow.tenant for entry in queue),
            cost_of=dict(self._costs),
            cost_of_others=self._cost_of_others,
            tenants=queue.tenants,
            **{**self._tally, "in_flight": queue.in_flight},
        )

    def make(self, message: Submit[ItemT] | FairSubmit[ItemT]) -> _TenantRequest[ItemT]:
        said = message if isinstance(message, FairSubmit) else None
        return _TenantRequest(item=message.item, said=said, deadline=self.context.deadline)

    def put(self, entry: _TenantRequest[ItemT]) -> None:
        if entry.said is not None:
            tenant, cost = entry.said.tenant, entry.said.cost
        else:
            tenant = None if self._tenant_of is None else self._tenant_of(entry.item)
            hash(tenant)
            cost = must_be_cost(1.0 if self._cost_of is None else self._cost_of(entry.item))
        entry.tenant, path = tenant, self.context.path
        weight = weight_in(self._weights, tenant, path)
        try:
            entry.entry = self._queue.put(entry, tenant, cost, weight)
        except QueueFull as error:
            raise MailboxFullError(f"{path}: {error}", path=path) from None
        self._hand_over()

    def refuse(self, entry: _TenantRequest[ItemT], error: Exception) -> None:
        self._tally["refused"] += 1
        # The keys of strangers are unbounded in number, and may be secrets, so they count as one tenant here.
        name = str(entry.tenant)[:_LONGEST_NAME] if entry.tenant in self._weights else _OTHER_TENANTS
        self._refused_of[name if len(self._refused_of) < _MOST_NAMED else _OTHER_TENANTS] += 1
        # Tenants without requests here share a pace, because the number of their keys is unbounded.
        key = entry.tenant if self._queue.has(entry.tenant) else None
        # After an immediate refusal, a caller calls again at once, and thousands of them would fill the loop.
        if key not in self._refused_later and self._refused_at_once.try_acquire(key):
            entry.reply.fail(error)
            return
        if not self._refused_later:
            self._nursery.start_soon(self._give_refusals)
        entry.refused = self._refused_later[key]
        entry.refused[entry] = error

    async def _give_refusals(self) -> None:
        while self._refused_later:
            await trio.sleep(_REFUSALS / _REFUSALS_A_SECOND)
            for key, refused in tuple(self._refused_later.items()):
                for _ in range(len(refused) if self.context.is_stopping else min(len(refused), _REFUSALS)):
                    turn, error = refused.popitem(last=False)
                    turn.reply.fail(error)
                if not refused:
                    del self._refused_later[key]

    @enable_ki_protection
    def leave(self, entry: _TenantRequest[ItemT]) -> None:
        # It gets a task only if the model has its request.
        if entry.scope is not None:
            entry.scope.cancel()
            return
        if entry.refused is not None:
            del entry.refused[entry]
        elif entry.entry is not None:
            self._queue.withdraw(entry.entry)
            self._tally["cancelled"] += 1
        self._leavers.let_go(entry.reply, entry.tenant)

    def _open(self) -> Iterable[_TenantRequest[ItemT]]:
        refused = (turn for turns in self._refused_later.values() for turn in turns)
        return [*(entry.value for entry in self._queue), *refused]

    async def _run(self) -> None:
        await self._leavers.run()

    async def _answer_in_turn(self, turn: _TenantRequest[ItemT]) -> ResultT:
        try:
            with self._tally:
                # Requests that end with the incarnation leave their turns to others that also end with it.
                await trio.lowlevel.checkpoint_if_cancelled()
                self._begin(turn)
                return await self._model(turn.item)
        finally:
            self._finish()

    @enable_ki_protection
    def _finish(self) -> None:
        self._queue.finish()
        if not self._nursery.cancel_scope.cancel_called:
            self._hand_over()

    @enable_ki_protection
    def _hand_over(self) -> None:
        """Start a task for each request whose turn it is, up to `max_in_flight`."""
        while self._queue.in_flight < self._max_in_flight:
            entry = self._queue.take()
            if entry is None:
                return
            tenant, turn = entry.flow.tenant, entry.value
            if tenant in self._weights:
                self._costs[tenant] = self._costs.pop(tenant, 0.0) + entry.cost
                # Tenants with removed weights count with the others, the longest unused first.
                while len(self._costs) > len(self._weights):
                    removed_tenant = next(name for name in self._costs if name not in self._weights)
                    self._cost_of_others += self._costs.pop(removed_tenant)
            else:
                self._cost_of_others += entry.cost
            turn.scope = trio.CancelScope(deadline=turn.deadline)
            self.start_for(turn.reply, turn.scope, partial(self._answer_in_turn, turn), turn.was_begun)


# D123: the number of callers that leave in one turn of the loop. One that calls again takes 30 us of it.
_IN_A_TURN = 32


class Leavers:
    """Cancelled callers, of which a few leave in each turn of the loop.

    If the deadlines of thousands of callers pass together, and the callers call again, all of them would run
    in one long turn of the loop, and each request of others needs several turns. Here the turns stay short,
    and no time is lost, because the loop continues with the next turn at once. Tenants also take turns.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[DeferredReply[Any]]] = OrderedDict()
        # The number that may still leave in this turn; 0 while some wait.
        self._room: float = _IN_A_TURN
        self._has_come = trio.Event()

    def let_go(self, reply: DeferredReply[Any], tenant: Hashable) -> None:
        """Give a caller its cancellation, now or in one of the next turns."""
        self._has_come.set()
        if self._room:
            self._room -= 1
            reply.cancelled()
            return
        self._waiting.setdefault(tenant, deque()).append(reply)

    async def run(self) -> None:
        """Begin each turn while callers leave; run until cancelled, and then release all callers."""
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
                # The tenant moves to the end of the queue.
                self._waiting[tenant] = replies
        if self._waiting:
            self._room = 0
        elif self._room == _IN_A_TURN:
            self._has_come = trio.Event()
