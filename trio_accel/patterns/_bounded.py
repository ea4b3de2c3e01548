"""Bounded memory for keys and events from outside: states by key, and counts of the last seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import attrs
import trio

__all__ = ["KeyedStates", "RecentCounts"]

StateT = TypeVar("StateT")

_FEW = 64


class KeyedStates(Generic[StateT]):
    """Remembers the state of each key as long as it makes a difference, and of a bounded number of keys.

    Args:
        make: Makes the state of a new key.
        debt: How much it matters to remember a state. At 0 or below, a new one would do as well. At infinity
            it is in use and stays.
        limit: The most states. Beyond it, those with the least debt are forgotten.
    """

    def __init__(
        self, make: Callable[[Hashable], StateT], debt: Callable[[StateT], float], limit: int
    ) -> None:
        self._make = make
        self._debt = debt
        self._limit = limit
        self._states: dict[Hashable, StateT] = {}
        # Doubles with what is left after a sweep, so that a sweep costs each new key a constant time.
        self._sweep_at = min(_FEW, limit)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[StateT]:
        return iter(self._states.values())

    def find(self, key: Hashable) -> StateT | None:
        """Return the state of a key; None if it has none."""
        return self._states.get(key)

    def get(self, key: Hashable) -> StateT:
        """Return the state of a key, a new one if it has none.

        While more states are in use than the limit, there are more: who uses them has to count.
        """
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= self._sweep_at:
                self._sweep()
            state = self._states[key] = self._make(key)
        return state

    def _sweep(self) -> None:
        debts = [(debt, key) for key, state in self._states.items() if (debt := self._debt(state)) > 0]
        if len(debts) >= self._limit:
            # A tenth more than is needed now, so that the next new keys find room. The sort is stable: among
            # equals the oldest go first.
            debts.sort(key=lambda pair: pair[0])
            gone = len(debts) - self._limit + max(1, self._limit // 10)
            debts = [pair for pair in debts[:gone] if pair[0] == math.inf] + debts[gone:]
        left = {key for _, key in debts}
        self._states = {key: state for key, state in self._states.items() if key in left}
        self._sweep_at = min(max(_FEW, 2 * len(left)), max(self._limit, len(left) + len(left) // 10 + 1))


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
        """Return the counts of the window: of things, and of marked ones."""
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
