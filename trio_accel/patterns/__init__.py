"""What a service builds around its devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Call`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from ._call import Call, GetStatistics, Model, Servant, as_callable
from ._cascade import (
    Cascade,
    CascadeAnswer,
    CascadeStatistics,
    NoAnswerError,
    Passed,
    Stage,
    StageStatistics,
)
from ._outputs import ModelOutputError
from ._tasks import TaskServant

__all__ = [
    "Call",
    "Cascade",
    "CascadeAnswer",
    "CascadeStatistics",
    "GetStatistics",
    "Model",
    "ModelOutputError",
    "NoAnswerError",
    "Passed",
    "Servant",
    "Stage",
    "StageStatistics",
    "TaskServant",
    "as_callable",
]
