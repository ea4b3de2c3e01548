"""Chains of operations that are recorded once and launched as one."""

from ._actor import GraphsActor
from ._graph import Graph, Replay, capture

__all__ = ["Graph", "GraphsActor", "Replay", "capture"]
