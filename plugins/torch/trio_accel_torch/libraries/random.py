"""Random numbers: Philox-4x32-10 by integers, so that the bits are those of all backends; and Sobol points.

Numbers that are proposed until one is accepted, and linear sequences, are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trio_accel.backends.base import kernel
from trio_accel.backends.base.contract.ops import (
    FIRST,
    PHILOX_ROW,
    PHILOX_START,
    RANDOM_DTYPES,
    PhiloxSpec,
    SobolSpec,
)

from .._views import read, write
from ..manifest import BACKEND

T = torch.Tensor
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Counters of one piece, whose arrays stay in the caches.
_PIECE = 1 << 16


def philox4x32(counter: list[T], seed: int) -> list[T]:
    """Return the four words of counters, each of 32 bits in an int64."""
    first, second, third, fourth = counter
    key0, key1 = seed & _LOW, seed >> 32
    for _ in range(10):
        # The product has 64 bits, which int64 holds as they are.
        upper, lower = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        second, fourth, first, third = (
            lower & _LOW,
            upper & _LOW,
            (lower >> 32) & _LOW ^ second ^ key0,
            (upper >> 32) & _LOW ^ fourth ^ key1,
        )
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return [first, second, third, fourth]


def _words(spec: PhiloxSpec, first: int, count: int, step: int, ahead: int, device: torch.device) -> list[T]:
    """Make the words of counters from number `first` on, in rows that are `step` apart."""
    seed, row = PHILOX_START.unpack(spec.start)
    numbers = torch.arange(first, first + count, device=device)
    half = numbers // PHILOX_ROW * step + (row + ahead)
    counter = [half & _LOW, (half >> 32) & _LOW, numbers % PHILOX_ROW, torch.zeros_like(numbers)]
    return philox4x32(counter, seed)


def _unit32(word: T, factor: float = 2.0**-32, more: float = 2.0**-33) -> T:
    return word.to(torch.float32) * factor + more


def _unit64(low: T, high: T) -> T:
    return ((high << 21) ^ low).to(torch.float64) * 2.0**-53 + 2.0**-54


def _units(words: list[T], *, is_double: bool) -> list[T]:
    if not is_double:
        return [_unit32(word) for word in words]
    return [_unit64(low, high) for low, high in zip(words[0::2], words[1::2], strict=True)]


def _normal(words: list[T], *, is_double: bool) -> list[T]:
    """Box and Muller's, as cuRAND has them."""
    if is_double:
        units = _units(words, is_double=True)
        radii, angles = units[0::2], [one * (2.0 * math.pi) for one in units[1::2]]
    else:
        # cuRAND rounds the angle to single precision before it multiplies by the factor of the circle.
        circle = float(torch.tensor(2.0**-32) * torch.tensor(2.0 * math.pi, dtype=torch.float32))
        radii, angles = (
            [_unit32(one) for one in words[0::2]],
            [_unit32(one, circle, circle / 2) for one in words[1::2]],
        )
    made: list[T] = []
    for radius, angle in zip(radii, angles, strict=True):
        far = torch.sqrt(torch.log(radius) * -2)
        made += [far * torch.sin(angle), far * torch.cos(angle)]
    return made


def _scaled(spec: PhiloxSpec, columns: list[T]) -> list[T]:
    if spec.width != 1.0:
        columns = [one * spec.width for one in columns]
    return [one + spec.low for one in columns] if spec.low != 0.0 else columns


def _columns(spec: PhiloxSpec, words: list[T], *, is_double: bool) -> list[T]:
    match spec.distribution:
        case "bits":
            return words
        case "integers":
            width = int(spec.width)
            # Both products have up to 64 bits.
            return [
                ((b * width + ((a * width >> 32) & _LOW)) >> 32 & _LOW) + int(spec.low)
                for a, b in zip(words[0::2], words[1::2], strict=True)
            ]
        case "uniform":
            return _scaled(spec, _units(words, is_double=is_double))
        case "exponential":
            return _scaled(spec, [-torch.log(one) for one in _units(words, is_double=is_double)])
        case "normal":
            return _scaled(spec, _normal(words, is_double=is_double))
        case _:
            return [torch.exp(one) for one in _scaled(spec, _normal(words, is_double=is_double))]


_DTYPES = tuple({dtype: None for dtypes in RANDOM_DTYPES.values() for dtype in dtypes})


@kernel(PhiloxSpec, backend=BACKEND, dtypes=_DTYPES)
def philox(spec: PhiloxSpec, call: Any) -> None:
    """Fill an array, four numbers for a counter."""
    size, is_double, where = spec.out.size, spec.out.dtype.itemsize == 8, call.device.where
    counters, made = -(-size // 4), []
    for first in range(0, counters, _PIECE):
        count = min(_PIECE, counters - first)
        # Four double numbers are two of a counter, and two of that of the next row.
        rows = [_words(spec, first, count, 1 + is_double, ahead, where) for ahead in range(1 + is_double)]
        words = [word for row in rows for word in row]
        made.append(torch.stack(_columns(spec, words, is_double=is_double), 1).reshape(-1))
    if made:
        write(call, spec.out, torch.cat(made)[:size].reshape(spec.out.shape))


@kernel(SobolSpec, backend=BACKEND)
def sobol_points(spec: SobolSpec, call: Any) -> None:
    """Combine the directions of the bits of each point's number by exclusive or."""
    if 0 in spec.out.shape:
        return
    (first,) = FIRST.unpack(spec.first)
    points = read(call, spec.shift).expand(spec.out.shape)
    numbers = torch.arange(first, first + spec.out.shape[0], device=call.device.where)
    for bit, direction in enumerate(read(call, spec.directions)):
        points = points ^ ((numbers >> bit & 1)[:, None] * direction)
    write(call, spec.out, points)
