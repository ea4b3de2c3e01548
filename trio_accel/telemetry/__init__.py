"""What an operator sees of a running program: metrics, traces, logs."""

from ._traces import trace

__all__ = ["trace"]
