"""Looking into exceptions and exception groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import trio

__all__ = ["is_fatal", "leaves", "single"]

_FATAL = (trio.Cancelled, KeyboardInterrupt, SystemExit, GeneratorExit)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that a group holds, however deeply; the exception itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]
        for member in members:
            yield from leaves(member)
    else:
        yield error


def is_fatal(error: BaseException) -> bool:
    """Whether an exception, or any member of a group, must travel on: cancellation, Ctrl-C, exit.

    A group that holds a failure beside one of these must not be swallowed either.
    """
    return any(isinstance(leaf, _FATAL) or not isinstance(leaf, Exception) for leaf in leaves(error))


def single(error: BaseException) -> BaseException:
    """The one exception that a group holds, however deeply; the group itself if it holds more."""
    first, *others = leaves(error)
    return error if others else first
