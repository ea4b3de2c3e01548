"""Generators of random numbers, and the draws that they ask for: which part of a sequence, and as what."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Coroutine, Sequence
from types import NoneType
from typing import Any, Final, Literal, ParamSpec, TypeAlias

import numpy as np

from ..actors import named_arguments
from ..backends.base import DType, DTypeLike, NotSupportedError
from ..backends.base.ops import PHILOX_ROW, RANDOM_DTYPES, Distribution, PhiloxSpec
from ..devices import AccelRef, Declared, Device, LibraryActor, Planned, Planner, check_device, operation

__all__ = [
    "Bits", "Exponential", "Generator", "Integers", "Lognormal", "Normal", "RngActor", "Uniform",
]  # fmt: skip

ParametersP = ParamSpec("ParametersP")

_Shape: TypeAlias = tuple[int, ...]
# Checked parameters of a distribution: the dtype, and `PhiloxSpec.low` and `PhiloxSpec.width`.
_Checked: TypeAlias = tuple[DType, float, float]

# Whole numbers from here on are not all floats.
_EXACT = 1 << 53


def rows_of(size: int) -> int:
    """Count the rows of counters that an array of this size may use, whatever its dtype: an even number."""
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
    """Return the numbers that the dtype can hold; complex ones are refused, because the dtype is real."""
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


class Generator:
    """Draws random numbers on a device from one sequence.

    The position in the sequence is kept here and not on the device, and each draw takes its part of
    it before anything is sent: no part is drawn twice, also when draws run concurrently, fail, are
    cancelled, or the device is rebuilt in between. The same seed and the same draws in the same
    order give the same numbers, on every backend that has the generator.

    Each draw begins a new row of the sequence, so that two draws of 10 numbers are other numbers
    than one draw of 20.

    A draw raises `ValueError` for a negative size, bounds in the wrong order, a negative deviation, values
    that the dtype cannot hold, and an `out` of another shape or dtype. It raises `TypeError` for a parameter
    that is no real number, or no whole one, and `NotSupportedError` for another dtype than float32 and
    float64. See `Device.ask` for cancellation and the errors that any operation can end with.

    Args:
        device: Where the numbers are made.
        kind: ``"philox4x32_10"`` (Salmon et al., SC 2011; cuRAND ``PHILOX4_32_10``).
        seed: Whole number of 64 bits; by default a fresh one from the operating system.

    Raises:
        NotSupportedError: There is no such generator.
        ValueError: The seed does not fit into 64 bits.
        TypeError: The seed is no whole number, or `device` is no device.
    """

    def __init__(
        self, device: Device, kind: Literal["philox4x32_10"] = "philox4x32_10", seed: int | None = None
    ) -> None:
        if kind != "philox4x32_10":
            raise NotSupportedError(f"Generator: kind {kind!r} is not there; it has 'philox4x32_10'")
        check_device("Generator", device)
        self._device = device
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, NoneType)):
            raise TypeError(f"Generator: seed must be a whole number or None, got {seed!r}")
        self._seed = secrets.randbits(64) if seed is None else int(seed)
        self._row = 0
        if not 0 <= self._seed < 1 << 64:
            raise ValueError(f"Generator: seed must be from 0 to 2**64 - 1, got {seed}")

    def __repr__(self) -> str:
        return f"<Generator philox4x32_10, seed {self._seed}, row {self._row}, on {self._device.name}>"

    @property
    def device(self) -> Device:
        """Where the numbers are made."""
        return self._device

    @property
    def seed(self) -> int:
        """Seed of its sequence, also where the operating system drew it."""
        return self._seed

    async def bits(self, shape: int | Sequence[int], *, out: AccelRef | None = None) -> AccelRef:
        """Draw 32-bit words, an array of uint32 (cuRAND ``curandGenerate``).

        Args:
            shape: Shape of the result.
            out: uint32 array of this shape to write to; by default a new one.
        """
        return await self._device.ask(Bits(*self._take(shape), out))

    @named_arguments
    async def uniform(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = "float32",
        *,
        low: float = 0.0,
        high: float = 1.0,
        out: AccelRef | None = None,
    ) -> AccelRef:
        """Draw numbers that are uniform over an interval (cuRAND ``curandGenerateUniform``).

        Args:
            shape: Shape of the result.
            dtype: float32 (24 random bits a number) or float64 (53).
            low: Lower bound, not drawn itself but by rounding.
            high: Upper bound, which may be drawn: the numbers come from above 0 up to 1, as in cuRAND.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        return await self._device.ask(Uniform(*self._take(shape), DType.of(dtype), low, high, out))

    @named_arguments
    async def normal(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = "float32",
        *,
        loc: float = 0.0,
        scale: float = 1.0,
        out: AccelRef | None = None,
    ) -> AccelRef:
        """Draw normally distributed numbers by Box and Muller (cuRAND ``curandGenerateNormal``).

        Args:
            shape: Shape of the result.
            dtype: float32 or float64.
            loc: Mean.
            scale: Standard deviation.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        return await self._device.ask(Normal(*self._take(shape), DType.of(dtype), loc, scale, out))

    async def exponential(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = "float32",
        *,
        scale: float = 1.0,
        out: AccelRef | None = None,
    ) -> AccelRef:
        """Draw exponentially distributed numbers: minus the logarithms of uniform ones.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64.
            scale: Mean.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        return await self._device.ask(Exponential(*self._take(shape), DType.of(dtype), scale, out))

    async def lognormal(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = "float32",
        *,
        mean: float = 0.0,
        sigma: float = 1.0,
        out: AccelRef | None = None,
    ) -> AccelRef:
        """Draw numbers whose logarithms are normally distributed (cuRAND ``curandGenerateLogNormal``).

        Args:
            shape: Shape of the result.
            dtype: float32 or float64.
            mean: Mean of the logarithms.
            sigma: Standard deviation of the logarithms.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        return await self._device.ask(Lognormal(*self._take(shape), DType.of(dtype), mean, sigma, out))

    async def integers(
        self, shape: int | Sequence[int], low: int, high: int, *, out: AccelRef | None = None
    ) -> AccelRef:
        """Draw whole numbers that are uniform from `low` on, below `high`: an array of int64.

        Each is made of 64 bits without rejection, so that of a range of n numbers none is drawn more often
        than another by more than n in 2**64.

        Args:
            shape: Shape of the result.
            low: The least number.
            high: The number above the greatest; by at most 2**32 above `low`.
            out: int64 array of this shape to write to; by default a new one.
        """
        return await self._device.ask(Integers(*self._take(shape), low, high, out))

    def _take(self, shape: int | Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
        """Read a shape, and take the rows for it out of the sequence: seed, first row and extents."""
        extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(isinstance(extent, bool) or operator.index(extent) < 0 for extent in extents):
            raise ValueError(f"shape must hold sizes of at least 0, got {shape!r}")
        row = self._row
        self._row += rows_of(int(np.prod(extents, dtype=object)) if extents else 1)
        return self._seed, row, tuple(int(extent) for extent in extents)


Bits: Final = _bits.message
Exponential: Final = _exponential.message
Integers: Final = _integers.message
Lognormal: Final = _lognormal.message
Normal: Final = _normal.message
Uniform: Final = _uniform.message
