"""Messages that draw random numbers: which part of which sequence, and as what."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeAlias

import numpy as np

from ..backends.base import DType, Ints, NotSupportedError, name_function, ops
from ..devices import AccelRef, Declared, LibraryActor, Operand, Planned, Planner, operation
from ..expressions import ARRAYS, Out
from ._sequences import State, powers

__all__ = [
    "Bits",
    "Exponential",
    "Integers",
    "Lognormal",
    "Normal",
    "Rejected",
    "RngActor",
    "SequenceBits",
    "SobolPoints",
    "Uniform",
]

ParametersP = ParamSpec("ParametersP")

# Checked parameters of a distribution: the dtype, and `PhiloxSpec.low` and `PhiloxSpec.width`.
_Checked: TypeAlias = tuple[DType, float, float]

# Integers from here on are not all floats.
_EXACT = 1 << 53
# The most words of a piece, as a power of two; and the most words of all pieces.
_LONGEST_PIECE = 8
_NOT_RECORDED = (
    "the program counts how much is drawn, so that each replay would draw the same numbers; draw them "
    "outside, and give the array to the graph"
)
# Served by other capabilities.
_BLAS = "trio_accel.linalg:BlasActor"


class RngActor(LibraryActor):
    """Serves random numbers, on a stream of its own.

    It has no state that a restart could lose or repeat, because every message names its part of its sequence.
    CPU backend: NumPy. CUDA: kernels of the backend's own.
    """

    library = "random"


def _draws(
    distribution: ops.Distribution, check: Callable[[Any, Planner], _Checked]
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], Declared[ParametersP, AccelRef]]:
    """Declare a draw, with a message that contains the seed, the first row and the number of rows."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        """Plan by hand, because no line of shapes expresses a shape and a dtype that are arguments."""
        dtype, low, width = check(message, planner)
        _check_place(planner, seed=message.seed, row=message.row)
        out = planner.output(message.shape, dtype, message.out)
        spec = ops.PhiloxSpec(
            distribution, ops.PHILOX_START.pack(message.seed, message.row), low, width, out.spec
        )
        return Planned(spec, out, is_checked=True)

    return operation(actor=RngActor, plan=plan, not_recorded=_NOT_RECORDED)


def _check_place(planner: Planner, bits: int = 64, **numbers: int) -> None:
    """Refuse a value that is not a word of `bits` bits."""
    for name, number in numbers.items():
        if not 0 <= operator.index(number) < 1 << bits:
            raise ValueError(f"{planner.name}: {name} must be from 0 to 2**{bits} - 1, got {number!r}")


def _check_integers(message: Any, planner: Planner) -> _Checked:
    low, high = operator.index(message.low), operator.index(message.high)
    if not (-_EXACT <= low < high <= _EXACT and high - low <= 1 << 32):
        raise ValueError(
            f"{planner.name}: high must be above low, by at most 2**32, and both from -2**53 to 2**53, "
            f"got {low} and {high}"
        )
    return DType.int64, float(low), float(high - low)


def _check_uniform(message: Any, planner: Planner) -> _Checked:
    dtype = message.dtype
    low, high = _reals(planner, dtype, low=message.low, high=message.high)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"{planner.name}: low must not be above high, and both finite, got {low} and {high}")
    width = high - low
    if math.isinf(width):
        raise ValueError(f"{planner.name}: high - low is outside the range of {dtype}")
    _reals(planner, dtype, **{"high - low": width})
    return dtype, low, width


def _deviation(*names: str) -> Callable[[Any, Planner], _Checked]:
    """Check finite parameters, of which the last is a deviation; the first is 0 where there is only one."""

    def check(message: Any, planner: Planner) -> _Checked:
        parameters = {name: getattr(message, name) for name in names}
        numbers = _reals(planner, message.dtype, **parameters)
        if not all(map(math.isfinite, numbers)) or numbers[-1] < 0:
            said = " and ".join(f"{name} {value}" for name, value in parameters.items())
            raise ValueError(f"{planner.name}: {names[-1]} must be at least 0, and finite, got {said}")
        return message.dtype, sum(numbers[:-1], 0.0), numbers[-1]

    return check


def _reals(planner: Planner, dtype: DType, **arguments: float) -> list[float]:
    """Return the numbers that the dtype can hold; complex ones are refused, because the dtype is real."""
    if dtype not in ops.RANDOM_DTYPES["uniform"]:
        raise NotSupportedError(f"{planner.name}: dtype must be float32 or float64, got {dtype}; use cast()")
    return [planner.factor(name, value, dtype).real for name, value in arguments.items()]


@_draws("bits", lambda message, planner: (DType.uint32, 0.0, 1.0))
async def _bits(seed: int, row: int, shape: Ints, out: AccelRef | None = None) -> AccelRef:
    """Draw words of a Philox sequence as they are; see `Generator.bits`."""
    ...


@_draws("integers", _check_integers)
async def _integers(
    seed: int, row: int, shape: Ints, low: int, high: int, out: AccelRef | None = None
) -> AccelRef:
    """Draw integers of a range; see `Generator.integers`."""
    ...


@_draws("uniform", _check_uniform)
async def _uniform(
    seed: int,
    row: int,
    shape: Ints,
    dtype: DType = DType.float32,
    low: float = 0.0,
    high: float = 1.0,
    out: AccelRef | None = None,
) -> AccelRef:
    """Draw uniform numbers of a Philox sequence; see `Generator.uniform`."""
    ...


@_draws("normal", _deviation("loc", "scale"))
async def _normal(
    seed: int,
    row: int,
    shape: Ints,
    dtype: DType = DType.float32,
    loc: float = 0.0,
    scale: float = 1.0,
    out: AccelRef | None = None,
) -> AccelRef:
    """Draw normal numbers of a Philox sequence; see `Generator.normal`."""
    ...


@_draws("lognormal", _deviation("mean", "sigma"))
async def _lognormal(
    seed: int,
    row: int,
    shape: Ints,
    dtype: DType = DType.float32,
    mean: float = 0.0,
    sigma: float = 1.0,
    out: AccelRef | None = None,
) -> AccelRef:
    """Draw numbers with normal logarithms; see `Generator.lognormal`."""
    ...


@_draws("exponential", _deviation("scale"))
async def _exponential(
    seed: int, row: int, shape: Ints, dtype: DType = DType.float32, scale: float = 1.0, out: Out = None
) -> AccelRef:
    """Draw exponentially distributed numbers; see `Generator.exponential`."""
    ...


def _plan_sequence(message: Any, planner: Planner) -> Planned[AccelRef]:
    out = planner.output(message.shape, DType.uint32, message.out)
    _check_place(planner, 32, **{f"state[{index}]": word for index, word in enumerate(message.state)})
    size = math.prod(message.shape)
    # Pieces are as long as there are of them, up to a length at which a jump costs less than the draws.
    level = min(_LONGEST_PIECE, size.bit_length() // 2)
    pieces = -(-size // (1 << level))
    jumps = powers(message.sequence, level, max(pieces - 1, 0).bit_length())
    state = planner.read("state", np.array(message.state, np.uint32))
    spec = ops.SequenceSpec(message.sequence, 1 << level, state, planner.read("jumps", jumps), out.spec)
    return Planned(spec, out, is_checked=True)


@operation(actor=RngActor, plan=_plan_sequence, not_recorded=_NOT_RECORDED)
async def _sequence_bits(
    sequence: ops.LinearSequence, state: State, shape: Ints, out: AccelRef | None = None
) -> AccelRef:
    """Draw words of a linear sequence from a state on; see `Generator.bits` and `SequenceSpec`."""
    ...


def _plan_rejection(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan by hand, as `_draws` does. Parameters are arrays of float64 by now."""
    out = planner.output(message.shape, message.dtype, message.out)
    a = planner.read("a", message.a)
    b = None if message.b is None else planner.read("b", message.b)
    _check_place(planner, seed=message.seed, row=message.row)
    start = ops.PHILOX_START.pack(message.seed, message.row)
    return Planned(ops.RejectionSpec(message.distribution, start, a, b, out.spec, planner.status(1)), out)


