"""Dense linear algebra on a device: messages, functions, and the actors that serve them."""

from ._actor import BlasActor, SolverActor
from ._factors import Cholesky, Lu, Qr, cholesky, lu, qr
from ._gemm import Gemm, gemm
from ._matmul import Matmul, matmul
from ._results import EighResult, LUResult, QRResult, SVDResult
from ._solve import LuSolve, Solve, lu_solve, solve
from ._spectra import Eigh, Eigvalsh, Svd, eigh, eigvalsh, svd
from ._vectors import Axpy, Dot, Nrm2, Scal, axpy, dot, nrm2, scal

__all__ = [
    "Axpy",
    "BlasActor",
    "Cholesky",
    "Dot",
    "Eigh",
    "EighResult",
    "Eigvalsh",
    "Gemm",
    "LUResult",
    "Lu",
    "LuSolve",
    "Matmul",
    "Nrm2",
    "QRResult",
    "Qr",
    "SVDResult",
    "Scal",
    "Solve",
    "SolverActor",
    "Svd",
    "axpy",
    "cholesky",
    "dot",
    "eigh",
    "eigvalsh",
    "gemm",
    "lu",
    "lu_solve",
    "matmul",
    "nrm2",
    "qr",
    "scal",
    "solve",
    "svd",
]
