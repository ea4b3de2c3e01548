"""Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011), by NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..runtime._memory import HostArray

__all__ = ["philox4x32", "unit64"]

_Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[_Words, _Words, _Words, _Words], key: tuple[int, int]) -> list[_Words]:
    """Ten rounds of Philox on arrays of 32-bit words, each in a uint64."""
    first, second, third, fourth = counter
    key0, key1 = key
    for _ in range(10):
        upper = first * _MULTIPLIERS[0]
        lower = third * _MULTIPLIERS[1]
        first = (lower >> _SHIFT) ^ second ^ np.uint64(key0)
        second = lower & _LOW
        third = (upper >> _SHIFT) ^ fourth ^ np.uint64(key1)
        fourth = upper & _LOW
        key0, key1 = (key0 + _WEYL[0]) & 0xFFFFFFFF, (key1 + _WEYL[1]) & 0xFFFFFFFF
    return [first, second, third, fourth]


def unit64(low: HostArray, high: HostArray) -> HostArray:
    """Return the numbers above 0 up to 1, as cuRAND makes them of two words."""
    numbers: HostArray = (low ^ (high << np.uint64(21))).astype(np.float64)
    numbers *= 2.0**-53
    numbers += 2.0**-54
    return numbers
