"""The asker of an operation that runs a program's code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["Asker"]


class Asker:
    """The asker of one call: the call sees whether it has left, and reports to it.

    Attributes:
        has_left: Whether nobody waits for the result any more.
        notify: Called in any thread behind a report; None where nobody wants to hear of them.
    """

    __slots__ = ("_last", "has_left", "notify")

    def __init__(self) -> None:
        self.has_left: bool = False
        self.notify: Callable[[], None] | None = None
        # One report at most: it may be written in a thread while the loop takes the one before.
        self._last: deque[str] = deque(maxlen=1)

    def report(self, text: str) -> None:
        """Put a report, as `text_of` writes it, in place of one that was not taken."""
        if self.notify is not None:
            self._last.append(text)
            self.notify()

    def take(self) -> str | None:
        """Return the last report, once; only the loop does."""
        return self._last.pop() if self._last else None
