"""Figures that actors and programs show of themselves: counters, gauges, and values by ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import attrs

from ._options import is_number

__all__ = ["Reading", "Spread"]


@attrs.frozen(kw_only=True)
class Reading:
    """A figure of an actor, or of a program, at one moment.

    Attributes:
        name: Words with an underscore between, and the unit last if there is one: ``"queue_wait_seconds"``.
        kind: ``"counter"``, which only rises until its owner begins anew, ``"gauge"`` or ``"histogram"``.
        help: Its meaning, in a sentence.
        value: Its value; the sum of all values of a histogram.
        labels: Names and values of what tells it from others of its name; there must be few of them.
        bounds: Upper ends of the ranges of a histogram, in rising order.
        counts: How many values are in each range; one more than there are bounds.
        path: Path of its actor; ``""`` if it is the program's.
    """

    name: str
    kind: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    path: str = ""


class Spread:
    """Counts values by ranges, for a histogram.

    Args:
        bounds: Upper ends of the ranges, in rising order; a value that equals one counts as below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        if not all(map(is_number, bounds)):
            raise ValueError(f"Spread: bounds must be numbers, got {bounds!r}")
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value.

        Raises:
            ValueError: A whole number that no float can hold.
        """
        try:
            self._total += value
        except OverflowError:
            raise ValueError("Spread.add: value is too large for a float") from None
        self._counts[bisect_left(self._bounds, value)] += 1

    def reading(self, name: str, help: str, labels: tuple[tuple[str, str], ...] = ()) -> Reading:  # noqa: A002  # as in metrics
        """Return what was counted."""
        return Reading(
            name=name,
            kind="histogram",
            help=help,
            value=self._total,
            labels=labels,
            bounds=self._bounds,
            counts=tuple(self._counts),
        )
