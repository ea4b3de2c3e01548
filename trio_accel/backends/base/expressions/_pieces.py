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
    strides = [each.strides for each in operands.values() if np.shape(each) == shape]
    groups, order = reduced_groups(shape, axes, strides)
    # All reductions except sums of rows combine elements in order, even if other axes are between.
    many = sum(is_reduced for _, is_reduced in groups)
    is_simple = many == 1 or (many and groups[-1][1] and ufunc is np.add)
    if math.prod(shape) <= _CHUNK_ELEMENTS or is_there or not is_simple:
        return np.asarray(ufunc.reduce(mapped(operands, shape), axis=axes, dtype=dtype))
    *outer, (extent, is_row) = groups
    three = math.prod(extent for extent, _ in outer), extent, 1
    if not is_row:
        three = outer[0][0] if len(outer) > 1 else 1, outer[-1][0], extent
    # Neighbours become one axis, for which an operand is copied only if it is broadcast along some of them.
    given = {
        number: np.broadcast_to(each, shape).transpose(order).reshape(three) if np.ndim(each) else each
        for number, each in operands.items()
    }

    def part(rows: slice, elements: slice) -> HostArray:
        here = {number: each[rows, elements] if np.ndim(each) else each for number, each in given.items()}
        return mapped(here, (rows.stop - rows.start, elements.stop - elements.start, three[2]))

    made = _in_pieces(part, ufunc, three)
    if is_row:
        made = made.reshape([extent for extent, _ in outer])
        left = tuple(number for number, (_, is_reduced) in enumerate(outer) if is_reduced)
        made = np.asarray(ufunc.reduce(made, axis=left, dtype=dtype)) if left else made
    kept = [axis for axis in order if axis not in axes]
    return made.reshape([shape[axis] for axis in kept]).transpose(np.argsort(kept))


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
    steps = next((each for each in strides if len(each) == len(shape)), ())
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
    many, step = max(_CHUNK_ELEMENTS // (count * tail), 1), max(_CHUNK_ELEMENTS // tail, 1)

    def reduced(rows: slice, first: int, stop: int) -> Any:
        if ufunc is np.add and tail == 1 and stop - first > _CHUNK_ELEMENTS:
            # NumPy adds the sums of both halves.
            middle = first + (stop - first) // 2 - (stop - first) // 2 % 8
            return reduced(rows, first, middle) + reduced(rows, middle, stop)
        found: HostArray | None = None
        for start in range(first, stop, step):
            values = part(rows, slice(start, min(start + step, stop)))
            if found is not None:
                values = np.concatenate([found, values], axis=1)
            found = ufunc.reduce(values, axis=1, dtype=values.dtype, keepdims=True)
        return found

    return np.concatenate(
        [reduced(slice(row, min(row + many, lead)), 0, count) for row in range(0, lead, many)]
    )
