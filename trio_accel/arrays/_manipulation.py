"""Copies of elements to other places; joins of arrays are copies by the actor of memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import attrs
import numpy as np

from ..backends.base import Ints, NotSupportedError, element
from ..backends.base.contract.ops import JoinSpec
from ..devices import (
    AccelRef,
    MemoryActor,
    Operand,
    Operation,
    Planned,
    Planner,
    composed,
    device_of,
)
from ..devices.base._views import indexed
from ..devices.operations._plan_source import written
from ..expressions import Elementwise, Out, promoted_dtype
from ._checks import axis_of, bounded_integer, bounded_integers, check_ref, flat, integer, is_several
from ._views import broadcast_to, reshape, split

__all__ = [
    "PadMode",
    "concat",
    "pad",
    "repeat",
    "roll",
    "stack",
    "tile",
]


@composed
async def concat(arrays: Sequence[Operand], *, axis: int | None = 0, out: Out = None) -> AccelRef:
    """Join arrays along an axis that they have.

    Args:
        arrays: Arrays of the same shape but for this axis; at least one, and one on the device. Their dtypes
            are promoted to one by the array API standard.
        axis: The axis, or None to join the elements of each in C order.
        out: Array to write to, of any strides.

    Returns:
        The joined array.

    Raises:
        TypeError: The dtypes do not promote to one, or it differs from the dtype of `out`.
        ValueError: There are no arrays, shapes differ, an axis is out of range, or `out` has another shape or
            shares memory with an array.
    """
    operands = tuple(arrays)
    return await device_of("arrays.concat", *operands, out).ask(_Join("concat", operands, axis, out))


@composed
async def stack(arrays: Sequence[Operand], *, axis: int = 0, out: Out = None) -> AccelRef:
    """Join arrays along a new axis of the result; see `concat` for arguments and errors.

    Args:
        arrays: Arrays of one shape.
        axis: The place of the new axis in the result.
        out: Array to write to, of any strides.
    """
    operands = tuple(arrays)
    bounded_integer("arrays.stack", "axis", axis)
    return await device_of("arrays.stack", *operands, out).ask(_Join("stack", operands, axis, out))


@attrs.frozen(eq=False)
class _Join(Operation[MemoryActor, AccelRef]):
    library: ClassVar[str] = "trio_accel.devices:MemoryActor"
    function: str
    arrays: tuple[Operand, ...]
    axis: int | None
    out: AccelRef | None

    @property
    def operation(self) -> str:
        """Name of the function."""
        return f"arrays.{self.function}"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Find dtype and shape; a stack joins arrays with a new axis."""
        name, is_new = planner.name, self.function == "stack"
        sources = [planner.read(f"arrays[{index}]", array) for index, array in enumerate(self.arrays)]
        dtype = promoted_dtype(
            name, {f"arrays[{index}]": source.dtype for index, source in enumerate(sources)}
        )
        if self.axis is None:
            sources = [flat(planner, source) for source in sources]
        ndim = sources[0].ndim + is_new
        first = indexed(sources[0], (None,)) if is_new else sources[0]
        axis = 0 if self.axis is None else axis_of(name, first, self.axis)
        leading, next_axis = (slice(None),) * axis, axis if is_new else axis + 1
        for index, source in enumerate(sources):
            other_shapes = [
                (*operand.shape[:axis], *operand.shape[next_axis:]) for operand in (sources[0], source)
            ]
            if source.ndim + is_new != ndim or other_shapes[0] != other_shapes[1]:
                rule = "of one shape" if is_new else f"of the same shape but for axis {axis}"
                raise ValueError(
                    f"{name}: arrays must be {rule}, got {sources[0].shape} and, as number {index}, "
                    f"{source.shape}"
                )
        if is_new:
            sources = [indexed(source, (*leading, None)) for source in sources]
        length = sum(source.shape[axis] for source in sources)
        shape = (*sources[0].shape[:axis], length, *sources[0].shape[axis + 1 :])
        named_sources = {f"arrays[{index}]": source for index, source in enumerate(sources)}
        ref, out = written(planner, "out", self.out, (shape, dtype), None, **named_sources)
        return Planned(JoinSpec(axis, tuple(sources), 0, out), ref)


PadMode: TypeAlias = Literal["constant", "edge", "reflect", "symmetric", "wrap"]
"""Values outside of an array: one number; the nearest element; elements mirrored at the edge, without or with
the one at the edge; or elements from the other end."""

