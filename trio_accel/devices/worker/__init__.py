"""Contexts in processes of their own: starting them, speaking to them, and coming back from their death."""

from ._dispatch import WorkerDispatch

__all__ = ["WorkerDispatch"]
