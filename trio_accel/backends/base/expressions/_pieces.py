"""Reductions of computed values by NumPy, in pieces that fit into the processor's caches.

The result is the same as if NumPy reduced one array of all values, so the order of its additions is
reproduced here. `reduced_groups` determines the order of the axes for compiled reductions also.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..contract.dtypes import HostArray, Ints
from ._expression import COMBINED

__all__ = ["reduced_groups"]

REDUCING = {**COMBINED, "mean": "add", "nanmin": "fmin", "nanmax": "fmax"}
"""NumPy's function that combines two values, by the name of the reduction."""

_CHUNK_ELEMENTS = 1 << 18  # computed at a time


def reduced_in_pieces(
    ufunc: Any,
    dtype: Any,
    mapped: Callable[[Mapping[int, Any], Ints], HostArray],
    operands: Mapping[int, Any],
    shape: Ints,
    axes: Ints,
    *,
    is_there: bool,
) -> HostArray:
    """Reduce computed values in the order in which NumPy reduces one array of all values.

    Args:
        ufunc: The ufunc that combines two values.
        dtype: The dtype in which values are combined.
        mapped: Computes the values from operands, or from pieces of them, and broadcasts them to a shape.
        operands: Arrays that broadcast to `shape`, and numbers.
        shape: The shape of the values.
        axes: The reduced axes, not negative.
        is_there: Whether the values are one of the operands, and not yet to be computed.

    Returns:
        The result, without the reduced axes.
    """
    strides = [array.strides for array in operands.values() if np.shape(array) == shape]
    groups, order = reduced_groups(shape, axes, strides)
    # NumPy sums each row, and then adds the sums. All other reductions combine the elements of all groups in
    # order, even if a retained axis is between the groups, which pieces cannot reproduce.
    reduced_count = sum(is_reduced for _, is_reduced in groups)
    is_simple = reduced_count == 1 or (reduced_count and groups[-1][1] and ufunc is np.add)
    if math.prod(shape) <= _CHUNK_ELEMENTS or is_there or not is_simple:
        return np.asarray(ufunc.reduce(mapped(operands, shape), axis=axes, dtype=dtype))
    *outer, (extent, is_row) = groups
    shape_3d = math.prod(extent for extent, _ in outer), extent, 1
    if not is_row:
        shape_3d = outer[0][0] if len(outer) > 1 else 1, outer[-1][0], extent
    # Join the axes of a group. `reshape` copies operands that cannot be viewed so, such as operands broadcast
    # along only some axes of a group.
    operands_3d = {
        number: np.broadcast_to(operand, shape).transpose(order).reshape(shape_3d)
        if np.ndim(operand)
        else operand
        for number, operand in operands.items()
    }

    def map_piece(rows: slice, elements: slice) -> HostArray:
        pieces = {
            number: operand[rows, elements] if np.ndim(operand) else operand
            for number, operand in operands_3d.items()
        }
        return mapped(pieces, (rows.stop - rows.start, elements.stop - elements.start, shape_3d[2]))

    result = _in_pieces(map_piece, ufunc, shape_3d)
    if is_row:
        result = result.reshape([extent for extent, _ in outer])
        remaining_axes = tuple(number for number, (_, is_reduced) in enumerate(outer) if is_reduced)
        result = (
            np.asarray(ufunc.reduce(result, axis=remaining_axes, dtype=dtype)) if remaining_axes else result
        )
    retained_axes = [axis for axis in order if axis not in axes]
    return result.reshape([shape[axis] for axis in retained_axes]).transpose(np.argsort(retained_axes))


def reduced_groups(
    shape: Ints, axes: Sequence[int], strides: Sequence[Ints]
) -> tuple[list[tuple[int, bool]], list[int]]:
    """Return the order in which NumPy reduces an array that it has computed from operands.

    Args:
        shape: The shape of the array.
        axes: The reduced axes, not negative.
        strides: The strides of each operand. The first operand with all axes determines the memory order of
            the array, unless it is broadcast.

    Returns:
        The groups, and the axes in memory order, the slowest first. The axes in a group are neighbours in
        memory, and all of them are reduced or all are retained. A group is its number of elements, and
        whether it is reduced.
    """
    order = list(range(len(shape)))
    steps = next((array_strides for array_strides in strides if len(array_strides) == len(shape)), ())
    if all(steps[axis] or shape[axis] == 1 for axis in order[: len(steps)]):
        # NumPy's result has the memory order of its operands; otherwise C order.
        order.sort(key=lambda axis: -abs(steps[axis]) if steps else 0)
    groups = list[tuple[int, bool]]()
    for axis in order:
        if shape[axis] == 1:
            continue
        is_reduced = axis in axes
        if groups and groups[-1][1] == is_reduced:
            groups[-1] = groups[-1][0] * shape[axis], is_reduced
        else:
            groups.append((shape[axis], is_reduced))
    return groups, order


def _in_pieces(
    map_piece: Callable[[slice, slice], HostArray], ufunc: Any, shape: tuple[int, int, int]
) -> HostArray:
    """Reduce the middle one of three axes; `map_piece` takes slices of the first and of the middle axis."""
    lead, count, tail = shape
    rows_per_piece, step = max(_CHUNK_ELEMENTS // (count * tail), 1), max(_CHUNK_ELEMENTS // tail, 1)

    def reduce_rows(rows: slice, first: int, stop: int) -> Any:
        if ufunc is np.add and tail == 1 and stop - first > _CHUNK_ELEMENTS:
            # NumPy sums pairwise: it splits a row at a multiple of 8, and adds the sums of both halves.
            middle = first + (stop - first) // 2 - (stop - first) // 2 % 8
            return reduce_rows(rows, first, middle) + reduce_rows(rows, middle, stop)
        accumulator: HostArray | None = None
        for start in range(first, stop, step):
            values = map_piece(rows, slice(start, min(start + step, stop)))
            if accumulator is not None:
                values = np.concatenate([accumulator, values], axis=1)
            accumulator = ufunc.reduce(values, axis=1, dtype=values.dtype, keepdims=True)
        return accumulator

    return np.concatenate(
        [
            reduce_rows(slice(row, min(row + rows_per_piece, lead)), 0, count)
            for row in range(0, lead, rows_per_piece)
        ]
    )
