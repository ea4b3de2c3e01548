"""``demo solve``: conjugate gradients through the sparse and BLAS actors alone, checked against SciPy."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs
import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style

import trio_accel as ta
from trio_accel.cli._board import Bench, Check, Step, StepResult, count_of, facts
from trio_accel.cli._run import InputError, in_thread, read_apart

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_SYMMETRY_TOLERANCE = 1e-12
# The recursive residual of CG drifts from b - Ax by rounding; more than this much is a wrong answer.
_DRIFT = 1.1
# Rows of a matrix that is factorised to compare with. The factors may fill up: 0.4 GB at most.
_DIRECT_LIMIT = 5_000
_LEAST_ITERATIONS = 1000
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 9
_WIDTH = 64


@attrs.frozen(kw_only=True)
class SolveData:
    """The matrix and the way to its solution.

    Attributes:
        matrix: Name of the file.
        title: Its title in the comments at the head of the file.
        kind: Type of the file's content, e.g. ``"coordinate real symmetric"``.
        rows: Number of rows.
        nonzeros: Number of stored entries, both triangles.
        converged: Whether the residual of the recursion came below ``rtol``.
        iterations: Iterations done.
        max_iterations: Iterations allowed.
        rtol: Asked for.
        residual: ``norm(b - A x) / norm(b)``, recomputed with SciPy in float64.
        condition: Condition number as seen by CG (quotient of its extreme Ritz values).
        reference: Routine of ``scipy.sparse.linalg`` that the solution was compared with, ``None`` if not.
        history: Relative residual of the recursion after each iteration, the starting residual 1 first.
    """

    matrix: str
    title: str
    kind: str
    rows: int
    nonzeros: int
    converged: bool
    iterations: int
    max_iterations: int
    rtol: float
    residual: float
    condition: float
    reference: str | None
    history: Sequence[float]

    def figures(self) -> RenderableType:
        """See `StepData`: the facts, and a chart of the residual."""
        return Group(facts(self._facts()), ResidualChart(history=self.history))

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "matrix", f"{self.matrix}: {self.rows} × {self.rows}, {count_of(self.nonzeros, 'nonzero')}"
        yield "", self.kind
        if self.title:
            yield "", self.title
        goal = (
            f"to {self.rtol:.0e}"
            if self.converged
            else f"of at most {self.max_iterations}, without reaching {self.rtol:.0e}"
        )
        iterations = count_of(self.iterations, "iteration")
        yield "solved by", f"conjugate gradients, no preconditioner, {iterations} {goal}"
        yield "condition", f"{self.condition:.1e} (from the Ritz values)"
        yield "residual", "norm(b - A x) / norm(b), b = 1 in every row:"


@attrs.frozen(kw_only=True)
class Matrix:
    """A real sparse matrix from a file.

    Attributes:
        name: The file's name.
        kind: Layout, field and storage as the file names them, e.g. ``"coordinate real symmetric"``.
        title: Its title in the comments at the head of the file, or an empty string.
        csr: float64, duplicates summed, column indices sorted.
    """

    name: str
    kind: str
    title: str
    csr: csr_array[np.float64] = attrs.field(eq=False, repr=False)

    @classmethod
    async def read(cls, path: Path | None) -> Matrix:
        """Read the user's matrix, or the carried one for ``None``.

        Raises:
            InputError: See `read_apart`.
        """
        from scipy.sparse import csr_array

        beginnings = b"%%matrixmarket", b"\x1f\x8b"
        name, found = await read_apart("Matrix Market", path, "bcsstk16.mtx.gz", beginnings)
        parts = found["data"], found["indices"], found["indptr"]
        csr = csr_array(parts, shape=tuple(found["shape"].tolist()))
        return cls(name=name, kind=str(found["kind"]), title=str(found["title"]), csr=csr)


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
        matrix: Matrix Market file, ``None`` for the carried one.
        rtol: Relative residual at which to stop.
        max_iterations: Iterations allowed, ``None`` for ten per row and at least 1000.
    """

    name: ClassVar[str] = "solve"
    matrix: Path | None = None
    rtol: float = 1e-10
    max_iterations: int | None = None
    _input: Matrix = attrs.field(init=False)

    async def prepare(self) -> None:
        """Read the matrix; refuse what CG cannot solve as far as the entries alone show it."""
        self._input = await Matrix.read(self.matrix)
        await in_thread(_require_solvable, self._input)

    async def run(self, bench: Bench) -> StepResult:
        """Solve ``A x = b`` with a unit load in every row, then compare with SciPy."""
        matrix = self._input
        rows = int(matrix.csr.shape[0])
        limit = self.max_iterations if self.max_iterations is not None else max(_LEAST_ITERATIONS, 10 * rows)
        load = np.ones(rows)
        outcome = await self._conjugate_gradients(bench, matrix, load, limit)
        bench.progress.update(1, 1, "comparing with SciPy")
        notes: list[str] = []
        checks, reference = await in_thread(_compare, matrix, outcome, load, self.rtol, notes)
        residual, iterations = checks[0].value, len(outcome.history) - 1
        reached = f"{count_of(iterations, 'iteration')}, residual {residual:.1e}"
        end = reached if outcome.converged else notes[0]
        return StepResult(
            summary=f"{rows} × {rows}, {end}",
            checks=checks,
            notes=notes,
            data=SolveData(
                matrix=matrix.name,
                title=matrix.title,
                kind=matrix.kind,
                rows=rows,
                nonzeros=int(matrix.csr.nnz),
                converged=outcome.converged,
                iterations=iterations,
                max_iterations=limit,
                rtol=self.rtol,
                residual=residual,
                condition=outcome.condition,
                reference=reference,
                history=outcome.history,
            ),
        )

    async def _conjugate_gradients(
        self, bench: Bench, matrix: Matrix, load: NDArray[np.float64], limit: int
    ) -> _Outcome:
        """Hestenes and Stiefel 1952; the vectors stay on the device, two scalars per iteration come back."""
        device = bench.device
        a = await ta.sparse.csr(device, matrix.csr)
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
            _require_finite(matrix, pq, len(alphas) + 1)
            if pq <= 0.0:
                told = f"p·Ap = {pq:.3g} in iteration {len(alphas) + 1}"
                raise _unsolvable(matrix, f"positive definite ({told})")
            alpha = rr / pq
            await ta.linalg.axpy(alpha, p, x)
            await ta.linalg.axpy(-alpha, q, r)
            previous, rr = rr, float(await ta.linalg.dot(r, r).item())
            _require_finite(matrix, rr, len(alphas) + 1)
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


