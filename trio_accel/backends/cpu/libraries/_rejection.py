"""Numbers that are proposed until one is accepted, by NumPy: all others propose again at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ...base.contract.ops import PHILOX_ROW, PLACE, RejectionSpec
from ...base.kit.kernels import HostCall
from ..runtime._memory import HostArray
from ._philox import philox4x32, unit64

__all__ = ["rejection"]

_Doubles: TypeAlias = npt.NDArray[np.float64]

# Numbers of one piece: its arrays stay in the caches, and the stream's thread lets others run in between.
_PIECE = 1 << 14
# Less than one number of 2**200 is not accepted in so many attempts.
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
class _Numbers:
    """Some numbers of a draw, and the uniform ones that each of them has.

    Attributes:
        seed: Key.
        row: First row of the draw.
        places: Which numbers.
    """

    seed: int
    row: int
    places: npt.NDArray[np.uint64]

    def of(self, chosen: HostArray) -> _Numbers:
        """Take those that are chosen, by truth values or indices."""
        return attrs.evolve(self, places=self.places[chosen])

    def uniform(self, block: int) -> tuple[_Doubles, _Doubles]:
        """Return two uniform numbers above 0 up to 1 of each, from its counter of this number."""
        width, mask, shift = np.uint64(PHILOX_ROW), np.uint64(0xFFFFFFFF), np.uint64(32)
        half = self.places // width + np.uint64(self.row)
        counter = (half & mask, half >> shift, self.places % width, np.full_like(half, block))
        first, second, third, fourth = philox4x32(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32))
        return unit64(first, second), unit64(third, fourth)


_Maker: TypeAlias = "Callable[[_Numbers, _Doubles, _Doubles], _Doubles]"


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
    seed, row = PLACE.unpack(spec.place)
    for first in range(0, out.size, _PIECE):
        places = np.arange(first, min(first + _PIECE, out.size), dtype=np.uint64)
        a, b = (
            np.broadcast_to(one if one.size == 1 else one[first : first + _PIECE], places.shape)
            for one in parameters
        )
        with np.errstate(all="ignore"):
            out[first : first + _PIECE] = _MAKERS[spec.distribution](_Numbers(seed, row, places), a, b)


def _are_in_range(distribution: str, a: _Doubles, b: _Doubles) -> bool:
    """Look for parameters that no number can be drawn of; NaN is one."""
    if "gamma" in distribution:
        return bool(((a >= 0) & np.isfinite(a)).all())
    is_fit = (a >= 0) & (a <= _LARGEST)
    if distribution == "binomial":
        return bool((is_fit & (a == np.floor(a))).all() and ((b >= 0) & (b <= 1)).all())
    return bool(is_fit.all())


def _propose(
    numbers: _Numbers,
    result: _Doubles,
    attempt: Callable[[_Numbers, HostArray, int], tuple[_Doubles, HostArray]],
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

    A shape below 1 is that of one above, times a power of a uniform number.
    """

    def make(numbers: _Numbers, a: _Doubles, _: _Doubles) -> _Doubles:
        d: _Doubles = np.where(a < 1, a + 1, a) - 1 / 3
        c = 1 / np.sqrt(9 * d)

        def attempt(those: _Numbers, waiting: HostArray, number: int) -> tuple[_Doubles, HostArray]:
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


def _poisson(numbers: _Numbers, a: _Doubles, _: _Doubles) -> _Doubles:
    """Hörmann, The transformed rejection method for generating Poisson random variables (1993): PTRS."""
    result = np.zeros(a.shape)
    small, large = np.flatnonzero(a < _INVERTED), np.flatnonzero(a >= _INVERTED)
    mean = a[small]
    result[small] = _inverted(numbers.of(small), np.exp(-mean), lambda k, those: mean[those] / k)
    mean = a[large]
    b = 0.931 + 2.53 * np.sqrt(mean)
    slope, scale, sure = -0.059 + 0.02483 * b, 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2)

    def attempt(those: _Numbers, waiting: HostArray, number: int) -> tuple[_Doubles, HostArray]:
        u, v = those.uniform(number + 1)
        u, lam, reach = u - 0.5, mean[waiting], b[waiting]
        near = 0.5 - np.abs(u)
        k = np.floor((2 * slope[waiting] / near + reach) * u + lam + 0.43)
        is_sure = (near >= 0.07) & (v <= sure[waiting])
        is_out = (k < 0) | ~np.isfinite(k) | ((near < 0.013) & (v > near))
        height = np.log(v * scale[waiting] / (slope[waiting] / (near * near) + reach))
        return k, is_sure | (~is_out & (height <= _log_poisson(k, lam)))

    result[large] = _propose(numbers.of(large), np.floor(mean), attempt)
    return result


