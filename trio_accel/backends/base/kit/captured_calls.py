"""Launches that a driver may capture, and when their third one at the same place is to be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from ..contract.protocols import KeptCounts
from .kept_plans import KeptPlan, KeptPlans

# A launch is captured after its key was seen this number of times.
_SEEN_BEFORE = 2
_KEYS_PER_MOVE = 8
_MOST_REFUSED = 16


@attrs.define(eq=False)
class GraphCall:
    """A call without its stream, addresses and factors. Known by its identity, which a key holds.

    Whether it can be cached may depend on the factors, and is assumed not to depend on the rest. A refusal is
    remembered for a few factors. After refusals with `_MOST_REFUSED` factors, a call is refused with all
    others also.

    Attributes:
        owner: The library that has the resources for such a call.
    """

    owner: object
    _refused: set[bytes] = attrs.field(factory=set[bytes], init=False, repr=False)

    def is_refused(self, key: Key) -> bool:
        """Return whether an earlier attempt to cache the call failed with the factors of its key."""
        refused = self._refused
        return bool(refused) and (len(refused) >= _MOST_REFUSED or _factors_of(key) in refused)

    def refuse(self, key: Key) -> None:
        """Note that the call cannot be cached with the factors of its key."""
        if len(self._refused) < _MOST_REFUSED:
            self._refused.add(_factors_of(key))


Key: TypeAlias = tuple[GraphCall, Any, *tuple[int | bytes, ...]]
"""A call, its stream, and whatever else it was made for: addresses, and last its factors, if it has any."""


def _factors_of(key: Key) -> bytes:
    factors = key[-1]
    return factors if isinstance(factors, bytes) else b""


class CapturedLaunches(KeptPlans[Any]):
    """Captured launches by their keys. The table is patient, because a capture takes long.

    Args:
        counts: Counts them.
        discard: Throws a captured launch away.
        bound: The most captured launches.
        is_free: Whether a captured launch may be thrown away; without it, any may.
    """

    def __init__(
        self,
        counts: KeptCounts,
        discard: Callable[[Any], object],
        bound: int,
        is_free: Callable[[KeptPlan[Any]], bool] | None = None,
    ) -> None:
        super().__init__(
            bound, counts, lambda plan: discard(plan.value), is_free=is_free, patience=_KEYS_PER_MOVE
        )

    def is_due(self, key: Key) -> bool:
        """Note a launch that was not captured; return whether to capture it, if there is room."""
        if not key[0].is_refused(key):
            if self.see(key) >= _SEEN_BEFORE:
                return True
            self.counts.unplanned += 1
        return False
