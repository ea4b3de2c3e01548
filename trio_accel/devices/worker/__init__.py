"""Contexts in processes of their own: starting them, speaking to them, and coming back from their death."""

from .front._dispatch import WorkerDispatch
from .front._left_memory import INTACT, LeftMemory, free_left_memory

__all__ = ["INTACT", "LeftMemory", "WorkerDispatch", "free_left_memory"]
