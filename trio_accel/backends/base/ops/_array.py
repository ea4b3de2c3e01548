"""Where an array lies in device memory, and how."""

from __future__ import annotations

import functools
import math

import attrs

from ..dtypes import DType

__all__ = ["ArraySpec", "contiguous_strides"]

_MOST_LAYOUTS = 1024


@attrs.define(on_setattr=None, unsafe_hash=True)
class ArraySpec:
    """An array in device memory: where it lies and how it is laid out.

    Not to be changed once it is made, which is not enforced: that would take longer than to make it.

    Attributes:
        block: Id of the memory block.
        offset: Bytes from the start of the block to the first element.
        dtype: Element type.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
    """

    block: int
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return self.size <= 1 or self.strides == contiguous_strides(self.shape, self.dtype.itemsize)


@functools.lru_cache(_MOST_LAYOUTS)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-ordered array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(int(extent), 1)
    return tuple(reversed(strides))
