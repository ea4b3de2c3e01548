"""Errors of the actor runtime: their classes, looking into them, and printing those that reach no asker."""

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
    """The request was not even begun: base of all errors that say so, of actors, devices and patterns.

    It speaks of that one request. Earlier requests of its caller may have been executed.

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
        return partial(type(self), path=self.path), self.args


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


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that a group holds, however deeply; the exception itself if it is no group."""
    left = [error]
    while left:
        one = left.pop()
        members = _members(one)
        if members:
            left.extend(reversed(members))
        else:
            yield one


def is_fatal(error: BaseException) -> bool:
    """Tell whether an exception, or any member of a group, must travel on: cancellation, Ctrl-C, exit.

    A group that holds a failure beside one of these must not be swallowed either.
    """
    return any(not isinstance(leaf, Exception) for leaf in leaves(error))


def single(error: BaseException) -> BaseException:
    """Take the groups of one member around an exception away."""
    while len(members := _members(error)) == 1:
        [error] = members
    return error


def describe(error: BaseException) -> str:
    """Say what an exception is, or all that a group holds, in one line; also if its ``__str__`` raises."""
    return "; ".join(_describe(leaf) for leaf in leaves(error))


def _describe(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001
        # The runtime describes errors where nothing may fail, such as while it resolves an ask.
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def safe_repr(value: object) -> str:
    """Show a value in a log or an error: like `repr`, also if its ``__repr__`` raises."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # a stranger's class
        return f"<{type(value).__name__}, which cannot be printed>"


class _Unprintable(BaseExceptionGroup[BaseException]):  # noqa: ASYNC126  # it does, below
    """Around an error whose ``repr`` fails.

    A Trio nursery prints the exception that it is left with. If that fails, the state of the whole run is
    broken (Trio 0.31 and later).
    """

    if not TYPE_CHECKING:
        # Its type in the standard library's stubs cannot be narrowed.
        def derive(self, errors: Sequence[BaseException]) -> BaseExceptionGroup:
            return _unprintable(self.message, errors)

    def __repr__(self) -> str:
        return f"<{self.message}>"


class _UnprintableFailure(_Unprintable, ExceptionGroup[Exception]):  # noqa: ASYNC126  # inherited
    """The same, around failures alone: an `Exception` itself."""


def _unprintable(text: str, errors: Sequence[BaseException]) -> _Unprintable:
    failures = [error for error in errors if isinstance(error, Exception)]
    return _UnprintableFailure(text, failures) if len(failures) == len(errors) else _Unprintable(text, errors)


def check_printable(error: BaseException) -> None:
    """Call it where an error is about to reach a nursery.

    Raises:
        BaseExceptionGroup: One around it, if its ``repr`` fails; `single` takes that away again.
    """
    try:
        repr(error)
    except Exception:  # noqa: BLE001  # whatever a stranger's class raises
        raise _unprintable(describe(error), [error]) from None


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions directly in a group; of another exception, none."""
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]


def drop_frames(error: BaseException) -> None:
    """Keep where an error was raised as a note alone.

    An actor's last error stays in the tree. Frames refer to those that called them, here to those of
    the program that sent the message, and would keep all their variables alive.
    """
    error.add_note("Raised in the task that sent the message:\n" + "".join(format_tb(error.__traceback__)))
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [one.__cause__, one.__context__]
        left += _members(one)


def warn_untold(
    logger: str, text: str, *values: object, level: int = logging.WARNING, **extra: object
) -> None:
    """Log a warning that no error tells of, so that it is printed where no logging is configured.

    Args:
        logger: Name of the logger.
        text: The message.
        *values: Its values.
        level: The level.
        **extra: More attributes of the record.
    """
    logging.getLogger(logger).log(level, text, *values, extra={"is_untold": True, **extra}, stacklevel=2)


class StderrUnlessConfigured(logging.Handler):
    """Prints a record in one line, unless another handler gets it.

    `logging` has the same for programs without any handler, but prints warnings too. Those of this package
    are told to somebody already, such as the asker whose request crashed an actor. `warn_untold` marks the
    others, which are printed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, if no other handler of its logger or of those above does anything with it."""
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
    """Return the message, with the exception and the place where it was raised; no traceback."""
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
    """Return a copy of an exception for another task, or itself where it cannot be copied."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  # a stranger's class
        return error
    if type(copied) is not type(error):
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)
