"""Outcomes of an actor's messages, across all its incarnations; and deferred replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar, Token, copy_context
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._errors import ActorFailedError, describe, is_fatal, leaves, safe_repr
from ._events import (
    Event,
    Measured,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    Meter,
    Observers,
    note_end,
)
from ._messages import AnyMessage, Envelope, EnvelopeState
from ._options import Directive, Policy
from ._system_state import SystemState, thread_ident

__all__ = ["DeferredReply"]

_logger = logging.getLogger("trio_accel.actors")


class OpenRequest(Protocol):
    """A request with a deferred reply."""

    @property
    def message(self) -> AnyMessage:
        """The message to reply to."""
        ...

    def fail(self, error: BaseException) -> bool:
        """Reply with an error, and return whether this was the first reply."""
        ...


@attrs.define(eq=False, repr=False)
class Outcomes:
    """The outcomes of an actor's messages: delivered to callers, counted, and reported to observers.

    Attributes:
        handled: Number of messages with a handler that returned.
        failed: Number of messages with a handler that raised.
        expired: Number of requests dropped because their deadline had passed.
        deferred: Open requests with a deferred reply.
    """

    path: str
    system: SystemState
    _policy: Policy
    observers: Observers = attrs.field(init=False)
    handled: int = 0
    failed: int = 0
    expired: int = 0
    deferred: set[OpenRequest] = attrs.field(factory=set[OpenRequest])
    # Called once, when the last deferred request is settled.
    on_settled: Callable[[], None] | None = None
    # The meter's counters, by message class or name.
    _meter: Meter | None = None
    _measured: dict[type | str, Measured] = attrs.field(factory=dict[type | str, Measured])

    def __attrs_post_init__(self) -> None:
        self.observers = self.system.observers

    def settle(self, request: OpenRequest) -> None:
        """Forget a deferred request, because it has its reply or needs none."""
        self.deferred.discard(request)
        if not self.deferred:
            self.all_settled()

    def all_settled(self) -> None:
        """Call `on_settled`, because all deferred requests are settled."""
        callback, self.on_settled = self.on_settled, None
        if callback is not None:
            callback()

    def unwind(self, envelope: Envelope) -> bool:
        """Deliver the cancellation to a caller after its request has unwound, unless it has an outcome."""
        is_unwound = envelope.unwind()
        self.settle(envelope)
        if is_unwound and self.observers.sees_messages:
            self.observe_end(envelope, cancelled=True)
        return is_unwound

    def end_cancelled(self, envelope: Envelope) -> None:
        """Settle a request after its caller or its deadline has cancelled the handler."""
        if envelope.is_cancelled:
            self.unwind(envelope)
            return
        # D132: caller and handler had the same deadline, so Trio would normally cancel the caller too. Here
        # the caller has moved its own deadline since. The error must reach it, because a retry would execute
        # the request twice.
        error = trio.TooSlowError("the deadline with which it was asked has passed")
        self.failed += 1
        self.settle(envelope)
        if envelope.fail(error) and self.observers.sees_messages:
            self.observe_end(envelope, error)

    def reply_with(self, envelope: Envelope, error: BaseException) -> bool:
        """Reply with an exception if the policy lets the actor continue after it; return whether it does."""
        if is_fatal(error) or self._policy.directive_for(error) is not Directive.RESUME:
            return False
        self.settle(envelope)
        if not envelope.fail(error) or envelope.is_told:
            level = logging.ERROR if envelope.is_told else logging.WARNING
            shown, operation = safe_repr(error), envelope.message.operation
            text = "actor %s goes on after %s in %s"
            extra = {"path": self.path, "message_type": operation}
            _logger.log(level, text, self.path, shown, operation, exc_info=error, extra=extra)
        if self.observers.sees_messages:
            self.observe_end(envelope, error)
        return True

    def fail(self, request: OpenRequest, cause: BaseException) -> None:
        """Fail a request because the actor crashed or ended while serving it."""
        self.settle(request)
        if not request.fail(crash_error(self.path, request.message, cause)):
            return
        if isinstance(request, Envelope) and self.observers.sees_messages:
            self.observe_end(request, cause)

    def observe_start(self, envelope: Envelope) -> None:
        """Report the start of a handler to the observers, once per message even if it was stashed."""
        if envelope.started_at is not None:
            return
        observers = self.observers
        envelope.started_at = now = observers.now()
        if not observers.of_messages:
            return
        envelope.number = number = next(observers.numbers)
        queue_time = now - (now if envelope.queued_at is None else envelope.queued_at)
        self._emit(MessageStarted, envelope, number, queue_time=queue_time)

    def observe_end(
        self, envelope: Envelope, error: BaseException | None = None, *, cancelled: bool = False
    ) -> None:
        """Report the end of a message to the observers, if they saw its start."""
        started = envelope.started_at
        if started is None:
            return
        envelope.started_at = None
        observers, queued = self.observers, envelope.queued_at
        queue_time = 0.0 if queued is None else started - queued
        run_time = observers.now() - started
        if observers.meter is not None:
            measured = self._measured.get(envelope.message.__class__)
            if measured is None or self._meter is not observers.meter:
                measured = self.measured(observers.meter, envelope.message)
            note_end(measured, queue_time, run_time, error, cancelled=cancelled)
        # If only a meter was installed when the message started, the message does not have a number.
        if observers.of_messages and hasattr(envelope, "number"):
            make = _end_event(error, is_cancelled=cancelled)
            self._emit(make, envelope, envelope.number, queue_time=queue_time, run_time=run_time)

    @contextmanager
    def part(self, name: str, queue_time: float) -> Generator[None]:
        """Report the block to the observers; see `ActorContext.part`."""
        observers = self.observers
        if not observers.sees_messages:
            yield
            return
        number, context, initial = next(observers.numbers), copy_context(), copy_context()
        fields: dict[str, Any] = {
            "path": f"{self.path}/{name}",
            "message_type": name,
            "number": number,
            "context": context,
            "queue_time": queue_time,
        }
        is_told = bool(observers.of_messages)
        if is_told:
            observers.emit(MessageStarted(**fields))
        # Observers may set context variables for the block, such as its span. Set them in this task until the
        # block ends.
        tokens: list[tuple[ContextVar[Any], Token[Any]]] = [
            (variable, variable.set(value))
            for variable, value in context.items()
            if initial.get(variable, initial) is not value
        ]
        started, error = observers.now(), None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            run_time = observers.now() - started
            for variable, token in tokens:
                variable.reset(token)
            cancelled = error is not None and all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error))
            if observers.meter is not None:
                measured = observers.meter.measured(fields["path"], name)
                note_end(measured, queue_time, run_time, error, cancelled=cancelled)
            if is_told:
                observers.emit(_end_event(error, is_cancelled=cancelled)(**fields, run_time=run_time))

    def _emit(
        self, make: Callable[..., Event], envelope: Envelope, number: int = 0, **fields: object
    ) -> None:
        """Emit an event about a message, with the fields that all such events share."""
        message_type = envelope.message.operation
        self.observers.emit(
            make(path=self.path, message_type=message_type, number=number, context=envelope.context, **fields)
        )

    def measured(self, meter: Meter, message: AnyMessage) -> Measured:
        """Return this actor's counters for this kind of message."""
        if meter is not self._meter:
            self._meter = meter
            self._measured = {}
        message_type = message.operation
        # Instances of some classes have their own `operation` names, so look these up by name.
        key = message.__class__ if message_type == message.__class__.__name__ else message_type
        measured = self._measured.get(key)
        if measured is None:
            measured = self._measured[key] = meter.measured(self.path, message_type)
        return measured

    def observe_withdrawal(self, envelope: Envelope) -> None:
        """Report to the observers that a caller has withdrawn its queued request."""
        queued_at = envelope.queued_at
        queue_time = 0.0 if queued_at is None else self.observers.now() - queued_at
        self._emit(MessageWithdrawn, envelope, queue_time=queue_time)

    def observe_drop(self, envelope: Envelope, reason: str) -> None:
        """Count a dead letter and report it to the observers."""
        self.system.dead_letters += 1
        observers = self.observers
        if observers.meter is not None:
            self.measured(observers.meter, envelope.message).dropped()
        if observers.of_messages:
            number = 0 if envelope.started_at is None else envelope.number
            self._emit(MessageDropped, envelope, number, reason=reason, message=envelope.message)


