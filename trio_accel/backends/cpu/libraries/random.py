"""Random numbers: Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).

The order of the numbers is that of cuRAND's ``PHILOX4_32_10``, so a program draws the same numbers on every
backend: bits and uniform numbers to the last bit, normal numbers except for the rounding of the logarithm and
the sine.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ...base import HostArray, HostCall, kernel
from ...base.contract.ops import (
    FIRST,
    PHILOX_ROW,
    PHILOX_START,
    PhiloxSpec,
    RejectionSpec,
    SequenceSpec,
    SobolSpec,
)
from ..compiled._compiler import has_fma, mode
from ..compiled._plans import LoopPlan

# Counters or numbers of one piece: its arrays stay in the caches, and the stream's thread lets others run in
# between.
_CHUNK_NUMBERS = 1 << 14

_Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_ARGUMENTS, _PAIR = struct.Struct("<5Q"), struct.Struct("<2Q")
_WEYL = (0x9E3779B9, 0xBB67AE85)


@functools.cache
def _compiled(*names: str, is_exact: bool = True) -> LoopPlan:
    """Return the code of these files. Unless it has NumPy's bits, it is compiled before its first use."""
    if mode() == "never" or not (is_exact or has_fma()):
        return LoopPlan()

    def text() -> str:
        folder = Path(__file__).parents[1] / "compiled"
        return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)

    # The code that it replaces has some hundred steps.
    return LoopPlan(text, is_exact=is_exact, weight=_CHUNK_NUMBERS * 8 * 100)


def philox4x32(counter: tuple[_Words, _Words, _Words, _Words], seed: int) -> list[_Words]:
    """Run ten rounds of Philox on arrays of 32-bit words, each in a uint64. The arrays are overwritten."""
    first, second, third, fourth = words = [np.ascontiguousarray(word) for word in counter]
    entry = _compiled("philox.h").find()
    if entry is not None:
        entry(_ARGUMENTS.pack(*[word.ctypes.data for word in words], seed), 0, first.size)
        return words
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    upper, lower, *spare = (np.empty_like(first) for _ in range(4))
    for _ in range(10):
        np.multiply(first, _MULTIPLIERS[0], out=upper)
        np.multiply(third, _MULTIPLIERS[1], out=lower)
        # The upper halves of the second and the fourth word are of no use: they go here.
        for word, product, operand, part in ((first, lower, second, key0), (third, upper, fourth, key1)):
            np.right_shift(product, _SHIFT, out=word)
            np.bitwise_xor(word, operand, out=word)
            np.bitwise_xor(word, np.uint64(part), out=word)
            np.bitwise_and(word, _LOW, out=word)
        second, fourth, (lower, upper), spare = lower, upper, spare, [lower, upper]
        key0, key1 = (key0 + _WEYL[0]) & 0xFFFFFFFF, (key1 + _WEYL[1]) & 0xFFFFFFFF
    return [first, second & _LOW, third, fourth & _LOW]


def unit64(low: HostArray, high: HostArray) -> HostArray:
    """Return the numbers above 0 up to 1, as cuRAND makes them of two words."""
    bits = high << np.uint64(21)
    bits ^= low
    # Numbers with a sign are converted faster.
    numbers: HostArray = bits.view(np.int64).astype(np.float64)
    numbers *= 2.0**-53
    numbers += 2.0**-54
    return numbers


_Doubles: TypeAlias = npt.NDArray[np.float64]

# Less than one number in 2**200 is still not accepted after this number of attempts.
_MOST_ATTEMPTS = 128
# Below this mean one uniform number is looked up in the distribution.
_INVERTED = 10.0
_LARGEST = 2.0**52
_HALF_LOG_2PI = 0.9189385332046727
# log(k!) - ((k + 1/2) log(k) - k + log(2 pi) / 2) for k from 1 to 15, rounded from 60 digits; 0 is not used.
_STIRLING = np.array([
    0.0, 0.08106146679532726, 0.0413406959554093, 0.02767792568499834, 0.020790672103765093,
    0.016644691189821193, 0.013876128823070748, 0.01189670994589177, 0.010411265261972096,
    0.009255462182712733, 0.00833056343336287, 0.007573675487951841, 0.00694284010720953,
    0.006408994188004207, 0.0059513701127588475, 0.005554733551962801,
])  # fmt: skip


