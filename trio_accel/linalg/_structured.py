"""Systems of linear equations whose matrices have a structure."""

from __future__ import annotations

from typing import Final

from ..devices import AccelRef, DeclaredSpec, Operand, operation
from ..devices.operations._calls import composed
from ..expressions import intermediates
from ._actor import SolverActor
from ._systems import SINGULAR, solve_triangular

__all__ = [
    "SolveBanded", "SolveToeplitz", "SolveTridiagonal", "SolvehBanded", "cho_solve", "solve_banded",
    "solve_toeplitz", "solve_tridiagonal", "solveh_banded",
]  # fmt: skip


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


@operation(
    "ab(s..., k, n), b(s..., n, c?) -> out(s..., n, c?)",
    actor=SolverActor,
    status=SINGULAR,
    check=_check_rows,
)
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
        The solution, of the shape of `b`.

    Raises:
        ValueError: `ab` has not as many rows as there are diagonals.
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    lower, upper = l_and_u
    return await _solve_banded(ab, b, lower, upper)


@operation(
    "ab(s..., k, n), b(s..., n, c?) -> out(s..., n, c?)",
    actor=SolverActor,
    status="is not positive definite: its leading minor of order {} is not positive",
    check=_check_band,
)
async def solveh_banded(ab: Operand, b: Operand, lower: bool = False) -> AccelRef:
    """Solution of ``a @ x = b`` for banded positive definite matrices (LAPACK ``pbsv``).

    As `scipy.linalg.solveh_banded`; the matrices count as Hermitian.

    Args:
        ab: Array of shape (..., u + 1, n), of float32, float64, complex64 or complex128: a diagonal is a row.
            ``ab[u + i - j, j]`` is ``a[i, j]`` of the upper triangle; with `lower`, ``ab[i - j, j]`` is that
            of the lower one.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.
        lower: Whether `ab` holds the lower triangle.

    Returns:
        The solution, of the shape of `b`.

    Raises:
        ValueError: `ab` has no row.
        LinAlgError: A matrix is not positive definite, or holds a NaN or an infinity; `LinAlgError.index`
            says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    ...


@operation(
    "dl(s..., n), d(s..., n), du(s..., n), b(s..., n, c?) -> out(s..., n, c?)",
    actor=SolverActor,
    status=SINGULAR,
)
async def solve_tridiagonal(dl: Operand, d: Operand, du: Operand, b: Operand) -> AccelRef:
    """Solution of ``a @ x = b`` for tridiagonal matrices (LAPACK ``gtsv``, with exchanges of rows).

    The diagonals have one length, as in `jax.lax.linalg.tridiagonal_solve` and in cuSPARSE. So a stack of
    them is one array.

    Args:
        dl: Diagonal below the main one, of shape (..., n), of float32, float64, complex64 or complex128:
            ``dl[i]`` is ``a[i, i - 1]``, and ``dl[0]`` is not read.
        d: Main diagonal, of the same shape and dtype.
        du: Diagonal above it: ``du[i]`` is ``a[i, i + 1]``, and ``du[n - 1]`` is not read.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.

    Returns:
        The solution, of the shape of `b`.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    ...


@operation(
    "c(s..., n), r(s..., n), b(s..., n, k?) -> out(s..., n, k?)",
    actor=SolverActor,
    status="has a singular leading minor, with which the recursion cannot go on",
)
async def _solve_toeplitz(c: Operand, b: Operand, *, r: Operand | None = None) -> AccelRef:
    """Solve with Toeplitz matrices; see `solve_toeplitz`."""
    ...


@composed
async def solve_toeplitz(c_or_cr: Operand | tuple[Operand, Operand], b: Operand) -> AccelRef:
    """Solution of ``a @ x = b`` for Toeplitz matrices, as `scipy.linalg.solve_toeplitz`.

    It goes by Levinson's recursion, and is computed in double precision.

    Args:
        c_or_cr: The first column, of shape (..., n), of float32, float64, complex64 or complex128; the first
            row is its conjugate. Or column and row, whose first element is not read.
        b: Vector of shape (n,), or array of shape (..., n, k) with the same stack, of the same dtype.

    Returns:
        The solution, of the shape of `b`.

    Raises:
        LinAlgError: A leading minor of a matrix is singular, though the matrix may not be; or it holds a NaN
            or an infinity. `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
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
        LinAlgError: A factor has a zero on its diagonal; `LinAlgError.index` says which one.
    """
    c, lower = c_and_lower
    columns = b[:, None] if len(b.shape) == 1 else b
    with intermediates() as made:
        first = made(await solve_triangular(c, columns, "N" if lower else "C", lower))
        x = await solve_triangular(c, first, "C" if lower else "N", lower)
    return x if columns is b else x[..., 0]


SolveBanded: Final = _solve_banded.message
SolvehBanded: Final = solveh_banded.message
SolveTridiagonal: Final = solve_tridiagonal.message
SolveToeplitz: Final = _solve_toeplitz.message
