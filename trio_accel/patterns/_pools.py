"""Equal models: actors started together, and a second try at another model where one is slow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, cast

import attrs
import outcome
import trio

from ..actors import Actor, ActorContext, MailboxOptions, Policy, Ref, named_options
from ._numbers import must_be_count, must_be_positive, must_be_share
from ._router import ByLoad, Member, Replica, Router, RouterStatistics, Routing
from ._servants import ItemT, Model, ResultT, Servant, as_callable, outcome_of

__all__ = ["Hedge", "Pool", "ReplicaPool", "ReplicaPoolStatistics"]

# All are started before the pool serves.
_MOST_MEMBERS = 10_000


class Pool(Router[Any, Any]):
    """Starts actors of one class as its children, and sends each request to one of them.

    It is a `Router` of models of its own. Members of a `Servant` class are asked ``Call(item)``. Actors of
    any other class are asked the item itself: it is one of their requests. Start it with
    ``await system.spawn(Pool, Embedder, 4, "model.bin")``, for 4 of ``Embedder("model.bin")``.

    The members are named ``"0"``, ``"1"``, and so on. One that crashes is restarted by the policy of the
    pool; its requests wait in its mailbox, or go to others, as `by` says. If that happens too often, the pool
    itself crashes, as any supervisor does; its supervisor restarts it, with new members. Until then requests
    get `NoReplicaError`. The members stop with the pool, by ``stop(drain=True)`` when all is answered.

    Args:
        actor_class: Class of the members.
        size: How many there are, 10 000 at most.
        args: Arguments of each member.
        by: How requests are spread, as for `Router`: by load unless it is given.
        member_policy: Policy of each member.
        member_mailbox: Mailbox of each member.
        kwargs: Arguments of the members by name.

    Raises:
        ValueError: `size` is out of range.
        TypeError: `actor_class` is no class of actors, or cannot be made with the arguments.
    """

    def __init__(
        self,
        actor_class: Callable[..., Actor],
        size: int,
        /,
        *args: object,
        by: Routing | None = None,
        member_policy: Policy | None = None,
        member_mailbox: MailboxOptions | None = None,
        **kwargs: object,
    ) -> None:
        must_be_count("size", size, most=_MOST_MEMBERS)
        super().__init__([_not_started] * size, by=by)
        self._actor_class = actor_class
        self._args = args
        self._kwargs = kwargs
        self._policy = member_policy
        self._mailbox = member_mailbox

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Start the members."""
        async with super().lifespan(context):
            self._members = [await self._start_member(context, member.name) for member in self._members]
            yield

    async def _start_member(self, context: ActorContext, name: str) -> Member[Any, Any]:
        # Type checkers look for the arguments of the actor among those of `spawn`.
        spawn = cast("Callable[..., Awaitable[Ref[Any]]]", context.spawn)
        ref = await spawn(
            self._actor_class,
            *self._args,
            name=name,
            policy=self._policy,
            mailbox=self._mailbox,
            **self._kwargs,
        )
        is_servant = isinstance(self._actor_class, type) and issubclass(self._actor_class, Servant)
        ask: Callable[[Any], Awaitable[Any]] = ref.ask
        return Member(name, as_callable(ref) if is_servant else ask, ref)


async def _not_started(item: object) -> object:
    raise NotImplementedError(f"the members of the pool are not started: {item!r}")


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
    """Counts of the requests of a `ReplicaPool`.

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
        TypeError: A replica is no model.
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
        """Wait for the first result; raises the error of the first try if there is none."""
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
            each.result = await outcome_of(self._send(item, asked))
            # There is room for both, whether anybody waits or not.
            results.send_nowait(each)

    def statistics(self) -> ReplicaPoolStatistics:
        """Return the counts of the requests."""
        plain = attrs.asdict(super().statistics(), recurse=False)
        return ReplicaPoolStatistics(**plain, hedged=self._hedged, won=self._won)


def _unwrap(ended: _Try[ResultT]) -> ResultT:
    assert ended.result is not None  # it has ended
    return ended.result.unwrap()
