"""An array as kernels and libraries want it."""

from __future__ import annotations

import math

import attrs

from .dtypes import DType
from .ops import contiguous_strides

__all__ = ["DeviceArray"]


# Not frozen: three are made for each product, and that would take most of the time.
@attrs.define(eq=False)
class DeviceArray:
    """An array as kernels and libraries want it; not to be changed.

    Attributes:
        address: Of the first element.
        dtype: Element type.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
    """

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

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
        """Whether the elements lie in C order without gaps."""
        return self.size <= 1 or self.strides == contiguous_strides(self.shape, self.dtype.itemsize)

    @classmethod
    def packed(cls, address: int, dtype: DType, shape: tuple[int, ...]) -> DeviceArray:
        """One whose elements lie in C order without gaps."""
        return cls(address, dtype, shape, contiguous_strides(shape, dtype.itemsize))
