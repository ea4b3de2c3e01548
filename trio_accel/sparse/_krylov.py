"""Iterative solvers of systems: with short recurrences, and generalized minimal residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from .._names import later
from ..actors import arguments_of
from ..backends.base import NATIVE, NotSupportedError, Strs
from ..backends.base.contract.ops import real_of
from ..devices import AccelRef, Operand, composed, operation
from ._formats import CsrMatrix, SparseMatrix
from ._iterations import (
    Callback,
    IterativeMethod,
    LinearMap,
    LinearProblem,
    Preconditioner,
    SolveResult,
    check_bound,
    make,
    make_problem,
    reduce,
    run,
)
from ._products import SparseActor
from ._steps import CgSteps, Looks

if TYPE_CHECKING:
    from .. import linalg
else:
    linalg = later("trio_accel.linalg")

__all__ = ["ExtendBasis", "LeastResidual", "bicgstab", "cg", "gmres", "minres"]

# If a divisor is 0, or has lost its digits, nothing is left to do, and the step changes nothing.
_CG_STEP = make(
    "s = where(abs(pq) > least, rz / pq, 0 * pq); x1 = x + s * p; r1 = r - s * q",
    outputs=("x1", "r1"),
    operation="sparse.cg",
)
_CG_TURN = make("z + where(abs(rz) > least, new / rz, 0 * rz) * p", operation="sparse.cg")


class _Cg(IterativeMethod):
    """Conjugate gradients (Hestenes and Stiefel, 1952)."""

    changing: ClassVar[Strs] = ("x", "_r", "_p", "_rz")

    def __init__(self, problem: LinearProblem, x: AccelRef, r: AccelRef) -> None:
        self.problem, self.x, self._r = problem, x, r
        self._p: AccelRef | None = None
        self._rz: AccelRef = r
        m = problem.m
        self._is_one_operation = isinstance(problem.a, CsrMatrix) and (
            m is None
            or (isinstance(m, Preconditioner) and m.shape == problem.a.shape and m.dtype is problem.dtype)
        )

    async def make_rounds(self, turns: int, looks: int, bounds: tuple[float, float, float]) -> Looks | None:
        problem, m = self.problem, self.problem.m
        if not self._is_one_operation or not isinstance(problem.a, CsrMatrix):
            return None
        kind, arrays = (m.kind, m.arrays) if isinstance(m, Preconditioner) else ("", ())
        state, all_bounds = (self.x, self._r, self._p, self._rz), (*bounds, problem.smallest_divisor)
        message = CgSteps(problem.a, problem.b, state, kind, arrays, all_bounds, steps=turns, looks=looks)
        try:
            result = await problem.device.ask(message)
        except NotSupportedError:
            self._is_one_operation = False
            return None
        self.x, self._r, self._p, self._rz = result.state
        return result

    async def step(self) -> None:
        problem = self.problem
        if self._p is None:
            self._p = await problem.precondition(self._r)
            self._rz = await problem.dot(self._r, self._p)
        p, rz = self._p, self._rz
        q = await problem.multiply(p)
        pq = await problem.dot(p, q)
        self.x, self._r = await problem.ask(
            _CG_STEP.compute(least=problem.smallest_divisor, pq=pq, rz=rz, x=self.x, p=p, r=self._r, q=q)
        )
        z = await problem.precondition(self._r)
        self._rz = await problem.dot(self._r, z)
        self._p = await problem.ask(
            _CG_TURN.compute(least=problem.smallest_divisor, z=z, rz=rz, new=self._rz, p=p)
        )


async def _solve(
    method: Callable[[LinearProblem, AccelRef, AccelRef], IterativeMethod],
    name: str,
    A: SparseMatrix | LinearMap,  # noqa: N803  # SciPy's name
    b: Operand,
    x0: Operand | None,
    M: LinearMap | None,  # noqa: N803  # SciPy's name
    **options: Any,
) -> SolveResult:
    return await run(await make_problem(name, A, b, M, x0), method, x0=x0, **options)


@composed
async def cg(
    A: SparseMatrix | LinearMap,  # noqa: N803  # SciPy's name
    b: Operand,
    x0: Operand | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: LinearMap | None = None,  # noqa: N803  # SciPy's name
    callback: Callback | None = None,
    check_every: int = 10,
) -> SolveResult:
    """Solve ``A @ x = b`` by conjugate gradients, as `scipy.sparse.linalg.cg`, on every backend.

    All numbers stay on the device. Every `check_every` steps, ``b - A @ x`` is computed again, and its norm
    decides. So a solution may take some steps more than it needs, and its residual is the true one. If `A` is
    of rows, steps only write new arrays: with `DeviceOptions.retry` the solver continues after the loss of a
    worker, on the CPU with the same numbers. If `A` is of rows and `M` is None or of `precondition`, the CPU
    makes many steps in one operation, whose length bounds how long it continues after it is cancelled.
    Otherwise, if `M` is None or of kind ``"jacobi"``, the steps between two looks are recorded as a graph
    after a while. If squares of `b` are outside of the dtype, a multiple of the system is solved.

    Args:
        A: Hermitian positive definite matrix of shape (n, n) and any format, or an async function that
            multiplies a vector by such a matrix.
        b: Vector of shape (n,), of float32, float64, complex64 or complex128.
        x0: The initial solution; by default zeros. It is not changed.
        rtol: The residual may be as large as `rtol` times the norm of `b`,
        atol: or as large as this.
        maxiter: The largest number of steps; by default ``10 * n``.
        M: Preconditioner: an async function that approximates the product with the inverse of `A`, such as a
            result of `precondition`.
        callback: Called with the solution so far at each look; if it is async, it is awaited.
        check_every: Steps from one look to the next.

    Returns:
        The solution, the number of steps, and the residual.

    Raises:
        ConvergenceError: The residual is too large after `maxiter` steps, is not a number, or is the same at
            two looks. The error has the best solution so far: after a breakdown, the last one before it.
        LinAlgError: `b` holds a NaN or an infinity.
        TypeError: `A` or `M` is not a matrix or function, or dtypes differ.
        ValueError: `A` is not square, shapes do not fit, or a bound is negative.
        LibraryError: A wrong structure.
    """
    return await _solve(
        _Cg,
        "cg",
        A,
        b,
        x0,
        M,
        rtol=rtol,
        atol=atol,
        maxiter=maxiter,
        callback=callback,
        check_every=check_every,
    )


_BI_TURN = make(
    "r + where(abs(rho0 * omega) > least, (rho / rho0) * (alpha / omega), 0 * rho) * (p - omega * v)",
    operation="sparse.bicgstab",
)
_QUOTIENT = make("where(abs(y) > least, x / y, 0 * x)", operation="sparse.bicgstab")
_BI_HALF = make("r - alpha * v", operation="sparse.bicgstab")
_BI_STEP = make(
    "x1 = x + alpha * p + omega * s; r1 = half - omega * t", outputs=("x1", "r1"), operation="sparse.bicgstab"
)


class _BiCgStab(IterativeMethod):
    """Stabilized biconjugate gradients (van der Vorst, 1992)."""

    changing: ClassVar[Strs] = ("x", "_r", "_p", "_v", "_rho", "_alpha", "_omega")

    def __init__(self, problem: LinearProblem, x: AccelRef, r: AccelRef) -> None:
        self.problem, self.x, self._r, self._shadow = problem, x, r, r
        self._p: AccelRef | None = None
        self._v = self._rho = self._alpha = self._omega = r

    async def step(self) -> None:
        problem, r = self.problem, self._r
        rho, p = await problem.dot(self._shadow, r), r
        if self._p is not None:
            p = await problem.ask(
                _BI_TURN.compute(
                    least=problem.smallest_divisor,
                    r=r,
                    rho0=self._rho,
                    omega=self._omega,
                    rho=rho,
                    alpha=self._alpha,
                    p=self._p,
                    v=self._v,
                )
            )
        towards = await problem.precondition(p)
        v = await problem.multiply(towards)
        alpha = await problem.ask(
            _QUOTIENT.compute(least=problem.smallest_divisor, y=await problem.dot(self._shadow, v), x=rho)
        )
        half = await problem.ask(_BI_HALF.compute(r=r, alpha=alpha, v=v))
        s = await problem.precondition(half)
        t = await problem.multiply(s)
        omega = await problem.ask(
            _QUOTIENT.compute(
                least=problem.smallest_divisor, y=await problem.dot(t, t), x=await problem.dot(t, half)
            )
        )
        self.x, self._r = await problem.ask(
            _BI_STEP.compute(x=self.x, alpha=alpha, p=towards, omega=omega, s=s, half=half, t=t)
        )
        self._p, self._v, self._rho, self._alpha, self._omega = p, v, rho, alpha, omega


@arguments_of(cg, _solve, _BiCgStab, "bicgstab")
def bicgstab() -> None:
    """Solve ``A @ x = b`` by stabilized biconjugate gradients, as `scipy.sparse.linalg.bicgstab`.

    `A` is any square matrix. Each step has two products, and two calls of `M`. See `cg` for arguments,
    result, errors and the looks at the residual.
    """


_REAL_DOT = reduce("real(conj(x) * y)", "sum", operation="sparse.minres")
_LENGTH = make("sqrt(maximum(x, 0.0))", operation="sparse.minres")
_UNIT = make("where(beta != 0, y / beta, 0 * y)", operation="sparse.minres")
_FIRST = make("y - where(oldb != 0, beta / oldb, 0 * beta) * r1", operation="sparse.minres")
_SECOND = make("y - where(beta != 0, alpha / beta, 0 * beta) * r2", operation="sparse.minres")
_ROTATION = make(
    "delta = cs * dbar + sn * alpha; gbar = sn * dbar - cs * alpha; epsilon1 = sn * beta; dbar1 = -cs * beta;"
    "gamma = maximum(hypot(gbar, beta), least); cs1 = gbar / gamma; sn1 = beta / gamma;"
    "phi = cs1 * phibar; phibar1 = sn1 * phibar",
    outputs=("delta", "epsilon1", "dbar1", "gamma", "cs1", "sn1", "phi", "phibar1"),
    operation="sparse.minres",
)
_MINRES_STEP = make(
    "w = (v - epsilon * w1 - delta * w2) / gamma; x1 = where(phi != 0, x + phi * w, x)",
    outputs=("w", "x1"),
    operation="sparse.minres",
)


class _Minres(IterativeMethod):
    """Minimal residuals (Paige and Saunders, 1975), with the names of that paper's program."""

    changing: ClassVar[Strs] = (
        "x", "_y", "_r1", "_r2", "_w1", "_w2", "_beta", "_oldb", "_dbar", "_epsilon", "_cs", "_sn", "_phibar",
    )  # fmt: skip

    def __init__(self, problem: LinearProblem, x: AccelRef, r: AccelRef) -> None:
        self.problem, self.x, self._r1, self._r2 = problem, x, r, r
        self._y: AccelRef | None = None
        self._w1 = self._w2 = self._beta = self._oldb = self._dbar = self._epsilon = r
        self._cs = self._sn = self._phibar = r

    async def _length(self, x: AccelRef, y: AccelRef) -> AccelRef:
        return await self.problem.ask(_LENGTH.compute(await self.problem.ask(_REAL_DOT.compute(x, y))))

    async def _begin(self) -> AccelRef:
        problem, device = self.problem, self.problem.device
        y = await problem.precondition(self._r2)
        self._beta = await self._length(self._r2, y)
        zero = await device.zeros((), self._beta.dtype)
        self._w1 = self._w2 = self._r1 = await device.zeros(len(y), problem.dtype)
        self._oldb = self._sn = self._dbar = self._epsilon = zero
        self._cs, self._phibar = await device.full((), -1, self._beta.dtype), self._beta
        self._least = float(np.finfo(self._beta.dtype.dtype).tiny)
        return y

    async def step(self) -> None:
        problem = self.problem
        y, beta = await self._begin() if self._y is None else self._y, self._beta
        v = await problem.ask(_UNIT.compute(beta=beta, y=y))
        y = await problem.multiply(v)
        y = await problem.ask(_FIRST.compute(y=y, oldb=self._oldb, beta=beta, r1=self._r1))
        alpha = await problem.ask(_REAL_DOT.compute(v, y))
        self._r1 = self._r2
        self._r2 = await problem.ask(_SECOND.compute(y=y, beta=beta, alpha=alpha, r2=self._r1))
        self._y = await problem.precondition(self._r2)
        self._oldb = beta
        self._beta = await self._length(self._r2, self._y)
        epsilon = self._epsilon
        delta, self._epsilon, self._dbar, gamma, self._cs, self._sn, phi, self._phibar = await problem.ask(
            _ROTATION.compute(
                cs=self._cs,
                dbar=self._dbar,
                sn=self._sn,
                alpha=alpha,
                beta=self._beta,
                least=self._least,
                phibar=self._phibar,
            )
        )
        w, self.x = await problem.ask(
            _MINRES_STEP.compute(
                v=v, epsilon=epsilon, w1=self._w1, delta=delta, w2=self._w2, gamma=gamma, phi=phi, x=self.x
            )
        )
        self._w1, self._w2 = self._w2, w


