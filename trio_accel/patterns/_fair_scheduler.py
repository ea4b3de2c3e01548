"""Shares of a model by tenant, in proportion to their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import (
    ActorError,
    DeferredReply,
    MailboxFullError,
    NotExecutedError,
    Request,
    handles,
    quick,
)
from ._fair_queue import FairQueue, Queued, QueueFull, Weights, must_be_cost
from ._numbers import must_be_count
from ._servants import Call, Model, TaskServant, as_callable

__all__ = ["FairCall", "FairScheduler", "FairStatistics", "UnknownTenantError"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
TenantT = TypeVar("TenantT", bound=Hashable)


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
class _Turn:
    """A request that waits, or is with the model.

    Attributes:
        has_come: Set when the model has room for it.
        has_begun: Whether the model was called.
    """

    has_come: trio.Event = attrs.field(factory=trio.Event)
    has_begun: bool = False


class FairScheduler(TaskServant[ItemT, ResultT]):
    """Hands requests to a model so that each tenant gets its share, however much the others ask for.

    While several tenants have requests waiting, the costs of the requests that the model gets are in
    proportion to their weights. Nothing is held back: a tenant alone gets everything. One that returns from
    idle starts where the others are, without credit for its absence. Requests of one tenant keep their order.

    The rule is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). While two tenants have requests
    waiting, what they got, as ``cost / weight``, differs by at most one request of each.

    A request gets its place in the queue, or is refused, when it is asked: however many a tenant asks for at
    once, those of others do not stand behind them in the mailbox.

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
        self._queue: FairQueue[_Turn] = FairQueue(
            self._weights,
            max_queued=must_be_count("max_queued", max_queued),
            max_tenants=must_be_count("max_tenants", max_tenants),
        )
        self._tenant_of = tenant_of
        self._cost_of = cost_of
        self._requests = self._refused = 0
        self._costs: dict[Hashable, float] = {}
        self._cost_of_others = 0.0

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

    def _said_of(self, item: ItemT) -> tuple[Hashable, float]:
        tenant = None if self._tenant_of is None else self._tenant_of(item)
        hash(tenant)
        return tenant, must_be_cost(1.0 if self._cost_of is None else self._cost_of(item))

    @enable_ki_protection
    def _admit(
        self, item: ItemT, said_of: Callable[[ItemT], tuple[Hashable, float]]
    ) -> DeferredReply[ResultT]:
        """Give a request its place in the queue, in the order of the mailbox, and a task; or refuse it."""
        self._requests += 1
        try:
            tenant, cost = said_of(item)
            entry = self._queue.put(_Turn(), tenant, cost, self._weight_of(tenant))
        except Exception as error:  # noqa: BLE001  # the asker's, whatever its item makes of `said_of`
            self._refused += 1
            reply: DeferredReply[ResultT] = self.context.defer()
            reply.fail(self._refusal(error))
            return reply
        self._hand_over()
        return self.start(partial(self._answer_in_turn, item, entry), has_begun=lambda: entry.value.has_begun)

    def _drop_costs(self) -> None:
        """Count tenants with the others whose weights are gone, the longest unused first."""
        while len(self._costs) > len(self._weights):
            tenant = next(one for one in self._costs if one not in self._weights)
            self._cost_of_others += self._costs.pop(tenant)

    def _weight_of(self, tenant: Hashable) -> float:
        weight = self._weights.of(tenant)
        if weight is None:
            text = f"tenant {tenant!r} has no weight, and {self.context.path} has no default"
            raise UnknownTenantError(text, path=self.context.path)
        return weight

    def _refusal(self, error: Exception) -> Exception:
        if isinstance(error, QueueFull):
            return MailboxFullError(f"{self.context.path}: {error}", path=self.context.path)
        return error

    async def _answer_in_turn(self, item: ItemT, entry: Queued[_Turn]) -> ResultT:
        try:
            with self._tally:
                await entry.value.has_come.wait()
                # Requests that end with the incarnation leave their turns to others that end with it, too.
                await trio.lowlevel.checkpoint_if_cancelled()
                entry.value.has_begun = True
                return await self._model(item)
        finally:
            self._leave(entry)

    @enable_ki_protection
    def _leave(self, entry: Queued[_Turn]) -> None:
        if entry.value.has_come.is_set():
            self._queue.finish()
            self._hand_over()
        else:
            self._queue.withdraw(entry)

    @enable_ki_protection
    def _hand_over(self) -> None:
        """Let so many requests have their turn as the model has room for."""
        while self._queue.in_flight < self._max_in_flight:
            entry = self._queue.take()
            if entry is None:
                return
            tenant = entry.flow.tenant
            if tenant in self._weights:
                self._costs[tenant] = self._costs.pop(tenant, 0.0) + entry.cost
                self._drop_costs()
            else:
                self._cost_of_others += entry.cost
            entry.value.has_come.set()
