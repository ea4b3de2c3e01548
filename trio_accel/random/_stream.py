"""Words of a sequence, and numbers made from them by expressions: how a generator counts and saves them.

The numbers are the same on all backends, whatever draws the words.
"""

from __future__ import annotations

import functools
import math
import operator
import secrets
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, Self, TypeAlias, cast, get_args

import numpy as np

from ..backends.base import DType, Ints, NotSupportedError, Strs, host_array
from ..backends.base.contract.ops import PHILOX_ROW, LinearSequence
from ..devices import AccelRef, Device, check_device, composed
from ..devices.operations._operation import is_looking_ahead
from ..expressions import Elementwise, ExpressionArgument, Out
from ._messages import Bits, SequenceBits
from ._sequences import PERIOD_BITS, State, moved, seeded

Kind: TypeAlias = Literal["philox4x32_10", "mrg32k3a", "xorwow"]
"""A generator of words."""

Shape: TypeAlias = "int | Sequence[int]"

# Words in a row of Philox's counters.
_ROW = 4 * PHILOX_ROW
# The numbers of words in a jump and in the whole sequence.
_JUMP: Mapping[str, int] = {"philox4x32_10": 1 << 66, "mrg32k3a": 1 << 96, "xorwow": 1 << 96}
_LENGTH: Mapping[str, int] = {
    "philox4x32_10": _ROW << 64,
    "mrg32k3a": 1 << PERIOD_BITS,
    "xorwow": 1 << PERIOD_BITS,
}
# The objects of all children are made at once.
_MOST_CHILDREN = 1000
_FIELDS = ("kind", "seed", "position", "spawned")

# A uniform number between 0 and 1, neither of which it is, of two words: 52 bits, and a half. The words of
# MRG32k3a are below 2**32 - 209: two make a digit each.
_UNIT: Mapping[str, str] = {
    "philox4x32_10": "u = (float64(uint64(upper) << 20 | uint64(lower) >> 12) + 0.5) * 2.220446049250313e-16",
    "mrg32k3a": "u = (float64(uint64(upper) * 4294967087 + uint64(lower) >> 12) + 0.5) / 4503599189065739.0",
}
# 64 bits. Of MRG32k3a four digits, modulo 2**64: two of these numbers differ by 2**-127 at most in their
# probability.
_MRG_LONG = (
    "{v} = uint64({w[3]}) * 4294967087 + uint64({w[2]}); {v} = {v} * 4294967087 + uint64({w[1]});"
    "{v} = {v} * 4294967087 + uint64({w[0]})"
)
_WIDE_GENERATORS: Mapping[str, tuple[str, int]] = {
    "philox4x32_10": ("{v} = uint64({w[1]}) << 32 | uint64({w[0]})", 2),
    "mrg32k3a": (_MRG_LONG, 4),
}
# {h}: the upper 64 bits of {a} times {b}, both of 64 bits.
_UPPER = (
    "{h}l = ({a} & 4294967295) * ({b} & 4294967295) >> 32;"
    "{h}m = ({a} >> 32) * ({b} & 4294967295) + {h}l;"
    "{h}n = ({a} & 4294967295) * ({b} >> 32) + ({h}m & 4294967295);"
    "{h} = ({a} >> 32) * ({b} >> 32) + ({h}m >> 32) + ({h}n >> 32)"
)


class Seeded:
    """A source of numbers that a device draws by a seed.

    Args:
        name: Name of the class, for errors.
        device: The device.
        seed: The seed; None for one of the operating system.

    Raises:
        TypeError: No device, or no integer.
    """

    def __init__(self, name: str, device: Device, seed: int | None) -> None:
        check_device(name, device)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, NoneType)):
            raise TypeError(f"{name}: seed must be an integer or None, got {seed!r}")
        self._device = device
        self._seed = secrets.randbits(64) if seed is None else int(seed)

    @property
    def device(self) -> Device:
        """The device on which the numbers are made."""
        return self._device

    @property
    def seed(self) -> int:
        """The seed, also where the operating system drew it."""
        return self._seed


