"""The actor that serves sparse linear algebra."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["SparseActor"]


class SparseActor(LibraryActor):
    """Serves products with sparse matrices, on a stream of its own.

    CPU backend: SciPy. CUDA: cuSPARSE.
    """

    library = "sparse"
