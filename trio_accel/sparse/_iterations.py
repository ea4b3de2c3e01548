"""The base of iterative solvers: the problem, the look at its residual, and steps nobody waits for.

Operations of a step are sent one after the other, with the replies of the previous ones. Only the residual is
awaited. Methods with short recurrences write new arrays, so each operation can run again after a loss. The
steps between two looks become a graph (D166): one operation, which CUDA also launches as one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np

from .._names import later
from ..backends.base import (
    NATIVE,
    DType,
    HostArray,
    LinAlgError,
    NotSupportedError,
    QueueFullError,
    Strs,
)
from ..devices import (
    AccelRef,
    Device,
    Operand,
    Operation,
    Pending,
    bounded_integer,
    composed,
    device_of,
    real,
    refuse_dtypes,
    refuse_value,
)
from ..expressions import Elementwise, Out, Reduction, on_device
from ..graphs import Graph, capture
from ._elements import diagonal
from ._formats import BsrMatrix, CooMatrix, CscMatrix, CsrMatrix, SparseMatrix, check_csr
from ._products import CheckStructure, Spmv, spmv
from ._steps import Looks
from ._structures import tril, triu
from ._systems import SpsolveTriangular, ic0, ilu0

if TYPE_CHECKING:
    from .. import linalg
else:
    linalg = later("trio_accel.linalg")

__all__ = ["ConvergenceError", "LinearMap", "Preconditioner", "SolveResult", "precondition"]

ReplyT = TypeVar("ReplyT")

LinearMap: TypeAlias = Callable[[AccelRef], Awaitable[AccelRef]]
"""An async function of a vector on the device, which returns another one: a product, or a preconditioner."""

Callback: TypeAlias = Callable[[AccelRef], Awaitable[object] | None]

make = Elementwise[Any]
reduce = Reduction

# Well below what `DeviceOptions.in_flight` allows by default.
_MOST_PENDING = 24
# Elements of matrices and vectors that one operation of many steps takes.
_MOST_WORK = 1 << 25
_MOST_LOOKS = 64

_REAL_DOT = reduce("x * y", "sum", operation="sparse.dot")
_COMPLEX_DOT = reduce("conj(x) * y", "sum", operation="sparse.dot")
# The residual of a non-finite solution is not finite either, even if the matrix stores nothing for it.
_RESIDUAL = make("b - product + 0 * x", operation="sparse.residual")
_TIMES = make("x * y", operation="sparse.unit")


class SolveResult(NamedTuple):
    """The solution of an iterative solver."""

    x: AccelRef
    """The solution."""
    iterations: int
    """How many steps were made."""
    residual: float
    """The norm of ``b - A @ x``, computed from `x`."""


@attrs.define(eq=False, slots=False)
class ConvergenceError(LinAlgError):
    """An iteration did not reach the requested accuracy.

    Attributes:
        iterations: The number of steps.
        residual: The norm of ``b - A @ x``; for `eigsh`, the largest norm of ``A @ v - w * v``.
        x: The best solution at a look, which has the least residual; None without one.
    """

    iterations: int = attrs.field(kw_only=True)
    residual: float = attrs.field(kw_only=True)
    x: AccelRef | None = attrs.field(default=None, kw_only=True, repr=False)


class IterativeMethod(Protocol):
    """A method.

    Attributes:
        problem: The problem that it solves.
        x: The solution so far.
        step_count: The number of steps, if a round has several; else None.
        changing: Names of the attributes that a step sets, including `x`, if it may be recorded.
        looks_before_graph: Looks before steps become a graph, because recording them takes as long as a few
            steps.
    """

    problem: LinearProblem
    x: AccelRef
    step_count: AccelRef | None = None
    changing: ClassVar[Strs]
    looks_before_graph: ClassVar[int] = 2

    async def step(self) -> None:
        """Make it better by one round."""
        ...

    async def make_rounds(self, turns: int, looks: int, bounds: tuple[float, float, float]) -> Looks | None:
        """Make the rounds up to each of several looks by one operation, if the backend has it.

        Args:
            turns: Rounds up to each look.
            looks: The largest number of looks.
            bounds: The residual to reach, the residual of the last look and the best residual.

        Returns:
            The residuals, and the best state; None if the backend lacks the operation.
        """
        return None


@attrs.define(eq=False)
class LinearProblem:
    """A system of equations ``A @ x = b``, and how accurately it is to be solved.

    Attributes:
        name: Name of the solver.
        device: The device of its arrays.
        a: The matrix, or a function that multiplies by it.
        m: The preconditioner; None for none.
        b: The right-hand side.
        dtype: Its dtype.
        tolerance: The largest norm of the residual, once a solver runs.
        pending: Operations sent since the last look.
    """

    name: str
    device: Device
    a: SparseMatrix | LinearMap
    m: LinearMap | None
    b: AccelRef
    dtype: DType
    tolerance: float = 0.0
    pending: list[Pending[Any]] = attrs.field(factory=list[Pending[Any]])

    @property
    def smallest_divisor(self) -> float:
        """The smallest divisor with all its digits."""
        facts = np.finfo(self.dtype.dtype)
        return float(facts.tiny / facts.eps)

    async def ask(self, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Hand an operation over, and return its reply; wait only where too many are not done."""
        if len(self.pending) >= _MOST_PENDING:
            await self.pending.pop(0).wait()
        try:
            pending = self.device.submit(operation)
        except QueueFullError:
            # Others have handed over many, or `in_flight` is small.
            await self.settle()
            return await self.device.ask(operation)
        self.pending.append(pending)
        return pending.value

    async def settle(self) -> None:
        """Wait for the pending operations; raise the first failure."""
        pending, self.pending = self.pending, []
        for operation in pending:
            await operation.wait()

    async def dot(self, x: AccelRef, y: AccelRef) -> AccelRef:
        """Compute ``conj(x) @ y``."""
        return await self.ask((_COMPLEX_DOT if self.dtype.kind == "complex" else _REAL_DOT).compute(x, y))

    async def multiply(self, x: AccelRef) -> AccelRef:
        """Compute ``A @ x``."""
        if isinstance(self.a, CsrMatrix):
            return await self.ask(Spmv(self.a, x))
        if isinstance(self.a, (BsrMatrix, CooMatrix, CscMatrix)):
            return await spmv(self.a, x)
        return self._checked("A", await self.a(x))

    async def precondition(self, x: AccelRef) -> AccelRef:
        """Apply the preconditioner."""
        return x if self.m is None else self._checked("M", await self.m(x))

    def _checked(self, argument: str, product: object) -> AccelRef:
        if (
            not isinstance(product, AccelRef)
            or product.shape != self.b.shape
            or product.dtype is not self.dtype
        ):
            raise TypeError(
                f"sparse.{self.name}: {argument} must return an AccelRef of shape {self.b.shape} and dtype "
                f"{self.dtype}, got {product!r}"
            )
        return product

    async def residual(self, x: Out) -> AccelRef:
        """Compute ``b - A @ x``."""
        if x is None:
            return self.b
        return await self.ask(_RESIDUAL.compute(b=self.b, product=await self.multiply(x), x=x))

    @property
    def is_recorded(self) -> bool:
        """Whether steps may become a graph: functions of the program's own are called in each step."""
        return not callable(self.a) and (self.m is None or getattr(self.m, "is_recorded", False) is True)

    def most_looks(self, turns: int) -> int:
        """Return the most looks of one operation: 30 ms, so that a cancellation ends a solver soon."""
        elements = 8 * len(self.b) + (self.a.nnz if isinstance(self.a, CsrMatrix) else 0)
        return min(max(1, _MOST_WORK // (turns * max(elements, 1))), _MOST_LOOKS)

    async def size(self, x: AccelRef) -> float:
        """Compute the norm of a vector, and wait for it."""
        norm = await self.ask(linalg.Nrm2(x))
        await self.settle()
        return float(await norm.item())


async def make_problem(
    name: str, a: SparseMatrix | LinearMap, b: Operand, m: LinearMap | None, x0: Operand | None
) -> LinearProblem:
    """Check the arguments of a solver, and the structure of the matrix."""
    is_matrix = isinstance(a, SparseMatrix)
    _check_kinds(f"sparse.{name}", a, m)
    device, dtype = device_of(f"sparse.{name}", *([a] if is_matrix else []), b, x0), DType.of(b.dtype)
    _check_shapes(f"sparse.{name}", a if is_matrix else None, b, x0, dtype)
    if isinstance(a, (CscMatrix, CsrMatrix)):
        await device.ask(CheckStructure(a if isinstance(a, CsrMatrix) else a.T))
    placed = await device.put(b) if isinstance(b, np.ndarray) else on_device(b)
    return LinearProblem(name, device, a, m, placed, dtype)


def _check_kinds(name: str, a: object, m: object) -> None:
    if not isinstance(a, SparseMatrix) and not callable(a):
        raise TypeError(f"{name}: A must be a sparse matrix or an async function, got {type(a).__name__}")
    if m is not None and not callable(m):
        raise TypeError(f"{name}: M must be an async function or None, got {type(m).__name__}")


def _check_shapes(name: str, a: Any, b: Operand, x0: Operand | None, dtype: DType) -> None:
    if dtype not in NATIVE:
        raise TypeError(f"{name}: b has dtype {dtype}; allowed: {', '.join(map(str, NATIVE))} (use cast())")
    shape = tuple(b.shape)
    if len(shape) != 1 or (a is not None and a.shape != shape * 2):
        prefix = "" if a is None else f"A of shape {a.shape} and "
        raise ValueError(f"{name}: A must be square and b a vector as long, got {prefix}b of shape {shape}")
    if x0 is not None and x0.shape != shape:
        raise ValueError(f"{name}: x0 must have shape {shape}, got {x0.shape}")
    for argument, array in (("A", a), ("x0", x0)):
        if array is not None and DType.of(array.dtype) is not dtype:
            refuse_dtypes(name, {argument: DType.of(array.dtype), "b": dtype}, argument)


def unit_of(size: float, dtype: DType) -> float:
    """Return a power of two with this size: 1 if its square is far from the ends of the dtype."""
    facts, exponent = np.finfo(dtype.dtype), math.frexp(size)[1]
    is_kept = not math.isfinite(size) or not size or abs(exponent) < facts.maxexp // 4
    return 1.0 if is_kept else math.ldexp(1.0, min(max(exponent, 2 - facts.maxexp), facts.maxexp - 2))


def check_bound(name: str, argument: str, value: Any, *, is_whole: bool = False) -> Any:
    """Take a number that is not negative, or an integer from 1.

    Raises:
        TypeError: The value is not such a number.
        ValueError: The value is too small.
    """
    full_name = f"sparse.{name}"
    if is_whole:
        count = bounded_integer(full_name, argument, value)
        if count < 1:
            raise ValueError(f"{full_name}: {argument} must be at least 1, got {value!r}")
        return count
    if not 0 <= real(full_name, argument, value) < math.inf:
        raise ValueError(f"{full_name}: {argument} must be finite and not negative, got {value!r}")
    return float(value)


async def _recorded(method: IterativeMethod, turns: int) -> Graph[tuple[AccelRef, ...]] | None:
    """Record steps, with a look at the residual after them; None where they cannot be."""
    if not (method.changing and method.problem.is_recorded):
        return None

    async def steps(*state: AccelRef) -> tuple[AccelRef, ...]:
        clone = copy.copy(method)
        clone.problem = attrs.evolve(method.problem, pending=[])
        _set_state(clone, state)
        for _ in range(turns):
            await clone.step()
        norm = await clone.problem.ask(linalg.Nrm2(await clone.problem.residual(clone.x)))
        return *_state(clone), norm

    try:
        return await capture(method.problem.device, steps, *_state(method))
    except NotSupportedError:
        return None


async def _advance(
    method: IterativeMethod, graph: Graph[tuple[AccelRef, ...]] | None, turns: int
) -> tuple[float, list[AccelRef]]:
    """Make rounds, by their graph if there is one; return the norm of the residual, and arrays to release."""
    old_state = _state(method) if graph is not None else []
    try:
        replayed = None if graph is None else await graph(*old_state)
    except NotSupportedError:
        # The backend lacks graphs, or one of these operations in graphs.
        replayed = None
    if replayed is None:
        for _ in range(turns):
            await method.step()
        return await method.problem.size(await method.problem.residual(method.x)), old_state
    *state, norm = replayed
    del replayed
    _set_state(method, state)
    return float(await norm.item()), [*old_state, norm]


def _release(arrays: list[AccelRef]) -> None:
    """Drop arrays in the order of their blocks.

    Memory is taken in the reverse order of its release. With this order, each array gets the place of the
    array two steps before. So there are two places in all, and a driver's graph for each.
    """
    arrays.sort(key=lambda ref: ref.block.id)
    while arrays:
        arrays.pop()


@attrs.define(eq=False)
class _Best:
    """The state with the least residual of all looks, because steps after a breakdown may make it worse.

    Attributes:
        method: The method.
        residual: The norm of the residual.
        state: The state, by the names of `IterativeMethod.changing`; None where a step has not set it yet.
    """

    method: IterativeMethod
    residual: float
    state: list[AccelRef | None]

    def take(self, looks: Looks) -> None:
        """Take the best of several looks if it is better."""
        if looks.best is not None:
            self.residual = min(filter(math.isfinite, looks.residuals), default=looks.residuals[0])
            self.state = list(looks.best)

    def take_present(self, residual: float, spent: list[AccelRef]) -> None:
        """Take the present state if it is better; release the worse one, and the used arrays."""
        if residual < self.residual or not math.isfinite(self.residual):
            spent += [ref for ref in self.state if ref is not None]
            self.residual, self.state = residual, _state(self.method)
        _release(spent)

    async def refine(self, max_steps: int) -> None:
        """Go back to the best look, and look after each of the steps up to the next look."""
        _set_state(self.method, self.state)
        for _ in range(max_steps):
            residual, spent = await _advance(self.method, None, 1)
            if not math.isfinite(residual):
                break
            self.take_present(residual, spent)
        _set_state(self.method, self.state)


@attrs.define(eq=False)
class _Rounds:
    """Makes rounds: by one operation for several looks, by a graph, or by operations for each step.

    Attributes:
        method: The method.
        best: Gets each look.
        every: The usual rounds up to a look.
        graph: The graph of as many; None if there is none.
    """

    method: IterativeMethod
    best: _Best
    every: int
    graph: Graph[tuple[AccelRef, ...]] | None = None

    async def make(
        self, rounds_made: int, turns: int, looks: int, bounds: tuple[float, float]
    ) -> list[float]:
        """Make rounds up to the next look, or up to several; return their residuals.

        Args:
            rounds_made: The rounds made before.
            turns: Rounds up to each look.
            looks: The largest number of looks.
            bounds: The residual to reach, and the last one.
        """
        result = await self.method.make_rounds(turns, looks, (*bounds, self.best.residual))
        if result is not None:
            self.best.take(result)
            return result.residuals
        # A solver that ends soon needs no graph, and the first step of a method is another one.
        if rounds_made == self.every * self.method.looks_before_graph:
            self.graph = await _recorded(self.method, self.every)
        residual, spent = await _advance(self.method, self.graph if turns == self.every else None, turns)
        self.best.take_present(residual, spent)
        return [residual]


def _state(method: IterativeMethod) -> list[Any]:
    return [getattr(method, name) for name in method.changing]


def _set_state(method: IterativeMethod, state: Iterable[AccelRef | None]) -> None:
    for name, ref in zip(method.changing, state, strict=True):
        setattr(method, name, ref)


async def run(
    problem: LinearProblem,
    start: Callable[[LinearProblem, AccelRef, AccelRef], IterativeMethod],
    *,
    x0: Operand | None,
    rtol: float,
    atol: float,
    maxiter: int | None,
    callback: Callback | None,
    check_every: int,
) -> SolveResult:
    """Make steps until the residual is small enough: looked at once in `check_every` rounds."""
    name, n = problem.name, len(problem.b)
    rtol, atol = check_bound(name, "rtol", rtol), check_bound(name, "atol", atol)
    max_rounds = 10 * n if maxiter is None else check_bound(name, "maxiter", maxiter, is_whole=True)
    check_bound(name, "check_every", check_every, is_whole=True)
    length = await problem.size(problem.b)
    if not math.isfinite(length):
        raise LinAlgError(f"{name}: b holds a NaN or an infinity", library="sparse", code=-1)
    if not length:
        return SolveResult(await problem.device.zeros(n, problem.dtype), 0, 0.0)
    begin = await _begin(problem, x0)
    r = await problem.residual(None if x0 is None else begin)
    residual, rounds = await problem.size(r), 0
    # Methods compute squares. The system is linear, so they may solve a multiple of it.
    unit = unit_of(max(length, residual), problem.dtype)
    if unit != 1:
        problem.b, begin, r = [await _TIMES(x, 1 / unit) for x in (problem.b, begin, r)]
    residual, problem.tolerance = residual / unit, max(rtol * length, atol) / unit
    method, tolerance = start(problem, begin, r), problem.tolerance
    best = _Best(method, residual, _state(method))
    making = _Rounds(method, best, check_every)
    # A callback sees each look.
    looks = 1 if callback is not None else problem.most_looks(check_every)
    while not residual <= tolerance:
        turns = min(check_every, max_rounds - rounds)
        residuals = await making.make(
            rounds, turns, min(looks, (max_rounds - rounds) // turns), (tolerance, residual)
        )
        *previous_residuals, residual = residual, *residuals
        previous, rounds = previous_residuals[-1], rounds + turns * len(residuals)
        awaitable = None if callback is None else callback(await _solution(method, unit))
        if awaitable is not None:
            await awaitable
        if residual > tolerance and rounds < max_rounds and residual != previous and math.isfinite(residual):
            continue
        if not residual <= tolerance:
            reason = "it stands still" if residual == previous else "no more steps were allowed"
            iterations = await _iterations(method, rounds)
            if residual != best.residual:
                await best.refine(check_every)
            reason = reason if math.isfinite(residual) else "it broke down"
            raise _not_converged(best, iterations, unit, reason, await _solution(method, unit))
    return SolveResult(await _solution(method, unit), await _iterations(method, rounds), residual * unit)


async def _begin(problem: LinearProblem, x0: Operand | None) -> AccelRef:
    if x0 is None:
        return await problem.device.zeros(len(problem.b), problem.dtype)
    return await problem.device.put(x0) if isinstance(x0, np.ndarray) else on_device(x0)


def _not_converged(best: _Best, iterations: int, unit: float, reason: str, x: AccelRef) -> ConvergenceError:
    problem, residual = best.method.problem, best.residual * unit
    return ConvergenceError(
        f"{problem.name}: the residual is {residual:.3g} at best after {iterations} steps, and "
        f"{problem.tolerance * unit:.3g} was asked for: {reason}",
        library="sparse",
        code="not_converged",
        iterations=iterations,
        residual=residual,
        x=x,
    )


async def _solution(method: IterativeMethod, unit: float) -> AccelRef:
    """Return the solution of the caller's system."""
    return method.x if unit == 1 else await _TIMES(method.x, unit)


async def _iterations(method: IterativeMethod, rounds: int) -> int:
    return rounds if method.step_count is None else int(await method.step_count.item())


_Kind: TypeAlias = Literal["jacobi", "ilu0", "ic0"]

_DIVIDE = make("x / y", operation="sparse.precondition")


@attrs.define(eq=False, repr=False)
class Preconditioner:
    """Approximates the product of a vector with the inverse of a matrix. Made by `precondition`.

    Attributes:
        kind: ``"jacobi"``, ``"ilu0"`` or ``"ic0"``.
        shape: Rows and columns of the matrix.
    """

    kind: _Kind
    shape: tuple[int, int]
    _diagonal: Out = attrs.field(default=None, alias="diagonal")
    _lower: CsrMatrix | None = attrs.field(default=None, alias="lower")
    _upper: CsrMatrix | None = attrs.field(default=None, alias="upper")

    @property
    def arrays(self) -> tuple[AccelRef, ...]:
        """The diagonal, or the arrays of both triangles, the lower one first."""
        if self._diagonal is not None:
            return (self._diagonal,)
        triangles = [triangle for triangle in (self._lower, self._upper) if triangle is not None]
        return tuple(
            [array for triangle in triangles for array in (triangle.indptr, triangle.indices, triangle.data)]
        )

    @property
    def is_recorded(self) -> bool:
        """Whether a graph can hold it: triangular solutions report failures by status words."""
        return self._diagonal is not None

    @property
    def dtype(self) -> DType:
        """Element type of the matrix."""
        return self.arrays[-1].dtype

    def __repr__(self) -> str:
        return f"<Preconditioner {self.kind} {self.shape}>"

    async def __call__(self, x: AccelRef) -> AccelRef:
        """Apply it to a vector of shape (n,)."""
        if self._diagonal is not None:
            return await x.device.ask(_DIVIDE.compute(x, self._diagonal))
        assert self._lower is not None
        assert self._upper is not None
        is_unit = self.kind == "ilu0"
        half = await x.device.ask(SpsolveTriangular(self._lower, x, True, unit_diagonal=is_unit))
        return await x.device.ask(SpsolveTriangular(self._upper, half, False))


@composed
async def precondition(matrix: CsrMatrix, kind: _Kind = "jacobi") -> Preconditioner:
    """Make a preconditioner, for the argument `M` of `cg` and the others.

    Args:
        matrix: Square matrix of shape (n, n).
        kind: ``"jacobi"``: division by the diagonal, which the host reads once; it runs on every backend.
            ``"ilu0"``: the triangular solves of `ilu0`. ``"ic0"``: the triangular solves of `ic0`, for a
            Hermitian matrix.

    Returns:
        An async function of a vector.

    Raises:
        TypeError: The matrix has another format.
        ValueError: The matrix is not square, or the kind is unknown.
        LinAlgError: An element of the diagonal is zero or not stored, or `ilu0` or `ic0` fails.
        LibraryError: The structure is wrong.
        NotSupportedError: The backend lacks incomplete factors.
    """
    check_csr("precondition", matrix)
    if kind not in ("jacobi", "ilu0", "ic0"):
        refuse_value("sparse.precondition", "kind", ("jacobi", "ilu0", "ic0"), kind)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"sparse.precondition: matrix must be square, got shape {matrix.shape}")
    if kind != "jacobi":
        factors = await (ilu0 if kind == "ilu0" else ic0)(matrix)
        return Preconditioner(kind, matrix.shape, lower=await tril(factors), upper=await triu(factors))
    main_diagonal = await diagonal(matrix)
    values: HostArray = await main_diagonal.to_host()
    bad = np.flatnonzero((values == 0) | ~np.isfinite(values))
    if bad.size:
        row = int(bad[0])
        raise LinAlgError(
            f"precondition: the diagonal is missing, zero or not finite in row {row}",
            library="sparse",
            code=row + 1,
        )
    return Preconditioner(kind, matrix.shape, diagonal=main_diagonal)
