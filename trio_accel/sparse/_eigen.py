"""Eigenvalues of Hermitian sparse matrices."""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from .._names import later
from ..actors import run_in_thread
from ..backends.base import NATIVE, HostArray, LinAlgError, NotSupportedError
from ..backends.base.contract.ops import real_of
from ..devices import AccelRef, Operand, bounded_integer, composed, refuse_value
from ..graphs import Graph, capture
from ._conversions import add, tocsr
from ._elements import norm
from ._factors import factor
from ._formats import CsrMatrix, SparseMatrix
from ._iterations import (
    ConvergenceError,
    LinearMap,
    LinearProblem,
    check_bound,
    make,
    make_problem,
    reduce,
    unit_of,
)
from ._krylov import ExtendBasis, orthogonalize

if TYPE_CHECKING:
    from .. import linalg
else:
    linalg = later("trio_accel.linalg")

__all__ = ["EigshResult", "eigsh"]

_Which: TypeAlias = Literal["LM", "LA", "SA"]

_UNIT = make("w / maximum(size, least)", operation="sparse.eigsh")
_TIMES = make("x * y", operation="sparse.eigsh")
_LARGEST = reduce("abs(x)", "max", operation="sparse.eigsh")
_COPY = make("1 * w", operation="sparse.eigsh")
_OFF = make("w - theta * v", operation="sparse.eigsh")

# The best value of a run is certainly worse than the locked ones once its residual is this part of the
# distance.
_CERTAIN = 1e-3


class EigshResult(NamedTuple):
    """Eigenvalues and eigenvectors; see `eigsh`."""

    eigenvalues: AccelRef
    """Real numbers, the smallest first."""
    eigenvectors: AccelRef
    """Vectors of length 1, as columns."""


