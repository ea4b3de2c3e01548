"""Equal models, with a second try at another where one is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import attrs
import outcome
import trio

from ..actors import named_options
from ._call import Model, without_cancellation
from ._numbers import must_be_positive, must_be_share
from ._replicas import Member, Replica
from ._router import Router, RouterStatistics
from ._routing import ByLoad

__all__ = ["Hedge", "ReplicaPool", "ReplicaPoolStatistics"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Hedges that may be saved up while nothing is slow.
_MOST_SAVED = 10.0
# Ten shares of 0.1 add up to a little less than 1.
_ROUNDING = 1e-6


def _seconds(value: float) -> float:
    return must_be_positive("Hedge: after", value)


def _share(value: float) -> float:
    return must_be_share("Hedge: share", value)


@named_options
@attrs.frozen(kw_only=True)
class Hedge:
    """When a request that takes long is sent to a second replica (Dean and Barroso, CACM 2013).

    Attributes:
        after: Seconds without a reply. The 95th percentile of the latency is a good value.
        share: How many requests may be sent twice, as a part of all, from above 0 to 1. So replicas that
            are all slow do not get twice the load. Up to 10 are saved up.
    """

    after: float = attrs.field(converter=_seconds)
    share: float = attrs.field(default=0.1, converter=_share)


@attrs.frozen(kw_only=True)
class ReplicaPoolStatistics(RouterStatistics):
    """What became of the requests of a `ReplicaPool`.

    Attributes:
        hedged: Requests that were sent to a second replica.
        won: How many of them the second replica answered.
    """

    hedged: int
    won: int


@attrs.define(eq=False)
class _Try(Generic[ResultT]):
    """One of the two replicas' turns at a request."""

    scope: trio.CancelScope
    result: outcome.Outcome[ResultT] | None = None


class ReplicaPool(Router[ItemT, ResultT]):
    """Sends each request to the least busy of several equal models.

    It is a `Router` by load. With a `Hedge`, a request without a reply for some time is sent to a second
    replica, too, if another one works. The first result is the reply, and the other try is cancelled. An
    error is the reply only if both have failed, or if it came before the second try: it is that of the first.
    Hedge only requests that may be executed twice.

    With a hedge, an asker that is cancelled leaves at once: both tries are cancelled, and unwind by
    themselves. At the replicas they count as in flight until they have.

    Args:
        replicas: The models, as for `Router`.
        choices: Look at so many replicas only, chosen at random, as `ByLoad` says; None looks at all.
        hedge: When to ask a second replica; None never does.

    Raises:
        ValueError: There are no models; `choices` is below 1.
        TypeError: What was given is no model.
    """

    def __init__(
        self,
        replicas: Mapping[str, Model[ItemT, ResultT] | Replica[ItemT, ResultT]]
        | Sequence[Model[ItemT, ResultT] | Replica[ItemT, ResultT]],
        *,
        choices: int | None = None,
        hedge: Hedge | None = None,
    ) -> None:
        super().__init__(replicas, by=ByLoad(choices=choices))
        if not isinstance(hedge, Hedge | None):
            raise TypeError(f"hedge must be a Hedge, got {hedge!r}")
        self._hedge = hedge
        self._saved = 1.0
        self._hedged = 0
        self._won = 0

    async def answer(self, item: ItemT) -> ResultT:
        """Have a replica serve an item, or two of them; see `Router.answer`."""
        if self._hedge is None:
            return await self._send(item, [])
        self._saved = min(self._saved + self._hedge.share, _MOST_SAVED)
        asked: list[Member[ItemT, ResultT]] = []
        results, inbox = trio.open_memory_channel[_Try[ResultT]](2)
        tries = [self._start(item, asked, results)]
        try:
            with trio.move_on_after(self._hedge.after):
                return _unwrap(await inbox.receive())
            if self._saved > 1.0 - _ROUNDING and self._has_other(asked):
                self._saved -= 1.0
                self._hedged += 1
                tries.append(self._start(item, asked, results))
            return await self._first(tries, inbox)
        finally:
            for each in tries:
                each.scope.cancel()

    async def _first(
        self, tries: Sequence[_Try[ResultT]], inbox: trio.MemoryReceiveChannel[_Try[ResultT]]
    ) -> ResultT:
        """Wait for the first result; the error of the first try if there is none."""
        for _ in tries:
            ended = await inbox.receive()
            if isinstance(ended.result, outcome.Value):
                self._won += ended is not tries[0]
                return _unwrap(ended)
        return _unwrap(tries[0])

    def _has_other(self, asked: Sequence[Member[ItemT, ResultT]]) -> bool:
        return any(
            member.is_available and not member.is_dead for member in self._members if member not in asked
        )

    def _start(
        self,
        item: ItemT,
        asked: list[Member[ItemT, ResultT]],
        results: trio.MemorySendChannel[_Try[ResultT]],
    ) -> _Try[ResultT]:
        """Ask a replica in a task, which has the deadline of the asker."""
        each = _Try[ResultT](trio.CancelScope(deadline=trio.current_effective_deadline()))
        self._nursery.start_soon(self._try, item, asked, each, results)
        return each

    async def _try(
        self,
        item: ItemT,
        asked: list[Member[ItemT, ResultT]],
        each: _Try[ResultT],
        results: trio.MemorySendChannel[_Try[ResultT]],
    ) -> None:
        with each.scope:
            try:
                each.result = outcome.Value(await self._send(item, asked))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the asker's
                each.result = outcome.Error(error)
            except BaseExceptionGroup as group:
                each.result = outcome.Error(without_cancellation(group))
            # There is room for both, whether anybody waits or not.
            results.send_nowait(each)

    def statistics(self) -> ReplicaPoolStatistics:
        """What became of the requests."""
        plain = attrs.asdict(super().statistics(), recurse=False)
        return ReplicaPoolStatistics(**plain, hedged=self._hedged, won=self._won)


def _unwrap(ended: _Try[ResultT]) -> ResultT:
    assert ended.result is not None  # it has ended
    return ended.result.unwrap()
