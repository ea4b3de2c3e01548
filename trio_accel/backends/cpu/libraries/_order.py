"""Stable order by NumPy's default sorts, which are up to ten times as fast as its stable ones.

Equal elements differ only in their places, or in the bits of zeros and NaN, which are put right after the
sort. Integers of one and two bytes have a radix sort, which is stable, and the fastest.
"""

from __future__ import annotations

import numpy as np

from ...base import DType, HostArray, Ints

# NumPy inserts the elements of rows up to this length one by one, which is stable, and the fastest.
_INSERTION_SORT_LENGTH = 24
# If at most one in this number of elements is needed, they are selected before they are sorted.
_PARTITION_RATIO = 8


def comparable(x: HostArray) -> HostArray:
    """Return numbers in a type that NumPy sorts itself, because it cannot sort `ml_dtypes` types with NaN."""
    return x.astype(np.float32) if x.dtype.isbuiltin != 1 else x


def sort_to(out: HostArray, x: HostArray, *, descending: bool = False, kth: Ints = ()) -> None:
    """Sort along the last axis. NaN counts as larger than every number; equal elements keep their order.

    Args:
        out: The array for the elements.
        x: The elements.
        descending: Whether the largest elements come first.
        kth: The only places whose elements must be right; see `SortSpec`.
    """
    target = out[..., ::-1] if descending else out
    if out.dtype.isbuiltin == 1:
        np.copyto(target, x)
        if kth and not _is_small(target):
            target.partition(kth)
            return
        target.sort(kind="stable" if _is_small(target) else None)
    else:
        np.copyto(target, np.sort(comparable(x)), casting="unsafe")
    if x.size and DType.of(x.dtype).is_inexact:
        # Masks take elements row by row, so elements of equal value come in the order of the array.
        zeros = out == 0
        if zeros.any():
            out[zeros] = x[x == 0]
        if np.isnan(target[..., -1:]).any():
            out[np.isnan(out)] = x[np.isnan(x)]


def order_of(x: HostArray, *, descending: bool = False) -> HostArray:
    """Return the indices that sort along the last axis; equal elements keep their order."""
    count = x.shape[-1]
    if descending:
        # Backwards twice: equal elements keep their order.
        turned: HostArray = count - 1 - order_of(x[..., ::-1])[..., ::-1]
        return turned
    key = comparable(x)
    if _is_small(key) or count <= _INSERTION_SORT_LENGTH:
        return np.argsort(key, kind="stable")
    key = _as_integers(key)
    if key.itemsize == 4:
        # NumPy has a radix sort of 16 bits: by the lower half, and then by the upper one.
        low = np.argsort(key.astype(np.uint16), kind="stable")
        upper = np.take_along_axis((key >> 16).astype(np.int16), low, -1)
        return np.take_along_axis(low, np.argsort(upper, kind="stable"), -1)
    order = np.argsort(key)
    ordered = np.take_along_axis(key, order, -1)
    differs = ordered[..., 1:] != ordered[..., :-1]
    if not differs.all():
        # Indices of equal elements are sorted, after the indices of smaller elements.
        first: HostArray = np.zeros(order.shape, np.int64)
        np.cumsum(differs, -1, out=first[..., 1:])
        first *= count
        order += first
        order.sort()
        order -= first
    return order


def first_of(x: HostArray, count: int, *, descending: bool) -> HostArray:
    """Return the indices of the first elements in order along the last axis: of equal ones the first."""
    if not 0 < count * _PARTITION_RATIO <= x.shape[-1]:
        return order_of(x, descending=descending)[..., :count]
    key = comparable(x)
    if key.dtype.kind == "f" and np.isnan(key).any():
        key = _as_integers(key)
    taken: HostArray
    position = x.shape[-1] - count if descending else count - 1
    edge = np.partition(key, position)[..., position : position + 1]
    taken = key >= edge if descending else key <= edge
    if np.count_nonzero(taken) > x.size // x.shape[-1] * count:
        level = key == edge
        taken ^= level
        remaining: HostArray = np.subtract(count, taken.sum(-1, keepdims=True))
        taken |= level & (np.cumsum(level, -1) <= remaining)
    indices = np.nonzero(taken)[-1].reshape(*x.shape[:-1], count)
    order = order_of(np.take_along_axis(x, indices, -1), descending=descending)
    return np.take_along_axis(indices, order, -1)


def _is_small(key: HostArray) -> bool:
    return key.itemsize < 3 and key.dtype.kind != "f"


def _as_integers(key: HostArray) -> HostArray:
    """Return numbers as integers of the same order: equal for zeros, and for NaN, which comes last."""
    if key.dtype.kind != "f":
        return key.astype(np.int64) if key.dtype == np.uint32 else key
    key = key.astype(np.float32) if key.itemsize == 2 else key
    number = key + key.dtype.type(0)
    np.copyto(number, np.nan, where=key != key)  # noqa: PLR0124  # NaN
    bits: HostArray = number.view(np.int32 if key.itemsize == 4 else np.int64)
    # Below zero a larger number has smaller bits.
    bits ^= bits >> (8 * key.itemsize - 1) & np.iinfo(bits.dtype).max
    return bits
