"""Functions of arrays by the Python array API standard: messages, functions, and the actor that serves them.

A function asks the device of its array. See `Device.ask` for cancellation and the errors that any operation
can end with.
"""

from ._functions import ArraysActor, sum  # noqa: A004  # the name of the standard

__all__ = ["ArraysActor", "sum"]
