"""Contexts in processes of their own: starting them, speaking to them, and coming back from their death."""

from .front._calls import Borrowed
from .front._chunks import INTACT, LeftMemory, Stay, free_left_memory
from .front._dispatch import WorkerDispatch
from .transport._channel import spin_together

__all__ = [
    "INTACT",
    "Borrowed",
    "LeftMemory",
    "Stay",
    "WorkerDispatch",
    "free_left_memory",
    "spin_together",
]
