"""Specifications of the dense solvers.

All take stacks of matrices: the leading axes of an array are its stack. Arrays that are written are
C-contiguous and overlap no other. Elements are float32, float64, complex64 or complex128, of one dtype in
all arrays, but for those that are real (``s``, ``w``) and the pivots, which are int32.

``info`` has one word for each matrix of the stack of the first array that is read, in C order: 0 where the
operation succeeded. The backend writes all of them; before, they may hold anything. A word that is not 0
fails the operation as a whole, with the matrix named in the error.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ..dtypes import DType
from ..errors import LibraryError, LinAlgError
from ._array import ArraySpec
from ._roles import StatusArray, exact, reads, status, writes
from ._spec import OperationSpec, specification

__all__ = [
    "CholeskySpec",
    "EighSpec",
    "LuSolveSpec",
    "LuSpec",
    "QrSpec",
    "SolveSpec",
    "SvdSpec",
    "Triangle",
    "real_of",
]

Triangle = Literal["L", "U"]
"""The lower or the upper triangle, with the diagonal."""

_Shape = tuple[int, ...]
_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}


def real_of(dtype: DType) -> DType:
    """The dtype of absolute values."""
    return _REAL.get(dtype, dtype)


@specification
class CholeskySpec(OperationSpec):
    """The triangular factor of Hermitian positive definite matrices (LAPACK ``potrf``).

    Of ``a`` only one triangle is read: the lower one, or the upper one with ``upper``. The diagonal counts as
    real. ``out`` is ``L`` of ``a = L @ L^H``, or with ``upper`` ``U`` of ``a = U^H @ U``; its diagonal is
    positive, and its other triangle is zero.

    ``info``: the order, from 1, of the first leading minor that is not positive, or that holds a NaN or an
    infinity.
    """

    upper: bool = exact()
    a: ArraySpec = reads()
    out: ArraySpec = writes()
    info: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, n, _ = _matrices(name, self, self.a, is_square=True)
        _expect(name, self, self.a.dtype, out=(*stack, n, n))

    def check_status(self) -> None:
        """See `OperationSpec.check_status`."""
        _judge(self, "cholesky", "is not positive definite: its leading minor of order {} is not positive")


@specification
class LuSpec(OperationSpec):
    """``P @ L @ U`` of matrices of shape (m, n), with k = min(m, n) (LAPACK ``getrf``).

    ``lu`` holds ``U`` in its upper triangle and ``L`` below the diagonal. The diagonal of ``L`` is one, and
    not stored. ``piv`` has k int32 that count from 0: row i was exchanged with row ``piv[i]``, i = 0 first.

    ``info``: the number, from 1, of the first pivot that is exactly zero.
    """

    a: ArraySpec = reads()
    lu: ArraySpec = writes()
    piv: ArraySpec = writes()
    info: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, m, n = _matrices(name, self, self.a)
        _expect(name, self, self.a.dtype, lu=(*stack, m, n))
        _expect(name, self, DType.int32, piv=(*stack, min(m, n)))

    def check_status(self) -> None:
        """See `OperationSpec.check_status`."""
        _judge(self, "lu", "is singular: its pivot {} is zero")


@specification
class LuSolveSpec(OperationSpec):
    """``op(A) @ out = b`` for matrices that are given as `LuSpec` makes them (LAPACK ``getrs``).

    ``trans`` is op: ``"N"``, ``"T"`` or ``"C"``. ``lu`` has shape (..., n, n), ``piv`` (..., n), ``b``
    (..., n, k); the stacks of ``lu`` and ``b`` broadcast against each other, to that of ``out``. A zero on
    the diagonal of ``U`` makes infinities and NaN.

    ``info``: the number, from 1, of the first pivot that is no row. Such a one must not be followed.
    """

    trans: Literal["N", "T", "C"] = exact()
    lu: ArraySpec = reads()
    piv: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()
    info: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, n, _ = _matrices(name, self, self.lu, is_square=True)
        if self.trans not in ("N", "T", "C"):
            raise ValueError(f"{name}: LuSolveSpec.trans must be 'N', 'T' or 'C', got {self.trans!r}")
        _expect(name, self, DType.int32, piv=(*stack, n))
        _check_sides(name, self, stack, n, self.lu.dtype, self.b)

    def check_status(self) -> None:
        """See `OperationSpec.check_status`."""
        failed = np.flatnonzero(self.info)
        if failed.size:
            where = _place(self.lu.shape[:-2], int(failed[0]))
            raise LibraryError(
                f"lu_solve: pivot {self.info[failed[0]]} of {where[0]} is no row; piv is what lu() returns, "
                "and counts from 0",
                library="solver",
                code="invalid_value",
            )


@specification
class SolveSpec(OperationSpec):
    """``a @ out = b`` (LAPACK ``gesv``).

    ``a`` has shape (..., n, n), ``b`` (..., n, k); their stacks broadcast against each other, to that of
    ``out``. Each matrix of ``a`` is factored once.

    ``info``: the number, from 1, of the first pivot of LU with partial pivoting that is exactly zero.
    """

    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()
    info: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, n, _ = _matrices(name, self, self.a, is_square=True)
        _check_sides(name, self, stack, n, self.a.dtype, self.b)

    def check_status(self) -> None:
        """See `OperationSpec.check_status`."""
        _judge(self, "solve", "is singular: its pivot {} is zero")


@specification
class QrSpec(OperationSpec):
    """``q @ r`` of matrices of shape (m, n), with k = min(m, n) (LAPACK ``geqrf`` and ``orgqr``, ``ungqr``).

    ``q`` has shape (m, k) or (m, m) and orthonormal columns; ``r`` has as many rows as ``q`` columns, n
    columns, and zeros below its diagonal. Without ``q``, ``r`` has k rows. It cannot fail: NaN stays NaN.
    """

    a: ArraySpec = reads()
    q: ArraySpec | None = writes(optional=True)
    r: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, m, n = _matrices(name, self, self.a)
        is_complete = self.q is not None and self.q.shape[-1:] == (m,)
        k = m if is_complete else min(m, n)
        _expect(name, self, self.a.dtype, q=(*stack, m, k), r=(*stack, k, n))


@specification
class SvdSpec(OperationSpec):
    """``(u * s) @ vh`` of matrices of shape (m, n), with k = min(m, n) (LAPACK ``gesdd``).

    ``u`` has shape (m, k) and ``vh`` (k, n), or both are square; their columns and rows are orthonormal.
    ``s`` has k real numbers that do not increase. Without ``u`` there is no ``vh`` either.

    ``info``: not 0 where the matrix holds a NaN or an infinity (-1), or the iteration did not converge.
    """

    a: ArraySpec = reads()
    u: ArraySpec | None = writes(optional=True)
    s: ArraySpec = writes()
    vh: ArraySpec | None = writes(optional=True)
    info: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, m, n = _matrices(name, self, self.a)
        u, vh, k = self.u, self.vh, min(m, n)
        if (u is None) is not (vh is None):
            raise ValueError(f"{name}: SvdSpec takes both u and vh, or none")
        is_full = u is not None and vh is not None and (u.shape[-1:], vh.shape[-2:-1]) == ((m,), (n,))
        columns, rows = (m, n) if is_full else (k, k)
        _expect(name, self, self.a.dtype, u=(*stack, m, columns), vh=(*stack, rows, n))
        _expect(name, self, real_of(self.a.dtype), s=(*stack, k))

    def check_status(self) -> None:
        """See `OperationSpec.check_status`."""
        _judge(self, "svd", _NOT_CONVERGED)


@specification
class EighSpec(OperationSpec):
    """Eigenvalues, and eigenvectors if wanted, of Hermitian matrices (LAPACK ``syevd``, ``heevd``).

    Of ``a`` only the triangle ``uplo`` is read, and its diagonal counts as real. ``w`` has n real numbers
    that do not decrease; column ``v[:, i]`` has length 1 and belongs to ``w[i]``.

    ``info``: not 0 where that triangle holds a NaN or an infinity (-1), or the iteration did not converge.
    """

    uplo: Triangle = exact()
    a: ArraySpec = reads()
    w: ArraySpec = writes()
    v: ArraySpec | None = writes(optional=True)
    info: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        stack, n, _ = _matrices(name, self, self.a, is_square=True)
        if self.uplo not in ("L", "U"):
            raise ValueError(f"{name}: EighSpec.uplo must be 'L' or 'U', got {self.uplo!r}")
        _expect(name, self, self.a.dtype, v=(*stack, n, n))
        _expect(name, self, real_of(self.a.dtype), w=(*stack, n))

    def check_status(self) -> None:
        """See `OperationSpec.check_status`."""
        _judge(self, "eigh" if self.v is not None else "eigvalsh", _NOT_CONVERGED)


_NOT_FINITE = -1
_NOT_CONVERGED = "has no solution by iteration: it did not converge (status {})"


def _matrices(
    name: str, spec: OperationSpec, first: ArraySpec, *, is_square: bool = False
) -> tuple[_Shape, int, int]:
    """Stack, rows and columns of the array whose matrices have the status words."""
    cls = type(spec).__name__
    if first.ndim < 2 or (is_square and first.shape[-1] != first.shape[-2]):
        what = "square matrices" if is_square else "matrices"
        raise ValueError(f"{name}: {cls} takes {what}, got shape {first.shape}")
    *stack, rows, columns = first.shape
    info: StatusArray | None = getattr(spec, "info", None)
    if info is not None and info.shape != (math.prod(stack),):
        raise ValueError(
            f"{name}: {cls}.info must have one word for each matrix of {first.shape}, got {info.shape}"
        )
    return tuple(stack), rows, columns


def _expect(name: str, spec: OperationSpec, dtype: DType, **shapes: _Shape) -> None:
    """Require shapes and a dtype of fields, where they hold an array."""
    for field, shape in shapes.items():
        array: ArraySpec | None = getattr(spec, field)
        where = f"{name}: {type(spec).__name__}.{field}"
        if array is not None and array.shape != shape:
            raise ValueError(f"{where} must have shape {shape}, got {array.shape}")
        if array is not None and array.dtype is not dtype:
            raise TypeError(f"{where} must have dtype {dtype}, got {array.dtype}")


def _check_sides(name: str, spec: OperationSpec, stack: _Shape, n: int, dtype: DType, b: ArraySpec) -> None:
    """Require right-hand sides of n rows, and a result of the shape of the whole stack."""
    if b.ndim < 2:
        raise ValueError(f"{name}: {type(spec).__name__}.b takes matrices, got shape {b.shape}")
    columns = b.shape[-1]
    _expect(name, spec, dtype, b=(*b.shape[:-2], n, columns))
    _expect(name, spec, dtype, out=(*np.broadcast_shapes(stack, b.shape[:-2]), n, columns))


def _judge(spec: CholeskySpec | LuSpec | SolveSpec | SvdSpec | EighSpec, function: str, trouble: str) -> None:
    """Fail the operation over the first matrix whose status word is not 0."""
    failed = np.flatnonzero(spec.info)
    if not failed.size:
        return
    code = int(spec.info[failed[0]])
    where, index = _place(spec.a.shape[:-2], int(failed[0]))
    trouble = "holds a NaN or an infinity" if code == _NOT_FINITE else trouble.format(code)
    raise LinAlgError(f"{function}: {where} {trouble}", library="solver", code=code, index=index)


def _place(stack: _Shape, number: int) -> tuple[str, _Shape]:
    """A matrix by its number: its name for messages, and its index."""
    index = tuple(int(place) for place in np.unravel_index(number, stack)) if stack else ()
    shown = index[0] if len(index) == 1 else index
    return (f"matrix {shown} of the stack" if index else "the matrix"), index
