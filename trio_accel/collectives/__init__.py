"""Collectives: operations of many devices on arrays of which each has one, in worlds that heal."""

from ._errors import CollectiveMismatchError, RankFailedError, WorldBrokenError
from ._operations import CollectiveActor, Reduction
from ._ranks import Group, Rank, Result
from ._world import World, open_world

__all__ = [
    "CollectiveActor",
    "CollectiveMismatchError",
    "Group",
    "Rank",
    "RankFailedError",
    "Reduction",
    "Result",
    "World",
    "WorldBrokenError",
    "open_world",
]
