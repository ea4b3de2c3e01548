"""Collectives: operations of many devices on arrays of which each has one, in worlds that heal."""

from ._communicators import CommunicatorActor, CommunicatorControlActor
from ._errors import CollectiveMismatchError, RankFailedError, WorldBrokenError
from ._operations import CollectiveActor, Reduction
from ._ranks import Group, Rank, Result
from ._world import Transport, World, open_world

__all__ = [
    "CollectiveActor",
    "CollectiveMismatchError",
    "CommunicatorActor",
    "CommunicatorControlActor",
    "Group",
    "Rank",
    "RankFailedError",
    "Reduction",
    "Result",
    "Transport",
    "World",
    "WorldBrokenError",
    "open_world",
]
