"""Views: other shapes over the same memory, computed without touching it."""

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
from ._refusals import for_blocking_code, shown

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None"


class NoViewError(ValueError):
    """Only a copy can have this shape."""


def indexed(spec: ArraySpec, index: Index) -> ArraySpec:
    """Return a part by NumPy's basic indexing: integers, slices, ``...`` and ``None``.

    Raises:
        TypeError: An index of another kind would need a copy.
        IndexError: An index is out of range, or there are too many.
    """
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    for position, part in enumerate(parts):
        if part is None or part is Ellipsis or isinstance(part, slice):
            continue
        if not _is_whole(part):
            text = (
                f"index: integers, slices, ... and None make a view; {shown(part)} would make a copy: "
                "await ta.arrays.take(x, indices) of elements, await ta.arrays.compress(mask, x) by a mask"
            )
            raise TypeError(for_blocking_code(text))
        # With a 0-d array as an index, NumPy would make a copy.
        parts[position] = operator.index(part)
        if abs(parts[position]) > sys.maxsize:
            raise IndexError(f"index {shown(part)} is out of bounds for shape {spec.shape}")
    if not any(part is Ellipsis for part in parts):
        # Without it, NumPy would read an element if all indices are integers.
        parts.append(...)
    return view_layout(spec, lambda shadow: shadow[tuple(parts)])


def reshaped(spec: ArraySpec, shape: Sequence[int]) -> ArraySpec:
    """Return the elements in C order with another shape; one size may be -1.

    Raises:
        ValueError: The number of elements differs, or no view of this layout has this shape.
    """
    sizes = tuple(operator.index(size) for size in shape)
    if min(sizes, default=0) < -1:
        raise ValueError(f"reshape: sizes must be at least 0, and one may be -1, got {sizes}")
    try:
        return view_layout(spec, lambda shadow: np.reshape(shadow, sizes, copy=False))
    except ValueError as error:
        if "copy" not in str(error):
            raise ValueError(f"reshape: {error}") from None
        raise NoViewError(
            f"reshape: shape {spec.shape} with strides {spec.strides} cannot be viewed as shape {sizes}; "
            "reshape a copy: (await ref.copy()).reshape(...)"
        ) from None


def broadcast(spec: ArraySpec, shape: Ints) -> ArraySpec:
    """Repeat the elements along new leading axes, and along axes of size 1.

    Raises:
        ValueError: The array does not broadcast to this shape.
    """
    return spec if spec.shape == shape else view_layout(spec, lambda shadow: np.broadcast_to(shadow, shape))


def permuted(spec: ArraySpec, order: Sequence[int]) -> ArraySpec:
    """Return the axes in another order; negative axes count from the end.

    Raises:
        ValueError: `order` does not contain each axis once.
    """
    # NumPy would use the lower 32 bits of a number.
    if any(not -len(spec.shape) <= operator.index(axis) < len(spec.shape) for axis in order):
        raise np.exceptions.AxisError(f"axes {tuple(order)} are not those of shape {spec.shape}")
    if len({axis % len(spec.shape) for axis in order}) < len(spec.shape):
        raise ValueError(f"axes must name each axis of shape {spec.shape} once, got {tuple(order)}")
    return view_layout(spec, lambda shadow: shadow.transpose(order))


def transposed(spec: ArraySpec) -> ArraySpec:
    """Return the axes in opposite order."""
    return attrs.evolve(spec, shape=spec.shape[::-1], strides=spec.strides[::-1])


def overlaps(first: ArraySpec, second: ArraySpec) -> bool:
    """Return whether two arrays may share an element, because their byte ranges in one block overlap."""
    if first.block != second.block or not first.size or not second.size:
        return False
    start, end = reach(first)
    other_start, other_end = reach(second)
    return start < other_end and other_start < end


def overlaps_itself(array: HostArray | ArraySpec) -> bool:
    """Return whether two elements of an array may share memory, as in a broadcast array.

    False for every result of NumPy's indexing, transposing and reshaping of an ordinary array. Also true for
    handmade layouts with interleaved axes that do not meet.
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
    """Refuse to write to an array with elements that share memory.

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
        operator.index(part)  # type: ignore[arg-type]  # this tests it
    except TypeError:
        return False
    return True


def reach(spec: ArraySpec) -> tuple[int, int]:
    """Return the first byte of an array and the byte after its last; an empty range without elements."""
    if not spec.size:
        return spec.offset, spec.offset
    steps = [(extent - 1) * stride for extent, stride in zip(spec.shape, spec.strides, strict=True)]
    start = spec.offset + sum(step for step in steps if step < 0)
    end = spec.offset + sum(step for step in steps if step > 0) + spec.dtype.itemsize
    return start, end


def view_layout(spec: ArraySpec, change: Callable[[HostArray], HostArray]) -> ArraySpec:
    """Return the layout of a NumPy view of an array with this layout, without memory.

    Raises:
        AxisError: An integer does not fit NumPy's types, so it is a wrong value and a wrong index.
        Exception: Another NumPy error.
    """
    shadow = as_strided(np.empty(1, f"V{spec.dtype.itemsize}"), spec.shape, spec.strides)
    try:
        view = change(shadow)
    except OverflowError as error:
        raise np.exceptions.AxisError(f"view: {error}") from None
    if not view.size:
        # Without elements, no offset can be outside of the block.
        strides = contiguous_strides(view.shape, spec.dtype.itemsize)
        return attrs.evolve(spec, shape=view.shape, strides=strides, offset=0)
    offset = spec.offset + _address(view) - _address(shadow)
    return attrs.evolve(spec, shape=view.shape, strides=view.strides, offset=offset)


def _address(array: HostArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
