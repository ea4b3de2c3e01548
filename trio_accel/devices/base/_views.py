"""Views: other shapes over the same memory, worked out without touching it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...backends.base import HostArray, Ints
from ...backends.base.contract.ops import ArraySpec, contiguous_strides
from ._refusals import shown

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None"


class NoViewError(ValueError):
    """Only a copy has this shape."""


def indexed(spec: ArraySpec, index: Index) -> ArraySpec:
    """Take a part by NumPy's basic indexing: whole numbers, slices, ``...`` and ``None``.

    Raises:
        TypeError: An index of another kind, which would need a copy.
        IndexError: An index that is out of range, or too many of them.
    """
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    for place, part in enumerate(parts):
        if part is None or part is Ellipsis or isinstance(part, slice):
            continue
        if not _is_whole(part):
            raise TypeError(
                f"index: integers, slices, ... and None make a view; {shown(part)} would make a copy: "
                "await ta.arrays.take(x, indices) of elements, await ta.arrays.compress(mask, x) by a mask"
            )
        # With an integer in an array, NumPy would make a copy.
        parts[place] = operator.index(part)
        if abs(parts[place]) > sys.maxsize:
            raise IndexError(f"index {shown(part)} is out of bounds for shape {spec.shape}")
    if not any(part is Ellipsis for part in parts):
        # Without it, NumPy would read an element where nothing but whole numbers are given.
        parts.append(...)
    return seen(spec, lambda shadow: shadow[tuple(parts)])


def reshaped(spec: ArraySpec, shape: Sequence[int]) -> ArraySpec:
    """Take the elements in C order under another shape; one size may be -1.

    Raises:
        ValueError: Another number of elements, or a layout that no view can give this shape.
    """
    sizes = tuple(operator.index(size) for size in shape)
    if min(sizes, default=0) < -1:
        raise ValueError(f"reshape: sizes must be at least 0, and one may be -1, got {sizes}")
    try:
        return seen(spec, lambda shadow: np.reshape(shadow, sizes, copy=False))
    except ValueError as error:
        if "copy" not in str(error):
            raise ValueError(f"reshape: {error}") from None
        raise NoViewError(
            f"reshape: shape {spec.shape} with strides {spec.strides} cannot be viewed as shape {sizes}; "
            "reshape a copy: (await ref.copy()).reshape(...)"
        ) from None


def broadcast(spec: ArraySpec, shape: Ints) -> ArraySpec:
    """Take the elements again along axes in front, and along those of one element.

    Raises:
        ValueError: It does not broadcast to this shape.
    """
    return spec if spec.shape == shape else seen(spec, lambda shadow: np.broadcast_to(shadow, shape))


def permuted(spec: ArraySpec, order: Sequence[int]) -> ArraySpec:
    """Take the axes in another order; negative ones count from the end.

    Raises:
        ValueError: The axes are not all there are, each once.
    """
    # NumPy would take the lower 32 bits of a number.
    if any(not -len(spec.shape) <= operator.index(axis) < len(spec.shape) for axis in order):
        raise np.exceptions.AxisError(f"axes {tuple(order)} are not those of shape {spec.shape}")
    if len({axis % len(spec.shape) for axis in order}) < len(spec.shape):
        raise ValueError(f"axes must name each axis of shape {spec.shape} once, got {tuple(order)}")
    return seen(spec, lambda shadow: shadow.transpose(order))


def transposed(spec: ArraySpec) -> ArraySpec:
    """Take the axes in the opposite order."""
    return attrs.evolve(spec, shape=spec.shape[::-1], strides=spec.strides[::-1])


def overlaps(first: ArraySpec, second: ArraySpec) -> bool:
    """Tell whether two arrays may share an element: their byte ranges in one block meet."""
    if first.block != second.block or not first.size or not second.size:
        return False
    start, end = reach(first)
    other_start, other_end = reach(second)
    return start < other_end and other_start < end


def overlaps_itself(array: HostArray | ArraySpec) -> bool:
    """Tell whether two elements of an array may share memory, as those of a broadcast array do.

    False for all that NumPy's indexing, transposing and reshaping make of an ordinary array. True also for
    layouts made by hand whose axes interleave, and do not meet.
    """
    if not array.size:
        return False
    extent = array.dtype.itemsize
    axes = [(abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1]
    for stride, size in sorted(axes):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def check_apart(argument: str, written: ArraySpec) -> None:
    """Refuse to write to an array whose elements share memory.

    Raises:
        ValueError: Elements overlap.
    """
    if overlaps_itself(written):
        raise ValueError(
            f"{argument} must have memory of its own for each element, got a view of shape {written.shape} "
            f"with strides {written.strides}, whose elements overlap; write to a copy of it: await ref.copy()"
        )


def _is_whole(part: object) -> bool:
    if isinstance(part, (bool, np.bool)):
        return False
    try:
        operator.index(part)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return True


def reach(spec: ArraySpec) -> tuple[int, int]:
    """The first byte of the first element in memory, and the one after the last; of no elements, nothing."""
    if not spec.size:
        return spec.offset, spec.offset
    steps = [(extent - 1) * stride for extent, stride in zip(spec.shape, spec.strides, strict=True)]
    start = spec.offset + sum(step for step in steps if step < 0)
    end = spec.offset + sum(step for step in steps if step > 0) + spec.dtype.itemsize
    return start, end


def seen(spec: ArraySpec, change: Callable[[HostArray], HostArray]) -> ArraySpec:
    """Let NumPy make a view of an array of this layout without memory, and read the layout off.

    Raises:
        AxisError: A whole number that NumPy has no type for: it is a wrong value, and a wrong index.
        Exception: Another error of NumPy.
    """
    shadow = as_strided(np.empty(1, f"V{spec.dtype.itemsize}"), spec.shape, spec.strides)
    try:
        view = change(shadow)
    except OverflowError as error:
        raise np.exceptions.AxisError(f"view: {error}") from None
    if not view.size:
        # Without elements there is no place that could be outside the block.
        strides = contiguous_strides(view.shape, spec.dtype.itemsize)
        return attrs.evolve(spec, shape=view.shape, strides=strides, offset=0)
    offset = spec.offset + _address(view) - _address(shadow)
    return attrs.evolve(spec, shape=view.shape, strides=view.strides, offset=offset)


def _address(array: HostArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
