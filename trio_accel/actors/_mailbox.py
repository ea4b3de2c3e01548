"""An actor's bounded queue, owned by its cell, with a priority queue for control messages."""

from __future__ import annotations

from collections import OrderedDict, deque
from contextvars import Context
from typing import TypeAlias

import attrs
import outcome
import trio

from ._errors import ActorError, ActorRestartingError, ActorStoppedError, MailboxFullError
from ._handlers import HandlerTable
from ._messages import WAKE_VALUE, Envelope, EnvelopeState
from ._options import MailboxOptions, Overflow
from ._outcomes import Outcomes

# The maximum number of messages served without a checkpoint, because a checkpoint costs as much as a small
# operation. Other tasks wait for at most this many messages.
_IN_A_ROW = 8

_Messages: TypeAlias = OrderedDict[Envelope, None]


def _empty_messages() -> _Messages:
    # Calling an alias with type arguments would store the arguments in a dictionary of each instance.
    return OrderedDict()


@attrs.define(eq=False, repr=False)
class Mailbox:
    """Messages in arrival order.

    Invariants: `_waiting` is empty unless `_queue` is full. `receiver` is parked only while both queues are
    empty, so a message that meets a parked receiver is either handed to it directly, or served by another
    task. In the second case the receiver is in `_replaced` meanwhile. An `ask` that waits for room parks only
    once, for its reply; a `tell` wakes on admission. A queued envelope is in exactly one of `_queue`,
    `_waiting`, `_stash`, `_control`.

    All but the last are ordered dictionaries, which remove any message in constant time, because thousands of
    callers may be cancelled in one turn of the loop. A plain dictionary would search for its first key past
    all the removed ones.
    """

    _outcomes: Outcomes
    _handlers: HandlerTable
    _options: MailboxOptions
    _queue: _Messages = attrs.field(factory=_empty_messages)
    _waiting: _Messages = attrs.field(factory=_empty_messages)
    _stash: _Messages = attrs.field(factory=_empty_messages)
    # Created on first use, because most actors never need it and an empty deque takes 700 bytes.
    _control: deque[Envelope] | None = None
    receiver: trio.lowlevel.Task | None = None
    _replaced: trio.lowlevel.Task | None = None
    _woken: bool = False
    _in_a_row: int = 0
    refusal: tuple[type[ActorError], str] | None = None
    peak: int = 0
    dropped: int = 0

    @property
    def depth(self) -> int:
        """The number of messages in the queue."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """The number of senders that wait for room."""
        return len(self._waiting)

    @property
    def stashed(self) -> int:
        """The number of stashed messages."""
        return len(self._stash)

    @property
    def is_empty(self) -> bool:
        """Whether both queues are empty."""
        return not (self._queue or self._control)

    @property
    def would_wait(self) -> bool:
        """Whether the sender of a new message would have to wait for room."""
        return (
            self._options.overflow is Overflow.WAIT
            and len(self._queue) >= self._options.capacity
            and self.refusal is None
        )

    def put(self, envelope: Envelope, *, is_own: bool = False) -> bool:
        """Accept a message, or apply the overflow policy to it.

        Args:
            envelope: The message.
            is_own: Whether the current incarnation sends the message to itself, so that it is not refused.

        Returns:
            False if the message waits for room: `ask` then parks for its reply, `tell` for its admission.

        Raises:
            ActorStoppedError: The actor has ended or is stopping.
            ActorRestartingError: The actor is restarting, and its mailbox options reject messages meanwhile.
            MailboxFullError: The queue is full, and the policy is `REJECT` or `DROP_NEWEST`.
        """
        if self.refusal is not None and not is_own:
            self._drop(envelope, self.refusal[1])
            raise self._refused(envelope, self.refusal)
        observers = self._outcomes.observers
        if observers.sees_messages and envelope.queued_at is None:
            envelope.queued_at = observers.now()
        task = self.receiver
        if task is not None:
            self._hand_over(task, envelope)
            return True
        queue = self._queue
        depth = len(queue)
        if depth >= self._options.capacity:
            overflow = self._options.overflow
            if overflow is Overflow.WAIT:
                # D87: the actor itself may wait for this sender, directly or not. `refuse_waiting` ends that
                # deadlock.
                self._waiting[envelope] = None
                return False
            if overflow is not Overflow.DROP_OLDEST:
                raise self._full(envelope, "was rejected" if overflow is Overflow.REJECT else "was dropped")
            oldest = _first(queue)
            # Append before `fail`, because an observer of the loss may send to this very mailbox.
            queue[envelope] = None
            oldest.fail(self._full(oldest, "was dropped in favour of a newer message"))
            return True
        queue[envelope] = None
        if depth >= self.peak:
            self.peak = depth + 1
        return True

    @property
    def is_idle(self) -> bool:
        """Whether the actor waits for a message, so that another task could serve it."""
        return self.receiver is not None and self.refusal is None

    def replace_receiver(self) -> None:
        """Let the current task serve a message instead of the parked receiver; only while `is_idle`."""
        self._replaced, self.receiver = self.receiver, None

    def restore_receiver(self) -> None:
        """Return the mailbox to the actor's own task, which then takes the messages received meanwhile."""
        task, self._replaced = self._replaced, None
        if task is None:
            # The actor's task was cancelled in the meantime.
            return
        self.receiver = task
        if self._woken:
            self._woken = False
            self.wake()
        elif self._control:
            self._hand_over(task, self._control.popleft())
        elif self._queue:
            self._hand_over(task, _first(self._queue))
            self._admit()

    def refuse_waiting(self, envelope: Envelope) -> MailboxFullError:
        """Remove a waiting one-way message, because only its own sender could make room for it."""
        self.withdraw(envelope)
        path = self._outcomes.path
        reason = f"{envelope.message.shown_name} was not sent: the mailbox of {path} is full"
        self._drop(envelope, reason)
        return MailboxFullError(
            f"{reason} ({self._options.capacity} messages), and {path} makes no room before the sender "
            "goes on; use tell_nowait(), or a larger MailboxOptions.capacity",
            path=path,
        )

    def put_control(self, envelope: Envelope) -> None:
        """Accept a message from the runtime itself, before all others, regardless of the capacity."""
        if self.refusal is not None and self.refusal[0] is ActorStoppedError:
            self._drop(envelope, self.refusal[1])
            return
        if self.receiver is not None:
            self._hand_over(self.receiver, envelope)
            return
        if self._control is None:
            self._control = deque()
        self._control.append(envelope)

    def put_back(self, envelope: Envelope) -> None:
        """Return a received but unstarted message to the front, regardless of the capacity."""
        envelope.state = EnvelopeState.QUEUED
        self._put_in_front(envelope)

    def _put_in_front(self, envelope: Envelope) -> None:
        self._queue[envelope] = None
        self._queue.move_to_end(envelope, last=False)

    def withdraw(self, envelope: Envelope) -> None:
        """Remove a queued message, so that it never runs."""
        envelope.state = EnvelopeState.DONE
        envelope.task = None
        for queue in (self._waiting, self._stash, self._queue):
            queue.pop(envelope, None)
        # A stashed message has already started.
        if envelope.started_at is not None:
            self._outcomes.observe_end(envelope, cancelled=True)
        elif self._outcomes.observers.of_messages:
            self._outcomes.observe_withdrawal(envelope)
        # Admit a waiting sender to the free slot.
        self._admit()

    async def receive(self, task: trio.lowlevel.Task, base: Context) -> Envelope | None:
        """Take the next message; None if the incarnation has to check its own state first.

        Afterwards the task runs in the message's context. Each message costs one checkpoint, except for a few
        in a row that share a context or that need no waiting; for the latter, the caller handles the context.
        An envelope is returned in state RUNNING and must be resolved.

        Args:
            task: The calling task.
            base: The context to wait in.
        """
        if self._woken:
            self._woken = False
            task.context = base
            await trio.lowlevel.checkpoint()
            return None
        if self._queue or self._control:
            await trio.lowlevel.checkpoint_if_cancelled()
            envelope = self._control.popleft() if self._control else _first(self._queue)
            envelope.state = EnvelopeState.RUNNING
            if self._waiting:
                self._admit()
            if self._in_a_row < _IN_A_ROW and (
                task.context is envelope.context or self._handlers[type(envelope.message)].attempt is not None
            ):
                self._in_a_row += 1
                return envelope
            self._in_a_row = 0
            # Assign the context first, because Trio switches it at the checkpoint.
            task.context = envelope.context
            await trio.lowlevel.cancel_shielded_checkpoint()
            return envelope
        self.receiver = task
        task.context = base

        def abort(_: object) -> trio.lowlevel.Abort:
            # Another task may be serving instead of this one, and must not return the mailbox to it.
            self.receiver = self._replaced = None
            return trio.lowlevel.Abort.SUCCEEDED

        received: Envelope | None = await trio.lowlevel.wait_task_rescheduled(abort)
        return received

    def receive_next(self) -> Envelope | None:
        """Take the next message after one served without waiting, if it can be served without waiting too.

        Unlike `receive`, it does not check for cancellation: other tasks have not run since the last check,
        and a message that ends the actor wakes the mailbox.
        """
        queue = self._queue
        if not queue or self._in_a_row >= _IN_A_ROW or self._woken or self._control:
            return None
        handler = self._handlers[type(next(iter(queue)).message)]
        if handler.attempt is None or handler.group is not None:
            return None
        envelope = _first(queue)
        envelope.state = EnvelopeState.RUNNING
        if self._waiting:
            self._admit()
        self._in_a_row += 1
        return envelope

    def wake(self) -> None:
        """Make `receive` return None before the next message."""
        task, self.receiver = self.receiver, None
        if task is None:
            self._woken = True
        else:
            trio.lowlevel.reschedule(task, WAKE_VALUE)

    def stash(self, envelope: Envelope) -> None:
        """Set the message being served aside."""
        envelope.state = EnvelopeState.QUEUED
        self._stash[envelope] = None

    def unstash_all(self) -> None:
        """Return stashed messages to the front of the queue, in order, regardless of the capacity."""
        if self._stash:
            for envelope in reversed(self._stash):
                self._put_in_front(envelope)
            self._stash.clear()
            self.peak = max(self.peak, len(self._queue))
            if self.receiver is not None:
                # Called from another task, while the actor's own task sleeps because the queue is empty.
                self._hand_over(self.receiver, _first(self._queue))

    def suspend(self) -> None:
        """Begin a restart: if configured, reject queued and new messages."""
        self._drop_control("the watch ended with its incarnation")
        self.unstash_all()
        if self._options.on_restart == "reject" and self.refusal is None:
            reason = f"actor {self._outcomes.path} is restarting"
            self.refusal = (ActorRestartingError, reason)
            self._refuse_all(self.refusal)

    def resume(self) -> None:
        """End a restart, because the next incarnation has started."""
        if self.refusal is not None and self.refusal[0] is ActorRestartingError:
            self.refusal = None

    def refuse(self, reason: str) -> None:
        """Refuse new messages, because the actor is stopping."""
        if self.refusal is None or self.refusal[0] is not ActorStoppedError:
            self.refusal = (ActorStoppedError, reason)

    def close(self, reason: str, cause: BaseException | None) -> None:
        """Refuse queued and new messages, because the actor has ended."""
        self.refusal = (ActorStoppedError, reason)
        # Move stashed messages to the queue first, so that they are refused with it.
        self.unstash_all()
        self._drop_control(reason)
        self._refuse_all(self.refusal, cause)

    def _hand_over(self, task: trio.lowlevel.Task, envelope: Envelope) -> None:
        self.receiver = None
        envelope.state = EnvelopeState.RUNNING
        # Trio switches the context at this wake-up; assigning it later would cost one more checkpoint.
        task.context = envelope.context
        trio.lowlevel.reschedule(task, outcome.Value(envelope))

    def _admit(self) -> None:
        if self._waiting and len(self._queue) < self._options.capacity:
            envelope = _first(self._waiting)
            self._queue[envelope] = None
            # `tell` waits only for the admission; `ask` stays parked for its reply.
            if envelope.is_told and envelope.task is not None:
                task, envelope.task = envelope.task, None
                if task.custom_sleep_data is envelope:
                    trio.lowlevel.reschedule(task, WAKE_VALUE)

    def _drop_control(self, reason: str) -> None:
        control, self._control = self._control, None
        for envelope in control or ():
            self._drop(envelope, reason)

    def _refuse_all(self, refusal: tuple[type[ActorError], str], cause: BaseException | None = None) -> None:
        # Clear the queues before any error is delivered, because an observer may send again or withdraw a
        # message.
        envelopes = [*self._queue, *self._waiting]
        self._queue.clear()
        self._waiting.clear()
        for envelope in envelopes:
            self._drop(envelope, refusal[1])
            error = self._refused(envelope, refusal)
            error.__cause__ = cause
            envelope.fail(error)

    def _refused(self, envelope: Envelope, refusal: tuple[type[ActorError], str]) -> ActorError:
        cls, reason = refusal
        return cls(f"{envelope.message.shown_name} was not served: {reason}", path=self._outcomes.path)

    def _drop(self, envelope: Envelope, reason: str) -> None:
        self.dropped += 1
        self._outcomes.observe_drop(envelope, reason)

    def _full(self, envelope: Envelope, event: str) -> MailboxFullError:
        reason = f"{envelope.message.shown_name} {event}: the mailbox of {self._outcomes.path} is full"
        self._drop(envelope, reason)
        return MailboxFullError(f"{reason} ({self._options.capacity} messages)", path=self._outcomes.path)


def _first(messages: _Messages) -> Envelope:
    """Remove and return the oldest message."""
    return messages.popitem(last=False)[0]
