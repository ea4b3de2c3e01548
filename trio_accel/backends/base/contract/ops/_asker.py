"""The asker of an operation that runs a program's code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import attrs

__all__ = ["Asker"]


@attrs.define(eq=False)
class Asker:
    """The asker of one call: the call sees whether it has left, and reports to it.

    Attributes:
        has_left: Whether nobody waits for the result any more.
        waits_for_others: Whether the call waits for those of other devices now, and not for its own.
        waits_on_stream: Tells whether a stream of the call waits for those of other devices now.
        notify: Called in any thread behind a report; None where nobody wants to hear of them.
        reports: The last report, until it is taken.
    """

    has_left: bool = attrs.field(default=False, init=False)
    waits_for_others: bool = attrs.field(default=False, init=False)
    waits_on_stream: Callable[[], bool] = attrs.field(default=bool, init=False)
    notify: Callable[[], None] | None = attrs.field(default=None, init=False)
    # One report at most: it may be written in a thread while the loop takes the one before.
    reports: deque[str] = attrs.field(factory=partial(deque[str], maxlen=1), init=False)

    def report(self, text: str) -> None:
        """Put a report, as `text_of` writes it, in place of one that was not taken."""
        if self.notify is not None:
            self.reports.append(text)
            self.notify()

    def take(self) -> str | None:
        """Return the last report, once; only the loop does."""
        return self.reports.pop() if self.reports else None
