"""How fast calls come that many tasks make side by side."""

from __future__ import annotations

import time

import attrs

__all__ = ["Counted"]

_AHEAD = 4


@attrs.define(eq=False)
class Counted:
    """Counts calls while all tasks make some: not the first four of each, nor those that end behind the last.

    When the tasks begin, all of them ask before the first is served, which says nothing of how fast they are
    served when this goes on.

    Attributes:
        tasks: How many there are; each makes calls until `is_over`.
        calls: How many of each are counted, on average.
    """

    tasks: int
    calls: int
    _done: int = attrs.field(default=0, init=False)
    _began: float = attrs.field(default=0.0, init=False)
    _ended: float = attrs.field(default=0.0, init=False)

    @property
    def is_over(self) -> bool:
        """Whether all that count are done."""
        return self._ended > 0.0

    @property
    def rate(self) -> float:
        """Calls per second, once it is over."""
        return self.tasks * self.calls / (self._ended - self._began)

    def count(self) -> None:
        """A call is done."""
        self._done += 1
        if self._done == _AHEAD * self.tasks:
            self._began = time.perf_counter()
        elif self._done == (_AHEAD + self.calls) * self.tasks:
            self._ended = time.perf_counter()
