"""A message on its way, and the one slot in which its reply arrives."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Final, Generic, NoReturn, TypeVar

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._errors import ActorFailedError
from ._failures import describe
from ._runs import foreign_reply, thread_ident

if TYPE_CHECKING:
    from ._cell import Cell
    from ._messages import AnyMessage

__all__ = [
    "EXPIRED",
    "AwaitedStart",
    "DeferredReply",
    "Envelope",
    "EnvelopeState",
    "crash_error",
    "no_look",
    "not_returned",
]

_logger = logging.getLogger("trio_accel.actors")

EXPIRED: Final = object()
"""What an asker is woken with when its request was dropped because its deadline had passed."""

_NEVER = float("inf")
_ASKER_CANCELLED = "the asker was cancelled"

ReplyT_contra = TypeVar("ReplyT_contra", contravariant=True)


class EnvelopeState(enum.IntEnum):
    """Where an envelope is on its way; it only moves down this list, or back to QUEUED."""

    QUEUED = 0
    RUNNING = 1
    STASHING = 2
    """Still running, to be set aside when its handler returns."""
    DEFERRED = 3
    DONE = 4


@attrs.frozen(eq=False)
class AwaitedStart:
    """The start of an actor that another waits for: a link of the chain of callers, as a request is.

    Attributes:
        sender: Who waits.
        caller: What that is working on meanwhile.
    """

    sender: Cell
    caller: Envelope | AwaitedStart | None


class Envelope:
    """A message with what travels beside it, and the slot for its one outcome.

    Invariants: `task` is parked exactly while it is not None; whoever reschedules it, or
    lets it go in the abort function, sets it to None in the same step, so that no stale
    wake-up can reach a later wait of that task. `resolve` acts once; later calls are no-ops.
    """

    __slots__ = (
        "caller",
        "cell",
        "context",
        "deadline",
        "is_abandonable",
        "is_told",
        "last_look",
        "message",
        "on_cancel",
        "on_done",
        "on_failed_hook",
        "queued_at",
        "raise_cancel",
        "scope",
        "sender",
        "started_at",
        "state",
        "task",
    )

    def __init__(
        self,
        cell: Cell,
        message: AnyMessage,
        context: Context,
        sender: Cell | None = None,
        *,
        is_told: bool = False,
        is_abandonable: bool = False,
    ) -> None:
        # To whom it goes.
        self.cell: Cell = cell
        self.message: AnyMessage = message
        self.is_told: bool = is_told
        # Whether its asker goes at once when cancelled, also if it runs.
        self.is_abandonable: bool = is_abandonable
        self.context: Context = context
        self.sender: Cell | None = sender
        # What the sender is working on: following these gives the chain of callers.
        self.caller: Envelope | AwaitedStart | None = sender.awaited if sender is not None else None
        self.deadline: float = _NEVER
        self.state: EnvelopeState = EnvelopeState.QUEUED
        self.task: trio.lowlevel.Task | None = None
        self.scope: trio.CancelScope | None = None
        self.raise_cancel: Callable[[], NoReturn] | None = None
        self.on_cancel: Callable[[], None] | None = None
        self.on_failed_hook: Callable[[Exception], None] | None = None
        # In place of a parked task: who posted it is called back.
        self.on_done: Callable[[outcome.Outcome[object]], None] | None = None
        # What its asker calls before it parks, `no_look` if there is none; None where nobody will.
        self.last_look: Callable[[], None] | None = None
        # Set while somebody observes the system.
        self.queued_at: float | None = None
        self.started_at: float | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether the asker wants out while the request runs."""
        return self.raise_cancel is not None

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """The task that is parked for it is cancelled: Trio's abort function."""
        if self.state == EnvelopeState.QUEUED:
            self.cell.mailbox.withdraw(self)
            return trio.lowlevel.Abort.SUCCEEDED
        if self.is_abandonable:
            # The task waits no more: neither for a reply nor, through this request, for anybody else.
            self.task = self.sender = self.caller = None
            return trio.lowlevel.Abort.SUCCEEDED
        self.request_cancel(raise_cancel)
        return trio.lowlevel.Abort.FAILED

    def request_cancel(self, raise_cancel: Callable[[], NoReturn]) -> None:
        """Cancel the running request; the asker goes on waiting until it has unwound."""
        self.raise_cancel = raise_cancel
        if self.scope is not None:
            self.scope.cancel(reason=_ASKER_CANCELLED)
        self.call_hook()

    def call_hook(self) -> None:
        """Tell who has deferred the reply that its asker is cancelled."""
        if self.on_cancel is None:
            return
        try:
            self.on_cancel()
        except Exception as error:
            # It is called while Trio delivers the cancellation: an exception there ends the whole run.
            _logger.exception(
                "actor %s: the on_cancel hook of %s failed", self.cell.path, self.message.operation
            )
            if self.on_failed_hook is not None:
                self.on_failed_hook(error)

    def run_in(self, scope: trio.CancelScope) -> None:
        """Let the asker's cancellation cancel a scope, at once if it has come already."""
        self.scope = scope
        if self.raise_cancel is not None:
            scope.cancel(reason=_ASKER_CANCELLED)

    def resolve(self, result: outcome.Outcome[object]) -> bool:
        """Deliver the outcome, unless there was one already."""
        if self.state == EnvelopeState.DONE:
            return False
        self.state = EnvelopeState.DONE
        # The frames of an error that lives on refer to the envelope: it must keep nobody alive.
        task, self.task = self.task, None
        on_done, self.on_done = self.on_done, None
        self.scope = self.on_cancel = self.on_failed_hook = None
        if task is not None:
            trio.lowlevel.reschedule(task, result)
        elif on_done is not None:
            on_done(result)
        return True

    def fail(self, error: BaseException) -> bool:
        """Deliver an error, unless there was an outcome already."""
        return self.resolve(outcome.Error(error))

    def unwind(self) -> bool:
        """Deliver the asker's own cancellation: the request has unwound."""
        if self.raise_cancel is None:
            raise RuntimeError("the asker is not cancelled")
        return self.resolve(outcome.capture(self.raise_cancel))


