"""Serving a message in place of an actor that waits for one, without its mailbox."""

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
    """A reply that is given once, on the Trio thread, to a message that had no envelope.

    The actor that serves it may treat it as a `DeferredReply`. The asker waits for it by `wait`.

    Args:
        message: The message.

    Attributes:
        outcomes: The outcomes of the actor that has served it; None before that.
        is_done: Whether it was given.
        began: When it was begun, if messages are measured.
        on_cancel: Called with the context variables of the waiting task when that is cancelled.
    """

    message: AnyMessage
    outcomes: Outcomes | None = attrs.field(default=None, init=False)
    is_done: bool = attrs.field(default=False, init=False)
    began: float | None = attrs.field(default=None, init=False)
    on_cancel: Callable[[Context], None] | None = attrs.field(default=None, init=False)
    _poll: Callable[[], Awaitable[None]] | None = attrs.field(default=None, init=False)

    def served(self, context: ActorContext, error: Exception | None = None) -> None:
        """Count the message as served, in place of an actor that was idle.

        Args:
            context: The actor's, to which this belongs from now on, as a reply that is deferred does.
            error: The error that the actor crashes with over it; the asker is told so.
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
        """Wait for the outcome, at once; a cancelled task waits on, until `set` or `cancelled` is called."""
        if self.is_done or self._poll is not None:
            return self._poll_and_wait()
        # Most replies only wake the task: a coroutine of this class would take as long again.
        self.task = trio.lowlevel.current_task()
        return trio.lowlevel.wait_task_rescheduled(self.abort)  # noqa: ASYNC105  # by the caller

    async def _poll_and_wait(self) -> None:
        poll, self._poll = self._poll, None
        if poll is None:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            # The poll is made also if the operation has failed by now: a lost one may be in flight all the
            # same.
            await poll()
        if self.is_done:
            self.take()
        else:
            await self.wait()

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Tell that the parked task is cancelled; it waits on."""
        assert self.task is not None  # it is parked
        waits_on = super().abort(raise_cancel)
        if self.on_cancel is not None:
            self.on_cancel(self.task.context)
        return waits_on

    def deliver(self, error: BaseException | None) -> None:
        """Hand the outcome over; called once."""
        task = self.task
        if task is not None and error is None:
            # This line does what `settle` does, in a third of the time.
            self.task = None
            trio.lowlevel.reschedule(task, WAKE_VALUE)
            return
        self.settle(WAKE_VALUE if error is None else outcome.Error(error))

    def fail(self, error: BaseException) -> bool:
        """Fail; returns whether that is news."""
        return self.set(None, error)

    def set(self, _: None = None, error: BaseException | None = None) -> bool:
        """Give the outcome: it is served, or failed if there is an error; returns whether that is news."""
        if self.is_done:
            return False
        self.is_done = True
        # Breaks a reference cycle: the hook refers to the operation, and that to this reply.
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
        """Say that the actor crashed over it; see `DeferredReply.fail_as_crash`."""
        assert self.outcomes is not None  # it was served
        return self.fail(crash_error(self.outcomes.path, self.message, error))

    def cancelled(self) -> bool:
        """Give the waiting task its cancellation; returns whether that is news."""
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
        """Have the task that waits look for the end of what was launched, before it parks.

        Args:
            poll: Looks, and gives the reply if it sees the end.

        Returns:
            Whether it will.
        """
        self._poll = poll
        return True

    def poll_once_more(self, poll: Callable[[], None]) -> bool:
        """Have the task that waits look once for the end, behind a turn of the loop; see `DeferredReply`."""
        return self.poll_first(partial(_poll_once, poll))

    def _measure(
        self, outcomes: Outcomes, error: BaseException | None = None, *, cancelled: bool = False
    ) -> None:
        meter = outcomes.observers.meter
        if meter is not None and self.began is not None:
            run_time = outcomes.observers.now() - self.began
            note_end(outcomes.measured(meter, self.message), 0.0, run_time, error, cancelled=cancelled)


async def _poll_once(poll: Callable[[], None]) -> None:
    await trio.lowlevel.cancel_shielded_checkpoint()
    poll()


def idle_actor(ref: Ref[ActorT], reply: DirectReply) -> ActorT | None:
    """Find the actor itself while it waits for a message, and no observer wants every one; else None.

    Then its owner may call it as its own task would, on the Trio thread and without waiting, and counts that
    with `DirectReply.served`. There is no envelope: no stash, no deadline and no event.

    Args:
        ref: The actor.
        reply: Where the message is replied to, if the actor is called. It is measured if messages are.
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
    """Find the actor itself while it waits for a message, and no observer wants or measures any; else None.

    Then its owner may do its work in its place, without a message, and adds to what it has handled.

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
