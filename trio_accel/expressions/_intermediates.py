"""Arrays that a function of several steps makes on its way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from ..devices import AccelRef

__all__ = ["intermediates"]


@contextmanager
def intermediates() -> Generator[Callable[[AccelRef], AccelRef]]:
    """Release the arrays that a function makes on its way, however it ends.

    An error keeps the frames that it came through, and the arrays in them: what they refer to would stay as
    long as the error does.

    Yields:
        Takes such an array, and returns it.
    """
    made: list[AccelRef] = []

    def take(array: AccelRef) -> AccelRef:
        made.append(array)
        return array

    try:
        yield take
    finally:
        for array in made:
            array.release()