def _require_solvable(matrix: Matrix) -> None:
    """Refuse a matrix that is certainly not symmetric positive definite.

    Raises:
        InputError: It is not square, not symmetric, or has a diagonal entry that is not positive.
    """
    a = matrix.csr
    rows, columns = a.shape
    if rows != columns:
        raise _unsolvable(matrix, f"square ({rows} × {columns})")
    largest = float(abs(a).max()) if a.nnz else 0.0
    skew = abs(a - a.T).tocoo()
    if skew.nnz and float(skew.max()) > _SYMMETRY_TOLERANCE * largest:
        worst = int(np.argmax(skew.data))
        row, column = int(skew.row[worst]), int(skew.col[worst])
        entries = [(row, column), (column, row)]
        told = ", ".join(f"entry {i + 1},{j + 1} is {a[i, j]:g}" for i, j in entries)
        raise _unsolvable(matrix, f"symmetric ({told})")
    diagonal = a.diagonal()
    bad = np.flatnonzero(diagonal <= 0.0)
    if bad.size:
        place = f"diagonal entry {bad[0] + 1} is {diagonal[bad[0]]:g}"
        raise _unsolvable(matrix, f"positive definite ({place})")


def _unsolvable(matrix: Matrix, what: str) -> InputError:
    return InputError(f"{matrix.name} is not {what}: conjugate gradients cannot solve it")


def _require_finite(matrix: Matrix, value: float, iteration: int) -> None:
    if not math.isfinite(value):
        raise InputError(
            f"{matrix.name} leaves the range of float64 in iteration {iteration}: scale its entries"
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
    matrix: Matrix, outcome: _Outcome, load: NDArray[np.float64], rtol: float, notes: list[str]
) -> tuple[list[Check], str | None]:
    """Compare a solution with SciPy's, if CG has converged.

    Args:
        matrix: The matrix.
        outcome: The solution.
        load: The right-hand side.
        rtol: The residual that was asked for.
        notes: Gets what a reader should know where all is not as it should be.

    Returns:
        The checks, the residual first; and SciPy's routine, ``None`` if CG has not converged.
    """
    a, x = matrix.csr, outcome.solution
    norm = float(np.linalg.norm(load))
    residual = float(np.linalg.norm(load - np.asarray(a @ x))) / norm
    checks = [Check(name="residual b - A x, recomputed with SciPy", value=residual, limit=_DRIFT * rtol)]
    if not outcome.converged:
        last, done = outcome.history[-1], count_of(len(outcome.history) - 1, "iteration")
        notes.append(f"not converged: relative residual {last:.1e} after {done}")
        return checks, None
    if not checks[0].is_ok:
        # The most that rounding of the exact solution to float64 could move the residual.
        magnitude = np.asarray(abs(a) @ np.abs(x)) + load
        floor = sys.float_info.epsilon * float(np.linalg.norm(magnitude)) / norm
        notes.append(
            f"the recursion came below {rtol:.0e}, the residual itself did not: rounding to float64 alone "
            f"makes up to {floor:.0e} of it; try a larger --rtol"
        )
    reference, difference = _difference(matrix, x, load, rtol)
    # The error's energy norm is at most sqrt(condition) times the residual; SciPy's own is added.
    allowed = 10.0 * (math.sqrt(outcome.condition) * rtol + outcome.condition * sys.float_info.epsilon)
    name = f"difference to SciPy's {reference}, energy norm"
    return [*checks, Check(name=name, value=difference, limit=allowed)], reference


def _difference(
    matrix: Matrix, x: NDArray[np.float64], load: NDArray[np.float64], rtol: float
) -> tuple[str, float]:
    """SciPy's routine, and the energy norm of the difference relative to SciPy's solution."""
    from scipy.sparse import linalg

    a = matrix.csr
    if load.size <= _DIRECT_LIMIT:
        routine = "splu"
        try:
            reference = np.asarray(linalg.splu(a.tocsc()).solve(load))
        except RuntimeError as error:
            # CG can solve a singular system too if the load happens to be in the range of the matrix.
            raise InputError(f"{matrix.name} is singular, so not positive definite") from error
    else:
        routine, reference = "cg", np.asarray(linalg.cg(a, load, rtol=rtol)[0])
    return routine, math.sqrt(_energy(a, x - reference) / _energy(a, reference))


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