class _Lanczos:
    """Lanczos' method with full orthogonalization and thick restarts (Wu and Simon, 2000).

    The first `k` vectors of the basis are locked eigenvectors, or zeros. All others are orthogonal to them,
    so that they only see the rest of the matrix. The next ones are Ritz vectors, or an invariant subspace.
    Products with later vectors fill the upper triangle of the projected matrix, because all components along
    the basis are subtracted and noted. The steps for each part of the basis are recorded once.

    Attributes:
        locked: Eigenvalues of the locked vectors.
    """

    def __init__(self, problem: LinearProblem, steps: int, k: int, which: _Which) -> None:
        n = len(problem.b)
        self._problem, self._steps, self._k, self._which = problem, steps, k, which
        self._kept, self._most_kept = 0, min(k + (steps - k) // 2, steps - 1)
        self._generator = np.random.default_rng(0)
        # The rest of a product is nothing but roundings if it is not larger than this part of it.
        self._least = 4 * float(np.finfo(problem.dtype.dtype).eps) * math.sqrt(n)
        self._graphs: dict[tuple[int, int], Graph[Any]] = {}
        # Steps for a graph must run on any backend.
        self._is_one_operation = not problem.is_recorded
        self.locked: HostArray = np.zeros(0)

    async def start(self, v0: AccelRef) -> None:
        problem, rows = self._problem, self._k + self._steps
        self._basis = await problem.device.zeros((rows + 1, len(v0)), problem.dtype)
        self._spare = await problem.device.zeros((self._steps, len(v0)), problem.dtype)
        self._h = await problem.device.zeros((2, rows, rows), problem.dtype)
        self._sizes = await problem.device.zeros(rows, real_of(problem.dtype))
        # The program's memory has as much when the device has, and not before.
        self._projected: HostArray = np.zeros((self._steps, self._steps), problem.dtype.dtype)
        await self._put(self._k, v0)

    async def _put(self, index: int, vector: AccelRef | None) -> None:
        """Set a vector of the basis: one of length 1, or a random one orthogonal to the previous vectors."""
        problem = self._problem
        if vector is None:
            numbers = self._generator.normal(size=len(problem.b)).astype(problem.dtype.dtype)
            vector = await problem.device.put(numbers)
            notes = [self._h[time, 0, :index] for time in range(2)]
            vector = await orthogonalize(problem, self._basis[:index], vector, notes)
        size = await problem.ask(linalg.Nrm2(vector))
        await problem.ask(
            _UNIT.compute(size=size, least=problem.smallest_divisor, w=vector, out=self._basis[index])
        )

    async def cycle(self) -> tuple[HostArray, HostArray, float, int]:
        """Fill the basis.

        Returns:
            Ritz values and vectors of the projected matrix, the length of the last product's rest, and the
            number of vectors, without locked ones.
        """
        retained, left_of_n = self._kept, len(self._problem.b) - len(self.locked)
        begin, end = self._k, self._k + min(self._steps, left_of_n)
        await self._fill(begin + retained, end)
        columns, sizes = (await self._h.to_host()).sum(0)[begin:end], (await self._sizes.to_host())[begin:end]
        if not (np.isfinite(columns[retained:]).all() and np.isfinite(sizes[retained:]).all()):
            raise LinAlgError(
                "eigsh: A, or a product with it, holds a NaN or an infinity", library="sparse", code=-1
            )
        ends = np.flatnonzero(sizes[retained:] <= self._least * np.linalg.norm(columns[retained:], axis=1))
        count = retained + int(ends[0]) + 1 if ends.size else end - begin
        self._projected[:count, retained:count] = columns[retained:count, begin : begin + count].T
        # It grows with the cube of `ncv`.
        solve = functools.partial(np.linalg.eigh, UPLO="U")
        values, vectors = await run_in_thread(solve, self._projected[:count, :count])
        # If the basis spans everything, there is no rest.
        rest_length = 0.0 if ends.size or count == left_of_n else float(sizes[count - 1])
        return values, vectors, rest_length, count

    async def _fill(self, first: int, end: int) -> None:
        """Multiply the vectors of the basis from the first one on, by graphs where there are some."""
        problem, middle = self._problem, min(max(first, self._k + self._most_kept), end)
        await problem.settle()
        for begin, stop in ((first, middle), (middle, end)):
            if begin < stop and problem.is_recorded:
                try:
                    if (begin, stop) not in self._graphs:
                        steps = functools.partial(
                            self._multiply, attrs.evolve(problem, pending=[]), begin, stop
                        )
                        self._graphs[begin, stop] = await capture(problem.device, steps)
                    await self._graphs[begin, stop]()
                except NotSupportedError:
                    # The backend lacks graphs, or one of these operations in graphs.
                    pass
                else:
                    continue
            await self._multiply(problem, begin, stop)
        await problem.settle()

    async def _multiply(self, problem: LinearProblem, first: int, end: int) -> None:
        for step in range(first, end):
            w = await problem.multiply(self._basis[step])
            notes = self._h[0, step, : step + 1], self._h[1, step, : step + 1]
            if not await self._extend(w, step, *notes):
                w = await orthogonalize(problem, self._basis[: step + 1], w, notes)
                size = await problem.ask(linalg.Nrm2(w, out=self._sizes[step]))
                await problem.ask(
                    _UNIT.compute(size=size, least=problem.smallest_divisor, w=w, out=self._basis[step + 1])
                )
        await problem.settle()

    async def _extend(self, w: AccelRef, step: int, first: AccelRef, second: AccelRef) -> bool:
        """Add a vector to the basis by one operation; return whether the backend has this operation."""
        problem, basis = self._problem, self._basis
        if not self._is_one_operation:
            return False
        message = ExtendBasis(
            basis[: step + 1], w, first, second, self._sizes[step], basis[step + 1], problem.smallest_divisor
        )
        try:
            await problem.device.ask(message)
        except NotSupportedError:
            self._is_one_operation = False
        return self._is_one_operation

    async def _combine(self, vectors: HostArray) -> AccelRef:
        """Combine unlocked vectors of the basis in spare memory: one for each column."""
        factors = await self._problem.device.put(np.ascontiguousarray(vectors.T))
        basis, out = self._basis[self._k : self._k + len(vectors)], self._spare[: len(factors)]
        return await self._problem.ask(linalg.Gemm(1.0, factors, basis, 0.0, out))

    def rank(self, values: HostArray) -> HostArray:
        """Return numbers that are larger for values that `which` prefers."""
        ranks: dict[str, HostArray] = {"LM": np.abs(values), "LA": values, "SA": -values}
        return ranks[self._which]

    def best(self, values: HostArray) -> npt.NDArray[np.intp]:
        """Return the places of values, in the order of preference."""
        return np.argsort(-self.rank(values), kind="stable")

    async def lock(self, values: HostArray, vectors: HostArray) -> None:
        """Lock pairs; if there are `k` already, replace the least preferred one."""
        combined = await self._combine(vectors)
        if not len(self.locked):
            self.locked = np.full(len(values), np.nan, values.dtype)
        for number, value in enumerate(values):
            # NaN is last.
            index = int(self.best(self.locked)[-1])
            await self._basis[index].assign(combined[number])
            self.locked[index] = value

    async def vectors(self, order: npt.NDArray[np.intp]) -> list[AccelRef]:
        """Return the locked vectors."""
        return [self._basis[int(index)] for index in order]

    async def begin_anew(self) -> None:
        """Begin a run with random numbers."""
        self._kept = 0
        self._projected[:] = 0
        await self._put(self._k, None)

    async def restart(self, values: HostArray, vectors: HostArray, rest_length: float, count: int) -> None:
        """Begin the next cycle with the best Ritz vectors, which these are among, and with the last vector.

        After an invariant subspace, another direction joins it.
        """
        problem, basis = self._problem, self._basis[self._k :]
        if not rest_length and count < self._steps and len(values) == count:
            self._kept = count
            await self._put(self._k + count, None)
            return
        retained = self.best(values)[: self._most_kept]
        self._kept = len(retained)
        combined = await self._combine(vectors[:, retained])
        await problem.ask(_COPY.compute(combined, out=basis[: self._kept]))
        if rest_length:
            await problem.ask(_COPY.compute(basis[count], out=basis[self._kept]))
        else:
            await self._put(self._k + self._kept, None)
        self._projected[:] = 0
        self._projected[range(self._kept), range(self._kept)] = values[retained]


@composed
async def eigsh(
    A: SparseMatrix | LinearMap,  # noqa: N803  # SciPy's name
    k: int = 6,
    which: _Which = "LM",
    v0: Operand | None = None,
    ncv: int | None = None,
    maxiter: int | None = None,
    tol: float = 0.0,
    *,
    sigma: float | None = None,
) -> EigshResult:
    """Find some eigenvalues of a Hermitian matrix, as `scipy.sparse.linalg.eigsh`, on every backend.

    It uses Lanczos' method with full orthogonalization and thick restarts. Eigenvectors found are locked, and
    a new run from random numbers looks for better ones, because one direction finds equal eigenvalues only
    once. The search ends when such a run finds none. The basis of `ncv` vectors, `k` locked vectors, and as
    much again for restarts stay on the device. In each round the host reads a small matrix, whose eigenvalues
    it finds by LAPACK. At the end, the residual of each pair is computed from its vector. Like `gmres`, it
    ends if the context is lost.

    Args:
        A: Hermitian matrix of shape (n, n) and any format; or an async function that multiplies a vector by
            such a matrix, and then `v0` must be given.
        k: The number of eigenvalues: from 1, and below n.
        which: ``"LM"``: the largest absolute values. ``"LA"``: the largest ones. ``"SA"``: the smallest ones.
        v0: Vector of shape (n,) to begin with; by default random numbers, the same at each call.
        ncv: Vectors of the basis: above `k`, n at most; by default ``max(2 * k + 1, 40)``, with 20 instead of
            40 for `sigma` or a function.
        maxiter: The largest number of rounds of a run; by default ``10 * n``.
        tol: The largest residual, relative to the eigenvalue; 0 for the accuracy of the dtype.
        sigma: A number whose nearest eigenvalues are found: `which` then applies to ``1 / (w - sigma)``, so
            that ``"LM"`` finds the nearest ones. Each product is a solution by factors, as in `factor`.

    Returns:
        The eigenvalues, of shape (k,) and the real dtype, the smallest first; and the eigenvectors, as
        columns, of shape (n, k).

    Raises:
        ConvergenceError: Some residuals are not small enough after `maxiter` rounds.
        LinAlgError: A product holds a NaN or an infinity, or `sigma` is an eigenvalue.
        TypeError: `A` is not a matrix or function, or its dtype is not supported.
        ValueError: `A` is not square, or a number is out of its range.
        LibraryError: A structure is wrong.
        NotSupportedError: The backend lacks `factor`, which `sigma` needs.
    """
    problem = await _problem(A, v0)
    unit, shifted = 1.0, None
    if not callable(problem.a):
        # Squares of lengths are to be numbers of the dtype.
        unit = await _unit(problem.a)
        if unit != 1:
            problem.a = attrs.evolve(problem.a, data=await _TIMES(problem.a.data, 1 / unit))
    if sigma is not None:
        shifted = await _shifted(problem, sigma, unit)
        problem.a = (await factor(shifted)).solve
    n = len(problem.b)
    k = bounded_integer("sparse.eigsh", "k", k)
    if not 0 < k < n:
        raise ValueError(f"sparse.eigsh: k must be above 0 and below {n}, got {k}")
    if which not in ("LM", "LA", "SA"):
        refuse_value("sparse.eigsh", "which", ("LM", "LA", "SA"), which)
    # Longer rounds have fewer looks of the host; shorter ones, fewer calls of a function.
    usual = max(2 * k + 1, 20 if callable(problem.a) else 40)
    steps = min(n, usual) if ncv is None else bounded_integer("sparse.eigsh", "ncv", ncv)
    if not k < steps <= n:
        raise ValueError(f"sparse.eigsh: ncv must be above {k} and at most {n}, got {ncv}")
    max_rounds = 10 * n if maxiter is None else check_bound("eigsh", "maxiter", maxiter, is_whole=True)
    tolerance = check_bound("eigsh", "tol", tol) or float(np.finfo(problem.dtype.dtype).eps)
    lanczos = _Lanczos(problem, steps, k, which)
    await lanczos.start(problem.b)
    scale = await _find(lanczos, problem, k, max_rounds, tolerance)
    values = lanczos.locked
    if shifted is not None:
        # A correct residual for the inverse is also correct for the matrix, except for roundings. These are
        # as large as the largest eigenvalue of the inverse makes them, even if it is not among the requested
        # ones.
        scale *= float(await (await norm(shifted, math.inf)).item()) / float(np.abs(values).min())
        problem.a, values = shifted, 1 / values
    order = np.argsort(values)
    vectors = await _checked(problem, await lanczos.vectors(order), values[order], scale, tolerance)
    eigenvalues = (values[order] + (sigma or 0.0) / unit) * unit
    return EigshResult(await problem.device.put(eigenvalues.astype(values.dtype)), vectors)


async def _find(
    lanczos: _Lanczos, problem: LinearProblem, k: int, max_rounds: int, tolerance: float
) -> float:
    """Lock `k` pairs, once a run that begins with random numbers finds no better one; returns the scale."""
    n, epsilon, scale = len(problem.b), float(np.finfo(problem.dtype.dtype).eps), 0.0
    rounds, is_fresh = 0, False
    while True:
        values, vectors, rest_length, count = await lanczos.cycle()
        rounds, scale = rounds + 1, max(scale, float(np.abs(values).max()))
        limit = np.maximum(tolerance * np.abs(values), epsilon * scale)
        off, best, rest = np.abs(rest_length * vectors[-1]), lanczos.best(values), np.arange(count)
        if not len(lanczos.locked):
            if count >= k and (off <= limit)[best[:k]].all():
                await lanczos.lock(values[best[:k]], vectors[:, best[:k]])
                if count == n:
                    return scale
                await lanczos.begin_anew()
                rounds, is_fresh = 0, True
                continue
        else:
            better = _better(lanczos, values, off, limit, scale)
            if len(better):
                await lanczos.lock(values[better], vectors[:, better])
                rest, is_fresh = np.setdiff1d(rest, better), False
            elif _is_settled(lanczos, *map(float, (values[best[0]], off[best[0]], limit[best[0]], scale))):
                if is_fresh:
                    return scale
                await lanczos.begin_anew()
                rounds, is_fresh = 0, True
                continue
        if rounds >= max_rounds:
            residual = float(off[best[:k]].max())
            raise ConvergenceError(
                f"eigsh: a residual is {residual:.3g} after {rounds} rounds; give a larger ncv",
                library="sparse",
                code="not_converged",
                iterations=rounds,
                residual=residual,
            )
        await lanczos.restart(values[rest], vectors[:, rest], rest_length, count)


def _better(
    lanczos: _Lanczos, values: HostArray, off: HostArray, limit: HostArray, scale: float
) -> list[int]:
    """Return the places of converged pairs that are preferred to a locked one."""
    locked, positions = sorted(lanczos.rank(lanczos.locked)), list[int]()
    for position in lanczos.best(values):
        if lanczos.rank(values[position]) <= locked[0] + _slack(float(limit[position]), scale):
            break
        if off[position] <= limit[position]:
            locked = sorted([*locked[1:], lanczos.rank(values[position])])
            positions.append(int(position))
    return positions


def _is_settled(lanczos: _Lanczos, value: float, off: float, limit: float, scale: float) -> bool:
    """Return whether the best pair of a run is not preferred to the locked ones."""
    distance = float(lanczos.rank(lanczos.locked).min() - lanczos.rank(np.array(value)))
    return distance >= -_slack(limit, scale) and bool(off <= max(limit, _CERTAIN * distance))


def _slack(limit: float, scale: float) -> float:
    """Return how much equal values may differ: by the requested tolerance, or by roundings."""
    return float(max(limit, 64 * np.finfo(np.asarray(limit).dtype).eps * scale))


async def _problem(a: SparseMatrix | LinearMap, v0: Operand | None) -> LinearProblem:
    if v0 is None:
        if not isinstance(a, SparseMatrix):
            raise TypeError(
                f"sparse.eigsh: v0 must be given unless A is a sparse matrix, got A of {type(a).__name__}"
            )
        if a.dtype not in NATIVE:
            raise TypeError(f"sparse.eigsh: A has dtype {a.dtype}; allowed: {', '.join(map(str, NATIVE))}")
        v0 = np.random.default_rng(1).normal(size=a.shape[0]).astype(a.dtype.dtype)
    return await make_problem("eigsh", a, v0, None, None)


async def _unit(a: SparseMatrix) -> float:
    """Return a power of two by which a matrix is divided: 1 where its values are neither huge nor tiny."""
    return unit_of(float(await (await _LARGEST(a.data)).item()) if a.nnz else 0.0, a.dtype)


async def _shifted(problem: LinearProblem, sigma: Any, unit: float) -> CsrMatrix:
    """Take a number from the diagonal of the matrix."""
    if callable(problem.a):
        raise TypeError("sparse.eigsh: A must be a sparse matrix if sigma is given, got a function")
    if isinstance(sigma, bool) or not isinstance(sigma, Real) or not math.isfinite(float(sigma)):
        raise ValueError(f"sparse.eigsh: sigma must be a finite real number, got {sigma!r}")
    rows, n = await tocsr(problem.a), len(problem.b)
    index = rows.indptr.dtype.dtype
    indptr, indices = [await problem.device.put(np.arange(length, dtype=index)) for length in (n + 1, n)]
    ones = await problem.device.full(n, 1, problem.dtype)
    return await add(rows, CsrMatrix((n, n), indptr, indices, ones), 1.0, -float(sigma) / unit)


async def _checked(
    problem: LinearProblem, vectors: list[AccelRef], values: HostArray, scale: float, tolerance: float
) -> AccelRef:
    """Put vectors together as columns, and compute their residuals."""
    device, n = problem.device, len(problem.b)
    out = await device.zeros((len(vectors), n), problem.dtype)
    sizes = await device.zeros(len(vectors), values.dtype)
    for row, vector in enumerate(vectors):
        await problem.ask(
            _UNIT.compute(
                size=await problem.ask(linalg.Nrm2(vector)),
                least=problem.smallest_divisor,
                w=vector,
                out=out[row],
            )
        )
        product = await problem.multiply(out[row])
        off = await problem.ask(_OFF.compute(w=product, theta=float(values[row]), v=out[row]))
        await problem.ask(linalg.Nrm2(off, out=sizes[row]))
    await problem.settle()
    largest = float((await sizes.to_host()).max())
    # Roundings of products and of the combination are added to the estimate of Lanczos' method.
    epsilon = float(np.finfo(values.dtype).eps)
    if not largest <= (tolerance + 32 * epsilon * math.sqrt(n)) * scale:
        raise ConvergenceError(
            f"eigsh: the largest residual is {largest:.3g}; A is not Hermitian, or inaccurate",
            library="sparse",
            code="not_converged",
            iterations=0,
            residual=largest,
        )
    return out.T
