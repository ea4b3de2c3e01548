"""Messages: which part of which sequence to draw, and as what."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import attrs

from ..backends.base import DType, NotSupportedError
from ..backends.base.ops import PHILOX_ROW, PhiloxSpec
from ..devices import AccelRef, Operation, Planned, Planner
from ._actor import RngActor

__all__ = ["Bits", "Normal", "Uniform", "rows_of"]

_PATH = "trio_accel.random:RngActor"


def rows_of(size: int) -> int:
    """Rows of counters that an array of this size may use, whatever its dtype: an even number."""
    return 2 * -(-size // (4 * PHILOX_ROW))


@attrs.define(eq=False, on_setattr=None)
class Bits(Operation[RngActor, AccelRef]):
    """Words of a Philox sequence as they are; see `Generator.bits`."""

    seed: int
    row: int
    shape: tuple[int, ...]
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Name the array of words."""
        return _plan(planner, self, "bits", DType.uint32, 0.0, 1.0)


@attrs.define(eq=False, on_setattr=None)
class Uniform(Operation[RngActor, AccelRef]):
    """Uniform numbers of a Philox sequence; see `Generator.uniform`."""

    seed: int
    row: int
    shape: tuple[int, ...]
    dtype: DType = DType.float32
    low: float = 0.0
    high: float = 1.0
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the bounds and the dtype, and name the array."""
        _check_dtype(planner, self.dtype)
        low = _real(planner, "low", self.low, self.dtype)
        high = _real(planner, "high", self.high, self.dtype)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"{planner.name}: low must not be above high, and both finite, got {self.low} and {self.high}"
            )
        width = high - low
        if math.isinf(width):
            raise ValueError(f"{planner.name}: high - low is outside the range of {self.dtype}")
        return _plan(
            planner, self, "uniform", self.dtype, low, _real(planner, "high - low", width, self.dtype)
        )


@attrs.define(eq=False, on_setattr=None)
class Normal(Operation[RngActor, AccelRef]):
    """Normal numbers of a Philox sequence; see `Generator.normal`."""

    seed: int
    row: int
    shape: tuple[int, ...]
    dtype: DType = DType.float32
    loc: float = 0.0
    scale: float = 1.0
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the parameters and the dtype, and name the array."""
        _check_dtype(planner, self.dtype)
        loc = _real(planner, "loc", self.loc, self.dtype)
        scale = _real(planner, "scale", self.scale, self.dtype)
        if not (math.isfinite(loc) and math.isfinite(scale) and scale >= 0):
            raise ValueError(
                f"{planner.name}: scale must be at least 0, and both finite, got loc {self.loc} and "
                f"scale {self.scale}"
            )
        return _plan(planner, self, "normal", self.dtype, loc, scale)


def _plan(
    planner: Planner,
    message: Bits | Uniform | Normal,
    distribution: Literal["bits", "uniform", "normal"],
    dtype: DType,
    low: float,
    width: float,
) -> Planned[AccelRef]:
    out = planner.output(message.shape, dtype, message.out)
    return Planned(PhiloxSpec(distribution, message.seed, message.row, low, width, out.spec), out)


def _check_dtype(planner: Planner, dtype: DType) -> None:
    if dtype not in (DType.float32, DType.float64):
        raise NotSupportedError(f"{planner.name} makes float32 or float64, not {dtype}; use cast()")


def _real(planner: Planner, argument: str, value: float, dtype: DType) -> float:
    """A number that the dtype can hold; a complex one is refused, because the dtype is real."""
    return planner.factor(argument, value, dtype).real
