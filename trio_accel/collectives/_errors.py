"""The errors that a collective fails with."""

from __future__ import annotations

import attrs

from ..backends.base import AccelError

__all__ = ["CollectiveMismatchError", "RankFailedError", "WorldBrokenError"]


@attrs.define(eq=False, slots=False)
class RankFailedError(AccelError):
    """A collective has failed on one rank, and so on all; the error of that rank is its cause.

    Every rank that takes part gets it. Arrays that the collective only reads are intact, also on the failed
    rank. Arrays that it should write are refused by later operations, unless it failed before it wrote.

    Attributes:
        rank: Number of the rank.
    """

    rank: int = attrs.field(default=-1, kw_only=True)


class CollectiveMismatchError(AccelError):
    """Ranks asked for different collectives at the same place in their order; none of them was run."""


class WorldBrokenError(AccelError):
    """The world has had more failures than its intensity allows, or was closed; it runs no collectives."""
