"""LU factors that a device keeps: one factorization for many solutions (D172)."""

from __future__ import annotations

import itertools
from typing import Final

import attrs

from ..backends.base import NATIVE, DType
from ..backends.base.contract.ops import Transpose
from ..devices import AccelRef, Device, Operand, composed, operation
from ._formats import CsrMatrix, check_csr
from ._products import SparseActor
from ._structures import sum_duplicates
from ._systems import SQUARE, describe_failure

__all__ = ["Factor", "Factors", "SolveFactored", "factor"]

_numbers = itertools.count(1)


@operation(f"{SQUARE} -> ", actor=SparseActor, dtypes=NATIVE, status=describe_failure)
async def _factor(matrix: CsrMatrix, number: int) -> None:
    """Make numbered factors, and keep them until the values of the matrix are released."""
    ...


@operation(f"{SQUARE}, b(n, c?) -> out(n, c?)", actor=SparseActor, dtypes=NATIVE, status=describe_failure)
async def _solve_factored(
    matrix: CsrMatrix, b: Operand, number: int, trans: Transpose = "N", *, out: AccelRef | None = None
) -> AccelRef:
    """Solve by numbered factors; a worker without them makes them first."""
    ...


@attrs.frozen(eq=False, repr=False)
class Factors:
    """LU factors of a sparse matrix, in the memory of a device. Made by `factor`.

    The factors are freed by `release`, or with the last reference to this object. A new worker process makes
    them again at the first solution, because arrays survive the loss of a worker and factors do not. If the
    arrays are lost also, solutions raise the error of lost arrays.
    """

    _matrix: CsrMatrix
    _number: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self._matrix.shape

    @property
    def dtype(self) -> DType:
        """Element type of the matrix, of right-hand sides and of solutions."""
        return self._matrix.dtype

    @property
    def device(self) -> Device:
        """The device of the factors."""
        return self._matrix.device

    def __repr__(self) -> str:
        return f"<Factors {self.dtype} {self.shape}, on {self.device.name}>"

    async def solve(self, b: Operand, *, trans: Transpose = "N", out: AccelRef | None = None) -> AccelRef:
        """Solve ``op(matrix) @ x = b``, as `scipy.sparse.linalg.SuperLU.solve`.

        A solution continues in a thread after it is cancelled.

        Args:
            b: Vector of shape (n,), or dense matrix of shape (n, k), with the dtype of the factors.
            trans: ``"N"``: op(matrix) is the matrix; ``"T"``: its transpose; ``"C"``: the conjugate of that.
            out: Array with the shape of `b` for the solution; by default a new one.

        Returns:
            The reference `out`, or a new one, with the shape of `b`.

        Raises:
            TypeError: `b` or `out` has another dtype.
            ValueError: A shape does not fit, `trans` is another letter, or `out` shares memory with `b`.
            LinAlgError: On CUDA, no solution is good enough: the matrix counts as singular.
            OutOfMemoryError: On CUDA the limit of the device leaves no room to make the factors again.
            NotSupportedError: On CUDA, for ``"T"`` and ``"C"``.
        """
        return await _solve_factored(self._matrix, b, self._number, trans, out=out)

    def release(self) -> None:
        """Free the factors, and the copy of the matrix; solutions in flight are finished first."""
        self._matrix.release()


@composed
async def factor(matrix: CsrMatrix) -> Factors:
    """Make LU factors of a matrix once, for many solutions, as `scipy.sparse.linalg.splu`.

    The matrix is copied first, so later changes of its arrays do not change the factors. SuperLU makes them
    on the CPU, with the order MMD_AT_PLUS_A for a symmetric structure, and cuDSS on CUDA; see `spsolve`. A
    factorization continues in a thread after it is cancelled.

    Args:
        matrix: Matrix of shape (n, n), of float32, float64, complex64 or complex128.

    Returns:
        The factors; `Factors.solve` takes right-hand sides.

    Raises:
        LinAlgError: The matrix is singular, or holds a NaN or an infinity.
        TypeError: The matrix has another format or dtype.
        ValueError: It is not square.
        LibraryError: A wrong structure.
        OutOfMemoryError: On CUDA the limit of the device leaves no room for factors.
        NotSupportedError: CUDA without cuDSS 0.8 or cuda-cccl.
    """
    check_csr("factor", matrix)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"sparse.factor: matrix must be square, got shape {matrix.shape}")
    copied, number = await sum_duplicates(matrix), next(_numbers)
    await _factor(copied, number)
    return Factors(copied, number)


Factor: Final = _factor.message
SolveFactored: Final = _solve_factored.message
