"""Serving a message on behalf of an idle actor, without its mailbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import NoReturn, TypeVar

import attrs
import outcome
import trio

from ._actor import ActorContext
from ._errors import drop_frames
from ._events import note_end
from ._messages import WAKE_VALUE, AnyMessage, Waiter
from ._outcomes import Outcomes, crash_error
from ._ref import Ref

__all__ = ["DirectReply", "idle_actor", "unobserved_actor"]

ActorT = TypeVar("ActorT")


@attrs.define(eq=False, repr=False)
class DirectReply(Waiter):
    """A one-time reply, given on the Trio thread, to a message without an envelope.

    The serving actor may treat it as a `DeferredReply`. The caller waits for it with `wait`.

    Args:
        message: The message.

    Attributes:
        outcomes: The outcomes of the actor that served the message; None before.
        is_done: Whether the reply was given.
        began: The start time, if messages are measured.
        on_cancel: Called with the waiting task's context variables when the task is cancelled.
    """

    message: AnyMessage
    outcomes: Outcomes | None = attrs.field(default=None, init=False)
    is_done: bool = attrs.field(default=False, init=False)
    began: float | None = attrs.field(default=None, init=False)
    on_cancel: Callable[[Context], None] | None = attrs.field(default=None, init=False)
    _poll: Callable[[], Awaitable[None]] | None = attrs.field(default=None, init=False)

    def served(self, context: ActorContext, error: Exception | None = None) -> None:
        """Count the message as served, on behalf of the idle actor.

        Args:
            context: The actor's context. From now on the reply belongs to it, as a deferred reply does.
            error: The error that crashes the actor, and that the caller gets.
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

    def wait(self) -> Awaitable[object]:
        """Wait for the outcome; await it at once. A cancelled task still waits for `set` or `cancelled`."""
        return self._poll_and_wait() if self.is_done or self._poll is not None else self.park()

    async def _poll_and_wait(self) -> None:
        poll, self._poll = self._poll, None
        if poll is None:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            # Poll even if the operation has already failed, because a lost operation may still be in flight.
            await poll()
        if self.is_done:
            self.take()
        else:
            await self.wait()

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Record that the parked task is cancelled but continues to wait."""
        assert self.task is not None  # it is parked
        waits_on = super().abort(raise_cancel)
        if self.on_cancel is not None:
            self.on_cancel(self.task.context)
        return waits_on

    def deliver(self, error: BaseException | None) -> None:
        """Deliver the outcome; called once."""
        task = self.task
        if task is not None and error is None:
            # These lines do the same as `settle`, in a third of the time.
            self.task = None
            if task.custom_sleep_data is self:
                trio.lowlevel.reschedule(task, WAKE_VALUE)
            return
        self.settle(WAKE_VALUE if error is None else outcome.Error(error))

    def fail(self, error: BaseException) -> bool:
        """Fail, and return whether this was the first outcome."""
        return self.set(None, error)

    def set(self, _: None = None, error: BaseException | None = None) -> bool:
        """Give the outcome: None or an error; return whether this was the first outcome."""
        if self.is_done:
            return False
        self.is_done = True
        # Break a reference cycle, because the hook refers to the operation, and the operation to this reply.
        self.on_cancel = None
        outcomes = self.outcomes
        if outcomes is not None:
            deferred = outcomes.deferred
            deferred.discard(self)
            if not deferred and outcomes.on_settled is not None:
                outcomes.all_settled()
            if self.began is not None:
                self._measure(outcomes, error)
        self.deliver(error)
        return True

    def fail_as_crash(self, error: Exception) -> bool:
        """Fail because the actor crashed while serving the message; see `DeferredReply.fail_as_crash`."""
        assert self.outcomes is not None  # it was served
        return self.fail(crash_error(self.outcomes.path, self.message, error))

    def cancelled(self) -> bool:
        """Deliver the waiting task's own cancellation; return whether this was the first outcome."""
        if self.is_done:
            return False
        self.is_done = True
        self.on_cancel = None
        outcomes = self.outcomes
        assert outcomes is not None  # it is cancelled only while it is parked
        outcomes.settle(self)
        if self.began is not None:
            self._measure(outcomes, cancelled=True)
        self.settle(self.cancellation())
        return True

    def poll_first(self, poll: Callable[[], Awaitable[None]]) -> bool:
        """Have the waiting task check for the end of the launched work, before it parks.

        Args:
            poll: Checks, and gives the reply if the work has ended.

        Returns:
            Whether the task will poll.
        """
        self._poll = poll
        return True

    def poll_once_more(self, poll: Callable[[], None]) -> bool:
        """Have the waiting task check once for the end, after a turn of the loop; see `DeferredReply`."""
        return self.poll_first(partial(_poll_once, poll))

    def _measure(
        self, outcomes: Outcomes, error: BaseException | None = None, *, cancelled: bool = False
    ) -> None:
        meter = outcomes.observers.meter
        if meter is not None and self.began is not None:
            run_time = outcomes.observers.now() - self.began
            note_end(outcomes.measured(meter, self.message), 0.0, run_time, error, cancelled=cancelled)


async def _poll_once(poll: Callable[[], None]) -> None:
    try:
        await trio.lowlevel.cancel_shielded_checkpoint()
    finally:
        # Also if the await is closed here, because nothing else watches the operation before.
        poll()


def idle_actor(ref: Ref[ActorT], reply: DirectReply) -> ActorT | None:
    """Return the actor itself if it waits for a message, and no observer wants every message; else None.

    The actor's owner may then call it as the actor's own task would, on the Trio thread and without waiting,
    and record that with `DirectReply.served`. Without an envelope, there is no stash, deadline or event.

    Args:
        ref: The actor.
        reply: The reply to the message if the actor is called. If messages are measured, this starts its
            clock.
    """
    cell = ref._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # as `cell_behind`, without the call
    mailbox, observers = cell.mailbox, cell.outcomes.observers
    if mailbox.receiver is None or mailbox.refusal is not None or observers.of_every_message:
        return None
    if observers.meter is not None:
        reply.began = observers.now()
    assert cell.incarnation is not None  # it is who waits
    return cell.incarnation.actor  # type: ignore[return-value]  # pyright: ignore[reportReturnType]  # the reference's


def unobserved_actor(ref: Ref[ActorT]) -> tuple[ActorT, Outcomes] | None:
    """Return the actor if it waits for a message, and nothing observes or measures every message; else None.

    The actor's owner may then work on its behalf without a message, and increase its `Outcomes.handled`.

    Args:
        ref: The actor.

    Returns:
        The actor, and its outcomes.
    """
    cell = ref._cell  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # as `idle_actor`
    mailbox, observers = cell.mailbox, cell.outcomes.observers
    if mailbox.receiver is None or mailbox.refusal is not None:
        return None
    if observers.of_every_message or observers.meter is not None:
        return None
    assert cell.incarnation is not None  # it is who waits
    actor: ActorT = cell.incarnation.actor  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]  # the reference's
    return actor, cell.outcomes