@operation(actor=RngActor, plan=_plan_rejection, not_recorded=_NOT_RECORDED)
async def _rejected(
    distribution: ops.Rejection,
    seed: int,
    row: int,
    shape: Ints,
    dtype: DType,
    a: Operand,
    b: Operand | None = None,
    out: AccelRef | None = None,
) -> AccelRef:
    """Draw numbers of a distribution by rejection; see `RejectionSpec`."""
    ...


def _plan_sobol(message: Any, planner: Planner) -> Planned[AccelRef]:
    _check_place(planner, first=message.first, count=message.count)
    directions, shift = planner.read("directions", message.directions), planner.read("shift", message.shift)
    out = planner.output((message.count, directions.shape[1]), DType.uint32)
    return Planned(ops.SobolSpec(ops.FIRST.pack(message.first), directions, shift, out.spec), out)


@operation(actor=RngActor, plan=_plan_sobol, not_recorded=_NOT_RECORDED)
async def _sobol_points(first: int, count: int, directions: Operand, shift: Operand) -> AccelRef:
    """Make points of a Sobol sequence, as integers; see `SobolSpec`."""
    ...


def _plan_order(message: Any, planner: Planner) -> Planned[AccelRef]:
    keys = planner.read("keys", message.keys)
    out = planner.output((message.count,), DType.int64)
    return Planned(ops.SortSpec(0, message.descending, keys, None, out.spec, ()), out)


@operation(actor=ARRAYS, plan=_plan_order)
async def _order(keys: Operand, count: int, descending: bool) -> AccelRef:
    """Find the indices of the first keys in order, as `arrays.argsort` does."""
    ...


def _plan_search(message: Any, planner: Planner) -> Planned[AccelRef]:
    edges, x = planner.read("edges", message.edges), planner.read("x", message.x)
    out = planner.output(x.shape, DType.int64)
    return Planned(ops.SearchSpec("right", edges, x, None, out.spec, planner.status(1)), out)


@operation(actor=ARRAYS, plan=_plan_search)
async def _search(edges: Operand, x: Operand) -> AccelRef:
    """Find the first edge above each number, as `arrays.searchsorted` does."""
    ...


@operation("a(m, n), b(n, k) -> out(m, k)", actor=_BLAS, spec=ops.MatmulSpec)
async def _multiply(a: Operand, b: Operand) -> AccelRef:
    """Multiply by a matrix, as `linalg.matmul` does."""
    ...


Bits: Final = _bits.message
Exponential: Final = _exponential.message
Integers: Final = _integers.message
Lognormal: Final = _lognormal.message
Multiply: Final = _multiply.message
Normal: Final = _normal.message
Order: Final = _order.message
Rejected: Final = _rejected.message
Search: Final = _search.message
SequenceBits: Final = _sequence_bits.message
SobolPoints: Final = _sobol_points.message
Uniform: Final = _uniform.message


for _method in ("bits", "exponential", "integers", "lognormal", "normal", "uniform"):
    name_function(f"random.{_method.title()}", f"Generator.{_method}")
