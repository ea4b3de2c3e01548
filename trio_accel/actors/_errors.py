"""Errors of the actor runtime."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ActorError",
    "ActorFailedError",
    "ActorRestartingError",
    "ActorStoppedError",
    "AskCycleError",
    "MailboxFullError",
    "NotExecutedError",
]


class NotExecutedError(Exception):
    """The request was not even begun: base of all errors that say so, of actors, devices and patterns.

    It speaks of that one request. What its caller asked for before may have been executed.

    Attributes:
        may_go_elsewhere: Whether to ask again, a moment later or somewhere else, is the answer to it. Not so
            for mistakes, and for limits, which are there to be kept.
    """

    may_go_elsewhere: ClassVar[bool] = True


class ActorError(Exception):
    """Base of the errors that the actor runtime raises.

    Attributes:
        path: Path of the actor that it is about.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args[0], self.path)


def _rebuild(cls: type[ActorError], message: str, path: str) -> ActorError:
    return cls(message, path=path)


class ActorFailedError(ActorError):
    """The actor crashed while it served the request; the original error is the `__cause__`.

    The request may have been executed, in part or in full.
    """


class ActorStoppedError(ActorError, NotExecutedError):
    """The actor is stopped, or stopped before it came to the request; it was never executed."""


class ActorRestartingError(ActorError, NotExecutedError):
    """The actor is between two incarnations.

    Raised for requests it has not begun, where its mailbox is to reject them; the cause of the
    `ActorFailedError` of one that was running when its siblings' restart ended it.
    """


class AskCycleError(ActorError, NotExecutedError):
    """The ask would wait for an actor that is itself waiting for the asker."""

    may_go_elsewhere = False


class MailboxFullError(ActorError, NotExecutedError):
    """The mailbox is full and its policy rejects or drops; the request was never executed."""
