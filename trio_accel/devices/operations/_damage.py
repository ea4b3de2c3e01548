"""Damage of blocks: bytes that an operation was to write and did not finish, until they are overwritten."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import attrs

from ...backends.base.contract.ops import ArraySpec
from ..base._views import reach

__all__ = ["Damage", "Ranges", "in_turn", "meet", "ranges_of", "without"]

Ranges: TypeAlias = "list[tuple[int, int]]"
"""Ranges of bytes of a block: sorted, none empty, with gaps between them."""

in_turn: Callable[[], int] = partial(next, itertools.count(1))
"""Number launches in the order in which they were planned. Those of one block are begun in this order."""

# A view of more pieces counts as all bytes from its first to its last, or as none.
_MOST = 4096


@attrs.frozen(eq=False)
class Damage:
    """Damage by one operation.

    Attributes:
        by: Name of the operation.
        failure: Its error.
        ranges: What is damaged.
        turn: Number of the operation: later ones may heal it, earlier ones do not.
    """

    by: str
    failure: BaseException | None
    ranges: Ranges
    turn: int


def ranges_of(arrays: Sequence[ArraySpec], *, at_most: bool = False) -> Ranges:
    """Find the bytes that arrays of one block have.

    Args:
        arrays: The arrays.
        at_most: Whether one that is too scattered is left out; else all bytes in between count.
    """
    found: Ranges = []
    for array in arrays:
        if array.size:
            pieces = _pieces(array)
            found += pieces if pieces is not None else [] if at_most else [reach(array)]
    return _joined(found)


def _pieces(array: ArraySpec) -> Ranges | None:
    """Return the ranges of an array, in any order; None if there are too many."""
    starts, run = [reach(array)[0]], array.dtype.itemsize
    for step, count in sorted((abs(step), n) for step, n in zip(array.strides, array.shape, strict=True)):
        if step <= run:
            run += step * (count - 1)
        elif len(starts) * count > _MOST:
            return None
        else:
            starts = [start + step * index for start in starts for index in range(count)]
    return [(start, start + run) for start in starts]


def _joined(ranges: Ranges) -> Ranges:
    """Sort ranges, and join those that meet."""
    joined: Ranges = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what is left of ranges without others."""
    left: Ranges = []
    place = 0
    for start, end in ranges:
        while place < len(others) and others[place][1] <= start:
            place += 1
        index, rest = place, start
        while index < len(others) and others[index][0] < end:
            if rest < others[index][0]:
                left.append((rest, others[index][0]))
            rest = others[index][1]
            index += 1
        if rest < end:
            left.append((rest, end))
    return left


def meet(ranges: Ranges, others: Ranges) -> bool:
    """Tell whether ranges have a byte in common with others."""
    return without(ranges, others) != ranges
