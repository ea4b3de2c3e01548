"""``demo solve``: conjugate gradients through the sparse and BLAS actors alone, checked against SciPy."""

from __future__ import annotations

import gzip
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import attrs
import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style

import trio_accel as ta
from trio_accel.cli._board import Bench, Check, Step, StepResult, count_of, facts
from trio_accel.cli._run import in_thread

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_MATRIX = "bcsstk16.mtx.gz"
# The recursive residual of CG drifts from b - Ax by rounding; more than this much is a wrong answer.
_DRIFT = 1.1
_LEAST_ITERATIONS = 1000
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 9
_WIDTH = 64


@attrs.frozen(kw_only=True)
class SolveData:
    """The matrix and the way to its solution.

    Attributes:
        matrix: Name of the file.
        rows: Number of rows.
        nonzeros: Number of stored entries, both triangles.
        converged: Whether the residual of the recursion came below ``rtol``.
        iterations: Iterations done.
        max_iterations: Iterations allowed.
        rtol: Asked for.
        residual: ``norm(b - A x) / norm(b)``, recomputed with SciPy in float64.
        condition: Condition number as seen by CG (quotient of its extreme Ritz values).
        history: Relative residual of the recursion after each iteration, the starting residual 1 first.
    """

    matrix: str
    rows: int
    nonzeros: int
    converged: bool
    iterations: int
    max_iterations: int
    rtol: float
    residual: float
    condition: float
    history: Sequence[float]

    def figures(self) -> RenderableType:
        """See `StepData`: the facts, and a chart of the residual."""
        return Group(facts(self._facts()), ResidualChart(history=self.history))

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "matrix", f"{self.matrix}: {self.rows} × {self.rows}, {count_of(self.nonzeros, 'nonzero')}"
        yield "", "BCSSTK16, the stiffness matrix of a dam"
        goal = (
            f"to {self.rtol:.0e}"
            if self.converged
            else f"of at most {self.max_iterations}, without reaching {self.rtol:.0e}"
        )
        iterations = count_of(self.iterations, "iteration")
        yield "solved by", f"conjugate gradients, no preconditioner, {iterations} {goal}"
        yield "condition", f"{self.condition:.1e} (from the Ritz values)"
        yield "residual", "norm(b - A x) / norm(b), b = 1 in every row:"


def _read() -> csr_array[np.float64]:
    """Read the matrix that comes with the package. Blocking."""
    from scipy.io import mmread
    from scipy.sparse import csr_array

    with (files("trio_accel.cli") / "data" / _MATRIX).open("rb") as file, gzip.open(file) as text:
        return csr_array(mmread(text, spmatrix=False))


@attrs.frozen(kw_only=True)
class _Outcome:
    """The outcome of CG.

    Attributes:
        solution: The last iterate.
        history: Relative residuals, 1 first.
        condition: Condition number from the Lanczos coefficients.
        converged: Whether the last residual is at most ``rtol``.
    """

    solution: NDArray[np.float64] = attrs.field(eq=False, repr=False)
    history: Sequence[float]
    condition: float
    converged: bool


