"""Arrays as kernels and libraries want them, and stacks of matrices seen otherwise: nothing is copied."""

from __future__ import annotations

import math

import attrs

from .dtypes import DType, Ints
from .ops import ArraySpec, contiguous_strides


# The class is not frozen: three are made for each product, and that would take most of the time.
@attrs.define(eq=False)
class DeviceArray:
    """An array as kernels and libraries want it; not to be changed.

    Attributes:
        address: The address of the first element.
        dtype: Element type.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
    """

    address: int
    dtype: DType
    shape: Ints
    strides: Ints

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in C order without gaps."""
        return self.size <= 1 or self.strides == contiguous_strides(self.shape, self.dtype.itemsize)

    @classmethod
    def packed(cls, address: int, dtype: DType, shape: Ints) -> DeviceArray:
        """Make an array with elements in C order, without gaps."""
        return cls(address, dtype, shape, contiguous_strides(shape, dtype.itemsize))


def stacked(array: ArraySpec | DeviceArray) -> int:
    """Return the number of matrices in a stack."""
    return math.prod(array.shape[:-2])


def transposed(array: DeviceArray) -> DeviceArray:
    """Return the matrices transposed."""
    shape, strides = array.shape, array.strides
    shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    return DeviceArray(array.address, array.dtype, shape, strides)


def first_rows(array: DeviceArray, rows: int) -> DeviceArray:
    """Return the first rows of each matrix."""
    return DeviceArray(array.address, array.dtype, (*array.shape[:-2], rows, array.shape[-1]), array.strides)


def diagonals(array: DeviceArray) -> DeviceArray:
    """Return the diagonal of each matrix."""
    shape = *array.shape[:-2], min(array.shape[-2:])
    strides = *array.strides[:-2], array.strides[-1] + array.strides[-2]
    return DeviceArray(array.address, array.dtype, shape, strides)


def broadcast(array: DeviceArray, shape: Ints) -> DeviceArray:
    """Return an array broadcast to a shape that it broadcasts to."""
    missing = len(shape) - len(array.shape)
    axes = zip(array.shape, array.strides, shape[missing:], strict=True)
    steps = tuple(step if extent == target else 0 for extent, step, target in axes)
    return DeviceArray(array.address, array.dtype, shape, (0,) * missing + steps)


def merged(shape: Ints, strides: tuple[Ints, ...]) -> tuple[Ints, tuple[Ints, ...]]:
    """Drop axes of one element, and join contiguous ones; the order stays. An index costs a division each."""
    extents: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        pairs = [(row, stride[axis]) for row, stride in zip(steps, strides, strict=True)]
        if extents and all(row[-1] == extent * step for row, step in pairs):
            extents[-1] *= extent
            for row, step in pairs:
                row[-1] = step
        else:
            extents.append(extent)
            for row, step in pairs:
                row.append(step)
    return tuple(extents), tuple(map(tuple, steps))
