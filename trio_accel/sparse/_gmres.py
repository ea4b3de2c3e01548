"""Generalized minimal residuals."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import ClassVar, Final

from ..backends.base.contract.ops import real_of
from ..backends.base.kit.checks import NATIVE
from ..devices import AccelRef, Operand, operation
from ..devices.operations._calls import composed
from ..linalg import Axpy, Gemv, Matmul, Nrm2
from ._formats import SparseMatrix
from ._iterations import (
    Callback,
    LinearMap,
    Method,
    Problem,
    SolveResult,
    check_bound,
    make,
    make_problem,
    run,
)
from ._products import SparseActor

__all__ = ["LeastResidual", "gmres"]

_ADD = make("x + y", operation="sparse.gmres")
_COPY = make("1 * w", operation="sparse.gmres")
_UNIT = make("where(size != 0, w / size, 0 * w)", operation="sparse.gmres")


async def orthogonalize(problem: Problem, basis: AccelRef, w: AccelRef, outs: Iterable[AccelRef]) -> AccelRef:
    """Take from a vector its parts along others (classical Gram-Schmidt), once for each note of them."""
    if callable(problem.a):
        # A function of the program's own may return its argument, or keep what it returns.
        w = await problem.ask(_COPY.compute(w))
    columns = basis.T
    for out in outs:
        if problem.dtype.kind == "complex":
            await problem.ask(Gemv(1.0, columns, w, 0.0, out, "C"))
        else:
            await problem.ask(Matmul(basis, w, out=out))
        await problem.ask(Gemv(-1.0, columns, out, 1.0, w))
    return w


@operation(
    "h(m, m), sizes: real(m), size: real(), made: real() -> y(m), count: real()",
    actor=SparseActor,
    dtypes=NATIVE,
)
async def _least_residual(
    h: Operand, sizes: Operand, size: Operand, made: Operand, wanted: float
) -> tuple[AccelRef, AccelRef]:
    """Find the combination of the first vectors that makes the residual small enough, or least.

    On CUDA, Givens' rotations bring the matrix of Arnoldi's steps to triangular form. The first step with a
    residual of half of what is wanted, or with nothing left of its product, is the last one that counts.

    Args:
        h: Row by row, the parts of a product along the vectors before.
        sizes: What was left of each product.
        size: The norm of the residual that the first vector was made of.
        made: Steps that were made before.
        wanted: The norm that the residual may have.

    Returns:
        Factors of the vectors, zeros behind the last step that counts; and how many steps were made by then.
    """
    ...


class _Gmres(Method):
    """Cycles of minimal residuals (Saad and Schultz, 1986), preconditioned from the right."""

    changing: ClassVar[tuple[str, ...]] = ("x", "made")
    # A cycle has more steps than what it takes to record it, and only a graph may run again after a loss.
    alone: ClassVar[int] = 0

    def __init__(self, restart: int, made: AccelRef, problem: Problem, x: AccelRef, r: AccelRef) -> None:
        self.problem, self.x, self.made = problem, x, made
        self._restart = restart

    async def step(self) -> None:
        problem, steps, n = self.problem, self._restart, len(self.problem.b)
        r = await problem.residual(self.x)
        size = await problem.ask(Nrm2(r))
        basis = await problem.device.zeros((steps + 1, n), problem.dtype)
        h, rest = [await problem.device.zeros((steps, steps), problem.dtype) for _ in range(2)]
        sizes = await problem.device.zeros(steps, size.dtype)
        await problem.ask(_UNIT.compute(size=size, w=r, out=basis[0]))
        for step in range(steps):
            w = await problem.multiply(await problem.precondition(basis[step]))
            w = await orthogonalize(
                problem, basis[: step + 1], w, (h[step, : step + 1], rest[step, : step + 1])
            )
            await problem.ask(Nrm2(w, out=sizes[step]))
            await problem.ask(_UNIT.compute(size=sizes[step], w=w, out=basis[step + 1]))
        await problem.ask(Axpy(1.0, rest, h))
        assert self.made is not None
        y, self.made = await problem.ask(LeastResidual(h, sizes, size, self.made, problem.wanted))
        change = await problem.ask(Gemv(1.0, basis[:steps].T, y))
        self.x = await problem.ask(_ADD.compute(self.x, await problem.precondition(change)))


@composed
async def gmres(
    A: SparseMatrix | LinearMap,  # noqa: N803  # SciPy's name
    b: Operand,
    x0: Operand | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: LinearMap | None = None,  # noqa: N803  # SciPy's name
    callback: Callback | None = None,
) -> SolveResult:
    """Solve ``A @ x = b`` by generalized minimal residuals, as `scipy.sparse.linalg.gmres`.

    `A` is any square matrix. All numbers stay on the device, and the host reads the residual once in each
    cycle of `restart` steps. Vectors of a cycle are orthogonalized twice, by two products each time. Where
    `A` is a matrix, and `M` is None or of kind ``"jacobi"``, a cycle is recorded as a graph before the first
    one. Then the solver goes on after the loss of a worker, as `cg`. Else the vectors are rows of one array
    that steps write to, which `DeviceOptions.retry` does not have run again: a loss ends the solver.

    Args:
        A: See `cg`, but any matrix.
        b: See `cg`.
        x0: See `cg`.
        rtol: See `cg`.
        atol: See `cg`.
        restart: Steps of a cycle, n at most.
        maxiter: The largest number of cycles, as in SciPy; by default ``10 * n``.
        M: See `cg`; it is applied from the right.
        callback: See `cg`; it is called once in each cycle.

    Returns:
        The solution; the number of steps, of which the last cycle counts those that the solution has; and the
        residual.

    Raises:
        ConvergenceError, LinAlgError, TypeError, ValueError, LibraryError: As of `cg`.
    """
    problem = await make_problem("gmres", A, b, M, x0)
    steps = min(check_bound("gmres", "restart", restart, is_whole=True), max(len(problem.b), 1))
    made = await problem.device.zeros((), real_of(problem.dtype))
    return await run(
        problem, functools.partial(_Gmres, steps, made),
        x0=x0, rtol=rtol, atol=atol, maxiter=maxiter, callback=callback, check_every=1,
    )  # fmt: skip


LeastResidual: Final = _least_residual.message
