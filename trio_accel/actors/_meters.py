"""What becomes of messages in plain numbers, for who measures all of them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Measured", "Meter"]


class Measured(Protocol):
    """Takes what became of the messages of one type to one actor.

    It is called on the Trio thread, from inside the runtime, for every message: it must be quick and must not
    raise. Times are seconds on Trio's clock, as those of the events.
    """

    def completed(self, queue_time: float, run_time: float) -> None:
        """A reply was given, or a told message served."""
        ...

    def failed(self, queue_time: float, run_time: float, error: BaseException) -> None:
        """The handler raised, or the deferred reply is an error."""
        ...

    def cancelled(self, queue_time: float, run_time: float) -> None:
        """The asker was cancelled, and the request unwound."""
        ...

    def dropped(self) -> None:
        """It is a dead letter."""
        ...


class Meter(Protocol):
    """Measures the messages of a system; see `System.measure`."""

    def measured(self, path: str, message_type: str) -> Measured:
        """Who takes what becomes of the messages of one type to one actor; the runtime keeps it."""
        ...
