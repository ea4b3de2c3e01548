"""Start-time fair queueing: which request is next, without a clock and without an actor."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar

import attrs

from ._bounded import KeyedStates
from ._numbers import must_be_positive

__all__ = ["Weights"]

TenantT = TypeVar("TenantT", bound=Hashable)
ValueT = TypeVar("ValueT")

# Tags are whole numbers of this part of a unit. As floats, a small step would be lost in a large tag, and its
# tenant be served for ever.
_UNIT = 2.0**128
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6
_MOST_COST = 1e9


class Weights(MutableMapping[Hashable, float]):
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
        self._default = None if default is None else _weight("the default weight", default)
        self._weights: dict[Hashable, float] = {}
        for tenant, weight in (weights or {}).items():
            self[tenant] = weight

    def __repr__(self) -> str:
        return f"Weights({self._weights!r}, default={self._default!r})"

    def __getitem__(self, tenant: Hashable) -> float:
        return self._weights[tenant]

    def __setitem__(self, tenant: Hashable, weight: float) -> None:
        self._weights[tenant] = _weight(f"the weight of {tenant!r}", weight)

    def __delitem__(self, tenant: Hashable) -> None:
        del self._weights[tenant]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def of(self, tenant: Hashable) -> float | None:
        """Return the weight of a tenant, or the default; None if it is refused."""
        return self._weights.get(tenant, self._default)


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
        """How many tenants are remembered."""
        return len(self._flows)

    def __iter__(self) -> Iterator[Queued[ValueT]]:
        """Yield all queued requests, in order of arrival."""
        entries = [entry for flow in self._flows for entry in flow.queue.values()]
        return iter(sorted(entries, key=lambda entry: entry.number))

    def queued_of(self, tenant: Hashable) -> int:
        """Tell how many requests of a tenant are queued."""
        flow = self._flows.find(tenant)
        return 0 if flow is None else len(flow.queue)

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
