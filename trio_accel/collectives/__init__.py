"""Collectives: operations of many devices on arrays of which each has one, in worlds that heal."""

from ._communicators import VENDORS, CommunicatorActor, CommunicatorControlActor, Vendor
from ._errors import CollectiveMismatchError, RankFailedError, WorldBrokenError
from ._operations import CollectiveActor, Reduction
from ._ranks import Group, Rank, Result
from ._world import Transport, World, open_world

__all__ = [
    "VENDORS",
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
    "Vendor",
    "World",
    "WorldBrokenError",
    "open_world",
]
