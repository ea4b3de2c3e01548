"""What a list of measurements says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs

__all__ = ["Pairs", "Summary", "percentile"]


@attrs.frozen(kw_only=True)
class Summary:
    """The middle of some measurements, and how far they lie apart.

    Attributes:
        median: Half of them lie below.
        lower: First quartile: a quarter lies below.
        upper: Third quartile: a quarter lies above.
        count: How many there were.
    """

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise measurements; quartiles are interpolated between the values.

        Raises:
            ValueError: There are none.
        """
        if not values:
            raise ValueError("values: at least one measurement is needed")
        lower = upper = values[0]
        if len(values) > 1:
            lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=statistics.median(values), lower=lower, upper=upper, count=len(values))


@attrs.frozen(kw_only=True)
class Pairs:
    """Measurements of ours and of a peer, taken in turns.

    Attributes:
        ours: Of this library.
        peer: Of what it is compared with; each was taken right after the one of ours.
        retaken: Pairs that do not count: a processor was slow meanwhile.
        disturbed: Pairs that count although one was.
    """

    ours: tuple[float, ...]
    peer: tuple[float, ...]
    retaken: int = 0
    disturbed: int = 0

    def ratio(self) -> Summary:
        """Ours over the peer, pair by pair: what slows the machine for a while slows both of a pair."""
        return Summary.of([ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)])

    def difference(self) -> Summary:
        """Ours less the peer, pair by pair."""
        return Summary.of([ours - peer for ours, peer in zip(self.ours, self.peer, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least this share of all does not exceed (nearest rank).

    Raises:
        ValueError: There are no values, or the percentage is outside (0, 100].
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"percentile: {percent} % of {len(values)} values")
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]
