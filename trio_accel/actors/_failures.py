"""Looking into exceptions and exception groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from traceback import format_tb
from typing import TYPE_CHECKING, cast

__all__ = ["check_printable", "describe", "drop_frames", "is_fatal", "leaves", "safe_repr", "single"]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that a group holds, however deeply; the exception itself if it is no group."""
    left = [error]
    while left:
        one = left.pop()
        members = _members(one)
        if members:
            left.extend(reversed(members))
        else:
            yield one


def is_fatal(error: BaseException) -> bool:
    """Whether an exception, or any member of a group, must travel on: cancellation, Ctrl-C, exit.

    A group that holds a failure beside one of these must not be swallowed either.
    """
    return any(not isinstance(leaf, Exception) for leaf in leaves(error))


def single(error: BaseException) -> BaseException:
    """What is left when the groups of one member around an exception are taken away."""
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
