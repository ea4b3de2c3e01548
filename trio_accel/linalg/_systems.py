"""Factors of matrices, determinants, and systems of linear equations, also of matrices with a structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias, cast, overload

import numpy as np

from ..backends.base import NATIVE, DType, HostArray, Ints, LibraryError, LinAlgError
from ..backends.base.contract.ops import ArraySpec, OperationSpec, Transpose
from ..devices import (
    AccelRef,
    Call,
    DeclaredSpec,
    Operand,
    Operation,
    composed,
    device_of,
    message_of,
    operation,
    real,
    refuse_dtypes,
)
from ..expressions import Elementwise, Reduction, intermediates
from ._actor import BlasActor, SolverActor, solving
from ._blas import gemm, trsm
from ._spectra import Svd, SVDResult

__all__ = [
    "CheckDiagonal",
    "Cholesky",
    "LUResult",
    "LstsqResult",
    "LuSolve",
    "QRResult",
    "Qr",
    "SlogdetResult",
    "SolveBanded",
    "SolveToeplitz",
    "SolveTriangular",
    "cho_solve",
    "cholesky",
    "det",
    "inv",
    "lstsq",
    "lu",
    "lu_solve",
    "qr",
    "slogdet",
    "solve",
    "solve_banded",
    "solve_toeplitz",
    "solve_triangular",
    "solve_tridiagonal",
    "solveh_banded",
]

# The status word is the order, from 1, of the first leading minor that is not positive, or holds a NaN.
_NOT_POSITIVE = "is not positive definite: its leading minor of order {} is not positive"
_SINGULAR = "is singular: its pivot {} is zero"


class LUResult(NamedTuple):
    """An LU factorization; see `lu`."""

    lu: AccelRef
    """Both triangular factors, with the shape of the matrices."""
    piv: AccelRef
    """Row exchanges: int32, from 0."""


class QRResult(NamedTuple):
    """A QR factorization; see `qr`."""

    Q: AccelRef
    """Orthonormal columns."""
    R: AccelRef
    """Upper triangular matrices."""


class SlogdetResult(NamedTuple):
    """A determinant that may be too large for its dtype; see `slogdet`."""

    sign: AccelRef
    """0, or a number of absolute value 1."""
    logabsdet: AccelRef
    """The natural logarithm of the absolute value, a real number."""


class LstsqResult(NamedTuple):
    """A solution by least squares; see `lstsq`."""

    x: AccelRef
    """The solution."""
    residuals: AccelRef
    """Sums of squares, where the solution is the only one and not exact."""
    rank: int
    """How many singular values count."""
    s: AccelRef
    """The singular values, the largest first."""


@solving("a(..., n, n) -> out(..., n, n)", status=_NOT_POSITIVE)
async def cholesky(a: Operand, *, upper: bool = False) -> AccelRef:
    """Triangular factor of positive definite matrices, as `numpy.linalg.cholesky` (LAPACK ``potrf``).

    Only the lower triangle of `a` is read, or the upper one with `upper`; the matrices count as Hermitian.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        upper: Whether to make ``U`` of ``a = U^H @ U``, instead of ``L`` of ``a = L @ L^H``.

    Returns:
        The factor, with the shape and dtype of `a`, with a positive diagonal and zeros in its other triangle.

    Raises:
        LinAlgError: A matrix is not positive definite, or holds a NaN or an infinity; `LinAlgError.index`
            locates it. `code` is the order of its leading minor that is not positive.
    """
    ...


@solving("a(..., m, n) -> lu(..., m, n), piv: int32(..., min(m, n))", status=_SINGULAR, reply=LUResult)
async def lu(a: Operand) -> LUResult:
    """Triangular factors with row exchanges, as `scipy.linalg.lu_factor` (LAPACK ``getrf``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128.

    Returns:
        ``lu`` with the shape and dtype of `a`: ``U`` in the upper triangle and ``L`` below, without its
        diagonal of ones. ``piv`` of shape (..., min(m, n)) and int32, from 0: row i was exchanged with row
        ``piv[i]``. `lu_solve` takes both.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. SciPy only warns.
    """
    ...


@overload
def qr(a: Operand, mode: Literal["reduced", "complete"] = "reduced") -> Call[QRResult]: ...
@overload
def qr(a: Operand, mode: Literal["r"]) -> Call[AccelRef]: ...
@solving(
    {
        "reduced": "a(..., m, n) -> q(..., m, min(m, n)), r(..., min(m, n), n)",
        "complete": "a(..., m, n) -> q(..., m, m), r(..., m, n)",
        "r": "a(..., m, n) -> r(..., min(m, n), n)",
    },
    by="mode",
    reply=QRResult,
)
async def qr(a: Operand, mode: Literal["reduced", "complete", "r"] = "reduced") -> QRResult | AccelRef:
    """Orthogonal and triangular factors, as `numpy.linalg.qr` (LAPACK ``geqrf`` and ``orgqr``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128; k is min(m, n).
        mode: ``"reduced"``: Q of shape (..., m, k) and R of shape (..., k, n). ``"complete"``: (..., m, m)
            and (..., m, n). ``"r"``: only R, of shape (..., k, n).

    Returns:
        Q with orthonormal columns and R with zeros below its diagonal, such that ``a = Q @ R``; or R.
    """
    ...


@solving("a(..., n, n) -> det(...)")
async def det(a: Operand) -> AccelRef:
    """Determinant of matrices, as `numpy.linalg.det` (LAPACK ``getrf``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The determinants, of shape (...) and the dtype of `a`: 0 of singular matrices, 1 of empty ones.
    """
    ...


@solving("a(..., n, n) -> sign(...), logabsdet: real(...)", reply=SlogdetResult)
async def slogdet(a: Operand) -> SlogdetResult:
    """Sign and logarithm of the determinant, as `numpy.linalg.slogdet` (LAPACK ``getrf``).

    The determinant of a large matrix itself is often too large or too small for its dtype.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The sign, of shape (...) and the dtype of `a`, and the logarithm of the absolute value, of the real
        dtype: the determinant is ``sign * exp(logabsdet)``. A singular matrix has 0 and minus infinity.
    """
    ...


_Trans: TypeAlias = Literal[0, 1, 2]
_Letter: TypeAlias = Literal[0, 1, 2, "N", "T", "C"]
_LETTERS: dict[_Letter, Transpose] = {0: "N", 1: "T", 2: "C", "N": "N", "T": "T", "C": "C"}


def _no_row(spec: DeclaredSpec, matrix_name: str, code: int, index: Ints) -> LibraryError:
    """Name the pivot, from 1, that must not be followed; nothing is wrong with the matrix."""
    return LibraryError(
        f"lu_solve: pivot {code} of {matrix_name} is not a row; piv is what lu() returns, and counts from 0",
        library="solver",
        code="invalid_value",
    )


def _zero_there(spec: DeclaredSpec, matrix_name: str, code: int, index: Ints) -> LibraryError:
    """Name the function that asks for the look at the diagonal."""
    text = f"solve_triangular: {matrix_name} is singular: element {code} of its diagonal is zero"
    return LinAlgError(text, library="solver", code=code, index=index)


@solving("a(..., n, n), b(..., n, c?) -> out(..., n, c?)", status=_SINGULAR)
async def solve(a: Operand, b: Operand) -> AccelRef:
    """Solution of ``a @ x = b``, as `numpy.linalg.solve` (LAPACK ``gesv``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        b: Vector of shape (n,), or array of shape (..., n, k), of the same dtype. The stacks of `a` and `b`
            broadcast against each other; a matrix of `a` that serves several of `b` is factored once.

    Returns:
        The solution, of shape (..., n) if `b` is a vector, else (..., n, k).

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` locates it.
    """
    ...


@solving("a(..., n, n) -> out(..., n, n)", status=_SINGULAR)
async def inv(a: Operand) -> AccelRef:
    """Inverse of matrices, as `numpy.linalg.inv` (LAPACK ``gesv``). `solve` is faster, and more accurate.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The inverse, with the shape and dtype of `a`.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` locates it.
    """
    ...


@solving("lu(..., n, n), piv: int32(..., n), b(..., n, c?) -> out(..., n, c?)", status=_no_row)
async def _lu_solve(lu: Operand, piv: Operand, b: Operand, trans: _Trans = 0) -> AccelRef:
    """Solve with existing factors; see `lu_solve`."""
    ...


@composed
async def lu_solve(lu_and_piv: tuple[Operand, Operand], b: Operand, trans: Literal[0, 1, 2] = 0) -> AccelRef:
    """Solution of ``op(a) @ x = b`` by the factors of a, as `scipy.linalg.lu_solve` (LAPACK ``getrs``).

    Args:
        lu_and_piv: Result of `lu` for square matrices: (..., n, n), and (..., n) of int32.
        b: Vector of shape (n,), or array of shape (..., n, k), with the dtype of the factors. The stacks
            broadcast against each other.
        trans: 0: op(a) is a; 1: its transpose; 2: its conjugate transpose.

    Returns:
        The solution, of shape (..., n) if `b` is a vector, else (..., n, k).

    Raises:
        LibraryError: A pivot is not the number of a row.
    """
    lu, piv = lu_and_piv
    return await _lu_solve(lu, piv, b, trans)


def _triangular(
    lower: bool, trans: _Letter, unit_diagonal: bool, a: ArraySpec, b: ArraySpec, out: ArraySpec
) -> OperationSpec:
    return trsm.spec(1.0, a, b, "L", _LETTERS[trans], lower, unit_diagonal, out)


@operation("a(..., n, n), b(..., n, c?) -> out(..., n, c?)", actor=BlasActor, dtypes=NATIVE, spec=_triangular)
async def _solve_triangular(
    a: Operand, b: Operand, trans: _Letter = 0, lower: bool = False, unit_diagonal: bool = False
) -> AccelRef:
    """Solve with triangular matrices; the solution is infinite if they are singular."""
    ...


@solving("a(..., n, n) -> ", status=_zero_there)
async def _check_diagonal(a: Operand) -> None:
    """Fail with `LinAlgError` if a triangular matrix is singular; `solve_triangular` asks it too."""
    ...


@composed
async def solve_triangular(
    a: Operand,
    b: Operand,
    trans: Literal[0, 1, 2, "N", "T", "C"] = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
) -> AccelRef:
    """Solution of ``op(a) @ x = b`` for triangular matrices, as `scipy.linalg.solve_triangular` (``trsm``).

    A second operation looks at the diagonal at the same time.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128; one triangle is read.
        b: Vector of shape (n,), or array of shape (..., n, k), of the same dtype. The stacks broadcast.
        trans: 0 or ``"N"``: op(a) is a; 1 or ``"T"``: its transpose; 2 or ``"C"``: its conjugate transpose.
        lower: Whether the lower triangle is read, instead of the upper one.
        unit_diagonal: Whether the diagonal counts as ones, and is not read.

    Returns:
        The solution, of shape (..., n) if `b` is a vector, else (..., n, k).

    Raises:
        LinAlgError: A matrix is singular: its diagonal has a zero. `LinAlgError.index` locates it.
    """
    device = device_of("solve_triangular", a, b)
    solution = device.submit(SolveTriangular(a, b, trans, lower, unit_diagonal))
    if not unit_diagonal:
        await device.ask(CheckDiagonal(a))
    return await solution.wait()


@composed
async def lstsq(a: Operand, b: Operand, rcond: float | None = None) -> LstsqResult:
    """Return the x of least length that makes ``|b - a @ x|`` least, as `numpy.linalg.lstsq`; by `svd`.

    The singular values cross to the host, which finds the rank.

    Args:
        a: Matrix of shape (m, n), of float32, float64, complex64 or complex128.
        b: Vector of shape (m,), or matrix of shape (m, k), of the same dtype.
        rcond: Singular values up to `rcond` times the largest one count as zero. None: as many roundings of
            the dtype as the longer side of `a` has elements. Not between 0 and 1: one rounding, as in LAPACK.

    Returns:
        x of shape (n,) or (n, k); the sum of squared differences for each column, of shape (1,) or (k,) and
        the real dtype, without elements if the rank is less than n or m is not above n; the rank, an int; and
        the singular values of `a`. In a call that is not awaited, the arrays are operands.

    Raises:
        LinAlgError: The matrix holds a NaN or an infinity, or its iteration did not converge.
        numpy.linalg.LinAlgError: Shapes that do not fit. Stacks are refused, as by NumPy.
        TypeError: Neither is on a device, or another dtype, or two of them.

    A cancelled call keeps no arrays. See `Device.ask` for the errors that any operation can end with.
    """
    device = device_of("lstsq", a, b)
    _check(a, b)
    is_used = rcond is not None and 0 < real("lstsq", "rcond", rcond) < 1
    m, n = a.shape
    u, s, vh = cast(SVDResult, await device.ask(Svd(a, full_matrices=False)))
    values: HostArray = await s.to_host()
    epsilon = float(np.finfo(values.dtype).eps)
    tolerance = epsilon * max(m, n) if rcond is None else rcond if is_used else epsilon
    significant = values[values > tolerance * values.max(initial=0)]
    rank = len(significant)
    columns = b if len(b.shape) == 2 else b[:, None]
    parts = await _PARTS(await gemm(1.0, u[:, :rank], columns, trans_a="C"), s[:rank, None])
    x = await gemm(1.0, vh[:rank], parts, trans_a="C")
    if rank == n < m:
        residuals = await _RESIDUALS(columns, await gemm(1.0, a, x), axis=0)
    else:
        residuals = await device.empty(0, s.dtype)
    return LstsqResult(x if columns is b else x[:, 0], residuals, rank, s)


_PARTS = Elementwise[AccelRef]("parts / s", operation="linalg.lstsq")
_RESIDUALS = Reduction("abs(b - made) * abs(b - made)", "sum", operation="linalg.lstsq")


def _check(a: Operand, b: Operand) -> None:
    """Refuse shapes and dtypes before anything is launched."""
    if len(a.shape) != 2 or len(b.shape) not in (1, 2) or a.shape[0] != b.shape[0]:
        raise np.linalg.LinAlgError(
            "lstsq: Incompatible dimensions: a must have shape (m, n) and b shape (m,) or (m, k), "
            f"got a of shape {a.shape} and b of shape {b.shape}"
        )
    types = {"a": DType.of(a.dtype), "b": DType.of(b.dtype)}
    if types["a"] is not types["b"]:
        refuse_dtypes("lstsq", types, "ab"[isinstance(a, AccelRef) : 2 - isinstance(b, AccelRef)])


def _check_rows(name: str, spec: DeclaredSpec) -> None:
    """Hold the rows of a banded matrix against the numbers of its diagonals."""
    lower, upper, shape = spec.l, spec.u, spec.ab.shape
    if min(lower, upper) < 0 or shape[-2] != lower + upper + 1:
        raise ValueError(
            f"{name}: ab must have a row for each of l + u + 1 diagonals, got l {lower}, u {upper} and ab of "
            f"shape {shape}"
        )


def _check_band(name: str, spec: DeclaredSpec) -> None:
    """Refuse a banded matrix without its main diagonal."""
    if not spec.ab.shape[-2]:
        raise ValueError(f"{name}: ab must have a row for the main diagonal, got shape {spec.ab.shape}")


@solving("ab(s..., k, n), b(s..., n, c?) -> out(s..., n, c?)", status=_SINGULAR, check=_check_rows)
async def _solve_banded(ab: Operand, b: Operand, l: int, u: int) -> AccelRef:  # noqa: E741  # SciPy's name
    """Solve with banded matrices; see `solve_banded`."""
    ...


@composed
async def solve_banded(l_and_u: tuple[int, int], ab: Operand, b: Operand) -> AccelRef:
    """Solution of ``a @ x = b`` for banded matrices, as `scipy.linalg.solve_banded` (LAPACK ``gbsv``).

    Args:
        l_and_u: How many diagonals are below the main one, and above it.
        ab: Array of shape (..., l + u + 1, n), of float32, float64, complex64 or complex128: a diagonal is a
            row, the highest one first, and ``ab[u + i - j, j]`` is ``a[i, j]``. Corners that belong to no
            element are not read.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.

    Returns:
        The solution, with the shape of `b`.

    Raises:
        ValueError: The number of rows in `ab` differs from the number of diagonals.
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    lower, upper = l_and_u
    return await _solve_banded(ab, b, lower, upper)


@solving("ab(s..., k, n), b(s..., n, c?) -> out(s..., n, c?)", status=_NOT_POSITIVE, check=_check_band)
async def solveh_banded(ab: Operand, b: Operand, lower: bool = False) -> AccelRef:
    """Solution of ``a @ x = b`` for banded positive definite matrices (LAPACK ``pbsv``).

    As `scipy.linalg.solveh_banded`; the matrices count as Hermitian.

    Args:
        ab: Array of shape (..., u + 1, n), of float32, float64, complex64 or complex128: a diagonal is a row.
            ``ab[u + i - j, j]`` is ``a[i, j]`` of the upper triangle; with `lower`, ``ab[i - j, j]`` is
            ``a[i, j]`` of the lower one.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.
        lower: Whether `ab` holds the lower triangle.

    Returns:
        The solution, with the shape of `b`.

    Raises:
        ValueError: `ab` has no row.
        LinAlgError: A matrix is not positive definite, or holds a NaN or an infinity; `LinAlgError.index`
            locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    ...


@solving("dl(s..., n), d(s..., n), du(s..., n), b(s..., n, c?) -> out(s..., n, c?)", status=_SINGULAR)
async def solve_tridiagonal(dl: Operand, d: Operand, du: Operand, b: Operand) -> AccelRef:
    """Solution of ``a @ x = b`` for tridiagonal matrices (LAPACK ``gtsv``, with exchanges of rows).

    The diagonals have equal lengths, as in `jax.lax.linalg.tridiagonal_solve` and in cuSPARSE. So a stack of
    them is one array.

    Args:
        dl: Diagonal below the main one, of shape (..., n), of float32, float64, complex64 or complex128:
            ``dl[i]`` is ``a[i, i - 1]``, and ``dl[0]`` is not read.
        d: Main diagonal, of the same shape and dtype.
        du: Diagonal above it: ``du[i]`` is ``a[i, i + 1]``, and ``du[n - 1]`` is not read.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.

    Returns:
        The solution, with the shape of `b`.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    ...


@solving(
    "c(s..., n), r(s..., n), b(s..., n, k?) -> out(s..., n, k?)",
    status="has a singular leading minor, with which the recursion cannot go on",
)
async def _solve_toeplitz(c: Operand, b: Operand, *, r: Operand | None = None) -> AccelRef:
    """Solve with Toeplitz matrices; see `solve_toeplitz`."""
    ...


@composed
async def solve_toeplitz(c_or_cr: Operand | tuple[Operand, Operand], b: Operand) -> AccelRef:
    """Solution of ``a @ x = b`` for Toeplitz matrices, as `scipy.linalg.solve_toeplitz`.

    It uses Levinson's recursion, in double precision.

    Args:
        c_or_cr: The first column, of shape (..., n), of float32, float64, complex64 or complex128; the first
            row is its conjugate. Or column and row, whose first element is not read.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.

    Returns:
        The solution, with the shape of `b`.

    Raises:
        LinAlgError: A leading minor of a matrix is singular, though the matrix may not be; or it holds a NaN
            or an infinity. `LinAlgError.index` locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    c, r = c_or_cr if isinstance(c_or_cr, tuple) else (c_or_cr, None)
    return await _solve_toeplitz(c, b, r=r)


@composed
async def cho_solve(c_and_lower: tuple[Operand, bool], b: Operand) -> AccelRef:
    """Solution of ``a @ x = b`` by the factor of `cholesky`, as `scipy.linalg.cho_solve`: twice ``trsm``.

    Args:
        c_and_lower: The factor, of shape (..., n, n) and float32, float64, complex64 or complex128, and
            whether it is the lower triangle. `cholesky` makes that one, and the other with ``upper=True``.
        b: Vector of shape (n,), or array of shape (..., n, k), of the same dtype. The stacks broadcast.

    Returns:
        The solution, of shape (..., n) if `b` is a vector, else (..., n, k).

    Raises:
        LinAlgError: A factor has a zero on its diagonal; `LinAlgError.index` locates it.
    """
    c, lower = c_and_lower
    columns = b[:, None] if len(b.shape) == 1 else b
    with intermediates() as track:
        first = track(await solve_triangular(c, columns, "N" if lower else "C", lower))
        x = await solve_triangular(c, first, "C" if lower else "N", lower)
    return x if columns is b else x[..., 0]


Cholesky: Final = cholesky.message
Qr: Callable[..., Operation[SolverActor, QRResult | AccelRef]] = message_of(qr)
CheckDiagonal: Final = _check_diagonal.message
LuSolve: Final = _lu_solve.message
SolveTriangular: Final = _solve_triangular.message
SolveBanded: Final = _solve_banded.message
SolveToeplitz: Final = _solve_toeplitz.message