def _end_event(
    error: BaseException | None, *, is_cancelled: bool
) -> Callable[..., MessageCancelled | MessageFailed | MessageCompleted]:
    """Return the factory for the event that ends a message."""
    if is_cancelled:
        return MessageCancelled
    return MessageCompleted if error is None else partial(MessageFailed, error=error)


def crash_error(path: str, message: AnyMessage, error: BaseException) -> ActorFailedError:
    """Make the error for a caller whose request crashed the actor."""
    failed = ActorFailedError(
        f"actor {path} crashed while serving {message.shown_name} "
        f"(it may have been executed): {describe(error)}",
        path=path,
    )
    failed.__cause__ = error
    return failed


ReplyT_contra = TypeVar("ReplyT_contra", contravariant=True)


class DeferredReply(Generic[ReplyT_contra]):
    """A reply that you give later, on the Trio thread.

    You can give it once: a second `set` or `fail`, or a first one after the actor has ended, does nothing
    and returns False. From another thread or Trio run these methods raise `RuntimeError`, and the reply stays
    open: use ``trio.from_thread.run_sync(reply.set, value)`` there, or ``token.run_sync_soon``.

    When the caller is cancelled, the runtime calls the `on_cancel` hook, if any. In either case the caller
    continues to wait for the reply.
    """

    __slots__ = ("_envelope", "_outcomes")

    def __init__(self, envelope: Envelope, outcomes: Outcomes) -> None:
        self._envelope = envelope
        self._outcomes = outcomes

    @property
    def is_done(self) -> bool:
        """Whether the reply was given."""
        return self._envelope.state is EnvelopeState.DONE

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller was cancelled and now waits for the request to unwind."""
        return self._envelope.is_cancelled

    def is_of(self, envelope: Envelope) -> bool:
        """Return whether this object is the reply to a request."""
        return self._envelope is envelope

    @property
    def context(self) -> Context:
        """The caller's context variables, as of the call."""
        return self._envelope.context

    def poll_once_more(self, poll: Callable[[], None]) -> bool:
        """Have the caller check for the reply once: after one turn of the loop, before its task parks.

        This saves a further turn of the loop if the reply takes at most one turn. Only callers with a request
        to an idle actor, served in the caller's own task, do it.

        Args:
            poll: Called on the Trio thread, even if the reply has arrived. It may give the reply, and must
                not raise.

        Returns:
            Whether the caller will call `poll`.
        """
        envelope = self._envelope
        if envelope.last_poll is None:
            return False
        envelope.last_poll = poll
        return True

    @enable_ki_protection
    def set(self, value: ReplyT_contra) -> bool:
        """Reply with a value.

        Returns:
            Whether this was the first reply.

        Raises:
            RuntimeError: You call this from another thread or Trio run; the reply stays open.
        """
        return self._give("set", outcome.Value(value))

    @enable_ki_protection
    def fail(self, error: Exception) -> bool:
        """Reply with an error, which the caller raises unchanged; see `set`."""
        return self._give("fail", outcome.Error(error), error)

    def _give(self, verb: str, result: outcome.Outcome[Any], error: Exception | None = None) -> bool:
        envelope, outcomes = self._envelope, self._outcomes
        if thread_ident() != outcomes.system.thread:
            raise self._foreign(verb)
        outcomes.settle(envelope)
        is_settled = envelope.resolve(result)
        if is_settled and envelope.started_at is not None:
            outcomes.observe_end(envelope, error)
        return is_settled

    @enable_ki_protection
    def fail_as_crash(self, error: Exception) -> bool:
        """Reply as if the actor had crashed with this error: with an `ActorFailedError` that it caused."""
        return self.fail(crash_error(self._outcomes.path, self._envelope.message, error))

    @enable_ki_protection
    def cancelled(self) -> bool:
        """End the wait of a cancelled caller with its cancellation.

        Raises:
            RuntimeError: The caller is not cancelled, or you call this from another thread or Trio run.
        """
        if thread_ident() != self._outcomes.system.thread:
            raise self._foreign("cancelled")
        return self._outcomes.unwind(self._envelope)

    def _foreign(self, verb: str) -> RuntimeError:
        operation, path = self._envelope.message.operation, self._outcomes.path
        return RuntimeError(
            f"{verb}: the reply to {operation} of actor {path} belongs to another thread or Trio run, and is "
            f"still open; give it there: trio.from_thread.run_sync(reply.{verb}, ...) from a thread that the "
            f"run has started, or token.run_sync_soon(reply.{verb}, ...) from any other"
        )
