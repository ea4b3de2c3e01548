"""What an actor sees of its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import attrs

from ._envelope import DeferredReply, Envelope, EnvelopeState
from ._errors import MailboxFullError
from ._messages import AnyMessage, Message
from ._options import MailboxOptions, Policy, Restart
from ._ref import Ref, cell_of

if TYPE_CHECKING:
    from ._actor import Actor
    from ._cell import Cell, Terminated
    from ._incarnation import Incarnation

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

    __slots__ = ("_cell", "_incarnation", "restart")

    def __init__(self, cell: Cell, incarnation: Incarnation, restart: RestartInfo) -> None:
        self._cell = cell
        self._incarnation = incarnation
        self.restart = restart

    @property
    def path(self) -> str:
        """The actor's path, such as ``"demo/cpu:0/context"``."""
        return self._cell.path

    @property
    def ref(self) -> Ref[Any]:
        """The actor's own address, to hand out to others."""
        return Ref(self._cell)

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
        return await self._incarnation.supervisor_of_children().spawn(
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
        if envelope is None or envelope.is_told or envelope.state != EnvelopeState.RUNNING:
            raise RuntimeError(f"defer: actor {self.path} is serving no request that could be deferred")
        envelope.state = EnvelopeState.DEFERRED
        envelope.on_cancel = on_cancel
        self._cell.deferred.add(envelope)
        if envelope.is_cancelled and on_cancel is not None:
            on_cancel()
        return DeferredReply(self._cell, envelope)

    def stash(self, message: AnyMessage) -> None:
        """Set the message being served aside; its asker goes on waiting. The handler returns then.

        `unstash_all` and a restart put what was set aside back in front of the mailbox. What the
        handler returns is no reply then; if it raises, the message is not set aside.

        Raises:
            RuntimeError: It is not the message being served.
            MailboxFullError: So many are set aside already (`MailboxOptions.stash`).
        """
        cell = self._cell
        envelope = cell.current
        if envelope is None or envelope.message is not message or envelope.state != EnvelopeState.RUNNING:
            raise RuntimeError(
                f"stash: actor {self.path} is not serving {message!r}; stash what the handler got"
            )
        stashing = sum(served.state == EnvelopeState.STASHING for served in self._incarnation.serving)
        limit = cell.mailbox_options.stash
        if cell.mailbox.stashed + stashing >= limit:
            raise MailboxFullError(
                f"stash of {self.path} is full ({limit} messages); "
                "call unstash_all(), or raise MailboxOptions.stash",
                path=self.path,
            )
        # Set aside only when the handler has returned: until then the message is its own.
        envelope.state = EnvelopeState.STASHING

    def unstash_all(self) -> None:
        """Put the messages that were set aside back in front of the mailbox, in their order."""
        self._cell.mailbox.unstash_all()

    def watch(self, ref: Ref[Any], *, to: Message[Any] | Callable[[Terminated], Message[Any]]) -> None:
        """Be told when another actor has ended for good; at once if it has already.

        The message comes before all others, whatever the mailbox holds. The watch ends with this
        incarnation: put it into `lifespan` to have it in each.

        Args:
            ref: Whom to watch; a second watch of the same actor takes the place of the first.
            to: The message to this actor, or a function that makes it from how the other ended.

        Raises:
            TypeError: This actor has no handler for the message.
        """
        make = to if callable(to) else _always(to)
        if not callable(to):
            self._cell.check(to, Message, "watch")

        def notify(terminated: Terminated) -> None:
            message = make(terminated)
            self._cell.check(message, Message, "watch")
            self._cell.mailbox.put_control(
                Envelope(message, context=copy_context(), sender=None, deadline=float("inf"), is_told=True)
            )

        watched = cell_of(ref)
        if watched.terminated is not None:
            notify(watched.terminated)
            return
        watched.add_watcher(self._incarnation, notify)
        if self._incarnation.watched is None:
            self._incarnation.watched = []
        self._incarnation.watched.append(watched)

    def unwatch(self, ref: Ref[Any]) -> None:
        """Watch an actor no more."""
        cell_of(ref).remove_watcher(self._incarnation)

    def stop(self) -> None:
        """End this actor after the message being served. A permanent actor is not restarted either."""
        self._cell.request_stop("it stopped itself")

    def finish(self) -> None:
        """End this incarnation after the message being served: its work is done.

        What follows is up to the restart type: a permanent actor is started anew and keeps its
        mailbox; a transient or temporary one ends for good. Does nothing when the incarnation has
        ended already.
        """
        if self._cell.incarnation is self._incarnation:
            self._incarnation.finish()

    def crash(self, error: Exception) -> None:
        """Crash this incarnation before its next message, as if a handler had raised the error.

        Does nothing when the incarnation has ended already.
        """
        if self._cell.incarnation is self._incarnation:
            self._incarnation.crash(error)


def _always(message: Message[Any]) -> Callable[[Terminated], Message[Any]]:
    def make(_: Terminated) -> Message[Any]:
        return message

    return make
