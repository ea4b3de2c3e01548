"""Counts of the last seconds, in bounded memory."""

from __future__ import annotations

from collections import deque

import attrs
import trio

__all__ = ["RecentCounts"]

_SLOTS = 10


@attrs.define(eq=False)
class _Slot:
    number: int
    all: int = 0
    marked: int = 0


class RecentCounts:
    """How many things happened lately, and how many of these are marked.

    Time is cut into slots of a tenth of the window. Counted are the running slot and the nine before, so at
    least nine tenths of the window.

    Args:
        within: Length of the window in seconds.
    """

    def __init__(self, within: float) -> None:
        self._width = within / _SLOTS
        self._slots: deque[_Slot] = deque()

    def add(self, *, count: int = 0, marked: int = 0) -> None:
        """Count things now, and things that are marked now; these are counts of their own."""
        number = self._drop_old()
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
        self._slots[-1].all += count
        self._slots[-1].marked += marked

    def totals(self) -> tuple[int, int]:
        """The counts of the window: of things, and of marked ones."""
        self._drop_old()
        return sum(slot.all for slot in self._slots), sum(slot.marked for slot in self._slots)

    def clear(self) -> None:
        """Begin anew."""
        self._slots.clear()

    def _drop_old(self) -> int:
        number = int(trio.current_time() // self._width)
        while self._slots and self._slots[0].number <= number - _SLOTS:
            self._slots.popleft()
        return number
