"""Places in a sequence of random words: what a generator counts, saves, and takes for each draw."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Literal, Self, TypeAlias, cast, get_args

import numpy as np

from ..backends.base import NotSupportedError
from ..backends.base.contract.ops import PHILOX_ROW, LinearSequence
from ..devices import AccelRef, Device, check_device
from ..devices.operations._calls import composed
from ..expressions import Out
from ._messages import Bits, SequenceBits
from ._sequences import PERIOD_BITS, State, moved, seeded

Kind: TypeAlias = Literal["philox4x32_10", "mrg32k3a", "xorwow"]
"""A generator of words."""

Shape: TypeAlias = "int | Sequence[int]"

# Words of a row of Philox's counters.
_ROW = 4 * PHILOX_ROW
# The number of words that a jump goes on, and that there are.
_JUMP: Mapping[str, int] = {"philox4x32_10": 1 << 66, "mrg32k3a": 1 << 96, "xorwow": 1 << 96}
_LENGTH: Mapping[str, int] = {
    "philox4x32_10": _ROW << 64, "mrg32k3a": 1 << PERIOD_BITS, "xorwow": 1 << PERIOD_BITS,
}  # fmt: skip
# Each is an object that is made at once.
_MOST_CHILDREN = 1000
_FIELDS = ("kind", "seed", "position", "spawned")


class Stream:
    """A sequence of words that a device draws, and the place in it, which is kept here."""

    def __init__(self, device: Device, kind: Kind = "philox4x32_10", seed: int | None = None) -> None:
        if kind not in get_args(Kind):
            names = ", ".join(map(repr, get_args(Kind)))
            raise NotSupportedError(f"Generator: kind {kind!r} is not there; it has {names}")
        check_device("Generator", device)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, NoneType)):
            raise TypeError(f"Generator: seed must be a whole number or None, got {seed!r}")
        self._device = device
        self._kind: Kind = kind
        self._seed = secrets.randbits(64) if seed is None else int(seed)
        if not 0 <= self._seed < 1 << 64:
            raise ValueError(f"Generator: seed must be from 0 to 2**64 - 1, got {seed}")
        self._begin(0)

    def __repr__(self) -> str:
        return f"<Generator {self._kind}, seed {self._seed}, word {self._position}, on {self._device.name}>"

    @property
    def device(self) -> Device:
        """The device on which the numbers are made."""
        return self._device

    @property
    def kind(self) -> Kind:
        """Kind of its sequence."""
        return self._kind

    @property
    def seed(self) -> int:
        """Seed of its sequence, also where the operating system drew it."""
        return self._seed

    @property
    def state(self) -> dict[str, int | str]:
        """Its kind, seed and position, and how many others it has spawned: a new dict, fit for JSON.

        Set it to go on from there: after that, the same draws give the same numbers.
        """
        return {
            "kind": self._kind, "seed": self._seed, "position": self._position, "spawned": self._spawned,
        }  # fmt: skip

    @state.setter
    def state(self, saved: Mapping[str, object]) -> None:
        if not isinstance(saved, Mapping) or set(saved) != {*_FIELDS}:
            raise ValueError(f"Generator.state: must have {', '.join(_FIELDS)}, got {saved!r}")
        if saved["kind"] != self._kind:
            raise ValueError(f"Generator.state: kind must be {self._kind!r}, got {saved['kind']!r}")
        numbers = [saved[name] for name in _FIELDS[1:]]
        limits = (1 << 64, _LENGTH[self._kind], 1 << 64)
        for name, number, limit in zip(_FIELDS[1:], numbers, limits, strict=True):
            if type(number) is not int or not 0 <= number < limit:
                raise ValueError(f"Generator.state: {name} must be from 0 below {limit}, got {number!r}")
        seed, position, spawned = cast("list[int]", numbers)
        if self._kind == "philox4x32_10" and position % (2 * _ROW):
            raise ValueError(f"Generator.state: position must be a multiple of {2 * _ROW}, got {position}")
        self._seed = seed
        self._begin(position, spawned)

    def advance(self, words: int) -> None:
        """Skip words: to where it is when it has drawn `bits` of this size.

        Raises:
            ValueError: A negative number, or the sequence ends.
            TypeError: No whole number.
        """
        if isinstance(words, bool) or operator.index(words) < 0:
            raise ValueError(f"Generator.advance: words must be at least 0, got {words!r}")
        self._take(operator.index(words))

    def jumped(self, jumps: int = 1) -> Self:
        """Return a generator that is so far ahead that this one never gets there, as NumPy's ``jumped``.

        A jump is 2**66 words of Philox, of whose sequence there are 65536 such parts; and 2**96 words of the
        others.

        Args:
            jumps: How many jumps.

        Raises:
            ValueError: A negative number, or the sequence ends.
            TypeError: No whole number.
        """
        if isinstance(jumps, bool) or operator.index(jumps) < 0:
            raise ValueError(f"Generator.jumped: jumps must be at least 0, got {jumps!r}")
        ahead = self._position + operator.index(jumps) * _JUMP[self._kind]
        self._check_end(ahead)
        other = type(self)(self._device, self._kind, self._seed)
        other.state = {**self.state, "position": ahead, "spawned": 0}
        return other

    def spawn(self, n_children: int) -> list[Self]:
        """Make generators with seeds of their own, as NumPy's `Generator.spawn`: others at each call.

        The seeds are those of NumPy's `SeedSequence`, which was made for that: 64 bits, so that of a million
        two are equal with a probability below 3e-8.

        Args:
            n_children: How many.

        Raises:
            ValueError: A negative number, or more than 1000: each is an object that is made at once.
            TypeError: No whole number.
        """
        if isinstance(n_children, bool) or not 0 <= operator.index(n_children) <= _MOST_CHILDREN:
            raise ValueError(
                f"Generator.spawn: n_children must be from 0 to {_MOST_CHILDREN}, got {n_children!r}"
            )
        first = self._spawned
        self._spawned += operator.index(n_children)
        seeds = [
            np.random.SeedSequence(self._seed, spawn_key=(number,)).generate_state(1, np.uint64)[0]
            for number in range(first, self._spawned)
        ]
        return [type(self)(self._device, self._kind, int(seed)) for seed in seeds]

    @composed
    async def bits(self, shape: Shape, *, out: Out = None) -> AccelRef:
        """Draw 32-bit words, an array of uint32 (cuRAND ``curandGenerate``).

        Those of ``"mrg32k3a"`` are below 2**32 - 209.

        Args:
            shape: Shape of the result.
            out: uint32 array of this shape to write to; by default a new one.
        """
        extents = self._extents(shape)
        count = math.prod(extents)
        if self._kind == "philox4x32_10":
            return await self._device.ask(Bits(*self._rows(count), extents, out))
        self._take(count)
        return await self._device.ask(SequenceBits(self._kind, self._before(count), extents, out))

    def _begin(self, position: int, spawned: int = 0) -> None:
        self._position, self._spawned = position, spawned
        # A state and its place: what comes later is moved from there.
        self._known: tuple[int, State] | None = None

    @staticmethod
    def _extents(shape: Shape) -> tuple[int, ...]:
        """Read a shape."""
        extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(isinstance(extent, bool) or operator.index(extent) < 0 for extent in extents):
            raise ValueError(f"shape must hold sizes of at least 0, got {shape!r}")
        return tuple(int(extent) for extent in extents)

    def _take(self, numbers: int) -> int:
        """Take words for so many numbers out of the sequence, and return where they begin.

        Those of Philox are rows, two for as many counters as a row has, so that there are enough for numbers
        of 8 bytes.
        """
        begin = self._position
        is_philox = self._kind == "philox4x32_10"
        end = begin + (2 * _ROW * -(-numbers // _ROW) if is_philox else numbers)
        self._check_end(end)
        self._position = end
        return begin

    def _rows(self, numbers: int) -> tuple[int, int]:
        """Take so many numbers out of Philox's sequence: seed and first row."""
        return self._seed, self._take(numbers) // _ROW

    def _before(self, count: int) -> State:
        """Find the state before the words that were just taken."""
        kind: LinearSequence = "mrg32k3a" if self._kind == "mrg32k3a" else "xorwow"
        begin = self._position - count
        place, state = self._known or (0, seeded(kind, self._seed))
        state = moved(kind, state, begin - place)
        self._known = begin, state
        return state

    def _check_end(self, position: int) -> None:
        if position >= _LENGTH[self._kind]:
            raise ValueError(f"Generator: the sequence of {self._kind} ends before word {position}")
