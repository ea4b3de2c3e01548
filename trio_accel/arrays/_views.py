"""Views by the array API standard, and by NumPy where it has more: plain functions, as nothing is launched.

NumPy finds the layout of each, by an array with the same layout and without memory, and refuses the arguments
that it would refuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view as _windows

from ..backends.base import HostArray
from ..devices import AccelRef, composed
from ..devices.base._views import NoViewError, permuted, view_layout
from ..expressions import diagonal_of
from ._checks import axis_of, bounded_integer, bounded_integers, check_ref, flag, integer, is_several

__all__ = [
    "broadcast_arrays",
    "broadcast_to",
    "diagonal",
    "expand_dims",
    "flip",
    "matrix_transpose",
    "meshgrid",
    "moveaxis",
    "permute_dims",
    "reshape",
    "rot90",
    "sliding_window_view",
    "split",
    "squeeze",
    "swapaxes",
    "unstack",
]

# The objects of all parts are made at once.
_MOST_PARTS = 1 << 16


def permute_dims(x: AccelRef, axes: Sequence[int]) -> AccelRef:
    """Return a view with the axes in another order.

    Args:
        x: The array.
        axes: The axis of `x` for each axis of the result; negative ones count from the end.

    Raises:
        ValueError: These are not all axes, each once.
    """
    order = bounded_integers("arrays.permute_dims", "axes", axes)
    check_ref("arrays.permute_dims", "x", x)
    return AccelRef(x.block, permuted(x.spec, order))


def moveaxis(x: AccelRef, source: int | Sequence[int], destination: int | Sequence[int]) -> AccelRef:
    """Return a view with axes at other places; the others keep their order.

    Raises:
        ValueError: An axis out of range, or twice, or not as many in both.
    """
    axes = [
        bounded_integers("arrays.moveaxis", *argument)
        for argument in (("source", source), ("destination", destination))
    ]
    return _view("moveaxis", x, lambda array: np.moveaxis(array, *axes))


def matrix_transpose(x: AccelRef) -> AccelRef:
    """Return a view with the last two axes exchanged.

    Raises:
        ValueError: There are fewer than two.
    """
    return _view("matrix_transpose", x, np.matrix_transpose)


def squeeze(x: AccelRef, axis: int | Sequence[int]) -> AccelRef:
    """Return a view without axes of one element.

    Raises:
        ValueError: An axis out of range, or one of another length.
    """
    axes = bounded_integers("arrays.squeeze", "axis", axis)
    return _view("squeeze", x, lambda array: np.squeeze(array, axes))


def expand_dims(x: AccelRef, axis: int | Sequence[int] = 0) -> AccelRef:
    """Return a view with more axes, of one element each, at these places of the result.

    Raises:
        ValueError: A place that there is not.
    """
    axes = bounded_integers("arrays.expand_dims", "axis", axis)
    return _view("expand_dims", x, lambda array: np.expand_dims(array, axes))


def flip(x: AccelRef, axis: int | Sequence[int] | None = None) -> AccelRef:
    """Return a view with the elements in the opposite order along axes; None for all.

    Raises:
        ValueError: An axis out of range, or twice.
    """
    axes = None if axis is None else bounded_integers("arrays.flip", "axis", axis)
    # NumPy copies a 0-d array.
    return _view("flip", x, lambda array: np.flip(array, axes) if array.ndim or axes else array)


def broadcast_to(x: AccelRef, shape: int | Sequence[int]) -> AccelRef:
    """Return a view that repeats elements along new leading axes, and along axes of one element.

    Elements of it share memory, so no operation writes to it.

    Raises:
        ValueError: `x` does not broadcast to this shape.
    """
    extents = bounded_integers("arrays.broadcast_to", "shape", shape)
    return _view("broadcast_to", x, lambda array: np.broadcast_to(array, extents))


def broadcast_arrays(*arrays: AccelRef) -> tuple[AccelRef, ...]:
    """Return a view of each array, all of one shape; see `broadcast_to`.

    Raises:
        ValueError: The shapes do not broadcast to one.
    """
    for number, x in enumerate(arrays):
        check_ref("arrays.broadcast_arrays", f"arrays[{number}]", x)
    shape = np.broadcast_shapes(*[x.shape for x in arrays])
    return tuple([broadcast_to(x, shape) for x in arrays])


def meshgrid(*arrays: AccelRef, indexing: Literal["xy", "ij"] = "xy") -> tuple[AccelRef, ...]:
    """Return the coordinates of a grid: views of the arrays, broadcast against each other.

    Elements of them share memory: `AccelRef.copy` makes arrays that can be written to.

    Args:
        *arrays: The coordinates along each axis, each with at most one axis.
        indexing: ``"ij"``: array number k goes along axis k. ``"xy"``: the first two axes are exchanged.

    Raises:
        ValueError: An array with several axes, or another `indexing`.
    """
    if indexing not in ("xy", "ij"):
        raise ValueError(f"arrays.meshgrid: indexing must be 'xy' or 'ij', got {indexing!r}")
    for number, x in enumerate(arrays):
        check_ref("arrays.meshgrid", f"arrays[{number}]", x)
    ndim, axes = len(arrays), list(range(len(arrays)))
    if indexing == "xy":
        axes[:2] = axes[1::-1] if ndim > 1 else axes[:2]
    lines = [x.reshape((1,) * k + (-1,) + (1,) * (ndim - 1 - k)) for k, x in zip(axes, arrays, strict=True)]
    if any(x.ndim > 1 for x in arrays):
        shapes = [x.shape for x in arrays]
        raise ValueError(f"arrays.meshgrid: each array must be a vector or a scalar, got shapes {shapes}")
    return broadcast_arrays(*lines)


def diagonal(x: AccelRef, *, offset: int = 0) -> AccelRef:
    """Return a view of each matrix's diagonal in a stack, along the last axis of the result.

    Args:
        x: Array of shape (..., m, n).
        offset: Which diagonal: above the main one for positive numbers, below it for negative ones.

    Raises:
        ValueError: There are fewer than two axes.
    """
    number = integer("arrays.diagonal", "offset", offset)
    return _view("diagonal", x, lambda array: diagonal_of(array, number))


def rot90(x: AccelRef, k: int = 1, axes: Sequence[int] = (0, 1)) -> AccelRef:
    """Return a view turned by 90 degrees, from the first of two axes towards the second.

    Args:
        x: The array.
        k: How often.
        axes: The plane.

    Raises:
        ValueError: These are not two axes that there are.
    """
    times, plane = integer("arrays.rot90", "k", k) % 4, bounded_integers("arrays.rot90", "axes", axes)
    return _view("rot90", x, lambda array: np.rot90(array, times, cast("Any", plane)))


def swapaxes(x: AccelRef, axis1: int, axis2: int) -> AccelRef:
    """Return a view with two axes exchanged.

    Raises:
        ValueError: An axis out of range.
    """
    name = "arrays.swapaxes"
    axes = bounded_integer(name, "axis1", axis1), bounded_integer(name, "axis2", axis2)
    return _view("swapaxes", x, lambda array: array.swapaxes(*axes))


def sliding_window_view(
    x: AccelRef, window_shape: int | Sequence[int], axis: int | Sequence[int] | None = None
) -> AccelRef:
    """Return a view of all windows, as `numpy.lib.stride_tricks.sliding_window_view` does.

    The axes of a window are the last axes of the result. Windows share elements, so no operation writes to
    the view.

    Args:
        x: The array.
        window_shape: Elements of a window along each of `axis`.
        axis: The axes; None for all.

    Raises:
        ValueError: An axis is out of range, the numbers of axes and sizes differ, or a window is larger than
            the array or smaller than one element.
    """
    sizes = bounded_integers("arrays.sliding_window_view", "window_shape", window_shape)
    axes = None if axis is None else bounded_integers("arrays.sliding_window_view", "axis", axis)
    if any(size < 1 for size in sizes):
        raise ValueError(f"arrays.sliding_window_view: window_shape must be at least 1, got {window_shape!r}")
    return _view("sliding_window_view", x, lambda array: _windows(array, sizes, axes))


def unstack(x: AccelRef, *, axis: int = 0) -> tuple[AccelRef, ...]:
    """Return views of an array's parts along an axis, one for each index.

    Raises:
        ValueError: An axis out of range, or more than 65 536 parts.
    """
    axis_index = axis_of("arrays.unstack", x, axis)
    moved = _view("unstack", x, lambda array: np.moveaxis(array, axis_index, 0))
    _check_parts("unstack", len(moved))
    return tuple([moved[index] for index in range(len(moved))])


def split(x: AccelRef, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[AccelRef]:
    """Return views of parts that follow one another along an axis, as `numpy.split` does.

    Args:
        x: The array.
        indices_or_sections: How many parts of one length there are; or where each but the first begins.
        axis: The axis.

    Raises:
        ValueError: An axis out of range, or it cannot be divided into parts of one length; or there are more
            than 65 536 parts.
    """
    axis_index = axis_of("arrays.split", x, axis)
    moved = _view("split", x, lambda array: np.moveaxis(array, axis_index, 0))
    bounds = bounded_integers("arrays.split", "indices_or_sections", indices_or_sections)
    if not is_several(indices_or_sections):
        [parts] = bounds
        if parts < 1 or len(moved) % parts:
            raise ValueError(f"arrays.split: {len(moved)} elements are not divided into {parts} parts")
        _check_parts("split", parts)
        bounds = tuple([len(moved) // parts * number for number in range(1, parts)])
    pairs = itertools.pairwise((0, *bounds, None))
    return [moveaxis(moved[start:end], 0, axis_index) for start, end in pairs]


def _check_parts(name: str, count: int) -> None:
    """Refuse more views than are made at once: an array without elements can have any number of parts."""
    if count > _MOST_PARTS:
        raise ValueError(f"arrays.{name}: there must be at most {_MOST_PARTS} parts, got {count}")


@composed
async def reshape(x: AccelRef, shape: int | Sequence[int], *, copy: bool | None = None) -> AccelRef:
    """Return the elements in C order under another shape: a view where there is one, else a copy.

    It is awaited, as it may copy. `AccelRef.reshape` returns the view, or refuses.

    Args:
        x: The array.
        shape: The shape; one size may be -1.
        copy: True for a copy in any case, False for none: then a shape that needs one is refused. None for a
            copy where it is needed.

    Raises:
        ValueError: Another number of elements, or a shape that needs a copy where there is to be none.
    """
    name = "arrays.reshape"
    check_ref(name, "x", x)
    extents = bounded_integers(name, "shape", shape)
    if copy is None:
        try:
            return x.reshape(extents)
        except NoViewError:
            copy = True
    return (await x.copy() if flag(name, "copy", copy) else x).reshape(extents)


def _view(name: str, x: AccelRef, change: Callable[[HostArray], HostArray]) -> AccelRef:
    check_ref(f"arrays.{name}", "x", x)
    return AccelRef(x.block, view_layout(x.spec, change))
