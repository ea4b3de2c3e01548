"""Numbers that expressions make of words: the same on all backends, whatever draws the words."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backends.base import DType, NotSupportedError
from ..backends.base.contract.values import host_array
from ..devices import AccelRef
from ..expressions import Elementwise, ExpressionArgument, Out
from ._stream import Stream

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
_LONG: Mapping[str, tuple[str, int]] = {
    "philox4x32_10": ("{v} = uint64({w[1]}) << 32 | uint64({w[0]})", 2),
    "mrg32k3a": (_MRG_LONG, 4),
}
# The upper half of a product of 64 bits each: {h} of {a} and {b}.
_UPPER = (
    "{h}l = ({a} & 4294967295) * ({b} & 4294967295) >> 32;"
    "{h}m = ({a} >> 32) * ({b} & 4294967295) + {h}l;"
    "{h}n = ({a} & 4294967295) * ({b} >> 32) + ({h}m & 4294967295);"
    "{h} = ({a} >> 32) * ({b} >> 32) + ({h}m >> 32) + ({h}n >> 32)"
)


class WordStream(Stream):
    """A sequence of words, and numbers that are made of a fixed count of them each."""

    async def _computed(
        self,
        name: str,
        text: str,
        extents: tuple[int, ...],
        dtype: DType,
        out: Out,
        **arguments: ExpressionArgument,
    ) -> AccelRef:
        """Compute `y` of a uniform number `u` and of arguments, for each element."""
        words = await self.bits((*extents, 2))
        made = _transform(name, self._alike(), text, tuple(arguments), dtype.value)
        return await self._device.ask(
            made.compute(words[..., 0], words[..., 1], **arguments, shape=extents, out=out)
        )

    async def _normals(self, extents: tuple[int, ...]) -> AccelRef:
        """Draw normal numbers of float64 by the cosines of Box and Muller."""
        words = await self.bits((*extents, 4))
        made = _normal(self._alike())
        return await self._device.ask(made.compute(*[words[..., one] for one in range(4)], shape=extents))

    async def _keys(self, count: int) -> AccelRef:
        """Draw numbers of 64 bits."""
        return await self._whole("permutation", (count,), 1 << 64, 0, DType.uint64, None)

    async def _whole(
        self, name: str, extents: tuple[int, ...], width: int, low: int, dtype: DType, out: Out
    ) -> AccelRef:
        """Draw whole numbers from `low` on, below ``low + width``: upper words of a product.

        A width of up to 2**32 is multiplied by 64 random bits, a larger one by 128.
        """
        many = 2 if 1 << 32 < width < 1 << 64 else 1
        made, count = _bounded(name, self._alike(), many, width == 1 << 64, dtype.value)
        words = await self.bits((*extents, count))
        numbers: list[ExpressionArgument] = [words[..., one] for one in range(count)]
        if width < 1 << 64:
            numbers.append(np.uint64(width))
        first = np.uint64(low & (1 << 64) - 1)
        return await self._device.ask(made.compute(*numbers, first, shape=extents, out=out))

    def _alike(self) -> str:
        """Name the sequence whose words are used in the same way."""
        return "mrg32k3a" if self._kind == "mrg32k3a" else "philox4x32_10"


@functools.lru_cache(256)
def _transform(
    name: str, kind: str, text: str, arguments: tuple[str, ...], dtype: str
) -> Elementwise[AccelRef]:
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
    name: str, kind: str, many: int, is_whole: bool, dtype: str
) -> tuple[Elementwise[AccelRef], int]:
    """Make the expression for `WordStream._whole`, and say how many words it takes."""
    text, words = _LONG[kind]
    names = [f"w{number}" for number in range(words * many)]
    steps = [
        text.format(v=f"v{number}", w=names[words * number : words * (number + 1)]) for number in range(many)
    ]
    inputs = [*names, "width", "low"]
    if is_whole:
        steps.append("y = low + v0")
        inputs.remove("width")
    elif many == 1:
        steps += [_UPPER.format(h="h", a="v0", b="width"), "y = low + h"]
    else:
        steps += [_UPPER.format(h="h", a="v0", b="width"), _UPPER.format(h="k", a="v1", b="width")]
        # The carry of the lower half of the second product and the upper half of the first one.
        steps += ["s = v1 * width + h", "y = low + k + where(s < h, uint64(1), uint64(0))"]
    made = Elementwise[AccelRef]("; ".join(steps), inputs=inputs, dtypes=dtype, operation=f"random.{name}")
    return made, words * many


def checked_dtype(name: str, dtype: Any) -> DType:
    """Return float32 or float64; another one is refused."""
    found = DType.of(dtype)
    if found not in (DType.float32, DType.float64):
        raise NotSupportedError(f"random.{name}: dtype must be float32 or float64, got {found}; use cast()")
    return found


def real(name: str, argument: str, value: Any, *, least: str = "") -> ExpressionArgument:
    """Return a parameter as float64; one that is here is checked, an array on the device is not.

    Args:
        name: Name of the operation.
        argument: Name of the parameter.
        value: A number or an array.
        least: ``">= 0"`` or ``"> 0"`` for a bound.

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
    if least:
        is_fit &= numbers >= 0 if least == ">= 0" else numbers > 0
    if not is_fit.all():
        wrong = numbers[~is_fit].flat[0]
        bound = f" and {least}" if least else ""
        raise ValueError(f"random.{name}: {argument} must be finite{bound}, got {wrong}")
    return numbers if numbers.ndim else np.float64(numbers)
