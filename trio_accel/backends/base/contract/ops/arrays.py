"""Specifications of functions that move, order and count the elements of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from ..dtypes import DType, Ints
from ..errors import LibraryError
from ._array import ArraySpec, StatusArray, exact, reads, status, writes
from ._spec import OperationSpec, specification

__all__ = [
    "IDENTITIES",
    "Combination",
    "CountSpec",
    "GroupSpec",
    "Scan",
    "ScanSpec",
    "SearchSpec",
    "SegmentSpec",
    "SelectSpec",
    "SortSpec",
    "accumulator_of",
    "identity_of",
    "number_of",
]

Combination: TypeAlias = Literal["sum", "prod", "min", "max"]
"""What elements are combined by."""

Scan: TypeAlias = Literal["sum", "prod", "min", "max", "logaddexp"]
"""What elements up to each one are combined by."""

IDENTITIES: Mapping[str, int] = {"sum": 0, "prod": 1}
"""The neutral elements that are the same for all dtypes."""


def identity_of(combine: str, dtype: DType) -> complex:
    """Return the neutral element; for a comparison, the last number in its order."""
    if combine in IDENTITIES:
        return IDENTITIES[combine]
    is_least = combine != "min"
    if dtype.is_inexact:
        return -np.inf if is_least else np.inf
    if dtype is DType.bool:
        return not is_least
    limits = np.iinfo(dtype.dtype)
    return int(limits.min if is_least else limits.max)


# The keys are names, because the hash of a low-precision type imports ml_dtypes.
_WIDE = {**dict.fromkeys(("float16", "bfloat16", "float32"), DType.float64), "complex64": DType.complex128}


def accumulator_of(dtype: DType) -> DType:
    """Return the dtype that elements are added and multiplied in: rounded once, at the end."""
    return _WIDE.get(dtype.value, dtype)


@specification
class SortSpec(OperationSpec):
    """The first elements along an axis in order, and where they were: stable.

    NaN counts as larger than every number. Zeros of both signs are equal.

    Attributes:
        axis: The axis, not negative.
        descending: Whether the largest elements come first.
        x: The array: real numbers or truth values.
        values: The elements; their extent along the axis is the requested number.
        indices: Their indices along the axis, of int64.
        kth: The places whose elements must be right. Other elements may be in any order between them, and so
            may zeros of both signs. Empty for all places.
    """

    axis: int = exact()
    descending: bool = exact()
    x: ArraySpec = reads()
    values: ArraySpec | None = writes(optional=True)
    indices: ArraySpec | None = writes(optional=True)
    kth: Ints = exact()


@specification
class GroupSpec(OperationSpec):
    """The groups of equal elements in a vector, and their number. NaN is equal to nothing.

    Attributes:
        is_sorted: Whether all equal elements make a group, and groups are in ascending order. Otherwise equal
            neighbours make a group, and groups are in the order of the vector.
        x: The vector.
        values: The first element of each group. This and the next two are as long as the vector, and filled
            at the beginning.
        counts: The number of elements in each group, of int64.
        indices: Index of the first element of each group, of int64.
        inverse: The group of each element, of int64.
        count: The number of groups, an int64 in two words.
    """

    is_sorted: bool = exact()
    x: ArraySpec = reads()
    values: ArraySpec = writes()
    counts: ArraySpec | None = writes(optional=True)
    indices: ArraySpec | None = writes(optional=True)
    inverse: ArraySpec | None = writes(optional=True)
    count: StatusArray = status()


@specification
class SelectSpec(OperationSpec):
    """The items with nonzero flags, or their indices.

    Attributes:
        is_whole: Whether the other items follow the selected ones, in their order.
        flags: Items with a nonzero flag are selected.
        x: Items: an array whose first axes are the axes of `flags`. Without it, `out` gets indices.
        out: One array with a place for each item, filled at the beginning; or for each axis of `flags` an
            array of indices, of int64.
        count: The number of selected items, an int64 in two words.
    """

    is_whole: bool = exact()
    flags: ArraySpec = reads()
    x: ArraySpec | None = reads(optional=True)
    out: tuple[ArraySpec, ...] = writes(variadic=True)
    count: StatusArray = status()


@specification
class SearchSpec(OperationSpec):
    """The places to insert values into a vector in ascending order, so that it stays in order.

    Attributes:
        side: Whether to insert before (``"left"``) or after (``"right"``) equal elements.
        edges: The vector.
        x: The values.
        sorter: Indices that sort the vector; None if it is sorted.
        out: Indices, of int64 and the shape of `x`.
        fault: One word: whether an index of `sorter` is out of range.
    """

    side: Literal["left", "right"] = exact()
    edges: ArraySpec = reads()
    x: ArraySpec = reads()
    sorter: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    fault: StatusArray = status()

    def check_status(self) -> None:
        """Refuse indices out of range."""
        if self.fault[0]:
            _fail("searchsorted", f"an index of sorter is out of range for {self.edges.size} elements")


@specification
class CountSpec(OperationSpec):
    """The number of elements in each bin, or the sum of their weights.

    Attributes:
        x: Elements: integers that are the bins' numbers, or numbers if there are edges.
        edges: Edges of the bins in ascending order, one more than there are bins. A bin includes its lower
            edge, and the last bin both edges. Elements outside of all bins are not counted.
        bounds: The least and the largest integer to count, which replace the outer edges, because these are
            rounded. Empty to use the edges themselves.
        weights: Numbers of float64 to add instead of ones, with the shape of `x`.
        out: Counts of int64, or sums of float64.
        fault: One word: whether an element is not the number of a bin, if there are no edges.
    """

    x: ArraySpec = reads()
    edges: ArraySpec | None = reads(optional=True)
    bounds: Ints = exact()
    weights: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    fault: StatusArray = status()

    def check_status(self) -> None:
        """Refuse elements outside of all bins."""
        if self.fault[0]:
            _fail("bincount", f"an element of x is negative, or is not below {self.out.size}")


@specification
class SegmentSpec(OperationSpec):
    """Segments of a vector, each combined.

    Attributes:
        combine: How.
        x: The vector.
        offsets: The begin of each segment, and the end of the last one.
        out: One element for each segment.
        fault: One word: 1 for offsets out of range or decreasing, 2 for an empty segment without a result.
    """

    combine: Combination = exact()
    x: ArraySpec = reads()
    offsets: ArraySpec = reads()
    out: ArraySpec = writes()
    fault: StatusArray = status()

    def check_status(self) -> None:
        """Refuse wrong offsets, and empty segments without a least or largest element."""
        if self.fault[0] == 1:
            _fail("segmented_reduce", f"offsets must ascend, from 0 on to at most {self.x.size}")
        if self.fault[0]:
            _fail("segmented_reduce", f"a segment is empty, and {self.combine!r} has no result of nothing")


@specification
class ScanSpec(OperationSpec):
    """The elements up to each element along an axis, combined.

    Attributes:
        combine: How.
        axis: The axis, not negative.
        x: The array. Elements are converted to the dtype of `out` before they are combined.
        out: The results. With one more element along the axis, it begins with the result of no elements.
    """

    combine: Scan = exact()
    axis: int = exact()
    x: ArraySpec = reads()
    out: ArraySpec = writes()

    @property
    def has_initial(self) -> bool:
        """Whether the result of no elements is there."""
        return self.out.shape[self.axis] > self.x.shape[self.axis]


def number_of(words: StatusArray) -> int:
    """Return the int64 of two words."""
    return int(words.view(np.int64)[0])


def _fail(function: str, trouble: str) -> None:
    raise LibraryError(f"{function}: {trouble}", library="arrays", code="invalid_value")
