"""What a backend has still to do with a host array after a copy was enqueued."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

__all__ = ["HostUse"]


class HostUse:
    """The use of one host array by an enqueued copy, which can be withdrawn until it begins.

    The thread that copies calls `begin` and `end`, the Trio thread the others. Which of them is first is
    decided by the list: to take from it, or to replace its item, is one step.

    Args:
        array: What is copied from or to; None if the copy has taken place.
    """

    __slots__ = ("_array", "_is_over")

    def __init__(self, array: npt.NDArray[Any] | None) -> None:
        self._array: list[npt.NDArray[Any]] = [] if array is None else [array]
        self._is_over = array is None

    def begin(self) -> npt.NDArray[Any] | None:
        """Take the array to copy; None if that was withdrawn."""
        try:
            return self._array.pop()
        except IndexError:
            return None

    def end(self) -> None:
        """The copy is over, or has failed."""
        self._is_over = True

    def withdraw(self) -> bool:
        """Do not copy, if that has not begun; returns whether the array is used no more."""
        if self.begin() is not None:
            self._is_over = True
        return self._is_over

    def make_private(self, most: int) -> bool:
        """Copy from a private copy, if that has not begun; returns whether the array is used no more.

        Args:
            most: Larger arrays, in bytes, are left as they are.
        """
        if self._is_over:
            return True
        array = self._array[:]
        if not array or array[0].nbytes > most:
            return False
        try:
            self._array[0] = array[0].copy()
        except IndexError:
            return False
        # A thread that copies from it now uses nothing of the program's.
        self._is_over = True
        return True
