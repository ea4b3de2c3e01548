"""Requests to many models, each to the one that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from ..actors import ActorError, ActorStoppedError
from ._call import Model
from ._replicas import Member, Replica, ReplicaStatistics, make_members
from ._routing import ByLoad, Routing
from ._tally import CallStatistics
from ._tasks import TaskServant

__all__ = ["NoReplicaError", "Router", "RouterStatistics"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class NoReplicaError(ActorStoppedError):
    """All replicas have ended for good; the request was never executed."""


@attrs.frozen(kw_only=True)
class RouterStatistics(CallStatistics):
    """What became of the requests of a `Router`, `ReplicaPool` or `Pool`.

    Attributes:
        replicas: What became of those that each replica got, in order.
        rerouted: How often a request went on to another replica, because one had refused it unexecuted.
    """

    replicas: tuple[ReplicaStatistics, ...]
    rerouted: int


class Router(TaskServant[ItemT, ResultT], Generic[ItemT, ResultT]):
    """Sends each request to one of several models: the least busy one, or the one that its key belongs to.

    A model that has ended for good gets nothing more. By load, one that restarts is skipped as long as
    another works; if none works, requests wait at the least busy one that will. A request that a model's
    actor has refused unexecuted (`ActorStoppedError`, `ActorRestartingError`, `MailboxFullError`) goes on to
    the next model; by a key that does not fail over, only if that model has ended for good. Any other error
    is the asker's: the request may have been executed.

    Requests are sent in the order of the mailbox. Each is sent at once, and waits in the mailbox of its model
    if that is busy. ``stop(drain=True)`` waits for all of them. The models are not the router's: they go on
    when it ends.

    Args:
        replicas: The models. Names, by which keys find them, are those of a mapping, or places in a sequence.
        by: How it chooses: `ByLoad()` or ``ByKey(function)``.

    Raises:
        ValueError: There are no models.
        TypeError: What was given is no model.
    """

    def __init__(
        self,
        replicas: Mapping[str, Model[ItemT, ResultT] | Replica[ItemT, ResultT]]
        | Sequence[Model[ItemT, ResultT] | Replica[ItemT, ResultT]],
        *,
        by: Routing | None = None,
    ) -> None:
        self._by: Routing = ByLoad() if by is None else by
        if not callable(getattr(self._by, "choose", None)):
            raise TypeError(f"by must be ByLoad(...) or ByKey(...), got {by!r}")
        self._members: list[Member[ItemT, ResultT]] = make_members(replicas)
        self._turns = 0
        self._rerouted = 0

    async def answer(self, item: ItemT) -> ResultT:
        """Have one of the models serve an item.

        Raises:
            NoReplicaError: All models have ended for good.
            TypeError: The key of the item is none.
            Exception: What the model raised.
        """
        return await self._send(item, [])

    async def _send(self, item: ItemT, asked: list[Member[ItemT, ResultT]]) -> ResultT:
        """Ask models until one does not refuse.

        Args:
            item: What they are asked.
            asked: Models that are left out; those that were asked are added.
        """
        refusal: ActorError | None = None
        while (member := self._choose(item, asked)) is not None:
            asked.append(member)
            self._rerouted += refusal is not None
            member.turn = self._turns = self._turns + 1
            try:
                return await member.ask(item)
            except ActorError as error:
                if not (member.has_refused(error) and (self._by.skips or member.is_dead)):
                    raise
                refusal = error
        if refusal is None or all(member.is_dead for member in self._members):
            what = f"all {len(self._members)} replicas of {self.context.path} have ended"
            raise NoReplicaError(what, path=self.context.path) from refusal
        raise refusal

    def _choose(
        self, item: ItemT, left_out: Sequence[Member[ItemT, ResultT]]
    ) -> Member[ItemT, ResultT] | None:
        candidates = [member for member in self._members if member not in left_out and not member.is_dead]
        if self._by.skips:
            candidates = [member for member in candidates if member.is_available] or candidates
        return self._by.choose(item, candidates) if candidates else None

    def statistics(self) -> RouterStatistics:
        """What became of the requests."""
        replicas = tuple(member.statistics() for member in self._members)
        return RouterStatistics(**attrs.asdict(self._tally), replicas=replicas, rerouted=self._rerouted)
