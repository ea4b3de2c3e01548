"""Random numbers: Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).

The order of the numbers is that of cuRAND's ``PHILOX4_32_10``, so that a program draws the same
ones on every backend: bits and uniform numbers to the last bit, normal ones but for the rounding
of the logarithm and the sine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ...base.contract.ops import PHILOX_ROW, PhiloxSpec, RejectionSpec, SequenceSpec, SobolSpec
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray
from ._philox import philox4x32, unit64
from ._rejection import rejection
from ._sequences import linear_sequence, sobol_points

__all__ = ["philox", "philox4x32"]

_Draw: TypeAlias = Callable[[PhiloxSpec, int, int], HostArray]
_Transform: TypeAlias = Callable[[PhiloxSpec, HostArray], HostArray]
_Unit: TypeAlias = Callable[[HostArray], HostArray]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Counters of one piece: its arrays stay in the caches, and the stream's thread lets others run in between.
_PIECE = 1 << 14


def _plan(spec: PhiloxSpec, device: object) -> tuple[_Draw, _Transform]:
    """Find how numbers are made."""
    is_single = spec.out.dtype.itemsize == 4
    transform = _TRANSFORMS[spec.distribution][not is_single]
    return _single_words if is_single else _double_words, transform


@kernel(PhiloxSpec, backend="cpu", plan=_plan, is_quick=True)
def philox(spec: PhiloxSpec, call: HostCall[tuple[_Draw, _Transform]]) -> None:
    """Fill an array with random numbers, four a counter, whatever they are made of."""
    out, (draw, transform) = call.array(spec.out).reshape(-1), call.plan
    counters = -(-out.size // 4)
    for first in range(0, counters, _PIECE):
        count = min(_PIECE, counters - first)
        piece = out[4 * first : 4 * (first + count)]
        piece[...] = transform(spec, draw(spec, first, count))[: piece.size]


kernel(SequenceSpec, backend="cpu")(linear_sequence)
kernel(RejectionSpec, backend="cpu")(rejection)
kernel(SobolSpec, backend="cpu")(sobol_points)


def _words(seed: int, row: int, first: int, count: int, step: int) -> HostArray:
    """Words of `count` counters from number `first`, in rows that are `step` apart, four to each."""
    number = np.arange(first, first + count, dtype=np.uint64)
    half = number // np.uint64(PHILOX_ROW) * np.uint64(step) + np.uint64(row)
    counter = (half & _LOW, half >> _SHIFT, number % np.uint64(PHILOX_ROW), np.zeros_like(number))
    words: HostArray = np.stack(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=-1)
    return words


def _single_words(spec: PhiloxSpec, first: int, count: int) -> HostArray:
    return _words(spec.seed, spec.row, first, count, 1).reshape(-1)


def _double_words(spec: PhiloxSpec, first: int, count: int) -> HostArray:
    """Words of four double numbers a counter: two from it and two from that of the next row."""
    near = _words(spec.seed, spec.row, first, count, 2)
    far = _words(spec.seed, spec.row + 1, first, count, 2)
    return np.concatenate([near, far], axis=1).reshape(-1)


def _unit32(words: HostArray) -> HostArray:
    """Return the numbers above 0 up to 1, as cuRAND makes them of one word."""
    return words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)


def _unit64(words: HostArray) -> HostArray:
    """Return the numbers above 0 up to 1, as cuRAND makes them of two words."""
    return unit64(words[0::2], words[1::2])


def _box_muller(unit: HostArray, angle: HostArray) -> HostArray:
    radius = np.sqrt(unit.dtype.type(-2) * np.log(unit))
    both: HostArray = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)
    return both.reshape(-1)


def _scaled(spec: PhiloxSpec, numbers: HostArray) -> HostArray:
    if spec.width != 1.0:
        numbers *= numbers.dtype.type(spec.width)
    if spec.low != 0.0:
        numbers += numbers.dtype.type(spec.low)
    return numbers


def _bits(spec: PhiloxSpec, words: HostArray) -> HostArray:
    return words


def _uniform(unit: _Unit) -> _Transform:
    return lambda spec, words: _scaled(spec, unit(words))


def _exponential(unit: _Unit) -> _Transform:
    return lambda spec, words: _scaled(spec, -np.log(unit(words)))


def _lognormal(normal: _Transform) -> _Transform:
    return lambda spec, words: np.exp(normal(spec, words))


def _normal32(spec: PhiloxSpec, words: HostArray) -> HostArray:
    # As cuRAND: the angle is rounded to single precision before the factor of the circle.
    circle = np.float32(2.0**-32) * np.float32(2.0 * np.pi)
    angle = words[1::2].astype(np.float32) * circle + circle / np.float32(2)
    return _scaled(spec, _box_muller(_unit32(words[0::2]), angle))


def _normal64(spec: PhiloxSpec, words: HostArray) -> HostArray:
    unit = _unit64(words)
    return _scaled(spec, _box_muller(unit[0::2], unit[1::2] * (2.0 * np.pi)))


def _integers(spec: PhiloxSpec, words: HostArray) -> HostArray:
    width = np.uint64(spec.width)
    above = (words[1::2] * width + (words[0::2] * width >> _SHIFT)) >> _SHIFT
    numbers: HostArray = above.astype(np.int64) + np.int64(spec.low)
    return numbers


# For numbers of 4 bytes, and of 8.
_TRANSFORMS: dict[str, tuple[_Transform, _Transform]] = {
    "bits": (_bits, _bits),
    "uniform": (_uniform(_unit32), _uniform(_unit64)),
    "normal": (_normal32, _normal64),
    "exponential": (_exponential(_unit32), _exponential(_unit64)),
    "lognormal": (_lognormal(_normal32), _lognormal(_normal64)),
    "integers": (_integers, _integers),
}
