"""The bounded queue of an actor, owned by its cell, with a control lane that goes first."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import outcome
import trio

from ._envelope import Envelope, EnvelopeState
from ._errors import ActorStoppedError, MailboxFullError
from ._options import MailboxOptions, Overflow

if TYPE_CHECKING:
    from contextvars import Context

__all__ = ["CONTROL", "Mailbox"]

CONTROL: Literal["control"] = "control"
"""What `Mailbox.receive` returns when the cell has something to look at before any message."""


class Mailbox:
    """Messages in arrival order.

    Invariants: `_waiting` is empty unless `_queue` is full; `_receiver` is parked only while
    `_queue` is empty, so a message that meets a parked receiver is handed to it directly.
    An ask that waits for room parks only once, for its reply; a tell is woken on admission.
    """

    __slots__ = ("_closed", "_control", "_options", "_path", "_queue", "_receiver", "_waiting", "peak")

    def __init__(self, path: str, options: MailboxOptions) -> None:
        self._path = path
        self._options = options
        self._queue: deque[Envelope] = deque()
        self._waiting: deque[Envelope] = deque()
        self._receiver: trio.lowlevel.Task | None = None
        self._control = False
        self._closed: str | None = None
        self.peak = 0

    @property
    def depth(self) -> int:
        """Messages in the queue."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Senders that wait for room."""
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """The most messages that the queue holds."""
        return self._options.capacity

    @property
    def is_full(self) -> bool:
        """Whether a new message would have to wait, be rejected or dropped."""
        return self._receiver is None and len(self._queue) >= self._options.capacity

    def put(self, envelope: Envelope) -> bool:
        """Take a message in, or do with it what the overflow policy says.

        Returns:
            False if it waits for room: an asker parks for its reply, a teller for its admission.

        Raises:
            ActorStoppedError: The actor has ended or is stopping.
            MailboxFullError: The queue is full and the policy rejects, or drops what is newest.
        """
        if self._closed is not None:
            raise ActorStoppedError(self._closed, path=self._path)
        task = self._receiver
        if task is not None:
            self._receiver = None
            envelope.state = EnvelopeState.RUNNING
            # Takes effect with this wake-up; assigned later it would need one more checkpoint.
            task.context = envelope.context
            trio.lowlevel.reschedule(task, outcome.Value(envelope))
            return True
        if len(self._queue) >= self._options.capacity:
            overflow = self._options.overflow
            if overflow is Overflow.WAIT:
                self._waiting.append(envelope)
                return False
            if overflow is Overflow.DROP_OLDEST:
                self._queue.popleft().fail(self._full("dropped in favour of a newer message"))
            else:
                raise self._full("rejected" if overflow is Overflow.REJECT else "dropped")
        self._queue.append(envelope)
        self.peak = max(self.peak, len(self._queue))
        return True

    def withdraw(self, envelope: Envelope) -> None:
        """Take a queued or waiting message out again; it never runs."""
        envelope.state = EnvelopeState.DONE
        envelope.task = None
        try:
            self._waiting.remove(envelope)
        except ValueError:
            self._queue.remove(envelope)
            self._admit()

    async def receive(self, base: Context) -> Envelope | Literal["control"]:
        """Take the next message, or learn that the cell has something to look at first.

        The calling task runs in the message's context afterwards, and one checkpoint is taken
        for every message. An envelope is returned in state RUNNING and must be resolved.
        """
        task = trio.lowlevel.current_task()
        if self._control:
            self._control = False
            task.context = base
            await trio.lowlevel.checkpoint()
            return CONTROL
        if self._queue:
            await trio.lowlevel.checkpoint_if_cancelled()
            envelope = self._queue.popleft()
            envelope.state = EnvelopeState.RUNNING
            self._admit()
            task.context = envelope.context
            await trio.lowlevel.cancel_shielded_checkpoint()
            return envelope
        self._receiver = task
        task.context = base

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        received: Envelope | Literal["control"] = await trio.lowlevel.wait_task_rescheduled(abort)
        return received

    def wake_for_control(self) -> None:
        """Make `receive` return `CONTROL` before the next message."""
        task, self._receiver = self._receiver, None
        if task is None:
            self._control = True
        else:
            trio.lowlevel.reschedule(task, outcome.Value(CONTROL))

    def close(self, reason: str) -> list[Envelope]:
        """Refuse messages from now on and give back those that were not served."""
        self._closed = reason
        left = [*self._queue, *self._waiting]
        self._queue.clear()
        self._waiting.clear()
        return left

    def _admit(self) -> None:
        if self._waiting and len(self._queue) < self._options.capacity:
            envelope = self._waiting.popleft()
            self._queue.append(envelope)
            if envelope.is_told and envelope.task is not None:
                task, envelope.task = envelope.task, None
                trio.lowlevel.reschedule(task)

    def _full(self, fate: str) -> MailboxFullError:
        return MailboxFullError(
            f"mailbox of {self._path} is full ({self._options.capacity} messages): message {fate}",
            path=self._path,
        )