@attrs.define(kw_only=True, eq=False)
class SolveStep(Step):
    """The step, with its options.

    Attributes:
        rtol: Relative residual at which to stop.
        max_iterations: Iterations allowed, ``None`` for ten per row and at least 1000.
    """

    name: ClassVar[str] = "solve"
    rtol: float = 1e-10
    max_iterations: int | None = None

    async def run(self, bench: Bench) -> StepResult:
        """Solve ``A x = b`` with a unit load in every row, then compare with SciPy."""
        matrix = await in_thread(_read)
        rows = int(matrix.shape[0])
        limit = self.max_iterations if self.max_iterations is not None else max(_LEAST_ITERATIONS, 10 * rows)
        load = np.ones(rows)
        outcome = await self._conjugate_gradients(bench, matrix, load, limit)
        bench.progress.update(1, 1, "comparing with SciPy")
        notes: list[str] = []
        checks = await in_thread(_compare, matrix, outcome, load, self.rtol, notes)
        residual, iterations = checks[0].value, len(outcome.history) - 1
        reached = f"{count_of(iterations, 'iteration')}, residual {residual:.1e}"
        end = reached if outcome.converged else notes[0]
        return StepResult(
            summary=f"{rows} × {rows}, {end}",
            checks=checks,
            notes=notes,
            data=SolveData(
                matrix=_MATRIX,
                rows=rows,
                nonzeros=int(matrix.nnz),
                converged=outcome.converged,
                iterations=iterations,
                max_iterations=limit,
                rtol=self.rtol,
                residual=residual,
                condition=outcome.condition,
                history=outcome.history,
            ),
        )

    async def _conjugate_gradients(
        self, bench: Bench, matrix: csr_array[np.float64], load: NDArray[np.float64], limit: int
    ) -> _Outcome:
        """Hestenes and Stiefel 1952; the vectors stay on the device, two scalars per iteration come back."""
        device = bench.device
        a = await ta.sparse.csr(device, matrix)
        x = await device.put(np.zeros_like(load))
        r = await device.put(load)
        p = await r.copy()
        q = await ta.sparse.spmv(a, p)
        norm = float(await ta.linalg.nrm2(r).item())
        rr = norm * norm
        history = [1.0]
        alphas: list[float] = []
        betas: list[float] = []
        while history[-1] > self.rtol and len(alphas) < limit:
            pq = float(await ta.linalg.dot(p, q).item())
            alpha = rr / pq
            await ta.linalg.axpy(alpha, p, x)
            await ta.linalg.axpy(-alpha, q, r)
            previous, rr = rr, float(await ta.linalg.dot(r, r).item())
            beta = rr / previous
            await ta.linalg.scal(beta, p)
            await ta.linalg.axpy(1.0, r, p)
            await ta.sparse.spmv(a, p, out=q)
            alphas.append(alpha)
            betas.append(beta)
            history.append(math.sqrt(rr) / norm)
            # The residual's progress on a logarithmic scale.
            done = max(0.0, math.log(max(history[-1], self.rtol)) / math.log(self.rtol))
            stage = f"iteration {len(history) - 1}, residual {history[-1]:.1e}"
            bench.progress.update(round(1000 * done), 1000, stage)
        return _Outcome(
            solution=np.asarray(await x.to_host(), np.float64),
            history=history,
            condition=_condition(alphas, betas),
            converged=history[-1] <= self.rtol,
        )


def _condition(alphas: Sequence[float], betas: Sequence[float]) -> float:
    """Quotient of the extreme eigenvalues of the Lanczos matrix (Saad, Iterative Methods, section 6.7.3)."""
    from scipy.linalg import eigvalsh_tridiagonal

    if len(alphas) < 2:
        return 1.0
    alpha, beta = np.array(alphas), np.array(betas)
    diagonal = 1.0 / alpha
    diagonal[1:] += beta[:-1] / alpha[:-1]
    off = np.sqrt(beta[:-1]) / alpha[:-1]
    last = alpha.size - 1
    smallest = eigvalsh_tridiagonal(diagonal, off, select="i", select_range=(0, 0))[0]
    largest = eigvalsh_tridiagonal(diagonal, off, select="i", select_range=(last, last))[0]
    # Beyond this the smallest Ritz value is rounding noise.
    return float(largest / max(smallest, largest * sys.float_info.epsilon))


