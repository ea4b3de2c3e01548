"""The actor for functions of arrays."""

from __future__ import annotations

from ..devices import LibraryActor


class ArraysActor(LibraryActor):
    """Serves functions of arrays, on a stream of its own.

    CPU backend: NumPy. CUDA: kernels made of expressions.
    """

    library = "arrays"
