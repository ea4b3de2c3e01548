"""Systems of linear equations."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from ..backends.base import DType
from ..backends.base.ops import LuSolveSpec, SolveSpec
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import SolverActor
from ._checks import matrices, sides, status_of

__all__ = ["Inv", "LuSolve", "Solve", "inv", "lu_solve", "solve"]

_PATH = "trio_accel.linalg:SolverActor"
_TRANSPOSES: tuple[Literal["N", "T", "C"], ...] = ("N", "T", "C")


@attrs.define(eq=False, on_setattr=None)
class Solve(Operation[SolverActor, AccelRef]):
    """The solution of linear equations; see `solve`."""

    a: Operand
    b: Operand
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the solution."""
        a = matrices(planner, "a", self.a, is_square=True)
        b, out, x = sides(planner, a, self.b)
        return Planned(SolveSpec(a, b, out, status_of(planner, a)), x)


@attrs.define(eq=False, on_setattr=None)
class Inv(Operation[SolverActor, AccelRef]):
    """The inverse of matrices; see `inv`."""

    a: Operand
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the inverse."""
        a = matrices(planner, "a", self.a, is_square=True)
        out = planner.output(a.shape, a.dtype)
        return Planned(SolveSpec(a, None, out.spec, status_of(planner, a)), out)


@attrs.define(eq=False, on_setattr=None)
class LuSolve(Operation[SolverActor, AccelRef]):
    """The solution of linear equations by factors that are there; see `lu_solve`."""

    lu: Operand
    piv: Operand
    b: Operand
    trans: Literal[0, 1, 2] = 0
    library: ClassVar[str] = _PATH

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
        numpy.linalg.LinAlgError: `a` is no stack of square matrices.
        ValueError: Shapes that do not fit.
        TypeError: Neither is on a device, or another dtype, or two of them.

    See `Device.ask` for cancellation and the errors that any operation can end with.
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
        numpy.linalg.LinAlgError: Not a stack of square matrices.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
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
        numpy.linalg.LinAlgError: The factors are no stack of square matrices.
        ValueError: Shapes that do not fit, or another `trans`.
        TypeError: None of them is on a device, or dtypes that differ.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    lu, piv = lu_and_piv
    return await device_of("lu_solve", lu, piv, b).ask(LuSolve(lu, piv, b, trans))