@attrs.frozen
class _Draw:
    """Some numbers of a draw, and the uniform numbers for each.

    Attributes:
        seed: Key.
        row: First row of the draw.
        positions: The indices of these numbers in the draw.
    """

    seed: int
    row: int
    positions: npt.NDArray[np.uint64]

    def of(self, chosen: HostArray) -> _Draw:
        """Select some of the numbers, by truth values or indices."""
        return attrs.evolve(self, positions=self.positions[chosen])

    def uniform(self, block: int) -> tuple[_Doubles, _Doubles]:
        """Return two uniform numbers above 0 up to 1 of each, from its counter of this number."""
        width = np.uint64(PHILOX_ROW)
        half = self.positions // width + np.uint64(self.row)
        counter = (half & _LOW, half >> _SHIFT, self.positions % width, np.full_like(half, block))
        first, second, third, fourth = philox4x32(counter, self.seed)
        return unit64(first, second), unit64(third, fourth)


_Maker: TypeAlias = "Callable[[_Draw, _Doubles, _Doubles], _Doubles]"


@kernel(RejectionSpec, backend="cpu")
def rejection(spec: RejectionSpec, call: HostCall) -> None:
    """Fill an array, piece by piece."""
    out = call.array(spec.out).reshape(-1)
    parameters = [
        np.zeros(1) if array is None else call.array(array, write=False).reshape(-1)
        for array in (spec.a, spec.b)
    ]
    spec.fault[0] = not _are_in_range(spec.distribution, *parameters)
    if spec.fault[0]:
        return
    seed, row = PHILOX_START.unpack(spec.start)
    for first in range(0, out.size, _CHUNK_NUMBERS):
        positions = np.arange(first, min(first + _CHUNK_NUMBERS, out.size), dtype=np.uint64)
        a, b = (
            np.broadcast_to(
                parameter if parameter.size == 1 else parameter[first : first + _CHUNK_NUMBERS],
                positions.shape,
            )
            for parameter in parameters
        )
        with np.errstate(all="ignore"):
            out[first : first + _CHUNK_NUMBERS] = _MAKERS[spec.distribution](
                _Draw(seed, row, positions), a, b
            )


def _are_in_range(distribution: str, a: _Doubles, b: _Doubles) -> bool:
    """Look for parameters that no number can be drawn of; NaN is one."""
    if "gamma" in distribution:
        return bool(((a >= 0) & np.isfinite(a)).all())
    is_fit = (a >= 0) & (a <= _LARGEST)
    if distribution == "binomial":
        return bool((is_fit & (a == np.floor(a))).all() and ((b >= 0) & (b <= 1)).all())
    return bool(is_fit.all())


def _propose(
    numbers: _Draw,
    result: _Doubles,
    attempt: Callable[[_Draw, HostArray, int], tuple[_Doubles, HostArray]],
) -> _Doubles:
    """Ask for proposals until all are accepted."""
    waiting: HostArray = np.arange(len(result))
    for number in range(_MOST_ATTEMPTS):
        if not waiting.size:
            break
        proposed, is_accepted = attempt(numbers.of(waiting), waiting, number)
        result[waiting[is_accepted]] = proposed[is_accepted]
        waiting = waiting[~is_accepted]
    return result


def _gamma(*, has_log: bool) -> _Maker:
    """Marsaglia and Tsang, A simple method for generating gamma variables (2000): cubes of normal numbers.

    A number with a shape below 1 is a number with the shape above 1, times a power of a uniform number.
    """

    def make(numbers: _Draw, a: _Doubles, _: _Doubles) -> _Doubles:
        d: _Doubles = np.where(a < 1, a + 1, a) - 1 / 3
        c = 1 / np.sqrt(9 * d)

        def attempt(those: _Draw, waiting: HostArray, number: int) -> tuple[_Doubles, HostArray]:
            first, second = those.uniform(2 * number + 1)
            x = np.sqrt(-2 * np.log(first)) * np.cos(second * (2 * np.pi))
            v = (1 + c[waiting] * x) ** 3
            bound = 0.5 * x * x + d[waiting] * (1 - v + np.log(v))
            return v, (v > 0) & (np.log(those.uniform(2 * number + 2)[0]) < bound)

        v = _propose(numbers, np.ones_like(d), attempt)
        less = np.zeros_like(d)
        below = np.flatnonzero(a < 1)
        less[below] = np.log(numbers.of(below).uniform(0)[0]) / a[below]
        less[a == 0] = -np.inf
        return np.log(d * v) + less if has_log else d * v * np.exp(less)

    return make