@arguments_of(cg, _solve, _Minres, "minres")
def minres() -> None:
    """Solve ``A @ x = b`` by minimal residuals, as `scipy.sparse.linalg.minres`.

    `A` is Hermitian, and may be indefinite; `M` is positive definite. See `cg` for arguments, result, errors
    and the looks at the residual. `rtol` also has the meaning of `cg`, although SciPy's is relative to the
    norm of `A` also.
    """


_ADD = make("x + y", operation="sparse.gmres")
_COPY = make("1 * w", operation="sparse.gmres")
_NORMAL = make("where(size != 0, w / size, 0 * w)", operation="sparse.gmres")


async def orthogonalize(
    problem: LinearProblem, basis: AccelRef, w: AccelRef, outs: Iterable[AccelRef]
) -> AccelRef:
    """Take from a vector its parts along others (classical Gram-Schmidt), once for each note of them."""
    if callable(problem.a):
        # A function of the program's own may return its argument, or keep what it returns.
        w = await problem.ask(_COPY.compute(w))
    columns = basis.T
    for out in outs:
        if problem.dtype.kind == "complex":
            await problem.ask(linalg.Gemv(1.0, columns, w, 0.0, out, "C"))
        else:
            await problem.ask(linalg.Matmul(basis, w, out=out))
        await problem.ask(linalg.Gemv(-1.0, columns, out, 1.0, w))
    return w


