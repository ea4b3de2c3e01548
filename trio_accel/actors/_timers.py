"""Messages that an actor tells itself later, once or again and again."""

from __future__ import annotations

import math
from contextvars import copy_context

import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._cell import Cell
from ._errors import MailboxFullError, safe_repr
from ._incarnation import Incarnation
from ._messages import AnyMessage, Envelope, EnvelopeState

__all__ = ["Timer"]


class Timer:
    """A message that an actor tells itself later. Made by `ActorContext.after` and `ActorContext.every`.

    It ends with the incarnation that made it: no later one is told its message.
    """

    # Invariant: it is among the timers of its incarnation while a message of it may still be served.
    __slots__ = ("__weakref__", "_cell", "_due", "_incarnation", "_message", "_period", "_scope", "_sent")

    def __init__(
        self, cell: Cell, incarnation: Incarnation, message: AnyMessage, seconds: float, *, repeats: bool
    ) -> None:
        self._cell = cell
        self._incarnation = incarnation
        self._message = message
        self._due = trio.current_time() + seconds
        self._period = seconds if repeats else None
        self._scope = trio.CancelScope()
        # The last message, until it was served.
        self._sent: Envelope | None = None
        incarnation.timers.add(self)
        incarnation.nursery.start_soon(self._run, name=f"timer of {cell.path}")

    def __repr__(self) -> str:
        how = "once" if self._period is None else f"every {self._period:g} s"
        return f"<Timer of {self._cell.path}: {safe_repr(self._message)}, {how}>"

    @enable_ki_protection
    def cancel(self) -> bool:
        """Tell nothing any more: a message that waits in the mailbox is taken out of it.

        Returns:
            Whether it was not over. It is over when it was cancelled before, when its incarnation has ended,
            or when its only message is being served or was.

        Raises:
            RuntimeError: Called from another thread or Trio run.
        """
        self._cell.check_run("cancel")
        if self not in self._incarnation.timers:
            return False
        self._incarnation.timers.remove(self)
        self._scope.cancel(reason="the timer was cancelled")
        sent, self._sent = self._sent, None
        if sent is None:
            return True
        sent.on_done = None
        if sent.state == EnvelopeState.QUEUED:
            self._cell.mailbox.withdraw(sent)
            return True
        return self._period is not None

    @enable_ki_protection
    async def _run(self) -> None:
        with self._scope:
            await trio.sleep_until(self._due)
            self._send()
            while self._period is not None:
                # The times of the ticks do not drift; those that have passed meanwhile are left out.
                late = trio.current_time() - self._due
                self._due += late - late % self._period + self._period
                await trio.sleep_until(self._due)
                if self._sent is None:
                    self._send()

    def _send(self) -> None:
        envelope = Envelope(self._cell, self._message, copy_context(), is_told=True)
        envelope.on_done = self._served
        self._sent = envelope
        try:
            # It may have to wait for room in the mailbox, without a task.
            self._cell.mailbox.put(envelope, is_own=True)
        except MailboxFullError:
            # A dead letter, which was counted and told to the observers.
            self._served()

    def _served(self, _: outcome.Outcome[object] | None = None) -> None:
        """Note that the message was served, or dropped by the mailbox."""
        self._sent = None
        if self._period is None:
            self._incarnation.timers.discard(self)


def check_seconds(verb: str, seconds: float, *, is_period: bool) -> None:
    """Refuse what is no length of time.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, infinite or not a number; or a period of 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{verb}: seconds must be a number, got {safe_repr(seconds)}")
    if not (math.isfinite(seconds) and seconds >= 0 and (seconds > 0 or not is_period)):
        least = "above 0" if is_period else "of at least 0"
        raise ValueError(f"{verb}: seconds must be a finite number {least}, got {seconds!r}")
