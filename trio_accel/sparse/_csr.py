"""Matrices of compressed sparse rows, operations with them, and the actor that serves these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio

from ..actors import named_arguments
from ..backends.base import DType
from ..backends.base.checks import NATIVE
from ..backends.base.ops import Transpose
from ..devices import AccelRef, Device, LibraryActor, Operand, check_device, operation

if TYPE_CHECKING:
    import scipy.sparse

__all__ = [
    "CsrMatrix", "Sddmm", "SparseActor", "Spmm", "Spmv", "ToDense", "csr", "sddmm", "spmm", "spmv",
    "to_dense",
]  # fmt: skip


@attrs.frozen(eq=False, repr=False)
class CsrMatrix:
    """A sparse matrix on a device, as compressed sparse rows. Made by `csr`.

    Row i has its values at ``data[indptr[i]:indptr[i + 1]]``, in the columns that `indices` names.
    The structure was checked when it was made. A program that changes the arrays in place keeps it right.

    Attributes:
        shape: Rows and columns.
        indptr: int32 or int64 of shape (rows + 1,).
        indices: Same dtype, shape (nnz,): columns.
        data: Shape (nnz,): values.
    """

    operand_fields: ClassVar[tuple[str, ...]] = ("indptr", "indices", "data")
    made_by: ClassVar[str] = "sparse.csr"

    shape: tuple[int, int]
    indptr: AccelRef
    indices: AccelRef
    data: AccelRef

    def __repr__(self) -> str:
        return f"<CsrMatrix {self.dtype} {self.shape}, {self.nnz} stored, on {self.device.name}>"

    @property
    def device(self) -> Device:
        """The device whose memory holds it."""
        return self.data.device

    @property
    def dtype(self) -> DType:
        """Element type of the values."""
        return self.data.dtype

    @property
    def nnz(self) -> int:
        """Stored values, explicit zeros included."""
        return self.data.size

    def release(self) -> None:
        """Give the memory of all three arrays back."""
        for ref in (self.indptr, self.indices, self.data):
            ref.release()


@named_arguments
async def csr(device: Device, matrix: scipy.sparse.spmatrix | scipy.sparse.sparray) -> CsrMatrix:
    """Copy a SciPy sparse matrix of any format to a device, as compressed sparse rows.

    Entries that stand more than once are added up, and columns sorted, as SciPy's ``tocsr`` does;
    the matrix itself is not changed.

    Args:
        device: Where to.
        matrix: Matrix of float32, float64, complex64 or complex128.

    Raises:
        TypeError: Not a SciPy sparse matrix, or of another dtype.
        ValueError: Not two axes, or an inconsistent structure.
        OutOfMemoryError: There is not enough device memory.
    """
    check_device("csr", device)
    indptr, indices, data, shape = await trio.to_thread.run_sync(_arrays, matrix)
    return CsrMatrix(shape, await device.put(indptr), await device.put(indices), await device.put(data))


def _arrays(matrix: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], tuple[int, int]]:
    """Bring a matrix into canonical form. Runs in a thread: it may be large, and loads SciPy."""
    import scipy.sparse

    # SciPy's own annotations do not follow a matrix of any format and dtype through this.
    issparse = cast("Callable[[object], bool]", scipy.sparse.issparse)
    csr_array = cast("Callable[..., Any]", scipy.sparse.csr_array)
    if not issparse(matrix):
        raise TypeError(
            f"csr: matrix must be a SciPy sparse matrix, got {type(matrix).__name__}; "
            "make one with scipy.sparse.csr_array(matrix)"
        )
    if matrix.ndim != 2:
        raise ValueError(f"csr: matrix must have two axes, got shape {matrix.shape}")
    if matrix.dtype not in NATIVE:
        allowed = ", ".join(str(dtype) for dtype in NATIVE)
        raise TypeError(f"csr: matrix has dtype {matrix.dtype}; allowed: {allowed} (use matrix.astype)")
    try:
        if matrix.format in ("csr", "csc", "bsr"):
            # SciPy's conversions trust the indices. Another object of the same arrays, because
            # the check may change what it looks at.
            matrix = type(matrix)((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
            matrix.check_format(full_check=True)
        elif matrix.format == "coo":
            matrix = type(matrix)((matrix.data, matrix.coords), shape=matrix.shape)
        canonical = csr_array(matrix, copy=matrix.format == "csr")
    except ValueError as error:
        raise ValueError(f"csr: matrix is inconsistent: {error}") from error
    canonical.sum_duplicates()
    indptr, indices = canonical.indptr, canonical.indices
    if indptr.dtype != indices.dtype:
        indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    rows, columns = canonical.shape
    return indptr, indices, canonical.data, (int(rows), int(columns))


class SparseActor(LibraryActor):
    """Serves operations with sparse matrices, on a stream of its own.

    CPU backend: SciPy. CUDA: cuSPARSE.
    """

    library = "sparse"


# Row pointers begin at 0, do not decrease, and end at the number of stored elements; for spmv and to_dense
# they may end before. Where they do not, or a column is outside, the operation fails before memory is read. A
# backend may look at a structure once and believe it from then on: a program that changes the arrays keeps
# them right.
_STRUCTURE = "matrix(m, n), matrix.indptr: index(m+1), matrix.indices: index(e)"
_MATRIX = f"{_STRUCTURE}, matrix.data(e)"
_TRANSPOSED = f"{_MATRIX}, b(m, c) -> out(n, c)"


@operation(f"{_MATRIX}, x(n) -> out(m)", actor=SparseActor)
async def spmv(matrix: CsrMatrix, x: Operand, *, out: AccelRef | None = None) -> AccelRef:
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
async def spmm(
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


@operation(f"{_STRUCTURE}, a(m, k), b(k, n) -> out(e)", actor=SparseActor)
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
async def to_dense(matrix: CsrMatrix, *, out: AccelRef | None = None) -> AccelRef:
    """Make the dense matrix of a sparse one, as SciPy's ``toarray``; elements stored twice are added up.

    Args:
        matrix: Matrix of shape (m, n).
        out: Matrix of this shape and dtype to write to; by default a new one.

    Returns:
        The dense matrix.
    """
    ...


Sddmm: Final = sddmm.message
Spmm: Final = spmm.message
Spmv: Final = spmv.message
ToDense: Final = to_dense.message
