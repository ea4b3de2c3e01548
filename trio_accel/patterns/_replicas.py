"""What requests are routed to: models with names, and what is in flight at each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from ..actors import ActorError, NotExecutedError, Ref
from ..devices import Device
from ._call import Model, as_callable
from ._tally import CallStatistics, Tally

__all__ = ["Member", "Replica", "ReplicaStatistics", "make_members"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@attrs.frozen
class Replica(Generic[ItemT, ResultT]):
    """A model, and the device that it depends on.

    A model that is the address of an actor, or its method ``ref.ask``, needs no `Replica`: its actor tells
    whether it works.

    Attributes:
        model: What does the work.
        device: The device without which it cannot; it is skipped while that has no context.
    """

    model: Model[ItemT, ResultT]
    device: Device | None = attrs.field(default=None, kw_only=True)


@attrs.frozen(kw_only=True)
class ReplicaStatistics(CallStatistics):
    """What became of the requests that one replica got.

    Attributes:
        name: The replica.
        is_available: Whether it works now.
        is_dead: Whether it has ended for good.
    """

    name: str
    is_available: bool
    is_dead: bool


@attrs.define(eq=False)
class Member(Generic[ItemT, ResultT]):
    """A replica as a router sees it.

    Attributes:
        name: Its name, by which keys find it.
        model: What it is asked by.
        ref: Its actor, if it is one.
        device: The device that it depends on, if any.
        turn: Number of the last request that it got.
        tally: What became of its requests.
    """

    name: str
    model: Callable[[ItemT], Awaitable[ResultT]]
    ref: Ref[Any] | None = None
    device: Device | None = None
    turn: int = -1
    tally: Tally = attrs.field(factory=Tally)

    @property
    def in_flight(self) -> int:
        """Requests that it works on."""
        return self.tally.in_flight

    @property
    def is_dead(self) -> bool:
        """Whether it has ended for good."""
        return (self.ref is not None and self.ref.is_terminated) or (
            self.device is not None and self.device.is_ended
        )

    @property
    def is_available(self) -> bool:
        """Whether it would begin with a request now."""
        return (self.ref is None or self.ref.is_running) and (self.device is None or self.device.is_ready)

    def has_refused(self, error: ActorError) -> bool:
        """Whether an error says that its actor has not executed the request, and another one may."""
        is_its_own = self.ref is not None and error.path == self.ref.path
        return is_its_own and isinstance(error, NotExecutedError) and error.may_go_elsewhere

    async def ask(self, item: ItemT) -> ResultT:
        """Have it serve an item, and count what becomes of it."""
        with self.tally:
            return await self.model(item)

    def statistics(self) -> ReplicaStatistics:
        """What became of its requests."""
        return ReplicaStatistics(
            name=self.name,
            is_available=self.is_available,
            is_dead=self.is_dead,
            **attrs.asdict(self.tally),
        )


Given = Model[ItemT, ResultT] | Replica[ItemT, ResultT]


def make_members(
    given: Mapping[str, Given[ItemT, ResultT]] | Sequence[Given[ItemT, ResultT]],
) -> list[Member[ItemT, ResultT]]:
    """Make members of models; those of a sequence are named by their place.

    Raises:
        TypeError: It is neither a mapping nor a sequence, or one of them is no model.
        ValueError: There is none.
    """
    if not isinstance(given, Mapping | Sequence):
        raise TypeError(
            f"replicas must be a sequence of models, or a mapping of names to them, not {given!r}"
        )
    named: Mapping[str, Given[ItemT, ResultT]]
    named = given if isinstance(given, Mapping) else {str(place): each for place, each in enumerate(given)}
    if not named:
        raise ValueError("there must be at least one replica")
    return [_make(name, model) for name, model in named.items()]


def _make(name: str, given: Given[ItemT, ResultT]) -> Member[ItemT, ResultT]:
    if not isinstance(name, str):
        raise TypeError(f"the name of a replica must be a str, got {name!r}")
    if isinstance(given, Replica):
        # pyright does not keep the type arguments of a union.
        replica: Replica[ItemT, ResultT] = given  # pyright: ignore[reportUnknownVariableType]
        return Member(name, as_callable(replica.model), _actor_of(replica.model), replica.device)
    return Member(name, as_callable(given), _actor_of(given))


def _actor_of(model: object) -> Ref[Any] | None:
    """The actor that a model is the address of, or the method `Ref.ask` of."""
    holder: Any = getattr(model, "__self__", model)
    return holder if isinstance(holder, Ref) else None  # pyright: ignore[reportUnknownVariableType]