@operation(
    "basis(k, n), w(n), first(k), second(k), size: real(), unit(n) -> first, second, size, unit",
    actor=SparseActor,
    dtypes=NATIVE,
)
async def _extend_basis(
    basis: Operand,
    w: Operand,
    first: AccelRef,
    second: AccelRef,
    size: AccelRef,
    unit: AccelRef,
    smallest_divisor: float,
) -> tuple[AccelRef, AccelRef, AccelRef, AccelRef]:
    """Take the parts of a vector along a basis off, twice, and divide the rest by its length.

    Only the CPU has it, because the host's part in a step would take longer than the step.

    Args:
        basis: Vectors of length 1, row by row.
        w: The vector, which is not changed.
        first: Its components along the basis.
        second: The components that roundings have left.
        size: The length of the rest.
        unit: The rest divided by its length, or by `smallest_divisor` if that is larger.
        smallest_divisor: The rest is divided by at least this number.
    """
    ...


@operation(
    "h(m, m), sizes: real(m), size: real(), step_count: real() -> y(m), count: real()",
    actor=SparseActor,
    dtypes=NATIVE,
)
async def _least_residual(
    h: Operand, sizes: Operand, size: Operand, step_count: Operand, tolerance: float
) -> tuple[AccelRef, AccelRef]:
    """Find the combination of the first vectors that makes the residual small enough, or least.

    On CUDA, Givens' rotations bring the matrix of Arnoldi's steps to triangular form. The first step with
    half of the requested residual, or with nothing left of its product, is the last one that counts.

    Args:
        h: Row by row, the components of a product along the previous vectors.
        sizes: The length of each product's rest.
        size: The norm of the residual that gave the first vector.
        step_count: Steps made before.
        tolerance: The largest norm of the residual.

    Returns:
        Factors of the vectors, zeros after the last step that counts; and how many steps were made by then.
    """
    ...


