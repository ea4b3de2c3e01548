"""Memory of one CPU device: blocks under ids that the caller chose."""

from __future__ import annotations

import itertools
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..base import ChunkAllocator, MemoryStatistics, OutOfMemoryError
from ..base.chunks import ALIGNMENT
from ..base.ops import ArraySpec
from ._processor import available_bytes

__all__ = ["CpuMemory", "HostArray"]

HostArray: TypeAlias = npt.NDArray[Any]

# The system gives pages when they are written to: what is not used costs nothing.
_FIRST_CHUNK = 64 << 20


class CpuMemory:
    """The blocks of one device, and how many bytes they take.

    Blocks lie in chunks that are kept for the next blocks: memory that is fresh from the system
    costs a page fault for every 4 KiB, which made a copy to it half as fast. A chunk lives as long
    as a work item that uses it: an operation that is stuck when its device is closed writes to
    memory that is still its own.
    """

    def __init__(self, device: str, limit: int) -> None:
        self._device = device
        self._limit = limit
        self._used = 0
        self._peak = 0
        self._blocks: dict[int, HostArray] = {}
        self._chunks: dict[int, HostArray] = {}
        self._numbers = itertools.count(1)
        self._allocator = ChunkAllocator(self._make_chunk, self._chunks.__delitem__, first=_FIRST_CHUNK)
        # The engine allocates in Trio's thread, a device is closed in another.
        self._lock = threading.Lock()

    def allocate(self, block: int, nbytes: int) -> None:
        """Make a block of uninitialised memory.

        Raises:
            OutOfMemoryError: The limit, or the machine, has not so much left.
            KeyError: The id is taken.
            ValueError: The size is negative.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes: {nbytes} is negative")
        with self._lock:
            if block in self._blocks:
                raise KeyError(f"block {block} exists already")
            if nbytes > self._limit - self._used:
                raise self._error(nbytes, self._limit - self._used)
            try:
                place = self._allocator.allocate(block, nbytes)
            except MemoryError as error:
                raise self.exhausted(nbytes) from error
            self._blocks[block] = self._chunks[place.chunk][place.offset : place.offset + nbytes]
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def free(self, block: int) -> None:
        """Give a block back.

        Raises:
            KeyError: There is no such block.
        """
        with self._lock:
            try:
                memory = self._blocks.pop(block)
            except KeyError:
                raise KeyError(f"block {block} does not exist") from None
            self._allocator.free(block)
            self._used -= memory.nbytes

    def clear(self) -> None:
        """Give every block back."""
        with self._lock:
            for block in self._blocks:
                self._allocator.free(block)
            self._allocator.trim()
            self._blocks.clear()
            self._used = 0

    def view(self, array: ArraySpec) -> HostArray:
        """Make the array of a specification.

        Raises:
            KeyError: There is no such block.
            ValueError: The array does not lie within it.
        """
        try:
            memory = self._blocks[array.block]
        except KeyError:
            raise KeyError(f"block {array.block} does not exist") from None
        return np.ndarray(array.shape, array.dtype.dtype, memory.data, array.offset, array.strides)

    def statistics(self) -> MemoryStatistics:
        """Count the blocks and their bytes."""
        with self._lock:
            return MemoryStatistics(
                used=self._used,
                reserved=self._allocator.reserved,
                peak=self._peak,
                blocks=len(self._blocks),
                limit=self._limit,
            )

    def _make_chunk(self, nbytes: int) -> tuple[int, int]:
        try:
            whole: HostArray = np.empty(nbytes + ALIGNMENT, np.uint8)
        except MemoryError:
            self._allocator.trim()
            whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        # NumPy aligns to 16 bytes only.
        start = -whole.__array_interface__["data"][0] % ALIGNMENT
        number = next(self._numbers)
        self._chunks[number] = whole[start : start + nbytes]
        return number, nbytes

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for when the machine itself has no more.

        Args:
            requested: Bytes that were asked for; 0 where that is not known.
        """
        return self._error(requested, min(self._limit - self._used, available_bytes()))

    def _error(self, requested: int, free: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"{requested or 'an unknown number of'} bytes requested, {free} free of {self._limit}: release"
            " arrays, or open the device with a larger memory_limit if the machine has more",
            requested=requested,
            free=free,
            total=self._limit,
            device=self._device,
        )
