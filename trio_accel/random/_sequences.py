"""States of linear sequences: made of a seed, and moved on by matrices, with whole numbers alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base.ops import JUMP_WORDS, LinearSequence

__all__ = ["PERIOD_BITS", "State", "moved", "powers", "seeded"]

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
    for bit, matrix in enumerate(powers(sequence)[: words.bit_length()]):
        if words >> bit & 1:
            state = _jumped(sequence, matrix, state)
    return state if sequence == "mrg32k3a" else (*state[:5], counter)


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
def powers(sequence: LinearSequence) -> _Words:
    """Return the matrices that jump over one word, two, four and so on, as far as a sequence goes."""
    made = _powers_mrg() if sequence == "mrg32k3a" else _powers_xorwow()
    table = np.array(made, np.uint32).reshape(PERIOD_BITS, JUMP_WORDS[sequence])
    table.flags.writeable = False
    return table


def _powers_mrg() -> list[list[int]]:
    found: list[list[int]] = []
    matrices: list[Sequence[Sequence[int]]] = [*_STEPS]
    for _ in range(PERIOD_BITS):
        both = [
            number % modulus
            for matrix, modulus in zip(matrices, MODULI, strict=True)
            for row in matrix
            for number in row
        ]
        found.append(both)
        matrices = [_squared(matrix, modulus) for matrix, modulus in zip(matrices, MODULI, strict=True)]
    return found


def _squared(matrix: Sequence[Sequence[int]], modulus: int) -> list[list[int]]:
    columns = [*zip(*matrix, strict=True)]
    return [
        [sum(x * y for x, y in zip(row, column, strict=True)) % modulus for column in columns]
        for row in matrix
    ]


def _powers_xorwow() -> list[_Words]:
    """Sums of bits modulo 2: a row for each bit of x, y, z, w and v, the lowest first."""
    # A step of each state that has one bit.
    x, y, z, w, v = np.packbits(np.eye(160, dtype=np.uint8), axis=1, bitorder="little").view("<u4").T
    t = x ^ x >> np.uint32(2)
    last = v ^ v << np.uint32(4) ^ t ^ t << np.uint32(1)
    bits = np.unpackbits(np.stack([y, z, w, v, last], axis=1).view(np.uint8), axis=1, bitorder="little")
    found: list[_Words] = []
    for _ in range(PERIOD_BITS):
        found.append(np.packbits(bits, axis=1, bitorder="little").view("<u4"))
        # Sums of up to 160 ones are exact in float32, which the BLAS multiplies.
        one = bits.astype(np.float32)
        bits = (one @ one).astype(np.uint8) & np.uint8(1)
    return found
