"""Draws: which part of which sequence, and as what. A generator asks for them by their messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeAlias

from ..backends.base import DType, NotSupportedError
from ..backends.base.ops import PHILOX_ROW, RANDOM_DTYPES, Distribution, PhiloxSpec
from ..devices import AccelRef, Declared, LibraryActor, Planned, Planner, operation

__all__ = ["Bits", "Exponential", "Integers", "Lognormal", "Normal", "RngActor", "Uniform", "rows_of"]

ParametersP = ParamSpec("ParametersP")

_Shape: TypeAlias = tuple[int, ...]
# What a distribution has of a message, checked: the dtype, and `PhiloxSpec.low` and `PhiloxSpec.width`.
_Checked: TypeAlias = tuple[DType, float, float]

# Whole numbers from here on are not all floats.
_EXACT = 1 << 53


def rows_of(size: int) -> int:
    """Rows of counters that an array of this size may use, whatever its dtype: an even number."""
    return 2 * -(-size // (4 * PHILOX_ROW))


class RngActor(LibraryActor):
    """Serves random numbers, on a stream of its own.

    It has no state that a restart could lose or repeat: every message says which part of which
    sequence it draws. CPU backend: NumPy. CUDA: a kernel of the
    backend's own.
    """

    library = "random"


def _draws(
    distribution: Distribution, check: Callable[[Any, Planner], _Checked]
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], Declared[ParametersP, AccelRef]]:
    """Declare a draw, whose message says the seed, and from which row on how much is drawn."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        """Plan by hand: no line of shapes says a shape and a dtype that are arguments."""
        dtype, low, width = check(message, planner)
        out = planner.output(message.shape, dtype, message.out)
        spec = PhiloxSpec(distribution, message.seed, message.row, low, width, out.spec)
        return Planned(spec, out, is_checked=True)

    not_recorded = (
        "the program counts how much is drawn, so that each replay would draw the same numbers; draw them "
        "outside, and give the array to the graph"
    )
    return operation(actor=RngActor, plan=plan, not_recorded=not_recorded)


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
        given = {name: getattr(message, name) for name in names}
        numbers = _reals(planner, message.dtype, **given)
        if not all(map(math.isfinite, numbers)) or numbers[-1] < 0:
            said = " and ".join(f"{name} {value}" for name, value in given.items())
            raise ValueError(f"{planner.name}: {names[-1]} must be at least 0, and finite, got {said}")
        return message.dtype, sum(numbers[:-1], 0.0), numbers[-1]

    return check


def _reals(planner: Planner, dtype: DType, **arguments: float) -> list[float]:
    """Numbers that the dtype can hold; complex ones are refused, because the dtype is real."""
    if dtype not in RANDOM_DTYPES["uniform"]:
        raise NotSupportedError(f"{planner.name} makes float32 or float64, not {dtype}; use cast()")
    return [planner.factor(name, value, dtype).real for name, value in arguments.items()]


@_draws("bits", lambda message, planner: (DType.uint32, 0.0, 1.0))
async def _bits(seed: int, row: int, shape: _Shape, out: AccelRef | None = None) -> AccelRef:
    """Draw words of a Philox sequence as they are; see `Generator.bits`."""
    ...


@_draws("integers", _check_integers)
async def _integers(
    seed: int, row: int, shape: _Shape, low: int, high: int, out: AccelRef | None = None
) -> AccelRef:
    """Draw whole numbers of a range; see `Generator.integers`."""
    ...


@_draws("uniform", _check_uniform)
async def _uniform(
    seed: int,
    row: int,
    shape: _Shape,
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
    shape: _Shape,
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
    shape: _Shape,
    dtype: DType = DType.float32,
    mean: float = 0.0,
    sigma: float = 1.0,
    out: AccelRef | None = None,
) -> AccelRef:
    """Draw numbers whose logarithms are normal; see `Generator.lognormal`."""
    ...


@_draws("exponential", _deviation("scale"))
async def _exponential(
    seed: int,
    row: int,
    shape: _Shape,
    dtype: DType = DType.float32,
    scale: float = 1.0,
    out: AccelRef | None = None,
) -> AccelRef:
    """Draw exponentially distributed numbers; see `Generator.exponential`."""
    ...


Bits: Final = _bits.message
Exponential: Final = _exponential.message
Integers: Final = _integers.message
Lognormal: Final = _lognormal.message
Normal: Final = _normal.message
Uniform: Final = _uniform.message
