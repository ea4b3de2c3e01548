"""What an operation needs before it may be launched, and others make ready."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Arrival"]


class Arrival:
    """Something that is on its way, such as a host array that a thread copies.

    What needs it is not launched before. A stream that were held for it instead would hold up every call
    to the driver that waits for the context, and with it perhaps whoever is to let the stream go.

    Attributes:
        is_over: Whether it is there, or never will be.
        failure: Why it never will be.
    """

    __slots__ = ("__weakref__", "_waiting", "failure", "is_over")

    def __init__(self) -> None:
        self.is_over: bool = False
        self.failure: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    def tell(self, notify: Callable[[], None]) -> None:
        """Have somebody told when it is over; on the Trio thread."""
        if self.is_over:
            notify()
        else:
            self._waiting.append(notify)

    def end(self, failure: Exception | None = None) -> None:
        """It is over, and its waiters are told; on the Trio thread."""
        self.is_over = True
        self.failure = failure
        waiting, self._waiting = self._waiting, []
        for notify in waiting:
            notify()