class _Gmres(IterativeMethod):
    """Cycles of minimal residuals (Saad and Schultz, 1986), preconditioned from the right."""

    changing: ClassVar[Strs] = ("x", "step_count")
    # A cycle has more steps than what it takes to record it, and only a graph may run again after a loss.
    looks_before_graph: ClassVar[int] = 0

    def __init__(
        self, restart: int, step_count: AccelRef, problem: LinearProblem, x: AccelRef, r: AccelRef
    ) -> None:
        self.problem, self.x, self.step_count = problem, x, step_count
        self._restart = restart

    async def step(self) -> None:
        problem, steps, n = self.problem, self._restart, len(self.problem.b)
        r = await problem.residual(self.x)
        size = await problem.ask(linalg.Nrm2(r))
        basis = await problem.device.zeros((steps + 1, n), problem.dtype)
        h, rest = [await problem.device.zeros((steps, steps), problem.dtype) for _ in range(2)]
        sizes = await problem.device.zeros(steps, size.dtype)
        await problem.ask(_NORMAL.compute(size=size, w=r, out=basis[0]))
        for step in range(steps):
            w = await problem.multiply(await problem.precondition(basis[step]))
            w = await orthogonalize(
                problem, basis[: step + 1], w, (h[step, : step + 1], rest[step, : step + 1])
            )
            await problem.ask(linalg.Nrm2(w, out=sizes[step]))
            await problem.ask(_NORMAL.compute(size=sizes[step], w=w, out=basis[step + 1]))
        await problem.ask(linalg.Axpy(1.0, rest, h))
        assert self.step_count is not None
        y, self.step_count = await problem.ask(
            LeastResidual(h, sizes, size, self.step_count, problem.tolerance)
        )
        change = await problem.ask(linalg.Gemv(1.0, basis[:steps].T, y))
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
    cycle of `restart` steps. Vectors of a cycle are orthogonalized twice, by two products each time. If `A`
    is a matrix, and `M` is None or of kind ``"jacobi"``, a cycle is recorded as a graph before the first one.
    Then the solver continues after the loss of a worker, like `cg`. Otherwise the vectors are rows of one
    array that steps write to, which `DeviceOptions.retry` does not repeat: a loss ends the solver.

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
        The solution; the number of steps, counting those of the last cycle that the solution includes; and
        the residual.

    Raises:
        ConvergenceError, LinAlgError, TypeError, ValueError, LibraryError: As of `cg`.
    """
    problem = await make_problem("gmres", A, b, M, x0)
    steps = min(check_bound("gmres", "restart", restart, is_whole=True), max(len(problem.b), 1))
    step_count = await problem.device.zeros((), real_of(problem.dtype))
    return await run(
        problem,
        functools.partial(_Gmres, steps, step_count),
        x0=x0,
        rtol=rtol,
        atol=atol,
        maxiter=maxiter,
        callback=callback,
        check_every=1,
    )


ExtendBasis: Final = _extend_basis.message
LeastResidual: Final = _least_residual.message
