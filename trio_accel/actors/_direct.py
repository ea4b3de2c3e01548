"""Serving a message in place of an actor that waits for one, without its mailbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ._failures import drop_frames
from ._outcomes import crash_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ._context import ActorContext
    from ._messages import AnyMessage
    from ._outcomes import Outcomes
    from ._ref import Ref

__all__ = ["DirectReply", "idle_actor", "measured_idle_actor"]

ActorT = TypeVar("ActorT")


class DirectReply:
    """A reply that is given once, on the Trio thread, to a message that had no envelope.

    The actor that serves it may treat it as a `DeferredReply`. A subclass says in `deliver` where it goes.

    Args:
        message: The message.

    Attributes:
        outcomes: Those of the actor that has served it; None before that.
        is_done: Whether it was given.
    """

    __slots__ = ("is_done", "message", "outcomes")

    def __init__(self, message: AnyMessage) -> None:
        self.message: AnyMessage = message
        self.outcomes: Outcomes | None = None
        self.is_done: bool = False

    def served(self, context: ActorContext, error: Exception | None = None) -> None:
        """Count the message as served, in place of an actor that was idle.

        Args:
            context: The actor's, to which this belongs from now on, as a reply that is deferred does.
            error: What the actor crashes with over it; the asker is told so.
        """
        cell = context._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # as in `idle_actor`
        outcomes = self.outcomes = cell.outcomes
        if error is not None:
            outcomes.failed += 1
            self.fail_as_crash(error)
            drop_frames(error)
            context.crash(error)
            return
        outcomes.handled += 1
        if not self.is_done:
            outcomes.deferred.add(self)

    def deliver(self, error: BaseException | None) -> None:
        """Take the outcome; called once."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> bool:
        """It failed; returns whether that is news."""
        return self.set(None, error)

    def set(self, _: None = None, error: BaseException | None = None) -> bool:
        """It is served, or failed if there is an error; returns whether that is news."""
        if self.is_done:
            return False
        self.is_done = True
        outcomes = self.outcomes
        if outcomes is not None:
            outcomes.deferred.discard(self)
            if not outcomes.deferred:
                outcomes.all_settled()
        self.deliver(error)
        return True

    def fail_as_crash(self, error: Exception) -> bool:
        """The actor crashed over it; see `DeferredReply.fail_as_crash`."""
        assert self.outcomes is not None  # it was served
        return self.fail(crash_error(self.outcomes.path, self.message, error))

    def cancelled(self) -> bool:
        """Let a cancelled asker go; returns whether that is news."""
        raise NotImplementedError

    def spin_wait(
        self, wait: Callable[[], Awaitable[None]], complete_early: Callable[[Callable[[], None]], None]
    ) -> bool:
        """Have the asker itself wait for the end of what was launched.

        Args:
            wait: Waits, and gives the reply.
            complete_early: If the asker does not: takes what is to be called as soon as the end is seen and
                all went well, before anything else is done about it.

        Returns:
            Whether it will.
        """
        return False

    def look_last(self, look: Callable[[], None]) -> bool:
        """Have the asker itself look for the reply, once; see `DeferredReply.look_last`."""
        return False


def idle_actor(ref: Ref[ActorT]) -> ActorT | None:
    """The actor itself while it waits for a message, and nobody sees every one; else None.

    Then its owner may call it as its own task would, on the Trio thread and without waiting, and counts that
    with `DirectReply.served`. There is no envelope: no stash, no deadline and no event.
    """
    cell = ref._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # as `cell_behind`, without the call
    if not cell.mailbox.is_idle or cell.outcomes.observers.sees_every_message:
        return None
    assert cell.incarnation is not None  # it is who waits
    return cell.incarnation.actor  # type: ignore[return-value]  # pyright: ignore[reportReturnType]  # the reference's


def measured_idle_actor(ref: Ref[ActorT]) -> ActorT | None:
    """As `idle_actor`, where all messages are measured, and nobody observes every one.

    Its owner has each message measured that it gives the actor past its mailbox; see `System.measure`.
    """
    cell = ref._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # as in `idle_actor`
    observers = cell.outcomes.observers
    if observers.meter is None or observers.of_every_message or not cell.mailbox.is_idle:
        return None
    assert cell.incarnation is not None  # it is who waits
    return cell.incarnation.actor  # type: ignore[return-value]  # pyright: ignore[reportReturnType]  # as above
