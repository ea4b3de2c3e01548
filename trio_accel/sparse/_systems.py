"""Systems of equations with sparse matrices, and incomplete factors of them (D172)."""

from __future__ import annotations

from typing import Final

from ..backends.base import NATIVE, Ints, LibraryError, LinAlgError
from ..backends.base.contract.ops import Transpose
from ..devices import AccelRef, DeclaredSpec, Operand, composed, operation, operation_like
from ._formats import CsrMatrix, check_csr
from ._products import SparseActor

__all__ = [
    "Ic0",
    "Ilu0",
    "SpsolveTriangular",
    "ic0",
    "ilu0",
    "spsolve",
    "spsolve_triangular",
]

SQUARE = "matrix(n, n), matrix.indptr: index(n+1), matrix.indices: index(e), matrix.data(e)"
_NOT_FINITE, _NOT_HERMITIAN = -1, -2


def describe_failure(spec: DeclaredSpec, matrix_name: str, code: int, index: Ints) -> LibraryError:
    """Name the row, from 0, with a wrong diagonal element or pivot, given its number from 1."""
    function, row = spec.declaration.function, code - 1
    if code == _NOT_FINITE:
        trouble = "holds a NaN or an infinity"
    elif code == _NOT_HERMITIAN:
        trouble = "is not Hermitian"
    elif function in ("spsolve", "factor", "solve_factored"):
        trouble = "is singular"
    elif function == "ic0":
        trouble = f"has no incomplete Cholesky factor: its pivot of row {row} is missing or not positive"
    elif function == "ilu0":
        trouble = f"has no incomplete factors: its pivot of row {row} is missing or zero"
    else:
        trouble = f"is singular: its diagonal is missing or zero in row {row}"
    return LinAlgError(f"{function}: the matrix {trouble}", library="sparse", code=code)


@operation(f"{SQUARE}, b(n, c?) -> out(n, c?)", actor=SparseActor, dtypes=NATIVE, status=describe_failure)
async def spsolve_triangular(
    matrix: CsrMatrix, b: Operand, lower: bool = True, *, unit_diagonal: bool = False, trans: Transpose = "N"
) -> AccelRef:
    """Solve ``op(matrix) @ x = b`` with one triangle, as `scipy.sparse.linalg.spsolve_triangular`.

    SuperLU does it on the CPU. On CUDA cuSPARSE's SpSV and SpSM do, which look in each call for rows that can
    be solved at a time. Values of the other triangle are not looked at. Values of one place are added up.

    Args:
        matrix: Matrix of shape (n, n), of float32, float64, complex64 or complex128.
        b: Vector of shape (n,), or dense matrix of shape (n, k), of the same dtype.
        lower: Whether the lower triangle of `matrix` is read, instead of the upper one.
        unit_diagonal: Whether the diagonal counts as ones, and is not read.
        trans: ``"N"``: op(matrix) is that triangle; ``"T"``: its transpose; ``"C"``: its conjugate transpose.

    Returns:
        The solution, with the shape of `b`.

    Raises:
        LinAlgError: An element of the diagonal is not stored or zero; it names the row.
    """
    ...


@operation(f"{SQUARE}, b(n, c?) -> out(n, c?)", actor=SparseActor, dtypes=NATIVE, status=describe_failure)
async def spsolve(matrix: CsrMatrix, b: Operand) -> AccelRef:
    """Solve ``matrix @ x = b`` by LU factors, as `scipy.sparse.linalg.spsolve` (SuperLU, COLAMD).

    On CUDA cuDSS makes them. Its solution is checked against the equations. If it is less accurate than
    expected, factors are made again with pivots of whole columns, which takes longer. Factors are made and
    used in one operation, because they would be lost with a worker process. So pass all right-hand sides
    together, as the columns of `b`. A solution continues in a thread after it is cancelled.

    Args:
        matrix: Matrix of shape (n, n), of float32, float64, complex64 or complex128.
        b: Vector of shape (n,), or dense matrix of shape (n, k), of the same dtype.

    Returns:
        The solution, with the shape of `b`.

    Raises:
        LinAlgError: The matrix is singular, or holds a NaN or an infinity. On CUDA it also counts as singular
            where no solution is good enough.
        OutOfMemoryError: On CUDA the limit of the device leaves no room for factors.
        NotSupportedError: CUDA without cuDSS 0.8, or where columns do not ascend without cuda-cccl.
    """
    ...


@operation(f"{SQUARE} -> out(e)", actor=SparseActor, dtypes=NATIVE, status=describe_failure)
async def _ilu0(matrix: CsrMatrix) -> AccelRef:
    """Compute the values of incomplete LU factors."""
    ...


@operation_like(_ilu0, f"{SQUARE} -> out(e)", dtypes=NATIVE, status=describe_failure)
def _ic0() -> None:
    """Compute the values of an incomplete Cholesky factor."""


@composed
async def ilu0(matrix: CsrMatrix) -> CsrMatrix:
    """Compute incomplete LU factors with the structure of the matrix: ILU(0).

    That is algorithm 10.4 of Saad, Iterative Methods for Sparse Linear Systems, second edition. The CPU
    computes it row by row in Python: about a microsecond for each multiplication. CUDA does by cuSPARSE's
    ``csrilu02``, which looks for rows that can be eliminated at a time.

    Args:
        matrix: Matrix of shape (n, n), of float32, float64, complex64 or complex128; the columns of each row
            ascend, as of `csr` and `sum_duplicates`.

    Returns:
        Both factors in one matrix of the same structure, which shares the arrays of it: U in the upper
        triangle with the diagonal, and L below, without its diagonal of ones.

    Raises:
        LinAlgError: A pivot is not stored or zero; it names the row.
        LibraryError: Columns of a row do not ascend, or a wrong structure.
        NotSupportedError: The matrix has more than 2^31 - 1 rows or values on CUDA.
    """
    check_csr("ilu0", matrix)
    return CsrMatrix(matrix.shape, matrix.indptr, matrix.indices, await _ilu0(matrix))


@composed
async def ic0(matrix: CsrMatrix) -> CsrMatrix:
    """Compute an incomplete Cholesky factor with the structure of the matrix, IC(0), as `ilu0`.

    Args:
        matrix: Hermitian matrix, as for `ilu0`, with both triangles.

    Returns:
        A matrix of the same structure, which shares the arrays of it: L with the diagonal, and L^H above.

    Raises:
        LinAlgError: The matrix is not Hermitian, or a pivot is not stored or not positive, which happens for
            positive definite matrices too; it names the row.
        LibraryError, NotSupportedError: As of `ilu0`.
    """
    check_csr("ic0", matrix)
    return CsrMatrix(matrix.shape, matrix.indptr, matrix.indices, await _ic0(matrix))


Ic0: Final = _ic0.message
Ilu0: Final = _ilu0.message
SpsolveTriangular: Final = spsolve_triangular.message
