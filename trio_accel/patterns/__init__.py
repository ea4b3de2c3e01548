"""What a service builds around its devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Call`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from ._call import Call, GetStatistics, Model, Servant, as_callable
from ._tasks import TaskServant

__all__ = ["Call", "GetStatistics", "Model", "Servant", "TaskServant", "as_callable"]
