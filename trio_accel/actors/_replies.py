"""The reply to a request that is given after its handler has returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import outcome
from trio.lowlevel import enable_ki_protection

from ._envelope import EnvelopeState
from ._outcomes import crash_error
from ._runs import foreign_reply, thread_ident

if TYPE_CHECKING:
    from contextvars import Context

    from ._envelope import Envelope
    from ._outcomes import Outcomes

__all__ = ["DeferredReply"]

ReplyT_contra = TypeVar("ReplyT_contra", contravariant=True)


class DeferredReply(Generic[ReplyT_contra]):
    """A reply that the holder of this object gives later, on the Trio thread.

    It is given once: a second `set` or `fail`, or one after the actor has ended, does nothing
    and returns False. From another thread or Trio run these raise `RuntimeError`, and the reply stays open:
    use ``trio.from_thread.run_sync(reply.set, value)`` there, or ``token.run_sync_soon``.

    When the asker is cancelled, the `on_cancel` hook is called and the asker goes on waiting for the reply
    (without a hook too).
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
        envelope, outcomes = self._envelope, self._outcomes
        if thread_ident() != outcomes.system.thread:
            raise self._foreign("set")
        outcomes.settle(envelope)
        is_settled = envelope.resolve(outcome.Value(value))
        if is_settled and envelope.started_at is not None:
            outcomes.observe_end(envelope)
        return is_settled

    @enable_ki_protection
    def fail(self, error: Exception) -> bool:
        """Reply with an error, which is raised in the asker as it is; see `set`."""
        envelope, outcomes = self._envelope, self._outcomes
        if thread_ident() != outcomes.system.thread:
            raise self._foreign("fail")
        outcomes.settle(envelope)
        is_settled = envelope.fail(error)
        if is_settled and envelope.started_at is not None:
            outcomes.observe_end(envelope, error)
        return is_settled

    @enable_ki_protection
    def fail_as_crash(self, error: Exception) -> bool:
        """Reply as if the actor had crashed with an error: `ActorFailedError` caused by it."""
        return self.fail(crash_error(self._outcomes.path, self._envelope.message, error))

    @enable_ki_protection
    def cancelled(self) -> bool:
        """End the ask of a cancelled asker with its cancellation.

        Raises:
            RuntimeError: The asker is not cancelled; or this is called from another thread or Trio run.
        """
        if thread_ident() != self._outcomes.system.thread:
            raise self._foreign("cancelled")
        return self._outcomes.unwind(self._envelope)

    def _foreign(self, verb: str) -> RuntimeError:
        return foreign_reply(verb, self._envelope.message.operation, self._outcomes.path)
