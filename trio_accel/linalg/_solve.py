"""Systems of linear equations, and inverses."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from ..backends.base import LibraryError, LinAlgError
from ..backends.base.checks import NATIVE
from ..backends.base.ops import ArraySpec, OperationSpec, Transpose
from ..devices import AccelRef, DeclaredSpec, Operand, device_of, operation
from ._actor import BlasActor, SolverActor
from ._factors import SINGULAR
from ._matrices import trsm

__all__ = [
    "CheckDiagonal", "Inv", "LuSolve", "Solve", "SolveTriangular", "inv", "lu_solve", "solve",
    "solve_triangular",
]  # fmt: skip

_Trans: TypeAlias = Literal[0, 1, 2]
_Letter: TypeAlias = Literal[0, 1, 2, "N", "T", "C"]
_LETTERS: dict[_Letter, Transpose] = {0: "N", 1: "T", 2: "C", "N": "N", "T": "T", "C": "C"}


def _no_row(spec: DeclaredSpec, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
    """Name the pivot, from 1, that must not be followed; nothing is wrong with the matrix."""
    return LibraryError(
        f"lu_solve: pivot {code} of {where} is no row; piv is what lu() returns, and counts from 0",
        library="solver",
        code="invalid_value",
    )


def _zero_there(spec: DeclaredSpec, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
    """Name the function that asks for the look at the diagonal."""
    text = f"solve_triangular: {where} is singular: element {code} of its diagonal is zero"
    return LinAlgError(text, library="solver", code=code, index=index)


@operation(
    "a(..., n, n), b(..., n, c?) -> out(..., n, c?)", actor=SolverActor, dtypes=NATIVE, status=SINGULAR
)
async def solve(a: Operand, b: Operand) -> AccelRef:
    """Solution of ``a @ x = b``, as `numpy.linalg.solve` (LAPACK ``gesv``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        b: Vector of shape (n,), or array of shape (..., n, k), of the same dtype. The stacks of `a` and `b`
            broadcast against each other; a matrix of `a` that serves several of `b` is factored once.

    Returns:
        The solution, of shape (..., n) if `b` is a vector, else (..., n, k).

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` says which one.
    """
    ...


@operation("a(..., n, n) -> out(..., n, n)", actor=SolverActor, dtypes=NATIVE, status=SINGULAR)
async def inv(a: Operand) -> AccelRef:
    """Inverse of matrices, as `numpy.linalg.inv` (LAPACK ``gesv``). `solve` is faster, and more accurate.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The inverse, of the shape and dtype of `a`.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` says which one.
    """
    ...


@operation(
    "lu(..., n, n), piv: int32(..., n), b(..., n, c?) -> out(..., n, c?)",
    actor=SolverActor,
    dtypes=NATIVE,
    status=_no_row,
)
async def _lu_solve(lu: Operand, piv: Operand, b: Operand, trans: _Trans = 0) -> AccelRef:
    """Solve by factors that are there; see `lu_solve`."""
    ...


async def lu_solve(lu_and_piv: tuple[Operand, Operand], b: Operand, trans: Literal[0, 1, 2] = 0) -> AccelRef:
    """Solution of ``op(a) @ x = b`` by the factors of a, as `scipy.linalg.lu_solve` (LAPACK ``getrs``).

    Args:
        lu_and_piv: What `lu` returns for square matrices: (..., n, n), and (..., n) of int32.
        b: Vector of shape (n,), or array of shape (..., n, k), of the dtype of the factors. The stacks
            broadcast against each other.
        trans: 0: op(a) is a; 1: its transpose; 2: its conjugate transpose.

    Returns:
        The solution, of shape (..., n) if `b` is a vector, else (..., n, k).

    Raises:
        LibraryError: A pivot is no row.
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


@operation("a(..., n, n) -> ", actor=SolverActor, dtypes=NATIVE, status=_zero_there)
async def _check_diagonal(a: Operand) -> None:
    """Fail with `LinAlgError` if a triangular matrix is singular; `solve_triangular` asks it too."""
    ...


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
        LinAlgError: A matrix is singular: its diagonal has a zero. `LinAlgError.index` says which one.
    """
    device = device_of("solve_triangular", a, b)
    solution = device.submit(SolveTriangular(a, b, trans, lower, unit_diagonal))
    if not unit_diagonal:
        await device.ask(CheckDiagonal(a))
    return await solution.wait()


CheckDiagonal: Final = _check_diagonal.message
Inv: Final = inv.message
Solve: Final = solve.message
LuSolve: Final = _lu_solve.message
SolveTriangular: Final = _solve_triangular.message
