"""The actor of convolutions, pooling and attention."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["DnnActor"]


class DnnActor(LibraryActor):
    """Serves convolutions, pooling and attention, on a stream of its own.

    CPU backend: NumPy's BLAS on windows of strides. CUDA has no kernels for it yet: it raises
    `NotSupportedError`.
    """

    library = "dnn"
