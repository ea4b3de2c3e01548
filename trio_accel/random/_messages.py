"""Messages: which part of which sequence to draw, and as what."""

from __future__ import annotations

import math
import operator
from typing import ClassVar

import attrs

from ..backends.base import DType, NotSupportedError
from ..backends.base.ops import PHILOX_ROW, Distribution, PhiloxSpec
from ..devices import AccelRef, LibraryActor, Operation, Planned, Planner

__all__ = ["Bits", "Exponential", "Integers", "Lognormal", "Normal", "RngActor", "Uniform", "rows_of"]

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


@attrs.define(eq=False, on_setattr=None)
class _Draw(Operation[RngActor, AccelRef]):
    """What all messages share: the seed, and from which row on how much is drawn."""

    seed: int
    row: int
    shape: tuple[int, ...]
    library: ClassVar[str] = "trio_accel.random:RngActor"
    not_recorded: ClassVar[str] = (
        "the program counts how much is drawn, so that each replay would draw the same numbers; draw them "
        "outside, and give the array to the graph"
    )
    distribution: ClassVar[Distribution]

    def _planned(
        self, planner: Planner, dtype: DType, low: float, width: float, out: AccelRef | None
    ) -> Planned[AccelRef]:
        result = planner.output(self.shape, dtype, out)
        return Planned(PhiloxSpec(self.distribution, self.seed, self.row, low, width, result.spec), result)


@attrs.define(eq=False, on_setattr=None)
class Bits(_Draw):
    """Words of a Philox sequence as they are; see `Generator.bits`."""

    out: AccelRef | None = None
    distribution: ClassVar[Distribution] = "bits"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Name the array of words."""
        return self._planned(planner, DType.uint32, 0.0, 1.0, self.out)


@attrs.define(eq=False, on_setattr=None)
class Integers(_Draw):
    """Whole numbers of a range; see `Generator.integers`."""

    low: int
    high: int
    out: AccelRef | None = None
    distribution: ClassVar[Distribution] = "integers"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the bounds, and name the array."""
        low, high = operator.index(self.low), operator.index(self.high)
        if not (-_EXACT <= low < high <= _EXACT and high - low <= 1 << 32):
            raise ValueError(
                f"{planner.name}: high must be above low, by at most 2**32, and both from -2**53 to 2**53, "
                f"got {low} and {high}"
            )
        return self._planned(planner, DType.int64, float(low), float(high - low), self.out)


@attrs.define(eq=False, on_setattr=None)
class Uniform(_Draw):
    """Uniform numbers of a Philox sequence; see `Generator.uniform`."""

    dtype: DType = DType.float32
    low: float = 0.0
    high: float = 1.0
    out: AccelRef | None = None
    distribution: ClassVar[Distribution] = "uniform"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the bounds and the dtype, and name the array."""
        low, high = _reals(planner, self.dtype, low=self.low, high=self.high)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"{planner.name}: low must not be above high, and both finite, got {self.low} and {self.high}"
            )
        width = high - low
        if math.isinf(width):
            raise ValueError(f"{planner.name}: high - low is outside the range of {self.dtype}")
        _reals(planner, self.dtype, **{"high - low": width})
        return self._planned(planner, self.dtype, low, width, self.out)


@attrs.define(eq=False, on_setattr=None)
class Normal(_Draw):
    """Normal numbers of a Philox sequence; see `Generator.normal`."""

    dtype: DType = DType.float32
    loc: float = 0.0
    scale: float = 1.0
    out: AccelRef | None = None
    distribution: ClassVar[Distribution] = "normal"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the parameters and the dtype, and name the array."""
        loc, scale = _deviation(planner, self.dtype, loc=self.loc, scale=self.scale)
        return self._planned(planner, self.dtype, loc, scale, self.out)


@attrs.define(eq=False, on_setattr=None)
class Lognormal(_Draw):
    """Numbers whose logarithms are normal; see `Generator.lognormal`."""

    dtype: DType = DType.float32
    mean: float = 0.0
    sigma: float = 1.0
    out: AccelRef | None = None
    distribution: ClassVar[Distribution] = "lognormal"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the parameters and the dtype, and name the array."""
        mean, sigma = _deviation(planner, self.dtype, mean=self.mean, sigma=self.sigma)
        return self._planned(planner, self.dtype, mean, sigma, self.out)


@attrs.define(eq=False, on_setattr=None)
class Exponential(_Draw):
    """Exponentially distributed numbers; see `Generator.exponential`."""

    dtype: DType = DType.float32
    scale: float = 1.0
    out: AccelRef | None = None
    distribution: ClassVar[Distribution] = "exponential"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the scale and the dtype, and name the array."""
        (scale,) = _deviation(planner, self.dtype, scale=self.scale)
        return self._planned(planner, self.dtype, 0.0, scale, self.out)


def _reals(planner: Planner, dtype: DType, **arguments: float) -> list[float]:
    """Numbers that the dtype can hold; complex ones are refused, because the dtype is real."""
    if dtype not in (DType.float32, DType.float64):
        raise NotSupportedError(f"{planner.name} makes float32 or float64, not {dtype}; use cast()")
    return [planner.factor(name, value, dtype).real for name, value in arguments.items()]


def _deviation(planner: Planner, dtype: DType, **arguments: float) -> list[float]:
    """Finite parameters, of which the last is a deviation."""
    numbers = _reals(planner, dtype, **arguments)
    if not all(map(math.isfinite, numbers)) or numbers[-1] < 0:
        given = " and ".join(f"{name} {value}" for name, value in arguments.items())
        raise ValueError(f"{planner.name}: {[*arguments][-1]} must be at least 0, and finite, got {given}")
    return numbers
