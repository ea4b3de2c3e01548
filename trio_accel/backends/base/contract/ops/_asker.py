"""The caller of an operation that runs a program's code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import attrs

__all__ = ["Asker"]


@attrs.define(eq=False)
class Asker:
    """The caller of one call, as the call sees it: it may leave, and it gets reports.

    Attributes:
        has_left: Whether nobody waits for the result any longer.
        waits_for_others: Whether the call waits for calls of other devices now, and not for its own device.
        waits_on_stream: Returns whether a stream of the call waits for streams of other devices now.
        notify: Called in any thread after a report; None if nobody listens.
        reports: The last report, until it is taken.
    """

    has_left: bool = attrs.field(default=False, init=False)
    waits_for_others: bool = attrs.field(default=False, init=False)
    waits_on_stream: Callable[[], bool] = attrs.field(default=bool, init=False)
    notify: Callable[[], None] | None = attrs.field(default=None, init=False)
    # One report at most: it may be written in a thread while the loop takes the previous one.
    reports: deque[str] = attrs.field(factory=partial(deque[str], maxlen=1), init=False)

    def report(self, text: str) -> None:
        """Replace the last report by this one, in the form of `text_of`, unless it was taken already."""
        if self.notify is not None:
            self.reports.append(text)
            self.notify()

    def take(self) -> str | None:
        """Return the last report, once; only the loop does."""
        return self.reports.pop() if self.reports else None
