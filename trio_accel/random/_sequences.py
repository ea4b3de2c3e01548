"""States of linear sequences: derived from a seed, and advanced by matrices, with integers only."""

from __future__ import annotations

import functools
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base import HostArray, Ints
from ..backends.base.contract.ops import JUMP_WORDS, LinearSequence

State: TypeAlias = Ints
"""Six words; see `SequenceSpec`."""

PERIOD_BITS: Final = 191
"""Both sequences are longer than two to the power of this."""

_Words: TypeAlias = npt.NDArray[np.uint32]

_STEP = 362437
_WORD = 0xFFFFFFFF

# L'Ecuyer, Good parameters and implementations for combined multiple recursive random number generators
# (Operations Research 47, 1999): moduli, and the steps of the states, the oldest number first.
MODULI: Final = 2**32 - 209, 2**32 - 22853
_MODULI = np.array(MODULI, object).reshape(2, 1, 1)
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
    states = [word % MODULI[index // 3] for index, word in enumerate(words)]
    # The same of three zeros.
    return tuple(state or 1 for state in states)


def moved(sequence: LinearSequence, state: State, words: int) -> State:
    """Advance a state by a number of words, fewer than two to the power of `PERIOD_BITS`."""
    counter = (state[5] + _STEP * words) & _WORD
    for bit in range(words.bit_length()):
        if words >> bit & 1:
            state = _jumped(sequence, _power(sequence, bit), state)
    return state if sequence == "mrg32k3a" else (*state[:5], counter)


def powers(sequence: LinearSequence, first: int, count: int) -> _Words:
    """Return matrices that advance by two to the power of `first` words, by twice as many, and so on."""
    table = np.empty((count, JUMP_WORDS[sequence]), np.uint32)
    for row, level in zip(table, range(first, first + count), strict=True):
        row[...] = _power(sequence, level)
    return table


def _jumped(sequence: LinearSequence, matrix: _Words, state: State) -> State:
    if sequence == "mrg32k3a":
        halves = np.array(state, object).reshape(2, 3, 1)
        return tuple((_recurrences(matrix) @ halves % _MODULI).ravel().tolist())
    chosen = matrix.reshape(160, 5)[_bits(np.array(state[:5], np.uint32)) != 0]
    return (*np.bitwise_xor.reduce(chosen, axis=0).tolist(), state[5])


@functools.cache
def _power(sequence: LinearSequence, level: int) -> _Words:
    """Return the matrix that jumps over two to this power of words; squared when it is first needed."""
    if sequence == "mrg32k3a":
        both: HostArray = np.array(_STEPS, object)
        if level:
            root = _recurrences(_power(sequence, level - 1))
            both = root @ root
        return np.asarray(both % _MODULI, np.uint32).ravel()
    if not level:
        return _step().ravel()
    # The image of a bit is the sum, modulo 2, of the images of its bits.
    bits = _bits(_power(sequence, level - 1).reshape(160, 5)).astype(np.float32)
    return _words(bits @ bits % 2).ravel()


def _recurrences(matrix: _Words) -> HostArray:
    """Return the matrices of both recurrences, of Python's numbers: products have more than 64 bits."""
    return matrix.reshape(2, 3, 3).astype(object)


def _step() -> _Words:
    """Step each state of XORWOW with a single set bit: of x, y, z, w and v, the lowest first."""
    x, y, z, w, v = _words(np.eye(160)).T
    t = x ^ x >> 2
    return np.stack([y, z, w, v, v ^ v << 4 ^ t ^ t << 1], axis=1)


def _bits(words: _Words) -> npt.NDArray[np.uint8]:
    """Return the bits along the last axis, the lowest first."""
    return np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")


def _words(bits: HostArray) -> _Words:
    """Make words of bits along the last axis."""
    return np.packbits(bits.astype(np.uint8), axis=-1, bitorder="little").view("<u4").astype(np.uint32)
