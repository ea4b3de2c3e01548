"""The actor of random numbers."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["RngActor"]


class RngActor(LibraryActor):
    """Serves random numbers, on a stream of its own.

    It has no state that a restart could lose or repeat: every message says which part of which
    sequence it draws. CPU backend: NumPy. CUDA: kernels of the backend's own.
    """

    library = "random"