# The index of each mode for the place `j` along an axis of `n` elements; `j` is negative before the axis. A
# load counts from the end for a negative index, and takes the last element if an index is too large.
_PADDED: dict[str, str] = {
    "constant": "{j}",
    "edge": "maximum({j}, 0)",
    "reflect": "{n} - 1 - abs({n} - 1 - abs({j}))",
    "symmetric": "minimum({j} if {j} >= 0 else -1 - {j}, 2 * {n} - 1 - {j})",
    "wrap": "{j} if {j} < {n} else {j} - {n}",
}


@composed
async def roll(
    x: AccelRef, /, shift: int | Sequence[int], *, axis: int | Sequence[int] | None = None
) -> AccelRef:
    """Move elements along axes; an element that leaves the array enters it at the other end.

    There is one launch for each axis.

    Args:
        x: The array.
        shift: How far, along each of `axis`; or along all of these, where it is one number.
        axis: The axes, of which one may be given twice; None to move elements in C order.

    Returns:
        A new array.

    Raises:
        ValueError: An axis out of range, or not one number for each.
    """
    check_ref("arrays.roll", "x", x)
    shifts = bounded_integers("arrays.roll", "shift", shift, take=integer)
    if axis is None:
        flat = await reshape(x, -1)
        return (await roll(flat, shift, axis=0)).reshape(x.shape)
    axes = [axis_of("arrays.roll", x.spec, entry) for entry in bounded_integers("arrays.roll", "axis", axis)]
    if not is_several(shift):
        shifts *= len(axes)
    if len(shifts) != len(axes):
        raise ValueError(f"arrays.roll: there must be one shift for each of the axes {axis}, got {shift}")
    distance = [0] * x.ndim
    for dimension, by in zip(axes, shifts, strict=True):
        distance[dimension] += by
    within = [by % extent if extent else 0 for by, extent in zip(distance, x.shape, strict=True)]
    if not any(within):
        return await x.copy()
    for axis_index, by in enumerate(within):
        if by:
            # Two copies of parts: on the CPU, an index of each element takes three times as long.
            x = await concat(split(x, [-by], axis_index)[::-1], axis=axis_index)
    return x


@composed
async def tile(x: AccelRef, repetitions: int | Sequence[int], /) -> AccelRef:
    """Repeat a whole array along axes.

    Args:
        x: The array.
        repetitions: How often along each axis. If there are fewer than axes, they belong to the last ones; if
            there are more, `x` gets axes of one element in front.

    Returns:
        A new array.

    Raises:
        ValueError: A negative number.
    """
    check_ref("arrays.tile", "x", x)
    counts = bounded_integers("arrays.tile", "repetitions", repetitions)
    _check_counts("arrays.tile: repetitions", repetitions, counts)
    counts = (1,) * (x.ndim - len(counts)) + counts
    shape = (1,) * (len(counts) - x.ndim) + x.shape
    ones = x[(None,) * (len(counts) - x.ndim)][tuple([part for _ in counts for part in (None, slice(None))])]
    wide = tuple([extent for pair in zip(counts, shape, strict=True) for extent in pair])
    copy = await broadcast_to(ones, wide).copy()
    return copy.reshape(tuple(map(operator.mul, counts, shape)))


@composed
async def repeat(x: AccelRef, repeats: int | AccelRef, /, *, axis: int | None = None) -> AccelRef:
    """Repeat each element along an axis.

    Args:
        x: The array.
        repeats: How often.
        axis: The axis; None to repeat the elements in C order, to an array with one axis.

    Returns:
        A new array.

    Raises:
        ValueError: A negative number, or an axis out of range.
        NotSupportedError: There is a number for each element; use `take` with indices made on the host
            instead.
    """
    check_ref("arrays.repeat", "x", x)
    if isinstance(repeats, AccelRef) or is_several(repeats):
        raise NotSupportedError(
            "arrays.repeat: repeats must be one number; for one of each element: "
            "await ta.arrays.take(x, np.repeat(np.arange(n), repeats), axis=axis)"
        )
    if axis is None:
        return await repeat(await reshape(x, -1), repeats, axis=0)
    count = bounded_integer("arrays.repeat", "repeats", repeats)
    axis_index = axis_of("arrays.repeat", x.spec, axis)
    _check_counts("arrays.repeat: repeats", repeats, (count,))
    leading, trailing = x.shape[: axis_index + 1], x.shape[axis_index + 1 :]
    expanded = x[(*(slice(None),) * (axis_index + 1), None)]
    copy = await broadcast_to(expanded, (*leading, count, *trailing)).copy()
    return copy.reshape((*leading[:-1], leading[-1] * count, *trailing))


