"""What an actor sees of its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import attrs

from ._envelope import DeferredReply, EnvelopeState
from ._options import MailboxOptions, Policy, Restart

if TYPE_CHECKING:
    from ._actor import Actor
    from ._cell import Cell
    from ._ref import Ref

__all__ = ["ActorContext", "RestartInfo"]

ActorT = TypeVar("ActorT", bound="Actor")
Ts = TypeVarTuple("Ts")


@attrs.frozen(kw_only=True)
class RestartInfo:
    """Why this incarnation exists.

    Attributes:
        number: 0 for the first incarnation, then counting up.
        error: What ended the previous incarnation; None for the first, or if it ended by itself.
    """

    number: int
    error: BaseException | None


class ActorContext:
    """The surroundings of one incarnation."""

    __slots__ = ("_cell", "restart")

    def __init__(self, cell: Cell, restart: RestartInfo) -> None:
        self._cell = cell
        self.restart = restart

    @property
    def path(self) -> str:
        """The actor's path, such as ``"demo/cpu:0/context"``."""
        return self._cell.path

    @property
    def deadline(self) -> float:
        """When the asker being served gives up, on Trio's clock; infinity without a deadline."""
        current = self._cell.current
        return float("inf") if current is None else current.deadline

    async def spawn(
        self,
        actor_class: Callable[[*Ts], ActorT],
        *args: *Ts,
        name: str | None = None,
        restart: Restart = Restart.PERMANENT,
        policy: Policy | None = None,
        mailbox: MailboxOptions | None = None,
        **kwargs: object,
    ) -> Ref[ActorT]:
        """Start a child of this incarnation; it ends with it. See `System.spawn`."""
        supervisor = self._cell.supervisor_of_children()
        return await supervisor.spawn(
            actor_class, args, kwargs, name=name, restart=restart, policy=policy, mailbox=mailbox
        )

    def defer(self, *, on_cancel: Callable[[], None] | None = None) -> DeferredReply[Any]:
        """Keep the request being served open: its reply is given later, the next message comes at once.

        The handler returns the `DeferredReply`. It survives a restart of the actor, and is failed
        when the actor ends for good.

        Args:
            on_cancel: Called on the Trio thread, once, when the asker is cancelled; must not raise.

        Raises:
            RuntimeError: No request is being served, or it is deferred already.
        """
        envelope = self._cell.current
        if envelope is None or envelope.is_told or envelope.state is not EnvelopeState.RUNNING:
            raise RuntimeError(f"defer: actor {self.path} is serving no request that could be deferred")
        envelope.state = EnvelopeState.DEFERRED
        envelope.on_cancel = on_cancel
        self._cell.deferred.add(envelope)
        if envelope.is_cancelled and on_cancel is not None:
            on_cancel()
        return DeferredReply(self._cell, envelope)

    def stop(self) -> None:
        """End this actor after the message being served. A permanent actor is not restarted either."""
        self._cell.request_stop("it stopped itself")

    def crash(self, error: Exception) -> None:
        """Crash this incarnation before its next message, as if a handler had raised the error.

        Does nothing when the incarnation has ended already.
        """
        if self._cell.incarnation == self.restart.number:
            self._cell.request_crash(error)
