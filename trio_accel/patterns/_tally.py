"""What became of calls, counted where they are made."""

from __future__ import annotations

from typing import cast

import attrs
import trio

__all__ = ["CallStatistics", "Tally"]


@attrs.frozen(kw_only=True)
class CallStatistics:
    """What became of calls: ``begun == in_flight + answered + failed + cancelled``, at any time.

    Attributes:
        begun: Calls that were begun.
        in_flight: Those that have not ended.
        answered: Those with a result.
        failed: Those that ended with an error.
        cancelled: Those that were cancelled, and have ended without a result or an error.
    """

    begun: int
    in_flight: int
    answered: int
    failed: int
    cancelled: int


@attrs.define(eq=False)
class Tally:
    """Counts each call that is made in a block, ``with tally:``; any number of blocks at once."""

    begun: int = 0
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0

    def __enter__(self) -> None:
        self.begun += 1
        self.in_flight += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.in_flight -= 1
        if error is None:
            self.answered += 1
        elif _is_cancellation(error):
            self.cancelled += 1
        else:
            self.failed += 1


def _is_cancellation(error: BaseException) -> bool:
    """Whether nothing but a cancellation has ended a call; an error beside it is what its asker gets."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)