@composed
async def pad(
    x: AccelRef,
    pad_width: int | Sequence[int] | Sequence[Sequence[int]],
    /,
    *,
    mode: PadMode = "constant",
    constant_values: complex = 0,
) -> AccelRef:
    """Put elements around an array, as `numpy.pad` does.

    Args:
        x: The array.
        pad_width: The number of elements before and after each axis: one number for all, a pair for all axes,
            or a pair for each axis.
        mode: Which elements; see `PadMode`.
        constant_values: The number, for ``"constant"``.

    Returns:
        A new array.

    Raises:
        TypeError, ValueError: The width is negative, or exceeds the axis's number of elements for the mode
            (for ``"reflect"`` one less); or the mode is unknown, or the dtype cannot hold the number.
    """
    check_ref("arrays.pad", "x", x)
    if not isinstance(cast("object", mode), str) or mode not in _PADDED:
        raise ValueError(f"arrays.pad: mode must be one of {', '.join(_PADDED)}, got {mode!r}")
    pairs = _pairs(pad_width, x.ndim)
    for axis, (pair, extent) in enumerate(zip(pairs, x.shape, strict=True)):
        limit = _max_width(mode, extent)
        if max(pair) > limit:
            raise ValueError(
                f"arrays.pad: pad_width {pair} of axis {axis}, which has {extent} elements: {mode!r} has "
                f"values for at most {limit}"
            )
    shape = tuple(
        [
            width_before + extent + width_after
            for (width_before, width_after), extent in zip(pairs, x.shape, strict=True)
        ]
    )
    value = element("arrays.pad", "constant_values", constant_values, x.dtype)
    if not any(map(any, pairs)):
        return await x.copy()
    if not x.size and 0 not in shape:
        return await x.device.full(shape, value, x.dtype)
    expression = _padding(mode, x.ndim)
    arguments: dict[str, Any] = {"x": x, "value": np.asarray(value, x.dtype.dtype)[()]}
    for axis, ((width_before, _), extent) in enumerate(zip(pairs, x.shape, strict=True)):
        arguments |= {f"b{axis}": width_before, f"n{axis}": extent}
    return await expression(shape=shape, **{name: arguments[name] for name in expression.inputs})


def _max_width(mode: PadMode, extent: int) -> float:
    """Return the number of values that a mode has outside of an axis."""
    if mode == "constant" or (mode == "edge" and extent):
        return math.inf
    return max(extent - (mode == "reflect"), 0)


@functools.cache
def _padding(mode: PadMode, ndim: int) -> Elementwise[AccelRef]:
    """Load by an index along each axis; the value outside of them is a number for one mode."""
    positions = [f"(i({axis}) - b{axis})" for axis in range(ndim)]
    text = ", ".join(
        _PADDED[mode].format(j=position, n=f"n{axis}") for axis, position in enumerate(positions)
    )
    inside = " and ".join(f"0 <= {position} < n{axis}" for axis, position in enumerate(positions))
    text = f"x[{text}]" + (f" if {inside} else value" if mode == "constant" else "")
    return Elementwise(text, operation="arrays.pad")


def _check_counts(label: str, value: object, counts: Ints) -> None:
    if any(count < 0 for count in counts):
        raise ValueError(f"{label} must be at least 0, got {value!r}")


def _pairs(pad_width: Any, ndim: int) -> list[tuple[int, int]]:
    """Return how many elements come before each axis, and after it."""
    try:
        widths = np.broadcast_to(np.asarray(pad_width), (ndim, 2))
    except (TypeError, ValueError):
        widths = np.array([-1])
    if widths.size and (widths.dtype.kind not in "iu" or widths.min() < 0):
        raise ValueError(
            "arrays.pad: pad_width must be one integer of at least 0, a pair, or a pair for each of "
            f"{ndim} axes, got {pad_width!r}"
        )
    return [(int(width_before), int(width_after)) for width_before, width_after in widths]
