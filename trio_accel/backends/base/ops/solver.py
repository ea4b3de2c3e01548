"""Specifications of the dense solvers.

All take stacks of matrices: the leading axes of an array are its stack. Arrays that are written are
C-contiguous and overlap no other. Elements are float32, float64, complex64 or complex128, of one dtype in
all arrays, but for those that are real (``s``, ``w`` of `EighSpec`, ``logabsdet``) or complex (those that
`EigSpec` makes), and the pivots, which are int32.

``info`` has one word for each matrix of the stack of the first array that is read, in C order: 0 where the
operation succeeded. The backend writes all of them; before, they may hold anything. A word that is not 0
fails the operation as a whole, with the matrix named in the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import ClassVar, Literal, NoReturn

import numpy as np

from ..dtypes import DType
from ..errors import LibraryError, LinAlgError
from ._array import ArraySpec
from ._roles import StatusArray, exact, reads, status, writes
from ._spec import OperationSpec, specification

__all__ = [
    "CheckDiagonalSpec", "CholeskySpec", "DetSpec", "EigSpec", "EighSpec", "LuSolveSpec", "LuSpec",
    "QrSpec", "SolveSpec", "SvdSpec", "Triangle", "complex_of", "real_of",
]  # fmt: skip

Triangle = Literal["L", "U"]
"""The lower or the upper triangle, with the diagonal."""

_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}
_COMPLEX = {real: number for number, real in _REAL.items()}
_NOT_FINITE = -1
_SINGULAR = "is singular: its pivot {} is zero"


def real_of(dtype: DType) -> DType:
    """The dtype of absolute values."""
    return _REAL.get(dtype, dtype)


def complex_of(dtype: DType) -> DType:
    """The dtype of roots of polynomials."""
    return _COMPLEX.get(dtype, dtype)


class SolverSpec(OperationSpec):
    """Base of the specifications, which declare by tables what fits, and what a status word means.

    Attributes:
        shapes: By field the letters of its last extents, such as ``"m n"``; the first field has the matrices.
            They are square if it says ``"n n"``; ``k`` is the lesser of m and n, and ``c`` what the field b
            says, whose stack broadcasts. ``"real: k"``, ``"complex: k"`` and ``"int32: k"`` tell the dtype.
        letters: By field the letters that it may hold.
        trouble: What it means that the status word of a matrix is not 0; the word takes the place of ``{}``.
    """

    __slots__ = ()

    shapes: ClassVar[Mapping[str, str]]
    letters: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    trouble: ClassVar[str] = "has no solution by iteration: it did not converge (status {})"

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        first, is_square, fields = _rules(type(self))  # type: ignore[arg-type]  # mypy takes no class for hashable
        matrices: ArraySpec = getattr(self, first)
        self._check_matrices(name, matrices, is_square=is_square)
        for field, allowed in self.letters.items():
            if getattr(self, field) not in allowed:
                said = " or ".join(", ".join(map(repr, allowed)).rsplit(", ", 1))
                self._refuse(name, f".{field} must be {said}, got {getattr(self, field)!r}")
        stack, extents = matrices.shape[:-2], self.extents(name)
        for field, kind, letters in fields:
            array: ArraySpec | None = getattr(self, field)
            if array is None:
                continue
            here = stack
            if letters == _SIDES and "c" not in extents:
                if array.ndim < 2:
                    self._refuse(name, f".{field} takes matrices, got shape {array.shape}")
                here, extents["c"] = array.shape[:-2], array.shape[-1]
                stack = np.broadcast_shapes(stack, here) if here != stack else stack
            shape = (*here, *[extents[letter] for letter in letters])
            if array.shape != shape:
                self._refuse(name, f".{field} must have shape {shape}, got {array.shape}")
            dtype = _KINDS[kind](matrices.dtype) if kind else matrices.dtype
            if array.dtype is not dtype:
                self._refuse(name, f".{field} must have dtype {dtype}, got {array.dtype}", TypeError)

    def extents(self, name: str) -> dict[str, int]:
        """What the letters of `shapes` stand for, but for ``c``; a class may add some, or refuse."""
        m, n = self._matrices.shape[-2:]
        return {"m": m, "n": n, "k": min(m, n)}

    def function(self) -> str:
        """What errors call the operation."""
        return type(self).__name__.removesuffix("Spec").lower()

    def check_status(self) -> None:
        """Fail the operation over the first matrix whose status word is not 0."""
        info: StatusArray | None = getattr(self, "info", None)
        if info is None or not info.any():
            return
        number, stack = int(info.nonzero()[0][0]), self._matrices.shape[:-2]
        index = tuple(int(place) for place in np.unravel_index(number, stack)) if stack else ()
        shown = index[0] if len(index) == 1 else index
        where = f"matrix {shown} of the stack" if index else "the matrix"
        raise self.failure(where, int(info[number]), index)

    def failure(self, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
        """What a status word means for a matrix."""
        trouble = "holds a NaN or an infinity" if code == _NOT_FINITE else self.trouble.format(code)
        return LinAlgError(f"{self.function()}: {where} {trouble}", library="solver", code=code, index=index)

    @property
    def _matrices(self) -> ArraySpec:
        """The array whose matrices have the status words."""
        array: ArraySpec = getattr(self, next(iter(self.shapes)))
        return array

    def _check_matrices(self, name: str, matrices: ArraySpec, *, is_square: bool) -> None:
        shape = matrices.shape
        if len(shape) < 2 or (is_square and shape[-1] != shape[-2]):
            self._refuse(name, f" takes {'square matrices' if is_square else 'matrices'}, got shape {shape}")
        info: StatusArray | None = getattr(self, "info", None)
        if info is not None and info.shape != (math.prod(shape[:-2]),):
            self._refuse(name, f".info must have one word for each matrix of {shape}, got {info.shape}")

    def _refuse(self, name: str, trouble: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{name}: {type(self).__name__}{trouble}")


_SIDES = ("n", "c")
_KINDS: Mapping[str, Callable[[DType], DType]] = {
    "real": real_of,
    "complex": complex_of,
    "int32": lambda _: DType.int32,
}


@cache
def _rules(cls: type[SolverSpec]) -> tuple[str, bool, tuple[tuple[str, str, tuple[str, ...]], ...]]:
    """The first field, whether its matrices are square, and the kind and letters of the other fields."""
    first, *others = cls.shapes
    parts = [(field, *cls.shapes[field].rpartition(": ")[::2]) for field in others]
    fields = tuple((field, kind, tuple(letters.split())) for field, kind, letters in parts)
    return first, cls.shapes[first] == "n n", fields


@specification
class CholeskySpec(SolverSpec):
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

    shapes: ClassVar[Mapping[str, str]] = {"a": "n n", "out": "n n"}
    trouble: ClassVar[str] = "is not positive definite: its leading minor of order {} is not positive"


@specification
class LuSpec(SolverSpec):
    """``P @ L @ U`` of matrices of shape (m, n), with k = min(m, n) (LAPACK ``getrf``).

    ``lu`` holds ``U`` in its upper triangle and ``L`` below the diagonal. The diagonal of ``L`` is one, and
    not stored. ``piv`` has k int32 that count from 0: row i was exchanged with row ``piv[i]``, i = 0 first.

    ``info``: the number, from 1, of the first pivot that is exactly zero.
    """

    a: ArraySpec = reads()
    lu: ArraySpec = writes()
    piv: ArraySpec = writes()
    info: StatusArray = status()

    shapes: ClassVar[Mapping[str, str]] = {"a": "m n", "lu": "m n", "piv": "int32: k"}
    trouble: ClassVar[str] = _SINGULAR


@specification
class LuSolveSpec(SolverSpec):
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

    shapes: ClassVar[Mapping[str, str]] = {"lu": "n n", "piv": "int32: n", "b": "n c", "out": "n c"}
    letters: ClassVar[Mapping[str, tuple[str, ...]]] = {"trans": ("N", "T", "C")}

    def failure(self, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
        """See `SolverSpec.failure`; nothing is wrong with the matrix."""
        return LibraryError(
            f"lu_solve: pivot {code} of {where} is no row; piv is what lu() returns, and counts from 0",
            library="solver",
            code="invalid_value",
        )


@specification
class SolveSpec(SolverSpec):
    """``a @ out = b`` (LAPACK ``gesv``); without ``b``, ``out`` is the inverse of ``a``.

    ``a`` has shape (..., n, n), ``b`` (..., n, k); their stacks broadcast against each other, to that of
    ``out``. Each matrix of ``a`` is factored once.

    ``info``: the number, from 1, of the first pivot of LU with partial pivoting that is exactly zero.
    """

    a: ArraySpec = reads()
    b: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    info: StatusArray = status()

    shapes: ClassVar[Mapping[str, str]] = {"a": "n n", "b": "n c", "out": "n c"}
    trouble: ClassVar[str] = _SINGULAR

    def extents(self, name: str) -> dict[str, int]:
        """See `SolverSpec.extents`."""
        extents = super().extents(name)
        return extents if self.b is not None else {**extents, "c": extents["n"]}

    def function(self) -> str:
        """See `SolverSpec.function`."""
        return "solve" if self.b is not None else "inv"


@specification
class DetSpec(SolverSpec):
    """Determinants of square matrices, by LU.

    Any of the results may be wanted: ``det``; ``sign``, which is 0 or has the absolute value 1, with
    ``logabsdet``, the logarithm of the absolute value. It cannot fail: of a singular matrix ``det`` and
    ``sign`` are 0.
    """

    a: ArraySpec = reads()
    det: ArraySpec | None = writes(optional=True)
    sign: ArraySpec | None = writes(optional=True)
    logabsdet: ArraySpec | None = writes(optional=True)

    shapes: ClassVar[Mapping[str, str]] = {"a": "n n", "det": "", "sign": "", "logabsdet": "real: "}


@specification
class CheckDiagonalSpec(SolverSpec):
    """Fails for triangular matrices that are singular, and does nothing else.

    ``info``: the number, from 1, of the first element of the diagonal that is exactly zero.
    """

    a: ArraySpec = reads()
    info: StatusArray = status()

    shapes: ClassVar[Mapping[str, str]] = {"a": "n n"}
    trouble: ClassVar[str] = "is singular: element {} of its diagonal is zero"

    def function(self) -> str:
        """See `SolverSpec.function`."""
        return "solve_triangular"


@specification
class QrSpec(SolverSpec):
    """``q @ r`` of matrices of shape (m, n), with k = min(m, n) (LAPACK ``geqrf`` and ``orgqr``, ``ungqr``).

    ``q`` has shape (m, k) or (m, m) and orthonormal columns; ``r`` has as many rows as ``q`` columns, n
    columns, and zeros below its diagonal. Without ``q``, ``r`` has k rows. It cannot fail: NaN stays NaN.
    """

    a: ArraySpec = reads()
    q: ArraySpec | None = writes(optional=True)
    r: ArraySpec = writes()

    shapes: ClassVar[Mapping[str, str]] = {"a": "m n", "q": "m q", "r": "q n"}

    def extents(self, name: str) -> dict[str, int]:
        """See `SolverSpec.extents`."""
        extents = super().extents(name)
        is_complete = self.q is not None and self.q.shape[-1:] == (extents["m"],)
        return {**extents, "q": extents["m" if is_complete else "k"]}


@specification
class SvdSpec(SolverSpec):
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

    shapes: ClassVar[Mapping[str, str]] = {"a": "m n", "u": "m p", "vh": "q n", "s": "real: k"}

    def extents(self, name: str) -> dict[str, int]:
        """See `SolverSpec.extents`."""
        u, vh, extents = self.u, self.vh, super().extents(name)
        if (u is None) is not (vh is None):
            self._refuse(name, " takes both u and vh, or none")
        m, n, k = extents.values()
        is_full = u is not None and vh is not None and (u.shape[-1:], vh.shape[-2:-1]) == ((m,), (n,))
        return {**extents, "p": m if is_full else k, "q": n if is_full else k}


@specification
class EighSpec(SolverSpec):
    """Eigenvalues, and eigenvectors if wanted, of Hermitian matrices (LAPACK ``syevd``, ``heevd``).

    Of ``a`` only the triangle ``uplo`` is read, and its diagonal counts as real. ``w`` has n real numbers
    that do not decrease; column ``v[:, i]`` has length 1 and belongs to ``w[i]``.

    With positive definite matrices ``b``, of which the same triangle is read, these are the values and
    vectors of ``a @ v = b @ v * w`` (LAPACK ``sygvd``, ``hegvd``); then the vectors have ``v^H @ b @ v = 1``.

    ``info``: not 0 where a triangle holds a NaN or an infinity (-1), or the iteration did not converge; above
    n, where a leading minor of b is not positive: n and its order.
    """

    uplo: Triangle = exact()
    a: ArraySpec = reads()
    w: ArraySpec = writes()
    v: ArraySpec | None = writes(optional=True)
    info: StatusArray = status()
    b: ArraySpec | None = reads(optional=True)

    shapes: ClassVar[Mapping[str, str]] = {"a": "n n", "v": "n n", "w": "real: n", "b": "n n"}
    letters: ClassVar[Mapping[str, tuple[str, ...]]] = {"uplo": ("L", "U")}

    def function(self) -> str:
        """See `SolverSpec.function`."""
        return "eigh" if self.v is not None else "eigvalsh"

    def failure(self, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
        """See `SolverSpec.failure`."""
        order = code - self.a.shape[-1]
        if order <= 0:
            return super().failure(where, code, index)
        trouble = f"is not positive definite: its leading minor of order {order} is not positive"
        return LinAlgError(
            f"{self.function()}: b, {where} {trouble}", library="solver", code=order, index=index
        )


@specification
class EigSpec(SolverSpec):
    """Eigenvalues, and right eigenvectors if wanted, of square matrices (LAPACK ``geev``).

    ``w`` and ``v`` are complex whatever ``a`` is. Column ``v[:, i]`` has length 1 and belongs to ``w[i]``.

    ``info``: not 0 where the matrix holds a NaN or an infinity (-1), or the iteration did not converge.
    """

    a: ArraySpec = reads()
    w: ArraySpec = writes()
    v: ArraySpec | None = writes(optional=True)
    info: StatusArray = status()

    shapes: ClassVar[Mapping[str, str]] = {"a": "n n", "w": "complex: n", "v": "complex: n n"}

    def function(self) -> str:
        """See `SolverSpec.function`."""
        return "eig" if self.v is not None else "eigvals"
