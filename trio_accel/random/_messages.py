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
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(
                f"{planner.name}: low must not be above high, and both finite, got {self.low} and {self.high}"
            )
        return _plan(planner, self, "uniform", self.dtype, self.low, self.high - self.low)


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
        if not (math.isfinite(self.loc) and math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(
                f"{planner.name}: scale must be at least 0, and both finite, got loc {self.loc} and "
                f"scale {self.scale}"
            )
        return _plan(planner, self, "normal", self.dtype, self.loc, self.scale)


def _plan(
    planner: Planner,
    message: Bits | Uniform | Normal,
    distribution: Literal["bits", "uniform", "normal"],
    dtype: DType,
    low: float,
    width: float,
) -> Planned[AccelRef]:
    if distribution != "bits" and dtype not in (DType.float32, DType.float64):
        raise NotSupportedError(f"{planner.name} makes float32 or float64, not {dtype}; use cast()")
    out = planner.output(message.shape, dtype, message.out)
    return Planned(PhiloxSpec(distribution, message.seed, message.row, low, width, out.spec), out)
