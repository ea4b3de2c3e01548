"""The actors that serve dense linear algebra, and what the messages to each have in common."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from ..devices import LibraryActor, Operation

__all__ = ["BlasActor", "BlasOperation", "SolverActor", "SolverOperation"]

ReplyT = TypeVar("ReplyT")


class BlasActor(LibraryActor):
    """Serves BLAS operations, on a stream of its own.

    CPU backend: NumPy's BLAS and SciPy's BLAS pointers. CUDA: cuBLAS.
    """

    library = "blas"


class SolverActor(LibraryActor):
    """Serves factorizations, systems of equations and eigenvalues, on a stream of its own.

    CPU backend: SciPy's LAPACK pointers. CUDA: cuSOLVER.
    """

    library = "solver"


class BlasOperation(Operation[BlasActor, ReplyT]):
    """A message to `BlasActor`."""

    __slots__ = ()
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"


class SolverOperation(Operation[SolverActor, ReplyT]):
    """A message to `SolverActor`."""

    __slots__ = ()
    library: ClassVar[str] = "trio_accel.linalg:SolverActor"
