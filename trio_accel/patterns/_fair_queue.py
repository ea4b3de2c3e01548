"""A queue with fair shares by tenant, in proportion to their weights.

It implements start-time fair queueing: it selects the next request, without a clock and without an actor.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, UserDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import attrs

from ..actors import ActorError, NotExecutedError, must_be_positive
from ._limits import KeyedStates

__all__ = ["UnknownTenantError", "Weights"]

TenantT = TypeVar("TenantT", bound=Hashable)
ValueT = TypeVar("ValueT")

# Tags are integers in this fraction of a unit. As floats, a large tag would lose small steps, and its tenant
# would be served forever.
_UNIT = 2.0**128
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6


class UnknownTenantError(ActorError, NotExecutedError, LookupError):
    """The tenant and the default lack a weight; the request was never executed."""

    may_go_elsewhere = False


class Weights(UserDict[Hashable, float]):
    """Weights of tenants, which may be changed at any time.

    A change affects requests that are handed to the model later. Several schedulers may share them.

    Args:
        weights: The weights by tenant, from 1e-6 to 1e6.
        default: The weight of other tenants; None refuses them.

    Raises:
        ValueError: A weight is zero, negative, NaN, infinite or out of range.
        TypeError: A weight is not a number.
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


def _weight(label: str, value: float) -> float:
    return must_be_positive(label, value, minimum=_LEAST_WEIGHT, maximum=_MOST_WEIGHT)


def weight_in(weights: Weights, tenant: Hashable, path: str) -> float:
    """Return the weight of a tenant.

    Raises:
        UnknownTenantError: The tenant and the default lack a weight.
    """
    weight = weights.of(tenant)
    if weight is None:
        raise UnknownTenantError(
            f"tenant {tenant!r} is missing in the weights of {path}, which has no default", path=path
        )
    return weight


class QueueFull(Exception):  # noqa: N818  # it never leaves the scheduler, which converts it to an error
    """The queue lacks room for a request."""


@attrs.define(eq=False)
class _Flow(Generic[ValueT]):
    """The state of a tenant.

    Attributes:
        tenant: The key of the tenant.
        queue: Its requests by number, oldest first.
        finish: The finish tag of its last taken request.
        period: The busy period of that tag.
    """

    tenant: Hashable
    queue: OrderedDict[int, Queued[ValueT]] = attrs.field(factory=lambda: OrderedDict())  # noqa: PLW0108
    finish: int = 0
    period: int = 0

    def is_first(self, number: int) -> bool:
        """Return whether a request is the first in the queue."""
        return next(iter(self.queue), None) == number


