"""Tensor maps: how the Tensor Memory Accelerator (TMA) of a GPU reads and writes boxes of an array.

Its rules are those of `cuTensorMapEncodeTiled` in the driver's manual. The driver says of each no more than
"invalid value", so they are checked ahead of it (D192).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import attrs

from ..dtypes import DType
from ._array import ArraySpec

__all__ = ["MAP_BYTES", "TensorMap"]

MAP_BYTES = 128
"""Bytes of a tensor map, which the kernel gets by value."""

_MOST_AXES = 5
_LEAST_INTERLEAVED = 3
_MOST_BOX, _MOST_STEP = 256, 8
_MOST_EXTENT, _STRIDE_LIMIT = 1 << 32, 1 << 40

# The numbers of these in the driver are their places here.
_TYPES = "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"
_INTERLEAVES = None, "16B", "32B"
_SWIZZLES = None, "32B", "64B", "128B"
_PROMOTIONS = None, "64B", "128B", "256B"
_FILLS = "zero", "nan"
# Types that the driver does not have, and what their bits are copied as.
_COPIED = {
    **dict.fromkeys(("bool", "int8", "float8_e4m3fn", "float8_e5m2"), "uint8"),
    "int16": "uint16",
    "complex64": "uint64",
}
_ALLOWED: dict[str, tuple[object, ...]] = {
    "swizzle": _SWIZZLES, "interleave": _INTERLEAVES, "l2_promotion": _PROMOTIONS, "fill": _FILLS,
}  # fmt: skip


def _as_tuple(given: object) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    return tuple(cast("Iterable[object]", given))


def _whole_numbers(most: int, rule: str) -> Any:
    def check(_: object, field: attrs.Attribute[Any], given: tuple[object, ...]) -> None:
        if not all(type(each) is int and 1 <= each <= most for each in given):
            raise ValueError(
                f"TensorMap: {field.name} must be whole numbers from 1 to {most} ({rule}), got {given!r}"
            )

    return check


def _check_choice(_: object, field: attrs.Attribute[Any], value: object) -> None:
    allowed = _ALLOWED[field.name]
    if value not in allowed:
        told = ", ".join(map(repr, allowed))
        raise ValueError(f"TensorMap: {field.name} must be one of {told}, got {value!r}")


@attrs.frozen(kw_only=True)
class TensorMap:
    """How boxes of an array are copied to shared memory and back by the Tensor Memory Accelerator (TMA).

    Given to `reads`, `updates` or `writes`, it makes the kernel's parameter a ``CUtensorMap`` by value in
    place of a pointer: ``const __grid_constant__ CUtensorMap x``. Its PTX instructions, such as
    ``cp.async.bulk.tensor``, name boxes by the coordinates of their first elements. Axes are in the order of
    the array's shape here; the instructions take coordinates in the reverse order.

    Elements of a box that lie outside of the array are `fill` when they are read, and are not written. bool,
    int8, int16, float8 and complex64, which the driver does not know, are copied as unsigned numbers.

    Source: `cuTensorMapEncodeTiled` in the CUDA driver's manual, with all of its rules.

    Attributes:
        box: Elements of a box along each axis, 1 to 256; as many axes as the array has, 1 to 5.
        swizzle: Span in which shared memory is swizzled; None for none. A row of a box, in bytes, must fit.
        interleave: Layout of channels, ``"16B"`` or ``"32B"``, for 3 to 5 axes; None for none.
        l2_promotion: Bytes that the L2 cache fetches at once; None for no more than are asked for.
        fill: ``"zero"``, or ``"nan"``: of floating-point elements only.
        element_strides: Step between elements of a box along each axis, 1 to 8; by default 1. It counts
            elements of the array: a box of 64 with a step of 2 has 32.

    Raises:
        TypeError, ValueError: A rule is broken that does not depend on the array; the message names it.
    """

    box: tuple[int, ...] = attrs.field(converter=_as_tuple, validator=_whole_numbers(_MOST_BOX, "boxDim"))
    swizzle: Literal["32B", "64B", "128B"] | None = attrs.field(default=None, validator=_check_choice)
    interleave: Literal["16B", "32B"] | None = attrs.field(default=None, validator=_check_choice)
    l2_promotion: Literal["64B", "128B", "256B"] | None = attrs.field(default=None, validator=_check_choice)
    fill: Literal["zero", "nan"] = attrs.field(default="zero", validator=_check_choice)
    element_strides: tuple[int, ...] = attrs.field(
        default=(), converter=_as_tuple, validator=_whole_numbers(_MOST_STEP, "elementStrides")
    )

    def __attrs_post_init__(self) -> None:
        rank, least = len(self.box), 1 if self.interleave is None else _LEAST_INTERLEAVED
        if not least <= rank <= _MOST_AXES:
            why = "" if self.interleave is None else f" with interleave={self.interleave!r}"
            raise ValueError(
                f"TensorMap: box must have {least} to {_MOST_AXES} axes{why} (tensorRank), got {self.box}"
            )
        if self.element_strides and len(self.element_strides) != rank:
            raise ValueError(
                f"TensorMap: element_strides must have an entry for each axis of box {self.box}, got "
                f"{self.element_strides}"
            )
        if self.interleave == "32B" and self.swizzle != "32B":
            raise ValueError(f"TensorMap: swizzle must be '32B' with interleave='32B', got {self.swizzle!r}")

    @property
    def alignment(self) -> int:
        """Bytes that the address and the strides must be multiples of."""
        return 32 if self.interleave == "32B" else 16

    def type_of(self, dtype: DType) -> str:
        """Return the driver's type for elements, by NumPy's name.

        Raises:
            TypeError: The box or the fill does not suit them, or the driver has no such type.
            ValueError: A row of the box has the wrong size.
        """
        found = _COPIED.get(dtype.value, dtype.value)
        if found not in _TYPES:
            raise TypeError(f"a tensor map has elements of 1 to 8 bytes (tensorDataType), got {dtype}")
        if self.fill == "nan" and "float" not in found:
            raise TypeError(f"fill='nan' must be of floating-point elements (oobFill), got {dtype}")
        row = self.box[-1] * dtype.itemsize
        if self.interleave is None:
            span = int(self.swizzle[:-1]) if self.swizzle else row
            if row % 16 or row > span:
                most = f", and at most {span} with swizzle={self.swizzle!r}" if self.swizzle else ""
                raise ValueError(
                    f"a row of the box must be a multiple of 16 bytes{most} (boxDim[0]); box {self.box} of "
                    f"{dtype} has {row}"
                )
        return found

    def check(self, where: str, array: ArraySpec) -> None:
        """Refuse an array that the map cannot describe.

        Args:
            where: The operation and the parameter.
            array: The array.

        Raises:
            ValueError: A rule is broken; the message names it.
        """
        shape, multiple = array.shape, self.alignment
        if min(shape) < 1 or max(shape) > _MOST_EXTENT:
            raise ValueError(
                f"{where}: a tensor map's axes have 1 to 2**32 elements (globalDim), got {shape}"
            )
        if shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
            raise ValueError(
                f"{where}: elements of the last axis must lie side by side for a tensor map, got strides "
                f"{array.strides}"
            )
        if any(each % multiple or not 0 <= each < _STRIDE_LIMIT for each in self.strides(array)):
            raise ValueError(
                f"{where}: strides must be multiples of {multiple} bytes, and below 2**40 (globalStrides), "
                f"got {array.strides} for shape {shape}; copy it to an array with a longer last axis"
            )
        if array.offset % multiple:
            raise ValueError(
                f"{where}: the first element must lie at a multiple of {multiple} bytes (globalAddress), got "
                f"a view that begins {array.offset} bytes behind its array"
            )

    def strides(self, array: ArraySpec) -> tuple[int, ...]:
        """Return the strides of all axes but the last; that of an axis with one element is of no account."""
        given = zip(array.shape[:-1], array.strides[:-1], strict=True)
        return tuple(stride if extent > 1 else self.alignment for extent, stride in given)

    def plain(self) -> list[Any]:
        """Return what makes it again."""
        return list(attrs.astuple(self, recurse=False))

    @staticmethod
    def of(plain: list[Any]) -> TensorMap:
        """Make it of what `plain` returned."""
        names = [field.name for field in attrs.fields(TensorMap)]
        return TensorMap(**dict(zip(names, plain, strict=True)))

    def codes(self, dtype: DType) -> tuple[int, int, int, int, int]:
        """Return the driver's numbers: type, interleave, swizzle, L2 promotion, fill."""
        return (
            _TYPES.index(self.type_of(dtype)),
            _INTERLEAVES.index(self.interleave),
            _SWIZZLES.index(self.swizzle),
            _PROMOTIONS.index(self.l2_promotion),
            _FILLS.index(self.fill),
        )
