"""Sobol points: numbers that fill a cube more evenly than random ones."""

from __future__ import annotations

import functools
import operator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..actors import run_in_thread
from ..backends.base import DTypeLike, NotSupportedError
from ..devices import AccelRef, Device, composed
from ..devices.operations._named import named_methods
from ..expressions import Elementwise
from ._distributions import after
from ._messages import SobolPoints
from ._stream import Seeded, checked_dtype

__all__ = ["Sobol"]

_Words: TypeAlias = npt.NDArray[np.uint32]

# SciPy's table has as many.
_MOST_DIMENSIONS = 21201
_MOST_BITS = 32
_SINGLE_BITS = 24


class Sobol(Seeded):
    """Points of a Sobol sequence, as `scipy.stats.qmc.Sobol` makes them: the same ones for the same seed.

    SciPy has the direction numbers (Joe and Kuo 2008), and scrambles them, in a thread when the first points
    are made. A device makes the points. Each point is a function of its number, so any part of the sequence
    is made at once. As with `Generator`, the place in the sequence is kept here: no point is made twice.

    >>> import trio, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("points") as system, system.open_device("cpu") as device:
    ...         print(await ta.random.Sobol(device, 2, scramble=False).random(4).to_host())
    >>> trio.run(main)
    [[0.   0.  ]
     [0.5  0.5 ]
     [0.75 0.25]
     [0.25 0.75]]

    Args:
        device: The device of the points.
        d: Dimensions: at most SciPy's limit, 21201.
        scramble: Whether the numbers are scrambled (Matoušek 1998), so that the points are random, and none
            is certain to be zero.
        bits: Bits of each number, from 1 to 32. There are two to the power of this points.
        seed: Integer that scrambles, SciPy's `rng`; by default a fresh one.

    Raises:
        ValueError: Dimensions or bits out of range, or a negative seed.
        TypeError: No integer, or no device.
    """

    def __init__(
        self, device: Device, d: int, *, scramble: bool = True, bits: int = 30, seed: int | None = None
    ) -> None:
        super().__init__("Sobol", device, seed)
        if not 1 <= operator.index(d) <= _MOST_DIMENSIONS:
            raise ValueError(f"Sobol: d must be from 1 to {_MOST_DIMENSIONS}, got {d}")
        if not 1 <= operator.index(bits) <= _MOST_BITS:
            raise ValueError(f"Sobol: bits must be from 1 to {_MOST_BITS}, got {bits}")
        if self._seed < 0:
            raise ValueError(f"Sobol: seed must be at least 0, got {seed}")
        self._d, self._bits = operator.index(d), operator.index(bits)
        self._scramble = bool(scramble)
        self._numbers: tuple[_Words, _Words] | None = None
        self._position = 0

    def __repr__(self) -> str:
        return f"<Sobol in {self._d} dimensions, seed {self._seed}, point {self._position}>"

    @property
    def num_generated(self) -> int:
        """The number of the next point; `fast_forward` lets another sequence continue from there."""
        return self._position

    @composed
    async def random(self, n: int = 1, dtype: DTypeLike = "float64") -> AccelRef:
        """Make the next points.

        A power of two of points is balanced; SciPy warns of other numbers.

        Args:
            n: How many.
            dtype: float64; or float32, of the upper 24 bits.

        Returns:
            An array of shape (n, d), from 0 on, below 1.

        Raises:
            ValueError: The number is negative, or exceeds the remaining points.
            NotSupportedError: The dtype is not supported; or this SciPy stores its direction numbers in
                another way.
        """
        kind, first = checked_dtype("Sobol", dtype), self._skip("random", n)
        levels = max(1, (self._position - 1).bit_length())
        if self._numbers is None:
            self._numbers = await run_in_thread(
                _direction_numbers, self._d, self._scramble, self._bits, self._seed
            )
        directions, shift = self._numbers
        points = await self._device.ask(SobolPoints(first, operator.index(n), directions[:levels], shift))
        dropped_bits = max(0, self._bits - _SINGLE_BITS) if kind.itemsize == 4 else 0
        scale = np.float64(2.0 ** (dropped_bits - self._bits))
        return await _scaled(kind.value)(points, np.uint32(dropped_bits), scale)

    @composed
    async def random_base2(self, m: int, dtype: DTypeLike = "float64") -> AccelRef:
        """Make the next 2**m points, which end at a power of two.

        Args:
            m: Logarithm of how many.
            dtype: See `random`.

        Raises:
            ValueError: The points so far plus these would not be a power of two, or exceed the remaining
                points.
        """
        if not 0 <= operator.index(m) <= self._bits:
            raise ValueError(f"Sobol.random_base2: m must be from 0 to {self._bits}, got {m}")
        total = self._position + (1 << operator.index(m))
        if total & (total - 1):
            raise ValueError(
                f"Sobol.random_base2: {self._position} points and 2**{m} are not a power of two; use random()"
            )
        return await self.random(1 << operator.index(m), dtype)

    def fast_forward(self, n: int) -> Sobol:
        """Skip points, however many, at once; returns this object.

        Raises:
            ValueError: The number is negative, or exceeds the remaining points.
        """
        self._skip("fast_forward", n)
        return self

    def reset(self) -> Sobol:
        """Go back to the first point; returns this object."""
        self._position = 0
        return self

    def _skip(self, name: str, n: int) -> int:
        """Take points, and return the number of the first one."""
        if isinstance(n, bool) or operator.index(n) < 0:
            raise ValueError(f"Sobol.{name}: n must be at least 0, got {n!r}")
        first, point_count = self._position, 1 << self._bits
        if first + operator.index(n) > point_count:
            raise ValueError(
                f"Sobol.{name}: there are 2**{self._bits} points, and {first} are used; got n={n}"
            )
        self._position += operator.index(n)
        return first


named_methods("random.Sobol", Sobol)


def _direction_numbers(d: int, scramble: bool, bits: int, seed: int) -> tuple[_Words, _Words]:
    """Have SciPy make direction numbers and a shift; takes as long as to import it."""
    from scipy.stats import qmc

    sampler: Any = qmc.Sobol(d, scramble=scramble, bits=bits, rng=seed)
    # These two are SciPy's own.
    numbers, shift = np.array(getattr(sampler, "_sv", None)), np.array(getattr(sampler, "_shift", None))
    if (numbers.shape, shift.shape) != ((d, bits), (d,)):
        raise NotSupportedError("Sobol: the direction numbers of this SciPy were not found")
    # In Gray's code a bit of a point's number represents two bits. These directions need no such code.
    directions = np.ascontiguousarray(numbers.T)
    directions[1:] ^= directions[:-1].copy()
    return directions, shift


@functools.cache
def _scaled(dtype: str) -> Elementwise[AccelRef]:
    return after("Sobol", "float64(x >> left) * scale", dtype, "x", "left", "scale")
