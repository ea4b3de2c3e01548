"""The actor that serves dense linear algebra."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["BlasActor"]


class BlasActor(LibraryActor):
    """Serves BLAS operations, on a stream of its own.

    CPU backend: NumPy's BLAS and SciPy's BLAS pointers. CUDA: cuBLAS.
    """

    library = "blas"
