"""Products with matrices of compressed sparse rows, and the actor that serves sparse matrices."""

from __future__ import annotations

from typing import Final

from ..backends.base.contract.ops import Transpose
from ..backends.base.kit.checks import NATIVE
from ..devices import AccelRef, LibraryActor, Operand, operation
from ._formats import CsrMatrix

__all__ = ["CheckStructure", "Sddmm", "SparseActor", "Spmm", "Spmv", "ToDense", "sddmm"]


class SparseActor(LibraryActor):
    """Serves operations with sparse matrices, on a stream of its own.

    CPU backend: SciPy. CUDA: cuSPARSE.
    """

    library = "sparse"


# Row pointers begin at 0, do not decrease, and end at the number of stored elements; for spmv and to_dense
# they may end before. Where they do not, or a column is outside, the operation fails before memory is read. A
# backend may look at a structure once and believe it from then on: a program that changes the arrays keeps
# them right.
STRUCTURE = "matrix(m, n), matrix.indptr: index(m+1), matrix.indices: index(e)"
_MATRIX = f"{STRUCTURE}, matrix.data(e)"
_TRANSPOSED = f"{_MATRIX}, b(m, c) -> out(n, c)"


@operation(f"{_MATRIX}, x(n) -> out(m)", actor=SparseActor)
async def _spmv(matrix: CsrMatrix, x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Product of a sparse matrix and a vector (cuSPARSE ``SpMV``).

    Args:
        matrix: Matrix of shape (m, n).
        x: Vector of shape (n,) and the matrix's dtype.
        out: Vector of shape (m,) to write to; by default a new one.

    Returns:
        The product, of shape (m,).
    """
    ...


@operation(
    {"N": f"{_MATRIX}, b(n, c) -> out(m, c)", "T": _TRANSPOSED, "C": _TRANSPOSED},
    by="transpose",
    actor=SparseActor,
)
async def _spmm(
    matrix: CsrMatrix,
    b: Operand,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    out: AccelRef | None = None,
    transpose: Transpose = "N",
) -> AccelRef:
    """Product with a dense matrix: ``alpha * op(matrix) @ b + beta * out`` (cuSPARSE ``SpMM``).

    Args:
        matrix: Matrix with op(matrix) of shape (m, k).
        b: Dense matrix of shape (k, n) and the sparse matrix's dtype.
        alpha: Factor of the product; real unless the matrices are complex.
        beta: Factor of `out`; where it is 0, `out` is only written, whatever it holds.
        out: Dense matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        transpose: ``"N"``: op(matrix) is `matrix`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.

    Returns:
        The reference `out`, or a new one.
    """
    ...


@operation(f"{STRUCTURE}, a(m, k), b(k, n) -> out(e)", actor=SparseActor)
async def sddmm(matrix: CsrMatrix, a: Operand, b: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Elements of a product of dense matrices where a sparse one has stored elements (cuSPARSE ``SDDMM``).

    The product itself is not made. With the result, ``CsrMatrix(matrix.shape, matrix.indptr, matrix.indices,
    result)`` is a sparse matrix of the same structure.

    Args:
        matrix: Matrix of shape (m, n). Its structure counts, its values do not.
        a: Dense matrix of shape (m, k) and the sparse matrix's dtype.
        b: Dense matrix of shape (k, n) and the same dtype.
        out: Vector of shape (nnz,) to write to; by default a new one.

    Returns:
        The elements of ``a @ b``, in the order of `CsrMatrix.data`.
    """
    ...


@operation(f"{_MATRIX} -> out(m, n)", actor=SparseActor)
async def _to_dense(matrix: CsrMatrix, *, out: AccelRef | None = None) -> AccelRef:
    """Make the dense matrix of a sparse one, as SciPy's ``toarray``; elements stored twice are added up.

    Args:
        matrix: Matrix of shape (m, n).
        out: Matrix of this shape and dtype to write to; by default a new one.

    Returns:
        The dense matrix.
    """
    ...


@operation(f"{STRUCTURE}, matrix.data(e) -> ", actor=SparseActor, dtypes=NATIVE)
async def _check_structure(matrix: CsrMatrix) -> None:
    """Fail with `LibraryError` if a structure is wrong; functions made of expressions ask it first."""
    ...


declared_spmm, declared_spmv, declared_to_dense = _spmm, _spmv, _to_dense
CheckStructure: Final = _check_structure.message
Sddmm: Final = sddmm.message
Spmm: Final = _spmm.message
Spmv: Final = _spmv.message
ToDense: Final = _to_dense.message
