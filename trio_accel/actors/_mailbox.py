"""The bounded queue of an actor, owned by its cell, with a control queue that goes first."""

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

# Messages in a row without a checkpoint, which costs as much as a small operation; other tasks wait for so
# many at most.
_IN_A_ROW = 8

_Messages: TypeAlias = OrderedDict[Envelope, None]


def _none() -> _Messages:
    # An alias with type arguments, called, would store them in a dictionary of each instance.
    return OrderedDict()


@attrs.define(eq=False, repr=False)
class Mailbox:
    """Messages in arrival order.

    Invariants: `_waiting` is empty unless `_queue` is full; `receiver` is parked only while there is
    nothing to receive, so a message that meets a parked receiver is handed to it directly, or served in its
    place: then it is `_replaced` meanwhile. An ask that waits for room parks only once, for its reply; a
    tell is woken on admission. A queued envelope is in exactly one of `_queue`, `_waiting`, `_stash`,
    `_control`.

    All but the last are ordered dictionaries, of which any message is taken out in constant time: thousands
    of askers may be cancelled in one turn of the loop. A plain dictionary would look for its first key behind
    all that were taken before.
    """

    _outcomes: Outcomes
    _handlers: HandlerTable
    _options: MailboxOptions
    _queue: _Messages = attrs.field(factory=_none)
    _waiting: _Messages = attrs.field(factory=_none)
    _stash: _Messages = attrs.field(factory=_none)
    # Most actors never use it: an empty deque takes 700 bytes.
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
        """Messages in the queue."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Senders that wait for room."""
        return len(self._waiting)

    @property
    def stashed(self) -> int:
        """Messages that the actor has set aside."""
        return len(self._stash)

    @property
    def is_empty(self) -> bool:
        """Whether there is no message to receive."""
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
        """Take a message in, or apply the overflow policy to it.

        Args:
            envelope: The message.
            is_own: Whether the incarnation that serves the mailbox sends it to itself: it is not refused.

        Returns:
            False if it waits for room: an asker parks for its reply, a teller for its admission.

        Raises:
            ActorStoppedError: The actor has ended or is stopping.
            ActorRestartingError: It is restarting, and its mailbox is to reject meanwhile.
            MailboxFullError: The queue is full and the policy rejects, or drops what is newest.
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
                # D87: a sender that waits here may be one that the actor itself waits for; `refuse_waiting`
                # ends that.
                self._waiting[envelope] = None
                return False
            if overflow is not Overflow.DROP_OLDEST:
                raise self._full(envelope, "was rejected" if overflow is Overflow.REJECT else "was dropped")
            oldest = _first(queue)
            # First of all: an observer that hears of the loss may send to this very mailbox.
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
        """Let another task serve a message in place of the one that waits; only while `is_idle`."""
        self._replaced, self.receiver = self.receiver, None

    def restore_receiver(self) -> None:
        """Give the mailbox back to the actor's own task, which takes messages that have come meanwhile."""
        task, self._replaced = self._replaced, None
        if task is None:
            # The actor's task was cancelled meanwhile.
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
        """Take a told message out that waits for room which only its own sender could make."""
        self.withdraw(envelope)
        path = self._outcomes.path
        what = f"{envelope.message.operation} was not sent: the mailbox of {path} is full"
        self._drop(envelope, what)
        return MailboxFullError(
            f"{what} ({self._options.capacity} messages), and {path} makes no room before the sender "
            "goes on; use tell_nowait(), or a larger MailboxOptions.capacity",
            path=path,
        )

    def put_control(self, envelope: Envelope) -> None:
        """Take a message of the runtime itself in: before all others, whatever the capacity."""
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
        """Take a message that was received, and has not begun, in again: first, and whatever the capacity."""
        envelope.scope = None
        envelope.state = EnvelopeState.QUEUED
        self._put_in_front(envelope)

    def _put_in_front(self, envelope: Envelope) -> None:
        self._queue[envelope] = None
        self._queue.move_to_end(envelope, last=False)

    def withdraw(self, envelope: Envelope) -> None:
        """Take a queued message out again; it never runs."""
        envelope.state = EnvelopeState.DONE
        envelope.task = None
        for queue in (self._waiting, self._stash, self._queue):
            queue.pop(envelope, None)
        # A stashed message has begun.
        if envelope.started_at is not None:
            self._outcomes.observe_end(envelope, cancelled=True)
        elif self._outcomes.observers.of_messages:
            self._outcomes.observe_withdrawal(envelope)
        # Its room goes to a sender that waits.
        self._admit()

    async def receive(self, task: trio.lowlevel.Task, base: Context) -> Envelope | None:
        """Take the next message; None if the incarnation has to look at its own state first.

        It runs in the message's context afterwards, and one checkpoint is taken for every message, but
        for a few in a row that share one context, or that can be served without waiting: for these, the
        caller sees to the context. An envelope is returned in state RUNNING and must be resolved.

        Args:
            task: The calling task.
            base: Context in which it waits.
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
            # Trio switches the context with the checkpoint, so it is assigned before.
            task.context = envelope.context
            await trio.lowlevel.cancel_shielded_checkpoint()
            return envelope
        self.receiver = task
        task.context = base

        def abort(_: object) -> trio.lowlevel.Abort:
            # Another task may serve in place of this one, and must not give the mailbox back to it.
            self.receiver = self._replaced = None
            return trio.lowlevel.Abort.SUCCEEDED

        received: Envelope | None = await trio.lowlevel.wait_task_rescheduled(abort)
        return received

    def receive_next(self) -> Envelope | None:
        """Take the message behind one that was served without waiting, if it may be served so, too.

        As `receive` does, but for the look whether the task is cancelled: no other task has run since the
        last one, and a message that ends the actor wakes the mailbox.
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
        """Set a message that was being served aside."""
        envelope.state = EnvelopeState.QUEUED
        self._stash[envelope] = None

    def unstash_all(self) -> None:
        """Put messages that were set aside back in front of the queue, in order, whatever the capacity."""
        if self._stash:
            for envelope in reversed(self._stash):
                self._put_in_front(envelope)
            self._stash.clear()
            self.peak = max(self.peak, len(self._queue))
            if self.receiver is not None:
                # Called from another task, while the actor's own sleeps at an empty queue.
                self._hand_over(self.receiver, _first(self._queue))

    def suspend(self) -> None:
        """Begin a restart: reject queued and new messages, if the options say so."""
        self._drop_control("the watch ended with its incarnation")
        self.unstash_all()
        if self._options.on_restart == "reject" and self.refusal is None:
            why = f"actor {self._outcomes.path} is restarting"
            self.refusal = (ActorRestartingError, why)
            self._refuse_all(self.refusal)

    def resume(self) -> None:
        """End a restart: the next incarnation has started."""
        if self.refusal is not None and self.refusal[0] is ActorRestartingError:
            self.refusal = None

    def refuse(self, reason: str) -> None:
        """Take no new messages any more: the actor stops."""
        if self.refusal is None or self.refusal[0] is not ActorStoppedError:
            self.refusal = (ActorStoppedError, reason)

    def close(self, reason: str, cause: BaseException | None) -> None:
        """Refuse queued and new messages: the actor has ended."""
        self.refusal = (ActorStoppedError, reason)
        # Stashed messages go to the queue first, so that they are refused with it.
        self.unstash_all()
        self._drop_control(reason)
        self._refuse_all(self.refusal, cause)

    def _hand_over(self, task: trio.lowlevel.Task, envelope: Envelope) -> None:
        self.receiver = None
        envelope.state = EnvelopeState.RUNNING
        # Trio switches the context with this wake-up; assigned later it would need one more checkpoint.
        task.context = envelope.context
        trio.lowlevel.reschedule(task, outcome.Value(envelope))

    def _admit(self) -> None:
        if self._waiting and len(self._queue) < self._options.capacity:
            envelope = _first(self._waiting)
            self._queue[envelope] = None
            # A teller waits for its admission alone; an asker stays parked for its reply.
            if envelope.is_told and envelope.task is not None:
                task, envelope.task = envelope.task, None
                trio.lowlevel.reschedule(task, WAKE_VALUE)

    def _drop_control(self, reason: str) -> None:
        control, self._control = self._control, None
        for envelope in control or ():
            self._drop(envelope, reason)

    def _refuse_all(self, refusal: tuple[type[ActorError], str], cause: BaseException | None = None) -> None:
        # Cleared before any error is told: an observer may send again, or withdraw a message.
        left = [*self._queue, *self._waiting]
        self._queue.clear()
        self._waiting.clear()
        for envelope in left:
            self._drop(envelope, refusal[1])
            error = self._refused(envelope, refusal)
            error.__cause__ = cause
            envelope.fail(error)

    def _refused(self, envelope: Envelope, refusal: tuple[type[ActorError], str]) -> ActorError:
        cls, reason = refusal
        return cls(f"{envelope.message.operation} was not served: {reason}", path=self._outcomes.path)

    def _drop(self, envelope: Envelope, reason: str) -> None:
        self.dropped += 1
        self._outcomes.observe_drop(envelope, reason)

    def _full(self, envelope: Envelope, fate: str) -> MailboxFullError:
        what = f"{envelope.message.operation} {fate}: the mailbox of {self._outcomes.path} is full"
        self._drop(envelope, what)
        return MailboxFullError(f"{what} ({self._options.capacity} messages)", path=self._outcomes.path)


def _first(messages: _Messages) -> Envelope:
    """Take the oldest message out."""
    return messages.popitem(last=False)[0]