def _binomial(numbers: _Numbers, a: _Doubles, b: _Doubles) -> _Doubles:
    """Hörmann, The generation of binomial random variates (1993): BTRS, for the rarer of both outcomes."""
    p = np.minimum(b, 1 - b)
    result = np.zeros(a.shape)
    small, large = np.flatnonzero(a * p < _INVERTED), np.flatnonzero(a * p >= _INVERTED)
    n, odds = a[small], p[small] / (1 - p[small])
    result[small] = _inverted(
        numbers.of(small),
        np.exp(n * np.log1p(-p[small])),
        lambda k, those: (n[those] - (k - 1)) / k * odds[those],
    )
    result[large] = _many_trials(numbers.of(large), a[large], p[large])
    return np.where(b > 0.5, a - result, result)


def _many_trials(numbers: _Numbers, n: _Doubles, p: _Doubles) -> _Doubles:
    spread = np.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * spread
    slope, scale, sure = -0.0873 + 0.0248 * b + 0.01 * p, (2.83 + 5.1 / b) * spread, 0.92 - 4.2 / b
    mode = np.floor((n + 1) * p)
    log_mode = _log_binomial(mode, n, p)

    def attempt(those: _Numbers, waiting: HostArray, number: int) -> tuple[_Doubles, HostArray]:
        u, v = those.uniform(number + 1)
        u, trials, reach = u - 0.5, n[waiting], b[waiting]
        near = 0.5 - np.abs(u)
        k = np.floor((2 * slope[waiting] / near + reach) * u + (trials * p[waiting] + 0.5))
        is_sure = (near >= 0.07) & (v <= sure[waiting])
        is_in = (k >= 0) & (k <= trials)
        height = np.log(v * scale[waiting] / (slope[waiting] / (near * near) + reach))
        log_k = _log_binomial(np.where(is_in, k, 0), trials, p[waiting])
        return k, is_sure | (is_in & (height <= log_k - log_mode[waiting]))

    return _propose(numbers, mode.copy(), attempt)


def _inverted(numbers: _Numbers, first: _Doubles, ratio: Callable[[float, HostArray], _Doubles]) -> _Doubles:
    """Look a uniform number up in a distribution, of which the first probability and the ratios are known."""
    sought, result = numbers.uniform(0)[0], np.zeros(first.shape)
    probability, total = first.copy(), first.copy()
    waiting, k = np.flatnonzero(sought > total), 0
    while waiting.size:
        k += 1
        probability[waiting] *= ratio(float(k), waiting)
        more = total[waiting] + probability[waiting]
        # Where nothing is added any more, the rest is rounding.
        waiting, more = waiting[more > total[waiting]], more[more > total[waiting]]
        result[waiting], total[waiting] = k, more
        waiting = waiting[sought[waiting] > more]
    return result


def _stirling(k: _Doubles) -> _Doubles:
    """Return the error of Stirling's formula for log(k!), of whole numbers above 0."""
    near = np.minimum(k, 15).astype(np.int64)
    square = 1 / (k * k)
    far = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 * square) * square) * square) / k
    return np.where(k < 16, _STIRLING[near], far)


def _deviance(k: _Doubles, mean: _Doubles) -> _Doubles:
    """Return ``k log(k / mean) + mean - k``, which a plain formula loses the digits of (Loader 2000)."""
    apart = (k - mean) / mean
    return mean * ((1 + apart) * np.log1p(apart) - apart)


def _log_poisson(k: _Doubles, mean: _Doubles) -> _Doubles:
    some = np.maximum(k, 1)
    log = -_stirling(some) - _deviance(some, mean) - (_HALF_LOG_2PI + 0.5 * np.log(some))
    return np.where(k < 1, -mean, log)


def _log_binomial(k: _Doubles, n: _Doubles, p: _Doubles) -> _Doubles:
    some = np.minimum(np.maximum(k, 1), n - 1)
    others = n - some
    errors = _stirling(n) - _stirling(some) - _stirling(others)
    log = errors - _deviance(some, n * p) - _deviance(others, n * (1 - p))
    log += 0.5 * np.log(n / (some * others)) - _HALF_LOG_2PI
    return np.where(k < 1, n * np.log1p(-p), np.where(k >= n, n * np.log(p), log))


_MAKERS: Mapping[str, _Maker] = {
    "gamma": _gamma(has_log=False),
    "log_gamma": _gamma(has_log=True),
    "poisson": _poisson,
    "binomial": _binomial,
}
