"""Tensor maps: how the Tensor Memory Accelerator (TMA) of a GPU reads and writes boxes of an array.

Its rules are those of `cuTensorMapEncodeTiled` in the driver's manual. The driver reports each violation as
"invalid value", so the rules are checked before the call (D192).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, cast

import attrs

from ..dtypes import DType
from ._array import ArraySpec

__all__ = ["MAP_BYTES", "TensorMap"]

MAP_BYTES = 128
"""Bytes of a tensor map, which the kernel gets by value."""

_MOST_AXES, _MOST_BOX, _MOST_STEP = 5, 256, 8
# The manual does not name this rule. A driver also refuses such boxes, but not all.
_MOST_BYTES = 227 << 10
# The numbers of these in the driver are their places here.
_TYPES = "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"
_CHOICES: dict[str, tuple[object, ...]] = {
    "interleave": (None, "16B", "32B"),
    "swizzle": (None, "32B", "64B", "128B"),
    "l2_promotion": (None, "64B", "128B", "256B"),
    "fill": ("zero", "nan"),
}
# Types that the driver lacks, and the types that copy their bits.
_COPIED = {
    **dict.fromkeys(("bool", "int8", "float8_e4m3fn", "float8_e5m2"), "uint8"),
    "int16": "uint16",
    "complex64": "uint64",
}


def _as_tuple(value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)
    return tuple(cast("Iterable[object]", value))


@attrs.frozen(kw_only=True)
class TensorMap:
    """How boxes of an array are copied to shared memory and back by the Tensor Memory Accelerator (TMA).

    As the `layout` of a parameter (see `reads`), it makes the parameter a ``CUtensorMap`` by value instead of
    a pointer: ``const __grid_constant__ CUtensorMap x``. Its PTX instructions, such as
    ``cp.async.bulk.tensor``, name boxes by the coordinates of their first elements. Axes are in the order of
    the array's shape here; the instructions take coordinates in the reverse order. The map has the array's
    strides, which may have gaps except along the last axis. The coordinate along that axis must be a multiple
    of 16 bytes, below zero also: otherwise an H100 ends the context with "illegal instruction".

    Elements of a box that lie outside of the array are `fill` when they are read, and are not written. bool,
    int8, int16, float8 and complex64, which the driver does not know, are copied as unsigned numbers.

    Source: `cuTensorMapEncodeTiled` in the CUDA driver's manual, with all of its rules.

    Attributes:
        box: Elements of a box along each axis, 1 to 256; as many axes as the array has, 1 to 5.
        swizzle: Span in which shared memory is swizzled; None for none. A row of a box, in bytes, must fit.
        interleave: Layout of channels, ``"16B"`` or ``"32B"``, for 3 to 5 axes; None for none.
        l2_promotion: Bytes that the L2 cache fetches at once; None for only the requested bytes.
        fill: ``"zero"``, or ``"nan"``: of floating-point elements only.
        element_strides: Step between elements of a box along each axis, 1 to 8; by default 1. It counts
            elements of the array: a box of 64 with a step of 2 has 32.

    Raises:
        ValueError: A rule is broken that does not depend on the array; the message names the rule.
    """

    box: tuple[int, ...] = attrs.field(converter=_as_tuple)
    swizzle: Literal["32B", "64B", "128B"] | None = None
    interleave: Literal["16B", "32B"] | None = None
    l2_promotion: Literal["64B", "128B", "256B"] | None = None
    fill: Literal["zero", "nan"] = "zero"
    element_strides: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple)

    def __attrs_post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"TensorMap: {name} must be one of {choices}, got {getattr(self, name)!r}")
        of_map = ("box", _MOST_BOX, "boxDim"), ("element_strides", _MOST_STEP, "elementStrides")
        for name, limit, rule in of_map:
            if not all(type(number) is int and 1 <= number <= limit for number in getattr(self, name)):
                raise ValueError(
                    f"TensorMap: {name} must be integers from 1 to {limit} ({rule}), got "
                    f"{getattr(self, name)!r}"
                )
        rank, min_rank = len(self.box), 3 if self.interleave else 1
        if not min_rank <= rank <= _MOST_AXES or len(self.element_strides) not in (0, rank):
            raise ValueError(
                f"TensorMap: box must have {min_rank} to {_MOST_AXES} axes with "
                f"interleave={self.interleave!r} (tensorRank), and element_strides as many, got {self.box} "
                f"and {self.element_strides}"
            )
        if self.interleave == "32B" and self.swizzle != "32B":
            raise ValueError(f"TensorMap: swizzle must be '32B' with interleave='32B', got {self.swizzle!r}")

    @property
    def alignment(self) -> int:
        """Bytes that the address and the strides must be multiples of."""
        return 32 if self.interleave == "32B" else 16

    def codes(self, dtype: DType) -> tuple[int, ...]:
        """Return the driver's numbers: type of the elements, interleave, swizzle, L2 promotion, fill.

        Raises:
            TypeError: The fill does not suit elements of the dtype, or the driver lacks such a type.
            ValueError: A row of the box has the wrong size.
        """
        kind, row = _COPIED.get(dtype.value, dtype.value), self.box[-1] * dtype.itemsize
        if kind not in _TYPES:
            raise TypeError(f"a tensor map has elements of 1 to 8 bytes (tensorDataType), got {dtype}")
        if self.fill == "nan" and "float" not in kind:
            raise TypeError(f"fill='nan' must be of floating-point elements (oobFill), got {dtype}")
        span = int(self.swizzle[:-1]) if self.swizzle and self.interleave is None else row
        if row % 16 or row > span:
            swizzle_limit = f", and at most {span} with swizzle={self.swizzle!r}" if span < row else ""
            raise ValueError(
                f"a row of the box must be a multiple of 16 bytes{swizzle_limit} (boxDim[0]); box {self.box} "
                f"of {dtype} has {row}"
            )
        # The step along the last axis counts only with interleaved channels.
        steps = list(self.element_strides or (1,) * len(self.box))
        steps[-1] = steps[-1] if self.interleave else 1
        loaded = [-(-extent // step) for extent, step in zip(self.box, steps, strict=True)]
        taken = dtype.itemsize * math.prod(loaded)
        if taken > _MOST_BYTES:
            raise ValueError(
                f"a box must fit into the {_MOST_BYTES} bytes of shared memory that a block has at most; box "
                f"{self.box} of {dtype} takes {taken}"
            )
        return _TYPES.index(kind), *[choices.index(getattr(self, name)) for name, choices in _CHOICES.items()]

    def check(self, label: str, array: ArraySpec) -> None:
        """Refuse an array that the map cannot describe.

        Args:
            label: The operation and the parameter.
            array: The array.

        Raises:
            ValueError: A rule is broken; the message names it.
        """
        shape, strides, multiple = array.shape, array.strides, self.alignment
        trouble = ""
        if min(shape) < 1 or max(shape) > 1 << 32:
            trouble = f"the axes of a tensor map have 1 to 2**32 elements (globalDim), got {shape}"
        elif shape[-1] > 1 and strides[-1] != array.dtype.itemsize:
            trouble = (
                f"elements of the last axis must lie side by side for a tensor map, got strides {strides}"
            )
        elif any(stride % multiple or not 0 <= stride < 1 << 40 for stride in self.strides(array)):
            trouble = (
                f"strides must be multiples of {multiple} bytes, and below 2**40 (globalStrides), got "
                f"{strides} for shape {shape}; copy it to an array with a longer last axis"
            )
        elif array.offset % multiple:
            trouble = (
                f"the first element must lie at a multiple of {multiple} bytes (globalAddress), got a view "
                f"that begins {array.offset} bytes behind its array"
            )
        if trouble:
            raise ValueError(f"{label}: {trouble}")

    def strides(self, array: ArraySpec) -> tuple[int, ...]:
        """Return the strides of all axes but the last; strides along a single element do not count."""
        axes = zip(array.shape[:-1], array.strides[:-1], strict=True)
        return tuple(stride if extent > 1 else self.alignment for extent, stride in axes)
