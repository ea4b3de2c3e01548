"""Reductions of computed values by NumPy, in pieces that fit into the caches."""

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

# The number of elements mapped at a time.
_CHUNK_ELEMENTS = 1 << 18


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
        ufunc: Combines two values.
        dtype: The dtype of the combination.
        mapped: Computes values from operands, or from pieces of them, and broadcasts to a shape.
        operands: Arrays that broadcast to `shape`, and numbers.
        shape: Extents before the reduction.
        axes: The reduced axes, which the result does not have.
        is_there: Whether an operand already has the values.
    """
    strides = [array.strides for array in operands.values() if np.shape(array) == shape]
    groups, order = reduced_groups(shape, axes, strides)
    # All reductions except sums of rows combine elements in order, even if other axes are between.
    reduced_count = sum(is_reduced for _, is_reduced in groups)
    is_simple = reduced_count == 1 or (reduced_count and groups[-1][1] and ufunc is np.add)
    if math.prod(shape) <= _CHUNK_ELEMENTS or is_there or not is_simple:
        return np.asarray(ufunc.reduce(mapped(operands, shape), axis=axes, dtype=dtype))
    *outer, (extent, is_row) = groups
    three = math.prod(extent for extent, _ in outer), extent, 1
    if not is_row:
        three = outer[0][0] if len(outer) > 1 else 1, outer[-1][0], extent
    # Neighbours become one axis, for which an operand is copied only if it is broadcast along some of them.
    operands_3d = {
        number: np.broadcast_to(operand, shape).transpose(order).reshape(three)
        if np.ndim(operand)
        else operand
        for number, operand in operands.items()
    }

    def part(rows: slice, elements: slice) -> HostArray:
        pieces = {
            number: operand[rows, elements] if np.ndim(operand) else operand
            for number, operand in operands_3d.items()
        }
        return mapped(pieces, (rows.stop - rows.start, elements.stop - elements.start, three[2]))

    result = _in_pieces(part, ufunc, three)
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
    """Find in which order NumPy reduces an array that it made of others.

    Args:
        shape: Extents.
        axes: The reduced axes.
        strides: Strides of the other arrays; the first with all axes counts.

    Returns:
        Extents of groups of neighbouring axes, and whether each group is reduced or kept; and the order of
        axes.
    """
    order = list(range(len(shape)))
    steps = next((array_strides for array_strides in strides if len(array_strides) == len(shape)), ())
    if all(steps[axis] or shape[axis] == 1 for axis in order[: len(steps)]):
        # NumPy's result has the memory order of its operands.
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
    part: Callable[[slice, slice], HostArray], ufunc: Any, shape: tuple[int, int, int]
) -> HostArray:
    """Reduce the middle of three axes; `part` makes some rows, and some elements of them."""
    lead, count, tail = shape
    rows_per_piece, step = max(_CHUNK_ELEMENTS // (count * tail), 1), max(_CHUNK_ELEMENTS // tail, 1)

    def reduced(rows: slice, first: int, stop: int) -> Any:
        if ufunc is np.add and tail == 1 and stop - first > _CHUNK_ELEMENTS:
            # NumPy adds the sums of both halves.
            middle = first + (stop - first) // 2 - (stop - first) // 2 % 8
            return reduced(rows, first, middle) + reduced(rows, middle, stop)
        accumulator: HostArray | None = None
        for start in range(first, stop, step):
            values = part(rows, slice(start, min(start + step, stop)))
            if accumulator is not None:
                values = np.concatenate([accumulator, values], axis=1)
            accumulator = ufunc.reduce(values, axis=1, dtype=values.dtype, keepdims=True)
        return accumulator

    return np.concatenate(
        [
            reduced(slice(row, min(row + rows_per_piece, lead)), 0, count)
            for row in range(0, lead, rows_per_piece)
        ]
    )
