"""Errors of the actor runtime: classes, helpers to examine them, and output of errors without a caller."""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from traceback import format_tb
from typing import TYPE_CHECKING, ClassVar, cast

__all__ = [
    "ActorError",
    "ActorFailedError",
    "ActorRestartingError",
    "ActorStoppedError",
    "AskCycleError",
    "MailboxFullError",
    "NotExecutedError",
    "copied",
    "describe",
    "leaves",
    "single",
    "warn_untold",
]


class NotExecutedError(Exception):
    """The request was not even started: the base of all such errors, from actors, devices and patterns.

    This applies only to the one request. Earlier requests of the same caller may have been executed.

    Attributes:
        may_go_elsewhere: Whether the remedy is to repeat the request, later or elsewhere. False for mistakes,
            and for limits that exist on purpose.
    """

    may_go_elsewhere: ClassVar[bool] = True


class ActorError(Exception):
    """Base class of the errors raised by the actor runtime.

    Attributes:
        path: Path of the actor in question.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), path=self.path), self.args


class ActorFailedError(ActorError):
    """The actor crashed while it served the request; the original error is the `__cause__`.

    The request may have been executed, partly or completely.
    """


class ActorStoppedError(ActorError, NotExecutedError):
    """The actor is stopped, or stopped before it started the request; the request was never executed."""


class ActorRestartingError(ActorError, NotExecutedError):
    """The actor is between two incarnations.

    Raised for unstarted requests if the mailbox rejects messages during a restart. It is also the cause of
    an `ActorFailedError` if a sibling's failure ended the running request.
    """


class AskCycleError(ActorError, NotExecutedError):
    """The request would wait for an actor, but that actor already waits for the caller."""

    may_go_elsewhere = False


class MailboxFullError(ActorError, NotExecutedError):
    """The mailbox is full and its policy rejects or drops messages; the request was never executed."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions in a group at any depth, or the exception itself if it is not a group."""
    pending = [error]
    while pending:
        member = pending.pop()
        members = _members(member)
        if members:
            pending.extend(reversed(members))
        else:
            yield member


def is_fatal(error: BaseException) -> bool:
    """Return whether an exception, or any member of a group, must propagate: cancellation, Ctrl-C, exit.

    A group that also holds ordinary failures must propagate too.
    """
    return any(not isinstance(leaf, Exception) for leaf in leaves(error))


def single(error: BaseException) -> BaseException:
    """Unwrap an exception from groups with only one member."""
    while len(members := _members(error)) == 1:
        [error] = members
    return error


def describe(error: BaseException) -> str:
    """Describe an exception, or all members of a group, in one line, even if its ``__str__`` raises."""
    return "; ".join(_describe(leaf) for leaf in leaves(error))


def _describe(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001
        # The runtime describes errors in places that must not fail, such as while it resolves a request.
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def safe_repr(value: object) -> str:
    """Format a value for a log or an error, like `repr`, even if its ``__repr__`` raises."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # a stranger's class
        return f"<{type(value).__name__}, which cannot be printed>"


class _Unprintable(BaseExceptionGroup[BaseException]):  # noqa: ASYNC126  # it does, below
    """A wrapper for an error with a failing ``repr``.

    A Trio nursery prints its remaining exception. If that fails, Trio's entire run is left in a broken state
    (Trio 0.31 and later).
    """

    if not TYPE_CHECKING:
        # The attribute's type in the standard library's stubs cannot be narrowed.
        def derive(self, errors: Sequence[BaseException]) -> BaseExceptionGroup:
            return _unprintable(self.message, errors)

    def __repr__(self) -> str:
        return f"<{self.message}>"


class _UnprintableFailure(_Unprintable, ExceptionGroup[Exception]):  # noqa: ASYNC126  # inherited
    """The same wrapper for groups of only `Exception` failures, so that it is an `Exception` itself."""


def _unprintable(text: str, errors: Sequence[BaseException]) -> _Unprintable:
    failures = [error for error in errors if isinstance(error, Exception)]
    return _UnprintableFailure(text, failures) if len(failures) == len(errors) else _Unprintable(text, errors)


def check_printable(error: BaseException) -> None:
    """Check that an error is printable before it reaches a nursery.

    Raises:
        BaseExceptionGroup: A group around the error, because its ``repr`` fails; `single` unwraps it.
    """
    try:
        repr(error)
    except Exception:  # noqa: BLE001  # whatever a stranger's class raises
        raise _unprintable(describe(error), [error]) from None


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the direct members of a group; empty for other exceptions."""
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]


def drop_frames(error: BaseException) -> None:
    """Replace an error's traceback by a note.

    An actor's last error stays in the tree. A traceback's frames refer to their callers, here to the frames
    of the code that sent the message, and would keep all their variables alive.
    """
    error.add_note("Raised in the task that sent the message:\n" + "".join(format_tb(error.__traceback__)))
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in visited:
            continue
        visited.add(id(exception))
        exception.__traceback__ = None
        pending += [exception.__cause__, exception.__context__]
        pending += _members(exception)


def warn_untold(
    logger: str, text: str, *values: object, level: int = logging.WARNING, **extra: object
) -> None:
    """Log a warning that accompanies no error, so that it is printed even without logging handlers.

    Args:
        logger: Name of the logger.
        text: The message.
        *values: The message's values.
        level: The level.
        **extra: Further attributes of the record.
    """
    logging.getLogger(logger).log(level, text, *values, extra={"is_untold": True, **extra}, stacklevel=2)


class StderrUnlessConfigured(logging.Handler):
    """Prints a record in one line, unless another handler receives it.

    `logging` has the same for programs without any handler, but it also prints warnings. This package's
    warnings usually have another recipient, such as the caller of the request that crashed an actor.
    `warn_untold` marks the other warnings, which are printed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless its logger or one of the parents has another handler."""
        if record.levelno < logging.ERROR and not getattr(record, "is_untold", False):
            return
        if self._is_alone(record.name) and sys.stderr is not None:
            try:
                sys.stderr.write(f"{record.name}: {_in_one_line(record)}\n")
            except Exception:  # noqa: BLE001  # as every handler: it must not disturb who logs
                self.handleError(record)

    def _is_alone(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def _in_one_line(record: logging.LogRecord) -> str:
    """Return the message with the exception and the line that raised it, but without a traceback."""
    text = " ".join(record.getMessage().split("\n", 1)[0].split())
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return text
    if safe_repr(error) not in text:
        text += f": {describe(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        raised = frames[-1]
        text += f" ({os.path.basename(raised.filename)}:{raised.lineno}, in {raised.name})"
    return text


def copied(error: Exception) -> Exception:
    """Return a copy of an exception for another task, or the exception itself if it cannot be copied."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  # a stranger's class
        return error
    if type(copied) is not type(error):
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)
