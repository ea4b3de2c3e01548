"""Contexts in processes of their own: starting them, speaking to them, and coming back from their death."""

from ..wire._channel import spin_together
from ._calls import Borrowed
from ._chunks import INTACT, LeftMemory, Stay, free_left_memory
from ._worker_dispatch import WorkerDispatch

__all__ = [
    "INTACT",
    "Borrowed",
    "LeftMemory",
    "Stay",
    "WorkerDispatch",
    "free_left_memory",
    "spin_together",
]
