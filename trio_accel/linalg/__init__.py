"""Dense linear algebra on a device: messages, functions, and the actors that serve them.

A function asks the device of its first operand that is on one. Other operands may be NumPy arrays, which are
copied there. See `Device.ask` for cancellation and the errors that any operation can end with. If one fails,
the arrays that it was to change are damaged, and their use is refused.

What all refuse, before anything is launched:

* `TypeError`: no operand is on a device, dtypes differ, or a factor is complex and the arrays are real.
* `ValueError`: shapes that do not fit, unknown letters, factors outside the range of the dtype; an array to
  write to that has another shape or dtype than the result, or shares memory with an operand, unless that is
  allowed.
* `numpy.linalg.LinAlgError`, which is a `ValueError`: what a solver takes is no stack of matrices, or not of
  square ones where they have to be.
* `NotSupportedError`: the backend does not have it, or not for this dtype; of solvers, a `TypeError`.
"""

# fmt: off
# isort: off
from ._actor import BlasActor, SolverActor
from ._factors import Cholesky, Det, Lu, Qr, Slogdet, cholesky, det, lu, qr, slogdet
from ._least_squares import lstsq
from ._matrices import Symm, Syr2k, Syrk, Trmm, Trsm, symm, syr2k, syrk, trmm, trsm
from ._matrix_vector import Gemv, Ger, Symv, Syr, Syr2, Trmv, Trsv, gemv, ger, symv, syr, syr2, trmv, trsv
from ._products import Gemm, Matmul, gemm, matmul
from ._results import EighResult, EigResult, LstsqResult, LUResult, QRResult, SlogdetResult, SVDResult
from ._solve import (
    CheckDiagonal, Inv, LuSolve, Solve, SolveTriangular, inv, lu_solve, solve, solve_triangular,
)
from ._spectra import Eig, Eigh, Eigvals, Eigvalsh, Svd, eig, eigh, eigvals, eigvalsh, svd, svdvals
from ._vectors import (
    Asum, Axpy, Dot, Iamax, Nrm2, Rot, Scal, Swap, asum, axpy, dot, iamax, nrm2, rot, scal, swap,
)

__all__ = [
    "Asum", "Axpy", "BlasActor", "CheckDiagonal", "Cholesky", "Det", "Dot", "Eig", "EigResult", "Eigh",
    "EighResult", "Eigvals", "Eigvalsh", "Gemm", "Gemv", "Ger", "Iamax", "Inv", "LUResult", "LstsqResult",
    "Lu", "LuSolve", "Matmul", "Nrm2", "QRResult", "Qr", "Rot", "SVDResult", "Scal", "Slogdet",
    "SlogdetResult", "Solve", "SolveTriangular", "SolverActor", "Svd", "Swap", "Symm", "Symv", "Syr",
    "Syr2", "Syr2k", "Syrk", "Trmm", "Trmv", "Trsm", "Trsv", "asum", "axpy", "cholesky", "det", "dot",
    "eig", "eigh", "eigvals", "eigvalsh", "gemm", "gemv", "ger", "iamax", "inv", "lstsq", "lu", "lu_solve",
    "matmul", "nrm2", "qr", "rot", "scal", "slogdet", "solve", "solve_triangular", "svd", "svdvals", "swap",
    "symm", "symv", "syr", "syr2", "syr2k", "syrk", "trmm", "trmv", "trsm", "trsv",
]
