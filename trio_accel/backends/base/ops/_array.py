"""Arrays in device memory: place and layout; and arrays that other devices lend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import suppress

import attrs

from ..dtypes import DType

__all__ = ["ArraySpec", "PeerArray", "Peers", "contiguous_strides"]

_MOST_LAYOUTS = 1024


@attrs.define(on_setattr=None, unsafe_hash=True)
class ArraySpec:
    """An array in device memory: its place and layout.

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
        """Whether the elements are in C order without gaps."""
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


@attrs.frozen(eq=False)
class PeerArray:
    """An array that one part of an operation lends to the kernels of the others.

    Attributes:
        array: Its place and layout in the memory of its device.
        part: Number of the part that has it.
        owner: Its open device, as the backend knows it.
    """

    array: ArraySpec
    part: int
    owner: object


class Peers:
    """The other parts, as a kernel of one part sees them: arrays that they lend, and whether one has failed.

    While the kernel runs, the stream of every part has come to its kernel, and none goes on behind it.

    Attributes:
        arrays: The arrays that the part was given.
        failure: The error of another part, if one has failed.
    """

    __slots__ = ("_callbacks", "arrays", "failure")

    def __init__(self, arrays: tuple[PeerArray, ...]) -> None:
        self.arrays: tuple[PeerArray, ...] = arrays
        self.failure: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have something called on the Trio thread when another part fails; at once if one has.

        A kernel that waits for its peers stops waiting by this. The callback must be quick and not raise.
        """
        self._callbacks.append(callback)
        # A kernel may say so in a thread while the other part fails: looked at behind, none is overlooked.
        if self.failure is not None:
            self._call_back()

    def fail(self, failure: BaseException) -> None:
        """Another part has failed; called by the engine."""
        if self.failure is None:
            self.failure = failure
            self._call_back()

    def end(self) -> None:
        """End with the operation; called by the engine."""
        self._callbacks.clear()

    def _call_back(self) -> None:
        while self._callbacks:
            # The other thread may take the last one: each is called once.
            with suppress(IndexError):
                self._callbacks.pop()()