class Stream(Seeded):
    """A sequence of words that a device draws, and the place in it, which is kept here."""

    def __init__(self, device: Device, kind: Kind = "philox4x32_10", seed: int | None = None) -> None:
        if kind not in get_args(Kind):
            names = ", ".join(map(repr, get_args(Kind)))
            raise NotSupportedError(f"Generator: kind {kind!r} is not there; it has {names}")
        super().__init__("Generator", device, seed)
        self._kind: Kind = kind
        if not 0 <= self._seed < 1 << 64:
            raise ValueError(f"Generator: seed must be from 0 to 2**64 - 1, got {seed}")
        self._begin(0)

    def __repr__(self) -> str:
        return f"<Generator {self._kind}, seed {self._seed}, word {self._position}, on {self._device.name}>"

    @property
    def kind(self) -> Kind:
        """Kind of its sequence."""
        return self._kind

    @property
    def state(self) -> dict[str, int | str]:
        """Its kind, seed and position, and how many others it has spawned: a new dict, fit for JSON.

        Set it to go on from there: after that, the same draws give the same numbers.
        """
        return {
            "kind": self._kind,
            "seed": self._seed,
            "position": self._position,
            "spawned": self._spawned,
        }

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
            TypeError: No integer.
        """
        if isinstance(words, bool) or operator.index(words) < 0:
            raise ValueError(f"Generator.advance: words must be at least 0, got {words!r}")
        self._take(operator.index(words))

    def jumped(self, jumps: int = 1) -> Self:
        """Return a generator so far advanced that this one never reaches it, as NumPy's ``jumped``.

        A jump is 2**66 words of Philox, whose sequence has 65536 such parts, and 2**96 words of the other
        kinds.

        Args:
            jumps: How many jumps.

        Raises:
            ValueError: A negative number, or the sequence ends.
            TypeError: No integer.
        """
        if isinstance(jumps, bool) or operator.index(jumps) < 0:
            raise ValueError(f"Generator.jumped: jumps must be at least 0, got {jumps!r}")
        position = self._position + operator.index(jumps) * _JUMP[self._kind]
        self._check_end(position)
        generator = type(self)(self._device, self._kind, self._seed)
        generator.state = {**self.state, "position": position, "spawned": 0}
        return generator

    def spawn(self, n_children: int) -> list[Self]:
        """Make generators with seeds of their own, as NumPy's `Generator.spawn`: others at each call.

        The seeds come from NumPy's `SeedSequence`, which is meant for this: they have 64 bits, so the
        probability of two equal ones in a million is below 3e-8.

        Args:
            n_children: How many.

        Raises:
            ValueError: The number is negative, or above 1000, because each child is an object that is made at
                once.
            TypeError: The number is not an integer.
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
        state = self._state_at(self._take(count))
        return await self._device.ask(SequenceBits(self._kind, state, extents, out))

    def _begin(self, position: int, spawned: int = 0) -> None:
        self._position, self._spawned = position, spawned
        # A state and its place, from which later states are advanced.
        self._known: tuple[int, State] | None = None

    @staticmethod
    def _extents(shape: Shape) -> Ints:
        """Read a shape."""
        extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if bool in map(type, extents) or min(map(operator.index, extents), default=0) < 0:
            raise ValueError(f"shape must hold sizes of at least 0, got {shape!r}")
        return tuple(map(int, extents))

    def _take(self, numbers: int) -> int:
        """Take words for `count` numbers from the sequence, and return their first place.

        Those of Philox are rows, two for as many counters as a row has, so that there are enough for numbers
        of 8 bytes.
        """
        begin = self._position
        is_philox = self._kind == "philox4x32_10"
        end = begin + (2 * _ROW * -(-numbers // _ROW) if is_philox else numbers)
        self._check_end(end)
        if not is_looking_ahead():
            self._position = end
        return begin

    def _rows(self, numbers: int) -> tuple[int, int]:
        """Take `count` numbers from Philox's sequence: seed and first row."""
        return self._seed, self._take(numbers) // _ROW

    def _state_at(self, begin: int) -> State:
        """Find the state before a word."""
        kind: LinearSequence = "mrg32k3a" if self._kind == "mrg32k3a" else "xorwow"
        position, state = self._known or (0, seeded(kind, self._seed))
        state = moved(kind, state, begin - position)
        self._known = begin, state
        return state

    def _check_end(self, position: int) -> None:
        if position >= _LENGTH[self._kind]:
            raise ValueError(f"Generator: the sequence of {self._kind} ends before word {position}")

    async def _computed(
        self,
        name: str,
        text: str,
        extents: Ints,
        dtype: DType,
        out: Out,
        **arguments: ExpressionArgument,
    ) -> AccelRef:
        """Compute `y` of a uniform number `u` and of arguments, for each element."""
        words = await self.bits((*extents, 2))
        expression = _transform(name, self._alike(), text, tuple(arguments), dtype.value)
        return await self._device.ask(
            expression.compute(words[..., 0], words[..., 1], **arguments, shape=extents, out=out)
        )

    async def _normals(self, extents: Ints) -> AccelRef:
        """Draw normal numbers of float64 by the cosines of Box and Muller."""
        words = await self.bits((*extents, 4))
        expression = _normal(self._alike())
        return await self._device.ask(
            expression.compute(*[words[..., index] for index in range(4)], shape=extents)
        )

    async def _keys(self, count: int) -> AccelRef:
        """Draw numbers of 64 bits."""
        return await self._bounded_integers("permutation", (count,), 1 << 64, 0, DType.uint64, None)

    async def _bounded_integers(
        self, name: str, extents: Ints, width: int, low: int, dtype: DType, out: Out
    ) -> AccelRef:
        """Draw integers from `low` on, below ``low + width``: upper words of a product.

        A width of up to 2**32 is multiplied by 64 random bits, a larger one by 128.
        """
        draw_count = 2 if 1 << 32 < width < 1 << 64 else 1
        expression, count = _bounded(name, self._alike(), draw_count, width == 1 << 64, dtype.value)
        words = await self.bits((*extents, count))
        numbers: list[ExpressionArgument] = [words[..., index] for index in range(count)]
        if width < 1 << 64:
            numbers.append(np.uint64(width))
        first = np.uint64(low & (1 << 64) - 1)
        return await self._device.ask(expression.compute(*numbers, first, shape=extents, out=out))

    def _alike(self) -> str:
        """Return the name of the sequence whose words are used in the same way."""
        return "mrg32k3a" if self._kind == "mrg32k3a" else "philox4x32_10"


@functools.lru_cache(256)
def _transform(name: str, kind: str, text: str, arguments: Strs, dtype: str) -> Elementwise[AccelRef]:
    return Elementwise(
        f"{_UNIT[kind]}; {text}",
        inputs=("lower", "upper", *arguments),
        dtypes=dtype,
        operation=f"random.{name}",
    )


@functools.cache
def _normal(kind: str) -> Elementwise[AccelRef]:
    first = _UNIT[kind]
    second = first.replace("lower", "lower2").replace("upper", "upper2").replace("u =", "t =")
    text = f"{first}; {second}; y = sqrt(-2.0 * log(u)) * cos(2.0 * pi * t)"
    return Elementwise(text, inputs=("lower", "upper", "lower2", "upper2"), operation="random.normal")


@functools.cache
def _bounded(
    name: str, kind: str, draw_count: int, is_whole: bool, dtype: str
) -> tuple[Elementwise[AccelRef], int]:
    """Make the expression for `Stream._bounded_integers`, and the number of words that it takes."""
    text, words = _WIDE_GENERATORS[kind]
    names = [f"w{number}" for number in range(words * draw_count)]
    steps = [
        text.format(v=f"v{number}", w=names[words * number : words * (number + 1)])
        for number in range(draw_count)
    ]
    inputs = [*names, "width", "low"]
    if is_whole:
        steps.append("y = low + v0")
        inputs.remove("width")
    elif draw_count == 1:
        steps += [_UPPER.format(h="h", a="v0", b="width"), "y = low + h"]
    else:
        steps += [_UPPER.format(h="h", a="v0", b="width"), _UPPER.format(h="k", a="v1", b="width")]
        # The carry from the second product's lower half and the first product's upper half.
        steps += ["s = v1 * width + h", "y = low + k + where(s < h, uint64(1), uint64(0))"]
    expression = Elementwise[AccelRef](
        "; ".join(steps), inputs=inputs, dtypes=dtype, operation=f"random.{name}"
    )
    return expression, words * draw_count


def checked_dtype(name: str, dtype: Any) -> DType:
    """Return float32 or float64; another one is refused."""
    kind = DType.of(dtype)
    if kind not in (DType.float32, DType.float64):
        raise NotSupportedError(f"random.{name}: dtype must be float32 or float64, got {kind}; use cast()")
    return kind


def real(name: str, argument: str, value: Any, *, condition: str = "") -> ExpressionArgument:
    """Return a parameter as float64; a number is checked here, an array on the device is not.

    Args:
        name: Name of the operation.
        argument: Name of the parameter.
        value: A number or an array.
        condition: ``">= 0"`` or ``"> 0"`` for a bound.

    Raises:
        TypeError: It is not real.
        ValueError: A number is not finite, or below the bound.
    """
    if isinstance(value, AccelRef):
        if value.dtype.kind in ("complex", "bool"):
            raise TypeError(f"random.{name}: {argument} must be real, got {value.dtype}")
        return value
    host = host_array(f"random.{name}: {argument}", value)
    if host.dtype.kind not in "iuf":
        raise TypeError(f"random.{name}: {argument} must be a real number or an array, got {value!r}")
    numbers = host.astype(np.float64)
    is_fit = np.isfinite(numbers)
    if condition:
        is_fit &= numbers >= 0 if condition == ">= 0" else numbers > 0
    if not is_fit.all():
        wrong = numbers[~is_fit].flat[0]
        bound = f" and {condition}" if condition else ""
        raise ValueError(f"random.{name}: {argument} must be finite{bound}, got {wrong}")
    return numbers if numbers.ndim else np.float64(numbers)