def _poisson(numbers: _Draw, a: _Doubles, _: _Doubles) -> _Doubles:
    """Hörmann, The transformed rejection method for generating Poisson random variables (1993): PTRS."""
    result = np.zeros(a.shape)
    inverted, large = np.flatnonzero(a < _INVERTED), np.flatnonzero(a >= _INVERTED)
    mean = a[inverted]
    result[inverted] = _inverted(numbers.of(inverted), np.exp(-mean), lambda k, those: mean[those] / k)
    mean = a[large]
    b = 0.931 + 2.53 * np.sqrt(mean)
    slope, scale, sure = -0.059 + 0.02483 * b, 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2)

    def attempt(those: _Draw, waiting: HostArray, number: int) -> tuple[_Doubles, HostArray]:
        u, v = those.uniform(number + 1)
        u, lam, reach = u - 0.5, mean[waiting], b[waiting]
        us = 0.5 - np.abs(u)
        k = np.floor((2 * slope[waiting] / us + reach) * u + lam + 0.43)
        is_sure = (us >= 0.07) & (v <= sure[waiting])
        is_out = (k < 0) | ~np.isfinite(k) | ((us < 0.013) & (v > us))
        height = np.log(v * scale[waiting] / (slope[waiting] / (us * us) + reach))
        return k, is_sure | (~is_out & (height <= _log_poisson(k, lam)))

    result[large] = _propose(numbers.of(large), np.floor(mean), attempt)
    return result


def _binomial(numbers: _Draw, a: _Doubles, b: _Doubles) -> _Doubles:
    """Hörmann, The generation of binomial random variates (1993): BTRS, for the rarer of both outcomes."""
    p = np.minimum(b, 1 - b)
    result = np.zeros(a.shape)
    inverted, large = np.flatnonzero(a * p < _INVERTED), np.flatnonzero(a * p >= _INVERTED)
    n, odds = a[inverted], p[inverted] / (1 - p[inverted])
    result[inverted] = _inverted(
        numbers.of(inverted),
        np.exp(n * np.log1p(-p[inverted])),
        lambda k, those: (n[those] - (k - 1)) / k * odds[those],
    )
    result[large] = _many_trials(numbers.of(large), a[large], p[large])
    return np.where(b > 0.5, a - result, result)


def _many_trials(numbers: _Draw, n: _Doubles, p: _Doubles) -> _Doubles:
    spread = np.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * spread
    slope, scale, sure = -0.0873 + 0.0248 * b + 0.01 * p, (2.83 + 5.1 / b) * spread, 0.92 - 4.2 / b
    mode = np.floor((n + 1) * p)
    log_mode = _log_binomial(mode, n, p)

    def attempt(those: _Draw, waiting: HostArray, number: int) -> tuple[_Doubles, HostArray]:
        u, v = those.uniform(number + 1)
        u, trials, reach = u - 0.5, n[waiting], b[waiting]
        us = 0.5 - np.abs(u)
        k = np.floor((2 * slope[waiting] / us + reach) * u + (trials * p[waiting] + 0.5))
        is_sure = (us >= 0.07) & (v <= sure[waiting])
        is_in = (k >= 0) & (k <= trials)
        height = np.log(v * scale[waiting] / (slope[waiting] / (us * us) + reach))
        log_k = _log_binomial(np.where(is_in, k, 0), trials, p[waiting])
        return k, is_sure | (is_in & (height <= log_k - log_mode[waiting]))

    return _propose(numbers, mode.copy(), attempt)


def _inverted(numbers: _Draw, first: _Doubles, ratio: Callable[[float, HostArray], _Doubles]) -> _Doubles:
    """Look a uniform number up in a distribution, of which the first probability and the ratios are known."""
    sought, result = numbers.uniform(0)[0], np.zeros(first.shape)
    probability, total = first.copy(), first.copy()
    waiting, k = np.flatnonzero(sought > total), 0
    while waiting.size:
        k += 1
        probability[waiting] *= ratio(float(k), waiting)
        next_total = total[waiting] + probability[waiting]
        # If the sum no longer grows, the rest is rounding.
        waiting, next_total = waiting[next_total > total[waiting]], next_total[next_total > total[waiting]]
        result[waiting], total[waiting] = k, next_total
        waiting = waiting[sought[waiting] > next_total]
    return result


