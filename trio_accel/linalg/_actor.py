"""The actors that serve dense linear algebra."""

from __future__ import annotations

import functools
from typing import ClassVar

from ..backends.base import NATIVE, DType
from ..devices import LibraryActor, operation

__all__ = ["BlasActor", "BlasLtActor", "SolverActor"]


class BlasActor(LibraryActor):
    """Serves BLAS operations, on a stream of its own.

    CPU backend: NumPy's BLAS and SciPy's BLAS pointers. CUDA: cuBLAS.
    """

    library = "blas"


class BlasLtActor(LibraryActor):
    """Serves fused products, on a stream of its own.

    CPU backend: NumPy's BLAS. CUDA: cuBLASLt.
    """

    library = "blaslt"


class SolverActor(LibraryActor):
    """Serves factorizations, systems of equations and eigenvalues, on a stream of its own.

    CPU backend: SciPy's LAPACK pointers. CUDA: cuSOLVER.
    """

    library = "solver"
    dtypes: ClassVar[tuple[DType, ...]] = NATIVE


solving = functools.partial(operation, actor=SolverActor)
"""Declares an operation of solvers."""
