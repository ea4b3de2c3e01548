"""The actor of convolutions, pooling and attention."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["DnnActor"]


class DnnActor(LibraryActor):
    """Serves convolutions, pooling and attention, on a stream of its own.

    CPU backend: NumPy's BLAS on windows of strides. CUDA: cuDNN, where it is installed and has kernels. All
    else are products of cuBLAS, and kernels of the backend's own.
    """

    library = "dnn"
