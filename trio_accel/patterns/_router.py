"""Routing of requests to many models by load or key; pools of equal models, also with hedging."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import attrs
import outcome
import trio
from attrs.validators import optional

from ..actors import (
    Actor,
    ActorContext,
    ActorError,
    ActorStoppedError,
    MailboxOptions,
    NotExecutedError,
    Policy,
    Ref,
    checked_options,
    must_be_count,
    must_be_positive,
    named_options,
)
from ..devices import Device, Key, available, by_key
from ._checks import positive, positive_integer
from ._submit import (
    CallStatistics,
    ItemT,
    Model,
    ResultT,
    SubmitActor,
    Tally,
    TaskSubmitActor,
    as_callable,
    outcome_of,
)

__all__ = [
    "ByKey",
    "ByLoad",
    "Hedge",
    "Key",
    "NoReplicaError",
    "Pool",
    "Replica",
    "ReplicaPool",
    "ReplicaPoolStatistics",
    "ReplicaStatistics",
    "Router",
    "RouterStatistics",
    "Routing",
]


class NoReplicaError(ActorStoppedError):
    """All replicas have ended for good; the request was never executed."""


@attrs.frozen(kw_only=True)
class RouterStatistics(CallStatistics):
    """Counts of the requests to a `Router`, `ReplicaPool` or `Pool`.

    Attributes:
        replicas: Counts of each replica, in order.
        rerouted: The number of times that a request moved to another replica, because one had refused it
            unexecuted.
    """

    replicas: tuple[ReplicaStatistics, ...]
    rerouted: int = 0


class Router(TaskSubmitActor[ItemT, ResultT], Generic[ItemT, ResultT]):
    """Sends each request to one of several models: the least busy one, or the owner of its key.

    A model that has ended for good gets no more requests. By load, a restarting model is skipped while
    another works; if none works, requests wait for the least busy model that will work again. If a model's
    actor refuses a request unexecuted (`ActorStoppedError`, `ActorRestartingError`, `MailboxFullError`), the
    request moves to the next model; by a key without failover, only if that model has ended for good. The
    caller gets any other error, because the request may have been executed.

    Requests are sent in mailbox order. Each is sent at once, and waits in its model's mailbox if the model is
    busy. ``stop(drain=True)`` waits for all of them. The router does not own the models: they continue when
    it ends.

    Args:
        replicas: The models. Keys are assigned by name: the names of a mapping, or the indices of a sequence.
        by: How it chooses: `ByLoad()` or ``ByKey(function)``.

    Raises:
        ValueError: `replicas` is empty.
        TypeError: A replica is not a model.
    """

    @checked_options
    def __init__(self, replicas: Replicas[ItemT, ResultT], *, by: Routing | None = None) -> None:
        self._by: Routing = ByLoad() if by is None else by
        if not callable(getattr(self._by, "choose", None)):
            raise TypeError(f"by must be ByLoad(...) or ByKey(...), got {by!r}")
        self._members: list[ReplicaState[ItemT, ResultT]] = make_members(replicas)
        self._turns = 0
        self._counted_as: type[RouterStatistics] = RouterStatistics

    async def answer(self, item: ItemT) -> ResultT:
        """Have one of the models serve an item.

        Raises:
            NoReplicaError: All models have ended for good.
            TypeError: The key of the item has an unsupported type.
            Exception: The error of the model.
        """
        return await self._send(item, [])

    async def _send(self, item: ItemT, asked: list[ReplicaState[ItemT, ResultT]]) -> ResultT:
        """Ask models until one does not refuse.

        Args:
            item: The item.
            asked: Models to leave out; every called model is added.
        """
        refusal: ActorError | None = None
        while (member := self._choose(item, asked)) is not None:
            asked.append(member)
            self._tally["rerouted"] += refusal is not None
            member.turn = self._turns = self._turns + 1
            try:
                return await member.ask(item)
            except ActorError as error:
                if not (member.has_refused(error) and (self._by.skips or member.is_dead)):
                    raise
                refusal = error
        if refusal is None or all(member.is_dead for member in self._members):
            reason = f"all {len(self._members)} replicas of {self.context.path} have ended"
            raise NoReplicaError(reason, path=self.context.path) from refusal
        raise refusal

    def _choose(
        self, item: ItemT, left_out: Sequence[ReplicaState[ItemT, ResultT]]
    ) -> ReplicaState[ItemT, ResultT] | None:
        asked = [member for member in self._members if member not in left_out]
        candidates = available(asked, skips=self._by.skips)
        return self._by.choose(item, candidates) if candidates else None

    def statistics(self) -> RouterStatistics:
        """Return the counts of the requests."""
        replicas = tuple(member.statistics() for member in self._members)
        return self._counted_as(**self._tally, replicas=replicas)


CandidateT = TypeVar("CandidateT", bound="ReplicaState[Any, Any]")


class Routing(Protocol):
    """The way a router chooses."""

    @property
    def skips(self) -> bool:
        """Whether restarting replicas are skipped while another works."""
        ...

    def choose(self, item: Any, candidates: Sequence[CandidateT]) -> CandidateT:
        """Choose one of at least one replica."""
        ...


@named_options
@attrs.frozen(kw_only=True)
class ByLoad:
    """The replica with the fewest requests in flight; of equal ones, the least recently used.

    Attributes:
        choices: The number of replicas to consider, chosen at random. With 2, this is the power of two
            choices (Mitzenmacher, IEEE TPDS 2001), which spreads well if several routers share replicas and
            do not see each other's requests. None considers all.
        random: The source of chance; seed it to make the choices repeatable.
    """

    choices: int | None = attrs.field(default=None, validator=optional(positive_integer))
    random: random.Random = attrs.field(factory=random.Random, eq=False)

    @property
    def skips(self) -> bool:
        """A restarting replica is skipped while another works."""
        return True

    def choose(self, item: Any, candidates: Sequence[CandidateT]) -> CandidateT:
        """See `Routing.choose`."""
        if self.choices is not None and self.choices < len(candidates):
            candidates = self.random.sample(candidates, self.choices)
        return min(candidates, key=lambda candidate: (candidate.in_flight, candidate.turn))


@named_options
@attrs.frozen
class ByKey:
    """The same replica for the same key, by rendezvous hashing, as `DeviceGroup.place` finds devices.

    The names of the replicas decide, not their number or order. So when a replica ends for good, its keys
    move to all the others, and no other key moves.

    Attributes:
        key: Returns the key of an item: a str, bytes or an int.
        failover: Whether another replica serves the keys of a restarting replica. If not, their requests wait
            for it, in order, and a full mailbox refuses them. So a key with its own state is served by one
            replica while that replica lives.
    """

    key: Callable[[Any], Key]
    failover: bool = attrs.field(default=False, kw_only=True)

    @property
    def skips(self) -> bool:
        """Whether restarting replicas are skipped: `failover`."""
        return self.failover

    def choose(self, item: Any, candidates: Sequence[CandidateT]) -> CandidateT:
        """See `Routing.choose`."""
        return by_key(self.key(item), candidates)


@named_options
@attrs.frozen
class Replica(Generic[ItemT, ResultT]):
    """A model, and the device that it depends on.

    If a model is the address of an actor, or its method ``ref.ask``, it needs no `Replica`, because its actor
    knows whether it works.

    Attributes:
        model: The model.
        device: The device that the model needs; while the device lacks a context, the replica is skipped.
    """

    model: Model[ItemT, ResultT]
    device: Device | None = attrs.field(default=None, kw_only=True)


@attrs.frozen(kw_only=True)
class ReplicaStatistics(CallStatistics):
    """Counts of a replica's requests.

    Attributes:
        name: The name of the replica.
        is_available: Whether it works now.
        is_dead: Whether it has ended for good.
    """

    name: str
    is_available: bool
    is_dead: bool


@attrs.define(eq=False)
class ReplicaState(Generic[ItemT, ResultT]):
    """A replica as a router sees it.

    Attributes:
        name: The name, by which keys find it.
        model: The callable.
        ref: The actor, if it is one.
        device: The device that it depends on, if any.
        holder: An object such as a `cluster.EntityRef`, which may have `is_available` and `is_dead`.
        turn: The number of its last request.
        tally: The counts of its requests.
    """

    name: str
    model: Callable[[ItemT], Awaitable[ResultT]]
    ref: Ref[Any] | None = None
    device: Device | None = None
    holder: object = None
    turn: int = -1
    tally: Tally = attrs.field(factory=Tally)

    @property
    def in_flight(self) -> int:
        """The number of requests that it works on."""
        return self.tally["in_flight"]

    @property
    def is_dead(self) -> bool:
        """Whether it has ended for good."""
        return (
            (self.ref is not None and self.ref.is_terminated)
            or (self.device is not None and self.device.is_ended)
            or getattr(self.holder, "is_dead", False) is True
        )

    @property
    def is_available(self) -> bool:
        """Whether it would begin with a request now."""
        return (
            (self.ref is None or self.ref.is_running)
            and (self.device is None or self.device.is_ready)
            and getattr(self.holder, "is_available", True) is not False
        )

    def has_refused(self, error: ActorError) -> bool:
        """Return whether its actor has not executed the request, so that another may."""
        is_its_own = self.ref is not None and error.path == self.ref.path
        return is_its_own and isinstance(error, NotExecutedError) and error.may_go_elsewhere

    async def ask(self, item: ItemT) -> ResultT:
        """Have it serve an item, and count the outcome."""
        with self.tally:
            return await self.model(item)

    def statistics(self) -> ReplicaStatistics:
        """Return the counts of its requests."""
        return ReplicaStatistics(
            name=self.name,
            is_available=self.is_available,
            is_dead=self.is_dead,
            **self.tally,
        )


ReplicaLike = Model[ItemT, ResultT] | Replica[ItemT, ResultT]
Replicas = Mapping[str, ReplicaLike[ItemT, ResultT]] | Sequence[ReplicaLike[ItemT, ResultT]]


def make_members(replicas: Replicas[ItemT, ResultT]) -> list[ReplicaState[ItemT, ResultT]]:
    """Make members of models; the models of a sequence are named by their index.

    Raises:
        TypeError: `replicas` is neither a mapping nor a sequence, or an item is not a model.
        ValueError: There are no models.
    """
    if not isinstance(replicas, Mapping | Sequence):
        raise TypeError(
            f"replicas must be a sequence of models, or a mapping of names to them, not {replicas!r}"
        )
    named: Mapping[str, ReplicaLike[ItemT, ResultT]]
    named = (
        replicas
        if isinstance(replicas, Mapping)
        else {str(index): model for index, model in enumerate(replicas)}
    )
    if not named:
        raise ValueError("there must be at least one replica")
    return [_make(name, model) for name, model in named.items()]


def _make(name: str, model: ReplicaLike[ItemT, ResultT]) -> ReplicaState[ItemT, ResultT]:
    if not isinstance(name, str):
        raise TypeError(f"the name of a replica must be a str, got {name!r}")
    # pyright does not keep the type arguments of a union.
    replica: Replica[ItemT, ResultT] = model if isinstance(model, Replica) else Replica(model)  # pyright: ignore[reportUnknownVariableType]
    holder: Any = getattr(replica.model, "__self__", replica.model)
    ref: Ref[Any] | None = holder if isinstance(holder, Ref) else None  # pyright: ignore[reportUnknownVariableType]
    return ReplicaState(name, as_callable(replica.model), ref, replica.device, holder)  # pyright: ignore[reportUnknownArgumentType]


# All are started before the pool serves.
_MOST_MEMBERS = 10_000


class Pool(Router[Any, Any]):
    """Starts actors of one class as its children, and sends each request to one of them.

    It is a `Router` with models of its own. Members of a `SubmitActor` class are asked ``Submit(item)``.
    Actors of any other class are asked the item itself, which is one of their requests. Start it with
    ``await system.spawn(Pool, Embedder, 4, "model.bin")``, for 4 of ``Embedder("model.bin")``.

    The members are named ``"0"``, ``"1"``, and so on. A crashed member is restarted by the policy of the
    pool; its requests wait in its mailbox, or move to others, depending on `by`. If that happens too often,
    the pool itself crashes, as any supervisor does; its supervisor restarts it, with new members. Until then
    requests get `NoReplicaError`. The members stop with the pool; with ``stop(drain=True)``, after all
    requests are answered.

    Args:
        actor_class: The class of the members.
        size: The number of members, 10 000 at most.
        args: Arguments of each member.
        by: How requests are spread, as for `Router`; by default, by load.
        member_policy: The policy of each member.
        member_mailbox: The mailbox of each member.
        kwargs: Keyword arguments of each member.

    Raises:
        ValueError: `size` is out of range.
        TypeError: `actor_class` is not an actor class, or cannot be instantiated with the arguments.
    """

    @checked_options
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
        must_be_count("size", size, maximum=_MOST_MEMBERS)
        super().__init__([_not_started] * size, by=by)
        self._is_of_submit_actors = isinstance(actor_class, type) and issubclass(actor_class, SubmitActor)
        self._arguments: tuple[object, ...] = actor_class, *args
        self._options = {**kwargs, "policy": member_policy, "mailbox": member_mailbox}

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Start the members."""
        async with super().lifespan(context):
            self._members = [await self._start_member(context, member.name) for member in self._members]
            yield

    async def _start_member(self, context: ActorContext, name: str) -> ReplicaState[Any, Any]:
        # Type checkers look for the actor's arguments among the arguments of `spawn`.
        spawn = cast("Callable[..., Awaitable[Ref[Any]]]", context.spawn)
        ref = await spawn(*self._arguments, name=name, **self._options)
        ask: Callable[[Any], Awaitable[Any]] = ref.ask
        return ReplicaState(name, as_callable(ref) if self._is_of_submit_actors else ask, ref)


