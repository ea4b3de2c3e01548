"""Sequences whose next state is a linear function of the state, and Sobol points, by NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...base.contract.ops import FIRST, SequenceSpec, SobolSpec
from ...base.kit.kernels import HostCall
from ..runtime._memory import HostArray

__all__ = ["linear_sequence", "sobol_points"]

_M1, _M2 = np.uint64(2**32 - 209), np.uint64(2**32 - 22853)
_BITS = np.arange(32, dtype=np.uint32)
_STEP = 362437
# Pieces that are drawn side by side: a step of their states stays in the caches.
_SIDE_BY_SIDE = 12
# Sobol points that are made by exclusive or of one row with a table.
_TABLE = 8


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
    """Combine the columns of the bits that are set: sums of bits modulo 2; d counts on."""
    bits = (states[:, :5, np.newaxis] >> _BITS & np.uint32(1)).reshape(-1, 160).astype(np.float32)
    columns = (matrix.reshape(160, 5, 1) >> _BITS & np.uint32(1)).reshape(160, 160).astype(np.float32)
    odd = (bits @ columns).astype(np.uint32).reshape(-1, 5, 32) & np.uint32(1)
    new: HostArray = states.copy()
    new[:, :5] = np.bitwise_or.reduce(odd << _BITS, axis=2)
    new[:, 5] += np.uint32(_STEP * words & 0xFFFFFFFF)
    return new


def _draw_xorwow(states: HostArray) -> Iterator[HostArray]:
    """Marsaglia's generator of five words that are shifted, and a counter."""
    x, y, z, w, v, d = states.T.copy()
    one, two, four = np.uint32(1), np.uint32(2), np.uint32(4)
    while True:
        t = x ^ x >> two
        x, y, z, w, v = y, z, w, v, v ^ v << four ^ t ^ t << one
        d = d + np.uint32(_STEP)
        yield d + v


def sobol_points(spec: SobolSpec, call: HostCall) -> None:
    """Make points: those whose numbers differ in the lower bits alone differ by a row of a table."""
    out, shift = call.array(spec.out), call.array(spec.shift, write=False)
    directions = call.array(spec.directions, write=False)
    if not out.size:
        return
    table = np.zeros((1, out.shape[1]), np.uint32)
    for direction in directions[:_TABLE]:
        table = np.concatenate([table, table ^ direction])
    (first,) = FIRST.unpack(spec.first)
    number, last = first, first + len(out)
    while number < last:
        block, begin = divmod(number, len(table))
        end = min(len(table), begin + last - number)
        base = shift.copy()
        for bit, direction in enumerate(directions[_TABLE:]):
            if block >> bit & 1:
                base ^= direction
        np.bitwise_xor(table[begin:end], base, out=out[number - first :][: end - begin])
        number += end - begin
