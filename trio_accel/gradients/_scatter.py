"""Additions to elements of an array, in one order on each backend.

A scatter on a GPU adds by atomic operations in an order that changes from run to run, and so do the last bits
of floating sums. Work that is repeated after a lost context must have the same bits, so a GPU sorts the
values by their places, and adds up the segments. The CPU adds in the order of the elements.

The additions change new zeros in place, which has no gradient. So each is wrapped by a function with a rule
of its own: the gradient of an added value is the gradient at its place.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from ..devices import ArrayFunction, Call
from ..devices.operations._chain import device_of_call
from ..expressions import Elementwise

__all__ = [
    "added_along",
    "added_at",
    "flat_positions",
    "is_ordered",
    "nothing",
    "numbers_below",
    "sorted_sums",
]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays


def is_ordered(g: Any) -> bool:
    """Return whether a scatter on the array's device adds in the order of the elements."""
    device: Any = device_of_call(g)
    return bool(device.state.backend.adds_in_order)


def sorted_sums(positions: Any, values: Any, shape: Sequence[int]) -> Any:
    """Return an array of sums: of the values, by their positions in C order.

    Args:
        positions: A vector of integers from 0.
        values: A vector of as many floating numbers.
        shape: Shape of the result.
    """
    order = arrays.argsort(positions, stable=True)
    bounds = numbers_below(math.prod(shape) + 1, positions)
    offsets = arrays.searchsorted(arrays.take(positions, order), bounds)
    sums = arrays.segmented_reduce(arrays.take(values, order), offsets)
    return arrays.reshape(sums, tuple(shape))


def numbers_below(count: int, like: Any) -> Any:
    """Return the integers from 0 to a count, on the device of an array with elements.

    A host array would prevent that a plan is kept, because its elements may change.
    """
    return _NUMBERS(like[(0,) * len(like.shape)], shape=(count,))


def added_along(
    zeros: Callable[[], Any], shape: Sequence[int], positions: Any, values: Any, axis: int
) -> Any:
    """Return zeros with values added to elements along an axis.

    Args:
        zeros: Makes the zeros.
        shape: Their shape.
        positions: Indices along the axis, an array with the shape of `values`; negative ones count from the
            end.
        values: The values.
        axis: The axis.
    """
    if is_ordered(values):
        added = arrays.put_along_axis(zeros(), positions, values, axis, reduce="add")
    else:
        added = _by_sort(_along(positions, values, axis), values, shape)
    return Call(_ADDED_ALONG, (added, positions, values, axis))


def _along(positions: Any, values: Any, axis: int) -> list[Any]:
    """Return indices along all axes, by indices along one of them."""
    count = len(values.shape)
    return [
        positions if dim == axis else _line(extent, dim, count, values)
        for dim, extent in enumerate(values.shape)
    ]


def _line(extent: int, axis: int, ndim: int, like: Any) -> Any:
    """Return the indices of an axis, along that axis."""
    shape = tuple(-1 if dim == axis else 1 for dim in range(ndim))
    return arrays.reshape(numbers_below(extent, like), shape)


def added_at(x: Any, indices: Sequence[Any], values: Any) -> Any:
    """Return zeros like an array, with values added to elements by an index along each of its first axes."""
    if is_ordered(values):
        added = arrays.scatter_nd(arrays.zeros_like(x), tuple(indices), values, reduce="add")
    else:
        added = _by_sort(_all_indices(x.shape, indices, values), values, x.shape)
    return Call(_ADDED_AT, (added, list(indices), values))


def _all_indices(shape: Sequence[int], indices: Sequence[Any], values: Any) -> list[Any]:
    """Return indices along all axes of an array, by indices along its first axes."""
    rest = len(shape) - len(indices)
    count = len(values.shape)
    all_indices = [index.reshape((*np.shape(index), *(1,) * rest)) for index in indices]
    all_indices += [_line(values.shape[dim], dim, count, values) for dim in range(count - rest, count)]
    return all_indices


def _first(added: Any, *_: object) -> Any:
    return added


def _taken_along(call: Any, g: Any) -> Iterator[tuple[Any, Callable[[], Any]]]:
    added, positions, values, axis = call.args
    yield added, nothing
    yield values, partial(arrays.take_along_axis, g, positions, axis=axis)


def _taken_at(call: Any, g: Any) -> Iterator[tuple[Any, Callable[[], Any]]]:
    added, indices, values = call.args
    yield added, nothing
    yield values, partial(arrays.gather_nd, g, tuple(indices))


def nothing() -> None:
    """Stop a gradient, because the values have it by another way."""


# The operand determines the device.
_NUMBERS: Any = Elementwise("i(0) + where(x == x, 0, 0)", operation="gradients.numbers")
_ADDED_ALONG = ArrayFunction("gradients.added_along", _first, "value", takes_hosts=True, rule=_taken_along)
_ADDED_AT = ArrayFunction("gradients.added_at", _first, "value", takes_hosts=True, rule=_taken_at)


def _by_sort(indices: Sequence[Any], values: Any, shape: Sequence[int]) -> Any:
    return sorted_sums(flat_positions(indices, shape, values), arrays.reshape(values, (-1,)), shape)


def _wide(index: Any) -> Any:
    """Return indices as int64, because positions of small integers would overflow."""
    if index.dtype == "int64":
        return index
    return index.astype("int64") if isinstance(index, np.ndarray) else index.cast("int64")


def flat_positions(indices: Sequence[Any], shape: Sequence[int], like: Any) -> Any:
    """Return the positions of elements in C order, as a vector.

    Args:
        indices: Indices along each axis.
        shape: The shape that they index.
        like: An array on the device, with the shape that the indices broadcast to.
    """
    flat: Any = 0
    for index, extent in zip(indices, shape, strict=True):
        flat = flat * extent + _wide(index) % extent
    # Indices of the host go to the device.
    return arrays.reshape(arrays.full_like(like, 0, dtype="int64") + flat, (-1,))
