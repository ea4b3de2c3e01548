"""What a service builds around its devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Call`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from ._call import Call, Model, Servant, as_callable

__all__ = ["Call", "Model", "Servant", "as_callable"]
