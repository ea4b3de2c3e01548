"""The plans of a library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ...base import CacheCounts

__all__ = ["PlanTable"]


class PlanTable:
    """Plans by their keys, those that were used last; the oldest makes way for a new one.

    Args:
        most: How many are kept.
        close: Gives a plan back that has made way.
        is_busy: Whether work in flight may still use a plan: it stays until that is over.
        counts: Counts them, for several tables if need be.
    """

    def __init__(
        self,
        most: int,
        close: Callable[[Any], None] | None = None,
        is_busy: Callable[[Any], bool] | None = None,
        counts: CacheCounts | None = None,
    ) -> None:
        self._most = most
        self._close = close
        self._is_busy = is_busy
        self._counts = counts or CacheCounts()
        # The last one that was made, until a launch has used it.
        self._new: Any = None
        self._plans: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._plans)

    def find(self, key: tuple[object, ...]) -> Any:
        """The plan of a key, which was used last now; None if there is none."""
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def store(self, key: tuple[object, ...], plan: Any) -> None:
        """Keep a plan; as many as are too many make way, of those that nothing uses."""
        self._plans[key] = self._new = plan
        self._counts.made += 1
        excess = len(self._plans) - self._most
        if excess <= 0:
            return
        for old, other in tuple(self._plans.items()):
            if not excess or old == key:
                break
            if self._is_busy is None or not self._is_busy(other):
                del self._plans[old]
                excess -= 1
                self._counts.evicted += 1
                if self._close is not None:
                    self._close(other)

    def note_launch(self, plan: Any) -> None:
        """A launch has this plan: it was found, unless it was made for just this launch."""
        if plan is self._new:
            self._new = None
        else:
            self._counts.found += 1

    def clear(self) -> None:
        """Give all back: nothing uses any more."""
        self._new = None
        plans, self._plans = self._plans, OrderedDict()
        if self._close is not None:
            for plan in plans.values():
                self._close(plan)
