"""Eigenvalues of Hermitian sparse matrices."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base import LinAlgError
from ..backends.base.checks import NATIVE
from ..backends.base.ops import real_of
from ..devices import AccelRef, Operand
from ..devices.base._refusals import whole
from ..devices.operations._plan_source import refuse_value
from ._formats import BsrMatrix, CooMatrix, CscMatrix, CsrMatrix, SparseMatrix
from ._gmres import COMBINE, orthogonalize
from ._iterations import NORM, ConvergenceError, LinearMap, Problem, check_bound, make, make_problem

__all__ = ["EigshResult", "eigsh"]

_Which: TypeAlias = Literal["LM", "LA", "SA"]

_UNIT = make("where(size > least * whole, w / size, 0 * w)", operation="sparse.eigsh")
_OFF = make("w - theta * v", operation="sparse.eigsh")


class EigshResult(NamedTuple):
    """Eigenvalues and eigenvectors; see `eigsh`."""

    eigenvalues: AccelRef
    """Real numbers, the smallest first."""
    eigenvectors: AccelRef
    """Vectors of length 1, as columns."""


class _Lanczos:
    """Lanczos' method with full orthogonalization and thick restarts (Wu and Simon, 2000).

    The first vectors are Ritz vectors, or an invariant subspace. Products with the others fill the upper
    triangle of the projected matrix, because all parts along the basis are taken off and noted.
    """

    def __init__(self, problem: Problem, steps: int, k: int, which: _Which) -> None:
        self._problem, self._steps, self._k, self._which = problem, steps, k, which
        self._kept = 0
        self._projected: npt.NDArray[Any] = np.zeros((steps, steps), problem.dtype.dtype)
        self._generator = np.random.default_rng(0)

    async def start(self, v0: AccelRef) -> None:
        problem = self._problem
        self._basis = await problem.device.zeros((self._steps + 1, len(v0)), problem.dtype)
        await self._put(0, v0)

    async def _put(self, place: int, vector: AccelRef | None) -> None:
        """Set a vector of the basis: one of length 1, or a random one that is orthogonal to those before."""
        problem = self._problem
        if vector is None:
            made = self._generator.normal(size=len(problem.b)).astype(problem.dtype.dtype)
            vector = await problem.device.put(made)
            if place:
                unused = await problem.device.zeros(place, problem.dtype)
                vector = await orthogonalize(problem, self._basis[:place], vector, unused)
        size = await problem.ask(NORM.compute(vector))
        await problem.ask(_UNIT.compute(size=size, least=0.0, whole=1.0, w=vector, out=self._basis[place]))

    async def cycle(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], float, int]:
        """Fill the basis.

        Returns:
            Ritz values and vectors of the projected matrix, the length of what is left of the last product,
            and how many vectors there are.
        """
        problem, steps = self._problem, self._steps
        h = await problem.device.zeros((steps, steps), problem.dtype)
        sizes = await problem.device.zeros(steps, real_of(problem.dtype))
        wholes = await problem.device.zeros(steps, real_of(problem.dtype))
        # What is left of a product is nothing but roundings if it is not larger than this part of it.
        least = 4 * float(np.finfo(problem.dtype.dtype).eps) * math.sqrt(len(problem.b))
        for step in range(self._kept, steps):
            w = await problem.multiply(self._basis[step])
            await problem.ask(NORM.compute(w, out=wholes[step]))
            w = await orthogonalize(problem, self._basis[: step + 1], w, h[step, : step + 1])
            await problem.ask(NORM.compute(w, out=sizes[step]))
            await problem.ask(
                _UNIT.compute(
                    size=sizes[step], least=least, whole=wholes[step], w=w, out=self._basis[step + 1]
                )
            )
        await problem.settle()
        columns, found, all_of_it = await h.to_host(), await sizes.to_host(), await wholes.to_host()
        if not (np.isfinite(columns).all() and np.isfinite(found).all()):
            raise LinAlgError(
                "eigsh: A, or a product with it, holds a NaN or an infinity", library="sparse", code=-1
            )
        ends = np.flatnonzero((found <= least * all_of_it)[self._kept :])
        count = self._kept + int(ends[0]) + 1 if ends.size else steps
        self._projected[:, self._kept : count] = columns[self._kept : count].T
        values, vectors = np.linalg.eigh(self._projected[:count, :count], UPLO="U")
        return values, vectors, 0.0 if ends.size else float(found[count - 1]), count

    def chosen(self, values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
        """Return the places of so many wanted values, in ascending order."""
        by = {"LM": -np.abs(values), "LA": -values, "SA": values}[self._which]
        return np.sort(np.argsort(by, kind="stable")[:count])

    async def combine(self, vectors: npt.NDArray[Any]) -> list[AccelRef]:
        """Combine vectors of the basis: one result for each column."""
        problem, made = self._problem, list[AccelRef]()
        factors = await problem.device.put(np.ascontiguousarray(vectors.T))
        for row in range(vectors.shape[1]):
            terms = factors[row].reshape(-1, 1)
            made.append(await problem.ask(COMBINE.compute(v=self._basis[: len(vectors)], h=terms, axis=0)))
        return made

    async def restart(
        self, values: npt.NDArray[Any], vectors: npt.NDArray[Any], left: float, count: int, *, is_found: bool
    ) -> None:
        """Begin the next cycle.

        Behind an invariant subspace, another direction joins it. If the wanted vectors are found, they are
        kept, and another direction follows. Otherwise the best Ritz vectors are kept, and the last vector.
        """
        if not left and count < self._steps:
            self._kept = count
            await self._put(count, None)
            return
        more = 0 if is_found else (self._steps - self._k) // 2
        kept = self.chosen(values, min(self._k + more, self._steps - 1))
        made, last = await self.combine(vectors[:, kept]), await self._basis[count].copy()
        for place, vector in enumerate(made):
            await self._basis[place].assign(vector)
        self._kept = len(made)
        await self._put(self._kept, None if is_found else last)
        self._projected[:] = 0
        self._projected[range(self._kept), range(self._kept)] = values[kept]


async def eigsh(
    A: SparseMatrix | LinearMap,  # noqa: N803  # SciPy's name
    k: int = 6,
    which: _Which = "LM",
    v0: Operand | None = None,
    ncv: int | None = None,
    maxiter: int | None = None,
    tol: float = 0.0,
) -> EigshResult:
    """Find some eigenvalues of a Hermitian matrix, as `scipy.sparse.linalg.eigsh`, on every backend.

    By Lanczos' method with full orthogonalization and thick restarts. Eigenvalues that are found must stand a
    round that begins with random numbers, because one direction sees equal ones once. The basis of `ncv`
    vectors stays on the device. In each round the host reads a small matrix, whose eigenvalues it finds by
    LAPACK. At the end, the residual of each pair is computed from its vector. As of `gmres`, a loss ends it.

    Args:
        A: Hermitian matrix of shape (n, n) and any format; or an async function that multiplies a vector by
            one, and then `v0` must be given.
        k: How many: from 1, and below n.
        which: ``"LM"``: the largest absolute values. ``"LA"``: the largest ones. ``"SA"``: the smallest ones.
        v0: Vector of shape (n,) to begin with; by default random numbers, the same at each call.
        ncv: Vectors of the basis: above `k`, n at most; by default ``max(2 * k + 1, 20)``.
        maxiter: The largest number of rounds; by default ``10 * n``.
        tol: How large a residual may be, relative to the eigenvalue; 0 for the accuracy of the dtype.

    Returns:
        The eigenvalues, of shape (k,) and the real dtype, the smallest first; and the eigenvectors, as
        columns, of shape (n, k).

    Raises:
        ConvergenceError: Not all residuals are small enough after `maxiter` rounds.
        LinAlgError: A product holds a NaN or an infinity.
        TypeError: `A` is no matrix or function, or of another dtype.
        ValueError: `A` is not square, or a number is out of its range.
        LibraryError: A wrong structure.
    """
    problem = await _problem(A, v0)
    n, rounds = len(problem.b), 0
    if not 0 < whole("sparse.eigsh", "k", k) < n:
        raise ValueError(f"sparse.eigsh: k must be above 0 and below {n}, got {k}")
    if which not in ("LM", "LA", "SA"):
        refuse_value("sparse.eigsh", "which", ("LM", "LA", "SA"), which)
    steps = min(n, max(2 * k + 1, 20)) if ncv is None else whole("sparse.eigsh", "ncv", ncv)
    if not k < steps <= n:
        raise ValueError(f"sparse.eigsh: ncv must be above {k} and at most {n}, got {ncv}")
    most = 10 * n if maxiter is None else check_bound("eigsh", "maxiter", maxiter, is_whole=True)
    epsilon = float(np.finfo(problem.dtype.dtype).eps)
    wanted = check_bound("eigsh", "tol", tol) or epsilon
    lanczos, scale, before = _Lanczos(problem, steps, k, which), 0.0, np.full(k, np.nan)
    await lanczos.start(problem.b)
    places, is_fresh = np.arange(k), False
    while True:
        values, vectors, left, count = await lanczos.cycle()
        rounds, is_found = rounds + 1, False
        if count >= k:
            scale = max(scale, float(np.abs(values).max()))
            places = lanczos.chosen(values, k)
            limit = np.maximum(wanted * np.abs(values[places]), epsilon * scale)
            off = np.abs(left * vectors[-1, places])
            is_found = bool((off <= limit).all())
            # Of equal eigenvalues one direction sees a single one: so another one has the last word.
            is_same = is_fresh and bool((np.abs(values[places] - before) <= 8 * limit).all())
            if is_found and (count == n or is_same or rounds >= most):
                break
            if rounds >= most:
                raise ConvergenceError(
                    f"eigsh: a residual is {off.max():.3g} after {rounds} rounds; give a larger ncv",
                    library="sparse", code="not_converged", iterations=rounds, residual=float(off.max()),
                )  # fmt: skip
            before = values[places]
        is_fresh = is_found or not left
        await lanczos.restart(values, vectors, left, count, is_found=is_found)
    return await _result(problem, await lanczos.combine(vectors[:, places]), values[places], scale, wanted)


async def _problem(a: SparseMatrix | LinearMap, v0: Operand | None) -> Problem:
    if v0 is None:
        if not isinstance(a, (BsrMatrix, CooMatrix, CscMatrix, CsrMatrix)):
            raise TypeError(
                f"sparse.eigsh: v0 must be given unless A is a sparse matrix, got A of {type(a).__name__}"
            )
        if a.dtype not in NATIVE:
            raise TypeError(f"sparse.eigsh: A has dtype {a.dtype}; allowed: {', '.join(map(str, NATIVE))}")
        v0 = np.random.default_rng(1).normal(size=a.shape[0]).astype(a.dtype.dtype)
    return await make_problem("eigsh", a, v0, None, None)


async def _result(
    problem: Problem, vectors: list[AccelRef], values: npt.NDArray[Any], scale: float, wanted: float
) -> EigshResult:
    """Put pairs together, and compute their residuals."""
    device, n = problem.device, len(problem.b)
    out = await device.zeros((len(vectors), n), problem.dtype)
    sizes = await device.zeros(len(vectors), values.dtype)
    for place, vector in enumerate(vectors):
        await problem.ask(
            _UNIT.compute(
                size=await problem.ask(NORM.compute(vector)), least=0.0, whole=1.0, w=vector, out=out[place]
            )
        )
        product = await problem.multiply(out[place])
        off = await problem.ask(_OFF.compute(w=product, theta=float(values[place]), v=out[place]))
        await problem.ask(NORM.compute(off, out=sizes[place]))
    await problem.settle()
    largest = float((await sizes.to_host()).max())
    # Roundings of products and of the combination come on top of what Lanczos' method says.
    epsilon = float(np.finfo(values.dtype).eps)
    if not largest <= (wanted + 32 * epsilon * math.sqrt(n)) * scale:
        raise ConvergenceError(
            f"eigsh: the largest residual is {largest:.3g}; A is not Hermitian, or inaccurate",
            library="sparse", code="not_converged", iterations=0, residual=largest,
        )  # fmt: skip
    return EigshResult(await device.put(values), out.T)
