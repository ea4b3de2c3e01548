"""What becomes of messages in plain numbers, for who measures all of them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Measured", "Meter", "note_end"]


class Measured(Protocol):
    """Takes what became of the messages of one type to one actor.

    It is used on the Trio thread, from inside the runtime, for every message: it must be quick and must not
    raise. For most messages it is only a list that grows.
    """

    @property
    def times(self) -> list[float]:
        """Takes two numbers for each message that has ended: seconds in the queue, and thereafter."""
        ...

    @property
    def most(self) -> int:
        """How long `times` may become before `count` is called."""
        ...

    def count(self) -> None:
        """Empty `times`."""
        ...

    def failed(self, error: BaseException) -> None:
        """A message whose times were added last has failed."""
        ...

    def cancelled(self) -> None:
        """A message whose times were added last has unwound, as its asker was cancelled."""
        ...

    def dropped(self) -> None:
        """A message is a dead letter; it has no times."""
        ...


class Meter(Protocol):
    """Measures the messages of a system; see `System.measure`."""

    def measured(self, path: str, message_type: str) -> Measured:
        """Who takes what becomes of the messages of one type to one actor; the runtime keeps it."""
        ...


def note_end(
    measured: Measured,
    queue_time: float,
    run_time: float,
    error: BaseException | None = None,
    *,
    cancelled: bool = False,
) -> None:
    """Tell of a message that has ended.

    Args:
        measured: Who takes it.
        queue_time: Seconds from sending to the start.
        run_time: Seconds from there to the end.
        error: What it failed with.
        cancelled: Whether its asker was cancelled.
    """
    times = measured.times
    times += (queue_time, run_time)
    if len(times) >= measured.most:
        measured.count()
    if cancelled:
        measured.cancelled()
    elif error is not None:
        measured.failed(error)