def _stirling(k: _Doubles) -> _Doubles:
    """Return the error of Stirling's formula for log(k!), for integers above 0."""
    index = np.minimum(k, 15).astype(np.int64)
    square = 1 / (k * k)
    series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 * square) * square) * square) / k
    return np.where(k < 16, _STIRLING[index], series)


def _deviance(k: _Doubles, mean: _Doubles) -> _Doubles:
    """Return ``k log(k / mean) + mean - k``, which a plain formula loses the digits of (Loader 2000)."""
    apart = (k - mean) / mean
    return mean * ((1 + apart) * np.log1p(apart) - apart)


def _log_poisson(k: _Doubles, mean: _Doubles) -> _Doubles:
    clamped = np.maximum(k, 1)
    log = -_stirling(clamped) - _deviance(clamped, mean) - (_HALF_LOG_2PI + 0.5 * np.log(clamped))
    return np.where(k < 1, -mean, log)


def _log_binomial(k: _Doubles, n: _Doubles, p: _Doubles) -> _Doubles:
    clamped = np.minimum(np.maximum(k, 1), n - 1)
    failures = n - clamped
    errors = _stirling(n) - _stirling(clamped) - _stirling(failures)
    log = errors - _deviance(clamped, n * p) - _deviance(failures, n * (1 - p))
    log += 0.5 * np.log(n / (clamped * failures)) - _HALF_LOG_2PI
    return np.where(k < 1, n * np.log1p(-p), np.where(k >= n, n * np.log(p), log))


_MAKERS: Mapping[str, _Maker] = {
    "gamma": _gamma(has_log=False),
    "log_gamma": _gamma(has_log=True),
    "poisson": _poisson,
    "binomial": _binomial,
}


_M1, _M2 = np.uint64(2**32 - 209), np.uint64(2**32 - 22853)
_BITS = np.arange(32, dtype=np.uint32)
_STEP = 362437
# Pieces drawn next to each other, so that a step of their states stays in the caches.
_SIDE_BY_SIDE = 12
# The low bits of a Sobol point's number that a table covers; other bits change all its rows by exclusive or.
_TABLE = 8


