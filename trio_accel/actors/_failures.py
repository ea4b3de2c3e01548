"""Looking into exceptions and exception groups."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import format_tb
from typing import cast

__all__ = ["describe", "drop_frames", "is_fatal", "leaves", "single"]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that a group holds, however deeply; the exception itself if it is no group."""
    members = _members(error)
    if not members:
        yield error
    for member in members:
        yield from leaves(member)


def is_fatal(error: BaseException) -> bool:
    """Whether an exception, or any member of a group, must travel on: cancellation, Ctrl-C, exit.

    A group that holds a failure beside one of these must not be swallowed either.
    """
    return any(not isinstance(leaf, Exception) for leaf in leaves(error))


def single(error: BaseException) -> BaseException:
    """What is left when the groups of one member around an exception are taken away."""
    members = list(_members(error))
    return single(members[0]) if len(members) == 1 else error


def describe(error: BaseException) -> str:
    """Say what an exception is, or all that a group holds, in one line."""
    return "; ".join(_describe(leaf) for leaf in leaves(error))


def _describe(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001
        # The runtime describes errors where nothing may fail, such as while it resolves an ask.
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """The exceptions directly in a group; nothing if it is none."""
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]


def drop_frames(error: BaseException) -> None:
    """Keep where an error was raised as a note alone.

    What an actor crashed with lives on in the tree. Frames refer to those that called them, here to those of
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
