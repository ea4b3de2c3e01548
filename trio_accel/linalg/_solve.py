"""Systems of linear equations."""

from __future__ import annotations

from typing import Literal

import attrs

from ..backends.base import DType
from ..backends.base.ops import CheckDiagonalSpec, LuSolveSpec, SolveSpec, TriangularSpec
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import BlasOperation, SolverOperation
from ._checks import matrices, sides, status_of

__all__ = [
    "CheckDiagonal", "Inv", "LuSolve", "Solve", "SolveTriangular", "inv", "lu_solve", "solve",
    "solve_triangular",
]  # fmt: skip

_TRANSPOSES: dict[object, Literal["N", "T", "C"]] = {0: "N", 1: "T", 2: "C", "N": "N", "T": "T", "C": "C"}


@attrs.define(eq=False, on_setattr=None)
class Solve(SolverOperation[AccelRef]):
    """The solution of linear equations; see `solve`."""

    a: Operand
    b: Operand

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the solution."""
        a = matrices(planner, "a", self.a, is_square=True)
        b, out, x = sides(planner, a, self.b)
        return Planned(SolveSpec(a, b, out, status_of(planner, a)), x)


@attrs.define(eq=False, on_setattr=None)
class Inv(SolverOperation[AccelRef]):
    """The inverse of matrices; see `inv`."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the inverse."""
        a = matrices(planner, "a", self.a, is_square=True)
        out = planner.output(a.shape, a.dtype)
        return Planned(SolveSpec(a, None, out.spec, status_of(planner, a)), out)


@attrs.define(eq=False, on_setattr=None)
class LuSolve(SolverOperation[AccelRef]):
    """The solution of linear equations by factors that are there; see `lu_solve`."""

    lu: Operand
    piv: Operand
    b: Operand
    trans: Literal[0, 1, 2] = 0

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the solution."""
        if self.trans not in (0, 1, 2):
            raise ValueError(f"{planner.name}: trans must be 0, 1 or 2, got {self.trans!r}")
        lu = matrices(planner, "lu", self.lu, is_square=True)
        piv = planner.read("piv", self.piv)
        if piv.shape != lu.shape[:-1] or piv.dtype is not DType.int32:
            raise ValueError(
                f"{planner.name}: piv must have shape {lu.shape[:-1]} and dtype int32, "
                f"got shape {piv.shape} and dtype {piv.dtype}"
            )
        b, out, x = sides(planner, lu, self.b, factor="lu")
        return Planned(LuSolveSpec(_TRANSPOSES[self.trans], lu, piv, b, out, status_of(planner, lu)), x)


@attrs.define(eq=False, on_setattr=None)
class SolveTriangular(BlasOperation[AccelRef]):
    """The solution of equations with triangular matrices, infinite if they are singular."""

    a: Operand
    b: Operand
    trans: Literal[0, 1, 2, "N", "T", "C"] = 0
    lower: bool = False
    unit_diagonal: bool = False

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes, dtypes and letter, and name the solution."""
        if self.trans not in _TRANSPOSES:
            raise ValueError(f"{planner.name}: trans must be 0, 1, 2, 'N', 'T' or 'C', got {self.trans!r}")
        a = matrices(planner, "a", self.a, is_square=True)
        b, out, x = sides(planner, a, self.b)
        lower, trans, unit = bool(self.lower), _TRANSPOSES[self.trans], bool(self.unit_diagonal)
        return Planned(TriangularSpec(True, "L", lower, trans, unit, 1.0, a, b, out), x)


@attrs.define(eq=False, on_setattr=None)
class CheckDiagonal(SolverOperation[None]):
    """Fails with `LinAlgError` if a triangular matrix is singular; `solve_triangular` asks it too."""

    a: Operand

    def plan(self, planner: Planner) -> Planned[None]:
        """Check shape and dtype."""
        a = matrices(planner, "a", self.a, is_square=True)
        return Planned(CheckDiagonalSpec(a, status_of(planner, a)))


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
    return await device_of("solve", a, b).ask(Solve(a, b))


async def inv(a: Operand) -> AccelRef:
    """Inverse of matrices, as `numpy.linalg.inv` (LAPACK ``gesv``). `solve` is faster, and more accurate.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The inverse, of the shape and dtype of `a`.

    Raises:
        LinAlgError: A matrix is singular: a pivot is exactly zero. `LinAlgError.index` says which one.
    """
    return await device_of("inv", a).ask(Inv(a))


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
    return await device_of("lu_solve", lu, piv, b).ask(LuSolve(lu, piv, b, trans))


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