def no_look() -> None:
    """The `last_look` of an asker that would call one."""


class DeferredReply(Generic[ReplyT_contra]):
    """A reply that the holder of this object gives later, on the Trio thread.

    It is given once: a second `set` or `fail`, or one after the actor has ended, does nothing
    and returns False. From another thread or Trio run these raise `RuntimeError`, and the reply stays open:
    use ``trio.from_thread.run_sync(reply.set, value)`` there, or ``token.run_sync_soon``.

    When the asker is cancelled, the `on_cancel` hook is called and the asker goes on waiting for the reply
    (without a hook too).
    """

    __slots__ = ("_envelope",)

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    @property
    def is_done(self) -> bool:
        """Whether the reply was given."""
        return self._envelope.state is EnvelopeState.DONE

    @property
    def is_cancelled(self) -> bool:
        """Whether the asker was cancelled and waits for the request to unwind."""
        return self._envelope.is_cancelled

    def is_of(self, envelope: Envelope) -> bool:
        """Whether it is the reply to that request."""
        return self._envelope is envelope

    @property
    def context(self) -> Context:
        """Context variables of the asker, as they were when it asked."""
        return self._envelope.context

    def look_last(self, look: Callable[[], None]) -> bool:
        """Have the asker itself look for the reply, once: after a turn of the loop, before it parks.

        A reply that takes no longer than such a turn then costs no other. Only an asker does so whose request
        is being served in its own task, because the actor had nothing else to do.

        Args:
            look: Called on the Trio thread, also if the reply is there by then; may give it, must not raise.

        Returns:
            Whether it will be called.
        """
        envelope = self._envelope
        if envelope.last_look is None:
            return False
        envelope.last_look = look
        return True

    @enable_ki_protection
    def set(self, value: ReplyT_contra) -> bool:
        """Reply with a value.

        Returns:
            Whether this was the reply: False if there was one already.

        Raises:
            RuntimeError: Called from another thread or Trio run; the reply is still open.
        """
        envelope = self._envelope
        if thread_ident() != envelope.cell.system.thread:
            raise self._foreign("set")
        envelope.cell.settle(envelope)
        is_settled = envelope.resolve(outcome.Value(value))
        if is_settled and envelope.started_at is not None:
            envelope.cell.observe_end(envelope)
        return is_settled

    @enable_ki_protection
    def fail(self, error: Exception) -> bool:
        """Reply with an error, which is raised in the asker as it is; see `set`."""
        envelope = self._envelope
        if thread_ident() != envelope.cell.system.thread:
            raise self._foreign("fail")
        envelope.cell.settle(envelope)
        is_settled = envelope.fail(error)
        if is_settled and envelope.started_at is not None:
            envelope.cell.observe_end(envelope, error)
        return is_settled

    @enable_ki_protection
    def fail_as_crash(self, error: Exception) -> bool:
        """Reply as if the actor had crashed with an error: `ActorFailedError` caused by it."""
        return self.fail(crash_error(self._envelope.cell.path, self._envelope.message, error))

    @enable_ki_protection
    def cancelled(self) -> bool:
        """End the ask of a cancelled asker with its cancellation.

        Raises:
            RuntimeError: The asker is not cancelled; or this is called from another thread or Trio run.
        """
        if thread_ident() != self._envelope.cell.system.thread:
            raise self._foreign("cancelled")
        return self._envelope.cell.unwind(self._envelope)

    def _foreign(self, verb: str) -> RuntimeError:
        return foreign_reply(verb, self._envelope.message.operation, self._envelope.cell.path)


def not_returned(envelope: Envelope, reply: object) -> RuntimeError:
    """Make the error of a handler that has deferred its reply and returned something else."""
    return RuntimeError(
        f"the handler of {envelope.message.operation} in {envelope.cell.path} deferred its reply and "
        f"returned {type(reply).__name__}; return what self.context.defer() returned, or do not defer"
    )


def crash_error(path: str, message: AnyMessage, error: BaseException) -> ActorFailedError:
    """Make the error of an asker whose request crashed the actor."""
    failed = ActorFailedError(
        f"actor {path} crashed while serving {message.operation} "
        f"(it may have been executed): {describe(error)}",
        path=path,
    )
    failed.__cause__ = error
    return failed