@kernel(SequenceSpec, backend="cpu")
def linear_sequence(spec: SequenceSpec, call: HostCall) -> None:
    """Draw pieces side by side: a step of each is one step of arrays."""
    out = call.array(spec.out).reshape(-1)
    jumps, start = call.array(spec.jumps, write=False), call.array(spec.state, write=False)
    jump, draw = (_jump_mrg, _draw_mrg) if spec.sequence == "mrg32k3a" else (_jump_xorwow, _draw_xorwow)
    levels = min(len(jumps), _SIDE_BY_SIDE)
    group = spec.piece << levels
    states: HostArray = start[np.newaxis]
    for level in range(levels):
        states = np.concatenate([states, jump(jumps[level], spec.piece << level, states)])
    for first in range(0, out.size, group):
        part = out[first : first + group]
        pieces = -(-part.size // spec.piece)
        drawn = np.empty((spec.piece, pieces), np.uint32)
        for row, words in zip(drawn, draw(states[:pieces]), strict=False):
            row[...] = words
        part[...] = drawn.T.reshape(-1)[: part.size]
        if first + group < out.size:
            states = jump(jumps[levels], group, states)


def _jump_mrg(matrix: HostArray, words: int, states: HostArray) -> HostArray:
    """Multiply the three numbers of each recurrence by a matrix."""
    old, new = states.astype(np.uint64), np.empty_like(states)
    for half, modulus in ((0, _M1), (3, _M2)):
        rows = matrix[3 * half : 3 * half + 9].reshape(3, 3).astype(np.uint64)
        for row in range(3):
            products = old[:, half : half + 3] * rows[row] % modulus
            new[:, half + row] = products.sum(1, dtype=np.uint64) % modulus
    return new


def _draw_mrg(states: HostArray) -> Iterator[HostArray]:
    """L'Ecuyer's two recurrences, and their difference."""
    s10, s11, s12, s20, s21, s22 = states.T.astype(np.uint64)
    a12, a13n, a21, a23n = (np.uint64(factor) for factor in (1403580, 810728, 527612, 1370589))
    while True:
        s10, s11, s12 = s11, s12, (a12 * s11 + a13n * (_M1 - s10)) % _M1
        s20, s21, s22 = s21, s22, (a21 * s22 + a23n * (_M2 - s20)) % _M2
        yield np.where(s12 >= s22, s12 - s22, s12 + _M1 - s22)


def _jump_xorwow(matrix: HostArray, words: int, states: HostArray) -> HostArray:
    """Combine the columns of the set bits by sums modulo 2; d continues to count."""
    bits = (states[:, :5, np.newaxis] >> _BITS & np.uint32(1)).reshape(-1, 160).astype(np.float32)
    columns = (matrix.reshape(160, 5, 1) >> _BITS & np.uint32(1)).reshape(160, 160).astype(np.float32)
    odd = (bits @ columns).astype(np.uint32).reshape(-1, 5, 32) & np.uint32(1)
    new: HostArray = states.copy()
    new[:, :5] = np.bitwise_or.reduce(odd << _BITS, axis=2)
    new[:, 5] += np.uint32(_STEP * words & 0xFFFFFFFF)
    return new


def _draw_xorwow(states: HostArray) -> Iterator[HostArray]:
    """Yield the words of Marsaglia's generator of five shifted words and a counter."""
    x, y, z, w, v, d = states.T.copy()
    one, two, four = np.uint32(1), np.uint32(2), np.uint32(4)
    while True:
        t = x ^ x >> two
        x, y, z, w, v = y, z, w, v, v ^ v << four ^ t ^ t << one
        d = d + np.uint32(_STEP)
        yield d + v


@kernel(SobolSpec, backend="cpu")
def sobol_points(spec: SobolSpec, call: HostCall) -> None:
    """Make points; points with numbers that differ only in the lower bits differ by a row of a table."""
    out, shift = call.array(spec.out), call.array(spec.shift, write=False)
    directions = call.array(spec.directions, write=False)
    if not out.size:
        return
    table = np.zeros((1, out.shape[1]), np.uint32)
    for direction in directions[:_TABLE]:
        table = np.concatenate([table, table ^ direction])
    (first,) = FIRST.unpack(spec.first)
    number, stop = first, first + len(out)
    while number < stop:
        block, begin = divmod(number, len(table))
        end = min(len(table), begin + stop - number)
        base = shift.copy()
        for bit, direction in enumerate(directions[_TABLE:]):
            if block >> bit & 1:
                base ^= direction
        np.bitwise_xor(table[begin:end], base, out=out[number - first :][: end - begin])
        number += end - begin


_Columns: TypeAlias = "list[HostArray]"
_Transform: TypeAlias = Callable[[PhiloxSpec, _Columns], _Columns]
_Unit: TypeAlias = Callable[[_Columns], _Columns]


def _plan(spec: PhiloxSpec, device: object) -> _Transform:
    return _TRANSFORMS[spec.distribution][spec.out.dtype.itemsize == 8]


@kernel(PhiloxSpec, backend="cpu", plan=_plan, is_quick=True)
def philox(spec: PhiloxSpec, call: HostCall[_Transform]) -> None:
    """Fill an array with random numbers, four a counter, whatever they are made of."""
    out, is_double = call.array(spec.out).reshape(-1), spec.out.dtype.itemsize == 8
    counters, full_counters = -(-out.size // 4), out.size // 4
    for first in range(0, counters, _CHUNK_NUMBERS):
        count = min(_CHUNK_NUMBERS, counters - first)
        # Of four double numbers, two come from a counter, and two from the counter in the next row.
        columns = [_words(spec, first, count, 1 + is_double, offset) for offset in range(1 + is_double)]
        piece = out[4 * first : 4 * (first + count)]
        results = call.plan(spec, [word for row in columns for word in row])
        rows = piece[: 4 * (min(first + count, full_counters) - first)].reshape(-1, 4)
        for number, column in enumerate(results):
            rows[:, number] = column[: len(rows)]
        if piece.size % 4:
            piece[4 * len(rows) :] = [column[-1] for column in results][: piece.size % 4]


def _words(spec: PhiloxSpec, first: int, count: int, step: int, offset: int) -> list[_Words]:
    """Make the four words of `count` counters from number `first`, in rows at a distance of `step`."""
    seed, row = PHILOX_START.unpack(spec.start)
    # A piece is in one row.
    half, column = first // PHILOX_ROW * step + row + offset, first % PHILOX_ROW
    words = [np.full(count, word, np.uint64) for word in (half & 0xFFFFFFFF, half >> 32, 0)]
    counter = (words[0], words[1], np.arange(column, column + count, dtype=np.uint64), words[2])
    return philox4x32(counter, seed)


def _unit32(words: _Columns) -> _Columns:
    """Return the numbers above 0 up to 1, as cuRAND makes them of one word."""
    return [_single(word, np.float32(2.0**-32), np.float32(2.0**-33)) for word in words]


def _single(word: HostArray, factor: np.float32, offset: np.float32) -> HostArray:
    numbers: HostArray = word.view(np.int64).astype(np.float32)
    numbers *= factor
    numbers += offset
    return numbers


def _unit64(words: _Columns) -> _Columns:
    """Return the numbers above 0 up to 1, as cuRAND makes them of two words."""
    return [unit64(*pair) for pair in zip(words[0::2], words[1::2], strict=True)]


def _box_muller(units: _Columns, angles: _Columns) -> _Columns:
    normals: _Columns = []
    for radius, angle in zip(units, angles, strict=True):
        entry = None
        if radius.dtype == np.float64:
            entry = _compiled("functions.h", "normals.h", is_exact=False).find()
        if entry is not None:
            entry(_PAIR.pack(radius.ctypes.data, angle.ctypes.data), 0, radius.size)
            normals += [radius, angle]
            continue
        np.log(radius, out=radius)
        np.multiply(radius, radius.dtype.type(-2), out=radius)
        np.sqrt(radius, out=radius)
        normals += [radius * np.sin(angle), radius * np.cos(angle)]
    return normals


def _scaled(spec: PhiloxSpec, columns: _Columns) -> _Columns:
    for numbers in columns:
        if spec.width != 1.0:
            np.multiply(numbers, numbers.dtype.type(spec.width), out=numbers)
        if spec.low != 0.0:
            np.add(numbers, numbers.dtype.type(spec.low), out=numbers)
    return columns


def _bits(spec: PhiloxSpec, words: _Columns) -> _Columns:
    return words


def _uniform(unit: _Unit) -> _Transform:
    return lambda spec, words: _scaled(spec, unit(words))


def _exponential(unit: _Unit) -> _Transform:
    return lambda spec, words: _scaled(spec, [-np.log(column) for column in unit(words)])


def _lognormal(normal: _Transform) -> _Transform:
    return lambda spec, words: [np.exp(column) for column in normal(spec, words)]


def _normal32(spec: PhiloxSpec, words: _Columns) -> _Columns:
    # cuRAND rounds the angle to single precision before it multiplies by the factor of the circle.
    circle = np.float32(2.0**-32) * np.float32(2.0 * np.pi)
    angles = [_single(word, circle, circle / np.float32(2)) for word in words[1::2]]
    return _scaled(spec, _box_muller(_unit32(words[0::2]), angles))


def _normal64(spec: PhiloxSpec, words: _Columns) -> _Columns:
    units = _unit64(words)
    return _scaled(spec, _box_muller(units[0::2], [unit * (2.0 * np.pi) for unit in units[1::2]]))


def _integers(spec: PhiloxSpec, words: _Columns) -> _Columns:
    width, low = np.uint64(spec.width), np.int64(spec.low)
    pairs = zip(words[0::2], words[1::2], strict=True)
    return [((b * width + (a * width >> _SHIFT)) >> _SHIFT).view(np.int64) + low for a, b in pairs]


# The transforms for numbers of 4 bytes, and of 8.
_TRANSFORMS: dict[str, tuple[_Transform, _Transform]] = {
    "bits": (_bits, _bits),
    "uniform": (_uniform(_unit32), _uniform(_unit64)),
    "normal": (_normal32, _normal64),
    "exponential": (_exponential(_unit32), _exponential(_unit64)),
    "lognormal": (_lognormal(_normal32), _lognormal(_normal64)),
    "integers": (_integers, _integers),
}
