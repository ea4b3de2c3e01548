"""Contexts in processes of their own: starting them, speaking to them, and coming back from their death."""

from .front._chunks import INTACT, LeftMemory, free_left_memory
from .front._dispatch import WorkerDispatch
from .front._request import Loan

__all__ = ["INTACT", "LeftMemory", "Loan", "WorkerDispatch", "free_left_memory"]
