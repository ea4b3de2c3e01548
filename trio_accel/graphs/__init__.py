"""Chains of operations that are recorded once and launched as one, also on a condition."""

from ._conditions import Body, If, Switch, While, if_, switch, while_
from ._graph import Graph, GraphsActor, Replay, capture

__all__ = [
    "Body",
    "Graph",
    "GraphsActor",
    "If",
    "Replay",
    "Switch",
    "While",
    "capture",
    "if_",
    "switch",
    "while_",
]