def _compare(
    matrix: csr_array[np.float64], outcome: _Outcome, load: NDArray[np.float64], rtol: float, notes: list[str]
) -> list[Check]:
    """Compare a solution with SciPy's, if CG has converged.

    Args:
        matrix: The matrix.
        outcome: The solution.
        load: The right-hand side.
        rtol: The residual that was asked for.
        notes: Gets what a reader should know where all is not as it should be.

    Returns:
        The checks, the residual first.
    """
    x = outcome.solution
    norm = float(np.linalg.norm(load))
    residual = float(np.linalg.norm(load - np.asarray(matrix @ x))) / norm
    checks = [Check(name="residual b - A x, recomputed with SciPy", value=residual, limit=_DRIFT * rtol)]
    if not outcome.converged:
        last, done = outcome.history[-1], count_of(len(outcome.history) - 1, "iteration")
        notes.append(f"not converged: relative residual {last:.1e} after {done}")
        return checks
    if not checks[0].is_ok:
        # The most that rounding of the exact solution to float64 could move the residual.
        magnitude = np.asarray(abs(matrix) @ np.abs(x)) + load
        floor = sys.float_info.epsilon * float(np.linalg.norm(magnitude)) / norm
        notes.append(
            f"the recursion came below {rtol:.0e}, the residual itself did not: rounding to float64 alone "
            f"makes up to {floor:.0e} of it; try a larger --rtol"
        )
    difference = _difference(matrix, x, load)
    # The error's energy norm is at most sqrt(condition) times the residual; SciPy's own is added.
    allowed = 10.0 * (math.sqrt(outcome.condition) * rtol + outcome.condition * sys.float_info.epsilon)
    name = "difference to SciPy's splu, energy norm"
    return [*checks, Check(name=name, value=difference, limit=allowed)]


def _difference(a: csr_array[np.float64], x: NDArray[np.float64], load: NDArray[np.float64]) -> float:
    """Return the energy norm of the difference to SciPy's solution, relative to that."""
    from scipy.sparse import linalg

    reference = np.asarray(linalg.splu(a.tocsc()).solve(load))
    return math.sqrt(_energy(a, x - reference) / _energy(a, reference))


def _energy(a: csr_array[np.float64], vector: NDArray[np.float64]) -> float:
    return max(0.0, float(np.dot(vector, np.asarray(a @ vector))))


@attrs.frozen(kw_only=True)
class ResidualChart:
    """Relative residual over the iteration number, one column per iteration or more.

    Attributes:
        history: Positive numbers or zero, the starting residual first.
        height: Rows of text, at most.
    """

    history: Sequence[float]
    height: int = 8

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = _bins(self.history, max(8, min(_WIDTH, options.max_width - _LABEL_WIDTH - 2)))
        low = math.floor(min(columns))
        high = max(math.ceil(max(columns)), low + 1)
        # Whole decades per row, so that the labels are powers of ten.
        decades = math.ceil((high - low) / self.height)
        rows = math.ceil((high - low) / decades)
        low = high - rows * decades
        steps = [round((value - low) / decades * 8) for value in columns]
        style = Style(color="cyan")
        for row in range(rows - 1, -1, -1):
            cells = [max(0, min(8, step - row * 8)) for step in steps]
            text = "".join(
                _BLOCKS[cell] if not options.ascii_only else (" " if cell < 4 else "#") for cell in cells
            )
            # The label belongs to the upper edge of its row.
            label = f"1e{low + (row + 1) * decades:+03d}"
            yield Segment(f"{label:>{_LABEL_WIDTH}} ")
            yield Segment(text, style)
            yield Segment.line()
        last = f"{len(self.history) - 1}"
        room = max(1, len(columns) - 1 - len(last))
        axis = f"0{'iteration' if room > len('iteration') else '':^{room}}{last}"
        yield Segment(f"{'':>{_LABEL_WIDTH}} {axis}")
        yield Segment.line()


def _bins(history: Sequence[float], width: int) -> list[float]:
    """Decimal logarithms, the largest of each bin; a residual of zero counts as the smallest other one."""
    positive = min((value for value in history if value > 0.0), default=1.0)
    logs = [math.log10(max(value, positive)) for value in history]
    if len(logs) <= width:
        return logs
    edges = [index * len(logs) // width for index in range(width + 1)]
    return [max(logs[first:last]) for first, last in pairwise(edges)]
