"""States of linear sequences: made of a seed, and moved on by matrices, with whole numbers alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base.contract.ops import JUMP_WORDS, LinearSequence

State: TypeAlias = tuple[int, ...]
"""Six words; see `SequenceSpec`."""

PERIOD_BITS: Final = 191
"""Both sequences are longer than two to the power of this."""

_Words: TypeAlias = npt.NDArray[np.uint32]

_STEP = 362437
_WORD = 0xFFFFFFFF
_BITS = np.arange(32, dtype=np.uint32)

# L'Ecuyer, Good parameters and implementations for combined multiple recursive random number generators
# (Operations Research 47, 1999): moduli, and the steps of the states, the oldest number first.
MODULI: Final = 2**32 - 209, 2**32 - 22853
_STEPS = (
    ((0, 1, 0), (0, 0, 1), (-810728, 1403580, 0)),
    ((0, 1, 0), (0, 0, 1), (-1370589, 0, 527612)),
)


def seeded(sequence: LinearSequence, seed: int) -> State:
    """Make the first state of NumPy's `SeedSequence`, which spreads every bit of a seed over all words."""
    words = [int(word) for word in np.random.SeedSequence(seed).generate_state(6)]
    if sequence == "xorwow":
        # Five words of zeros would stay so.
        return tuple(words) if any(words[:5]) else (1, *words[1:])
    states = [word % MODULI[place // 3] for place, word in enumerate(words)]
    # The same of three zeros.
    return tuple(state or 1 for state in states)


def moved(sequence: LinearSequence, state: State, words: int) -> State:
    """Move a state on over so many words, fewer than two to the power of `PERIOD_BITS`."""
    counter = (state[5] + _STEP * words) & _WORD
    for bit in range(words.bit_length()):
        if words >> bit & 1:
            state = _jumped(sequence, _power(sequence, bit), state)
    return state if sequence == "mrg32k3a" else (*state[:5], counter)


def powers(sequence: LinearSequence, first: int, count: int) -> _Words:
    """Return so many matrices: over two to the power of `first` words, over twice as many, and so on."""
    table = np.empty((count, JUMP_WORDS[sequence]), np.uint32)
    for row, level in zip(table, range(first, first + count), strict=True):
        row[...] = _power(sequence, level)
    return table


def _jumped(sequence: LinearSequence, matrix: _Words, state: State) -> State:
    if sequence == "mrg32k3a":
        rows = matrix.reshape(2, 3, 3).tolist()
        return tuple(
            sum(factor * one for factor, one in zip(row, state[3 * half : 3 * half + 3], strict=True))
            % MODULI[half]
            for half in (0, 1)
            for row in rows[half]
        )
    bits = (np.array(state[:5], np.uint32)[:, np.newaxis] >> _BITS & np.uint32(1)).reshape(-1)
    words = np.bitwise_xor.reduce(matrix.reshape(160, 5)[bits != 0], axis=0)
    return (*map(int, words), state[5])


@functools.cache
def _power(sequence: LinearSequence, level: int) -> _Words:
    """Return the matrix that jumps over two to this power of words; squared when it is first needed."""
    if sequence == "mrg32k3a":
        both = _STEPS if not level else tuple(map(_squared, _recurrences(level - 1), MODULI))
        numbers = [
            number % modulus
            for one, modulus in zip(both, MODULI, strict=True)
            for row in one
            for number in row
        ]
        return np.array(numbers, np.uint32)
    columns = _step_columns() if not level else _squared_columns(_power(sequence, level - 1))
    return np.array(columns, np.uint32)


def _squared(matrix: Sequence[Sequence[int]], modulus: int) -> list[list[int]]:
    columns = [*zip(*matrix, strict=True)]
    return [
        [sum(x * y for x, y in zip(row, column, strict=True)) % modulus for column in columns]
        for row in matrix
    ]


def _recurrences(level: int) -> list[list[list[int]]]:
    """Return the matrices of both recurrences."""
    made: list[list[list[int]]] = _power("mrg32k3a", level).reshape(2, 3, 3).tolist()
    return made


def _step_columns() -> list[int]:
    """Step each state of XORWOW that has one bit: of x, y, z, w and v, the lowest first."""
    found: list[int] = []
    for bit in range(160):
        x, y, z, w, v = ((1 << bit) >> 32 * word & _WORD for word in range(5))
        t = x ^ x >> 2
        found += y, z, w, v, (v ^ v << 4 ^ t ^ t << 1) & _WORD
    return found


def _squared_columns(columns: _Words) -> list[int]:
    """Multiply a matrix of bits by itself: a bit becomes the sum, modulo 2, of what its bits become."""
    wide = [int.from_bytes(one.tobytes(), "little") for one in columns.astype("<u4").reshape(160, 5)]
    found: list[int] = []
    for number in wide:
        total = 0
        for bit, other in enumerate(wide):
            if number >> bit & 1:
                total ^= other
        found += ((total >> 32 * word) & _WORD for word in range(5))
    return found