@attrs.define(eq=False)
class Queued(Generic[ValueT]):
    """A request in the queue.

    Attributes:
        value: The value from `put`.
        flow: The state of its tenant.
        cost: Its cost.
        weight: The weight of its tenant at its arrival.
        number: Its number among all arrivals.
        arrived_at: The virtual time of its arrival.
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
    ``F = S + cost / weight``. The request with the least start tag is next, and among equals the earliest
    arrival. Virtual time ``v`` is the start tag of the last taken request, even if several run at once:
    SFQ(D) (Jin, Chase and Kaur, SIGMETRICS 2004). So a tenant that was idle starts at the same tag as the
    others.

    The paper assigns tags at arrival. Here only the first request of each tenant has a tag, which is
    equivalent, because after a queued request ``F`` exceeds ``v``. So a withdrawn request leaves no trace.

    A busy period ends when nothing is queued and all taken requests are finished. The paper then sets ``v``
    to the maximum finish tag. Here all tags become 0.

    Args:
        weights: The weights of the tenants.
        max_queued: The maximum number of requests from a tenant.
        max_tenants: The maximum number of remembered tenants. While the requests of `max_tenants` tenants
            wait, another tenant is refused, unless `weights` names it.
    """

    def __init__(self, weights: Weights, *, max_queued: int, max_tenants: int) -> None:
        self._weights = weights
        self._max_queued = max_queued
        self._max_tenants = max_tenants
        self._flows: KeyedStates[_Flow[ValueT]] = KeyedStates(_flow_of, self._debt, max_tenants)
        # Start tag and number of each tenant's first request; entries of withdrawn requests may remain.
        self._heads: list[tuple[int, int, _Flow[ValueT]]] = []
        self._virtual = 0
        self._period = 0
        self._arrivals = 0
        self._backlogged = 0
        self.queued: int = 0
        self.in_flight: int = 0

    @property
    def tenants(self) -> int:
        """The number of remembered tenants."""
        return len(self._flows)

    def __iter__(self) -> Iterator[Queued[ValueT]]:
        """Yield all queued requests, in order of arrival."""
        entries = [entry for flow in self._flows for entry in flow.queue.values()]
        return iter(sorted(entries, key=lambda entry: entry.number))

    def has(self, tenant: Hashable) -> bool:
        """Return whether a request of a tenant is queued."""
        flow = self._flows.find((tenant, 0))
        return flow is not None and bool(flow.queue)

    def put(
        self, value: ValueT, tenant: Hashable, cost: float, weight: float, *, level: int = 0
    ) -> Queued[ValueT]:
        """Put a request after the tenant's others, at this level.

        Raises:
            QueueFull: The tenant has too many requests, or too many tenants have some.
        """
        key = tenant, level
        is_further = self._backlogged >= self._max_tenants and tenant not in self._weights
        if is_further and self._flows.find(key) is None:
            raise QueueFull(f"requests of {self._backlogged} tenants are waiting, the most there may be")
        flow = self._flows.get(key)
        if len(flow.queue) >= self._max_queued:
            raise QueueFull(f"{self._max_queued} requests of tenant {tenant!r} are waiting, its most")
        self._arrivals += 1
        entry = Queued(value, flow, cost, weight, self._arrivals, self._virtual)
        flow.queue[entry.number] = entry
        self.queued += 1
        if len(flow.queue) == 1:
            self._backlogged += 1
            self._place_first(flow)
        return entry

    def withdraw(self, entry: Queued[ValueT]) -> None:
        """Remove a request from the queue."""
        was_first = entry.flow.is_first(entry.number)
        self._drop(entry)
        if was_first:
            self._place_first(entry.flow)
        if len(self._heads) > 2 * self._backlogged:
            self._heads = [head for head in self._heads if head[2].is_first(head[1])]
            heapq.heapify(self._heads)
        self._end_period_if_idle()

    def take(self) -> Queued[ValueT] | None:
        """Take the next request; None if there is none. Call `finish` when it is done."""
        while self._heads:
            _, number, flow = heapq.heappop(self._heads)
            if flow.is_first(number):
                entry = flow.queue[number]
                self.begin(entry)
                return entry
        return None

    def heads(self) -> list[Queued[ValueT]]:
        """Return the first request of each tenant and level, in the order in which they would be taken."""
        return [flow.queue[n] for _, n, flow in sorted(self._heads) if flow.is_first(n)]

    def begin(self, entry: Queued[ValueT]) -> None:
        """Take a request, the first of its tenant and level."""
        flow, start = entry.flow, self._start_of(entry)
        self._drop(entry)
        self.in_flight += 1
        self._virtual = max(self._virtual, start)
        # If a tenant has lost its weight meanwhile, use its weight at the request's arrival.
        weight = self._weights.of(flow.tenant) or entry.weight
        # D123: tags are integers. As floats, a large tag lost the small steps of a tenant with a large
        # weight, which was then served forever.
        flow.finish = start + max(1, int(entry.cost / weight * _UNIT))
        flow.period = self._period
        self._place_first(flow)

    def finish(self) -> None:
        """Record that a taken request is done."""
        self.in_flight -= 1
        self._end_period_if_idle()

    def _drop(self, entry: Queued[ValueT]) -> None:
        del entry.flow.queue[entry.number]
        self.queued -= 1
        self._backlogged -= not entry.flow.queue

    def _place_first(self, flow: _Flow[ValueT]) -> None:
        """Order the first request of a tenant, if any, among the first requests of the others."""
        for entry in flow.queue.values():
            heapq.heappush(self._heads, (self._start_of(entry), entry.number, flow))
            break

    def _start_of(self, entry: Queued[ValueT]) -> int:
        finish = entry.flow.finish if entry.flow.period == self._period else 0
        return max(entry.arrived_at, finish)

    def _end_period_if_idle(self) -> None:
        if not self.queued and not self.in_flight:
            self._period += 1
            self._virtual = 0
            self._heads.clear()

    def _debt(self, flow: _Flow[ValueT]) -> float:
        if flow.queue:
            return math.inf
        return flow.finish - self._virtual if flow.period == self._period else 0


def _flow_of(key: Hashable) -> _Flow[Any]:
    tenant, _ = cast("tuple[Hashable, int]", key)
    return _Flow(tenant)