async def _not_started(item: object) -> object:
    raise NotImplementedError(f"the members of the pool are not started: {item!r}")


# Hedges that may be saved up while nothing is slow.
_MOST_SAVED = 10.0
# Ten shares of 0.1 add up to a little less than 1.
_ROUNDING = 1e-6


def _is_share(_: object, attribute: object, value: float) -> None:
    must_be_positive("Hedge: share", value, maximum=1.0)


@named_options
@attrs.frozen(kw_only=True)
class Hedge:
    """The time when a slow request is sent to a second replica (Dean and Barroso, CACM 2013).

    Attributes:
        after: Seconds without a reply. The 95th percentile of the latency is a good value.
        share: The share of requests that may be sent twice, above 0 and at most 1. So replicas that are all
            slow do not get twice the load. Up to 10 are saved up.
    """

    after: float = attrs.field(validator=positive)
    share: float = attrs.field(default=0.1, validator=_is_share)


@attrs.frozen(kw_only=True)
class ReplicaPoolStatistics(RouterStatistics):
    """Counts of the requests to a `ReplicaPool`.

    Attributes:
        hedged: The number of requests sent to a second replica.
        won: The number of these that the second replica answered.
    """

    hedged: int = 0
    won: int = 0


class ReplicaPool(Router[ItemT, ResultT]):
    """Sends each request to the least busy of several equal models.

    It is a `Router` by load. With a `Hedge`, a request without a reply for some time is also sent to a second
    replica, if another one works. The first result is the reply, and the other attempt is cancelled. The
    reply is an error only if both have failed, or if the first attempt fails before the second one; it is the
    error of the first. Hedge only requests that may be executed twice.

    With a hedge, a cancelled caller leaves at once: both attempts are cancelled, and unwind on their own.
    Until then, they count as in flight at the replicas.

    Args:
        replicas: The models, as for `Router`.
        choices: The number of replicas to consider, chosen at random; see `ByLoad`. None considers all.
        hedge: When to call a second replica; None for never.

    Raises:
        ValueError: `replicas` is empty, or `choices` is below 1.
        TypeError: A replica is not a model.
    """

    @checked_options
    def __init__(
        self, replicas: Replicas[ItemT, ResultT], *, choices: int | None = None, hedge: Hedge | None = None
    ) -> None:
        super().__init__(replicas, by=ByLoad(choices=choices))
        if not isinstance(hedge, Hedge | None):
            raise TypeError(f"hedge must be a Hedge, got {hedge!r}")
        self._hedge = hedge
        self._saved = 1.0
        self._counted_as = ReplicaPoolStatistics

    async def answer(self, item: ItemT) -> ResultT:
        """Have a replica serve an item, or two of them; see `Router.answer`."""
        if self._hedge is None:
            return await self._send(item, [])
        self._saved = min(self._saved + self._hedge.share, _MOST_SAVED)
        asked: list[ReplicaState[ItemT, ResultT]] = []
        results, inbox = trio.open_memory_channel[tuple[int, outcome.Outcome[ResultT]]](2)
        # They have the deadline of the caller.
        deadline = trio.current_effective_deadline()
        scopes = [trio.CancelScope(deadline=deadline) for _ in range(2)]

        async def attempt(number: int) -> None:
            with scopes[number]:
                result = await outcome_of(self._send(item, asked))
                # There is room for both, whether anybody waits or not.
                results.send_nowait((number, result))

        self._nursery.start_soon(attempt, 0)
        attempts = 1
        try:
            with trio.move_on_after(self._hedge.after):
                _, result = await inbox.receive()
                return result.unwrap()
            if self._saved > 1.0 - _ROUNDING and self._has_other(asked):
                self._saved -= 1.0
                self._tally["hedged"] += 1
                self._nursery.start_soon(attempt, 1)
                attempts = 2
            ended: dict[int, outcome.Outcome[ResultT]] = {}
            for _ in range(attempts):
                number, result = await inbox.receive()
                ended[number] = result
                if isinstance(result, outcome.Value):
                    self._tally["won"] += number
                    break
            else:
                number = 0
            return ended[number].unwrap()
        finally:
            for scope in scopes:
                scope.cancel()

    def _has_other(self, asked: Sequence[ReplicaState[ItemT, ResultT]]) -> bool:
        return any(
            member.is_available and not member.is_dead for member in self._members if member not in asked
        )
