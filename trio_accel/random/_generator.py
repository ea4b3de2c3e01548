"""Generators: a sequence, and how far it has been drawn."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from types import NoneType
from typing import Literal

import numpy as np

from ..backends.base import DType, DTypeLike, NotSupportedError
from ..devices import AccelRef, Device, DeviceOpening
from ._messages import Bits, Exponential, Integers, Lognormal, Normal, Uniform, rows_of

__all__ = ["Generator"]


class Generator:
    """Draws random numbers on a device from one sequence.

    Where the sequence stands is kept here and not on the device, and each draw takes its part of
    it before anything is sent: no part is drawn twice, also when draws run concurrently, fail, are
    cancelled, or the device is rebuilt in between. The same seed and the same draws in the same
    order give the same numbers, on every backend that has the generator.

    Each draw begins a new row of the sequence, so that two draws of 10 numbers are other numbers
    than one draw of 20.

    A draw raises `ValueError` for a negative size, bounds in the wrong order, a negative deviation, what the
    dtype cannot hold, and an `out` of another shape or dtype. It raises `TypeError` for a parameter that is
    no real number, or no whole one, and `NotSupportedError` for another dtype than float32 and float64. See
    `Device.ask` for cancellation and the errors that any operation can end with.

    Args:
        device: Where the numbers are made.
        kind: ``"philox4x32_10"`` (Salmon et al., SC 2011; cuRAND ``PHILOX4_32_10``).
        seed: Whole number of 64 bits; by default a fresh one from the operating system.

    Raises:
        NotSupportedError: There is no such generator.
        ValueError: The seed does not fit into 64 bits.
        TypeError: The seed is no whole number, or the device is none.
    """

    def __init__(
        self, device: Device, kind: Literal["philox4x32_10"] = "philox4x32_10", seed: int | None = None
    ) -> None:
        if kind != "philox4x32_10":
            raise NotSupportedError(f"Generator: kind {kind!r} is not there; it has 'philox4x32_10'")
        given: object = device
        if not isinstance(given, Device):
            hint = f"; {given.what_to_do}" if isinstance(given, DeviceOpening) else ""
            raise TypeError(f"Generator: device must be an open Device, got {type(given).__name__}{hint}")
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
        """The seed."""
        return self._seed

    async def bits(self, shape: int | Sequence[int], *, out: AccelRef | None = None) -> AccelRef:
        """Draw 32-bit words, an array of uint32 (cuRAND ``curandGenerate``).

        Args:
            shape: Shape of the result.
            out: uint32 array of this shape to write to; by default a new one.
        """
        return await self._device.ask(Bits(*self._take(shape), out))

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
