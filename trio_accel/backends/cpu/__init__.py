"""The CPU backend: real computation with NumPy and SciPy, on streams, asynchronously."""

from ._backend import CpuBackend

__all__ = ["CpuBackend"]
