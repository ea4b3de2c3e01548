"""Generalized minimal residuals."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..devices import AccelRef, Operand
from ..expressions import Reduction
from ._formats import SparseMatrix
from ._iterations import (
    NORM,
    Callback,
    LinearMap,
    Problem,
    SolveResult,
    check_bound,
    make,
    make_problem,
    reduce,
    run,
)

__all__ = ["gmres"]

_ADD = make("x + y", operation="sparse.gmres")
_MINUS = make("x - y", operation="sparse.gmres")
_UNIT = make("where(size != 0, w / size, 0 * w)", operation="sparse.gmres")
COMBINE = reduce("v * h", "sum", operation="sparse.combine")


@functools.cache
def coefficients(kind: str) -> Reduction:
    """Return the products of a vector with each of several, conjugated."""
    return reduce("conj(v) * w" if kind == "complex" else "v * w", "sum", operation="sparse.coefficients")


async def orthogonalize(problem: Problem, basis: AccelRef, w: AccelRef, out: AccelRef) -> AccelRef:
    """Take from a vector its parts along others, twice (classical Gram-Schmidt), and note what they were."""
    kind, parts = problem.dtype.kind, list[AccelRef]()
    for _ in range(2):
        h = await problem.ask(coefficients(kind).compute(v=basis, w=w, axis=1))
        along = await problem.ask(COMBINE.compute(v=basis, h=h[:, None], axis=0))
        w = await problem.ask(_MINUS.compute(w, along))
        parts.append(h)
    await problem.ask(_ADD.compute(*parts, out=out))
    return w


class _Gmres:
    """Cycles of minimal residuals (Saad and Schultz, 1986), preconditioned from the right."""

    # The host computes in each cycle.
    changing: ClassVar[tuple[str, ...]] = ()

    def __init__(self, restart: int, wanted: float, problem: Problem, x: AccelRef, r: AccelRef) -> None:
        self.problem, self.x, self._r = problem, x, r
        self._restart, self._wanted = restart, wanted

    async def step(self) -> int:
        problem, steps, n = self.problem, self._restart, len(self.problem.b)
        r = await problem.residual(self.x)
        size = await problem.ask(NORM.compute(r))
        basis = await problem.device.zeros((steps + 1, n), problem.dtype)
        h = await problem.device.zeros((steps, steps), problem.dtype)
        sizes = await problem.device.zeros(steps, size.dtype)
        await problem.ask(_UNIT.compute(size=size, w=r, out=basis[0]))
        for step in range(steps):
            w = await problem.multiply(await problem.precondition(basis[step]))
            w = await orthogonalize(problem, basis[: step + 1], w, h[step, : step + 1])
            await problem.ask(NORM.compute(w, out=sizes[step]))
            await problem.ask(_UNIT.compute(size=sizes[step], w=w, out=basis[step + 1]))
        await problem.settle()
        y = self._least(await h.to_host(), await sizes.to_host(), float(await size.item()))
        if len(y):
            y_there = (await problem.device.put(y)).reshape(-1, 1)
            change = await problem.ask(COMBINE.compute(v=basis[: len(y)], h=y_there, axis=0))
            self.x = await problem.ask(_ADD.compute(self.x, await problem.precondition(change)))
        return len(y)

    def _least(self, h: npt.NDArray[Any], sizes: npt.NDArray[Any], size: float) -> npt.NDArray[Any]:
        """Find the combination of the first vectors that makes the residual small enough, or least."""
        steps = self._restart
        hessenberg = np.zeros((steps + 1, steps), h.dtype)
        hessenberg[:steps] = h.T
        hessenberg[range(1, steps + 1), range(steps)] = sizes
        target = np.zeros(steps + 1, h.dtype)
        target[0] = size
        if not np.isfinite(hessenberg).all():
            return np.full(1, np.nan, h.dtype)
        limit = np.finfo(h.dtype).eps * np.abs(hessenberg).max(initial=0)
        y = target[:0]
        for count in range(1, steps + 1):
            part = hessenberg[: count + 1, :count]
            y = np.linalg.lstsq(part, target[: count + 1])[0]
            left = float(np.linalg.norm(target[: count + 1] - part @ y))
            if left <= self._wanted / 2 or sizes[count - 1] <= limit:
                break
        return np.asarray(y, h.dtype)


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

    `A` is any square matrix. The host reads a small matrix and the residual once in each cycle of `restart`
    steps. Vectors of a cycle are orthogonalized twice, by two reductions each time. They are rows of one
    array that steps write to. `DeviceOptions.retry` does not have these run again: a loss ends the solver.

    Args:
        A: As for `cg`, but any matrix.
        b: As for `cg`.
        x0: As for `cg`.
        rtol: As for `cg`.
        atol: As for `cg`.
        restart: Steps of a cycle, n at most.
        maxiter: The largest number of cycles, as in SciPy; by default ``10 * n``.
        M: As for `cg`; it is applied from the right.
        callback: As for `cg`, once in each cycle.

    Returns:
        The solution; the number of steps, of which the last cycle counts those that the solution has; and the
        residual.

    Raises:
        ConvergenceError, LinAlgError, TypeError, ValueError, LibraryError: As of `cg`.
    """
    problem = await make_problem("gmres", A, b, M, x0)
    steps = min(check_bound("gmres", "restart", restart, is_whole=True), max(len(problem.b), 1))
    length = await problem.size(problem.b)
    wanted = max(check_bound("gmres", "rtol", rtol) * length, check_bound("gmres", "atol", atol))
    return await run(
        problem, functools.partial(_Gmres, steps, wanted),
        x0=x0, rtol=rtol, atol=atol, maxiter=maxiter, callback=callback, check_every=1,
    )  # fmt: skip
