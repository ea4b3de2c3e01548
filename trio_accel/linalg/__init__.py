"""Dense linear algebra on a device: messages, functions, and the actor that serves them."""

from ._actor import BlasActor
from ._gemm import Gemm, gemm
from ._matmul import Matmul, matmul
from ._vectors import Axpy, Dot, Nrm2, Scal, axpy, dot, nrm2, scal

__all__ = [
    "Axpy",
    "BlasActor",
    "Dot",
    "Gemm",
    "Matmul",
    "Nrm2",
    "Scal",
    "axpy",
    "dot",
    "gemm",
    "matmul",
    "nrm2",
    "scal",
]
