"""Looking into exceptions and exception groups."""

from __future__ import annotations

import trio

__all__ = ["is_fatal", "single"]

_FATAL = (trio.Cancelled, KeyboardInterrupt, SystemExit, GeneratorExit)


def is_fatal(error: BaseException) -> bool:
    """Whether an exception, or any member of a group, must travel on: cancellation, Ctrl-C, exit.

    A group that holds a failure beside one of these must not be swallowed either.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_fatal(member) for member in error.exceptions)
    return isinstance(error, _FATAL) or not isinstance(error, Exception)


def single(error: BaseException) -> BaseException:
    """The one exception that a group holds, however deeply; the group itself if it holds more."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
