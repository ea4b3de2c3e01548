"""Memory of one CPU device: blocks under ids that the caller chose."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..base import (
    ChunkAllocator,
    ChunkKeeper,
    MemoryStatistics,
    OutOfMemoryError,
    PlacedBlock,
    Placement,
)
from ..base.chunks import ALIGNMENT
from ..base.ops import ArraySpec
from ._processor import available_bytes
from ._shared import make_shared, map_shared

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

    Args:
        device: Name of the device.
        limit: The most bytes that its blocks may take.
        keeper: Gets the chunks, which are shared memory then.
    """

    def __init__(self, device: str, limit: int, keeper: ChunkKeeper | None = None) -> None:
        self._device = device
        self._limit = limit
        self._keeper = keeper
        self._used = 0
        self._peak = 0
        self._blocks: dict[int, HostArray] = {}
        self._chunks: dict[int, HostArray] = {}
        # Those of `_chunks` that are mapped and not adopted yet.
        self._mapped: set[int] = set()
        self._last_chunk = 0
        self._allocator = self._new_allocator()
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
            if nbytes > self._free():
                raise self._error(nbytes, self._free())
            try:
                place = self._allocator.allocate(block, nbytes)
            except MemoryError as error:
                raise self.exhausted(nbytes) from error
            self._add(block, place, nbytes)

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

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Map a chunk of another process; see `AccelDevice.map_chunk`. The descriptor stays the caller's."""
        self._kept()
        memory = map_shared(descriptor, nbytes)
        with self._lock:
            if chunk in self._chunks:
                raise ValueError(f"chunk {chunk} is there already")
            self._chunks[chunk] = memory
            self._mapped.add(chunk)
            self._last_chunk = max(self._last_chunk, chunk)

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk; see `AccelDevice.unmap_chunk`."""
        with self._lock:
            if chunk not in self._mapped:
                raise KeyError(f"chunk {chunk} is none that was mapped and not adopted")
            self._mapped.remove(chunk)
            del self._chunks[chunk]

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        """Take over the mapped chunks with their blocks; see `AccelDevice.adopt`."""
        self._kept()
        places = tuple(blocks)
        with self._lock:
            self._allocator.adopt(
                {chunk: self._chunks[chunk].nbytes for chunk in self._mapped},
                [(place.block, Placement(place.chunk, place.offset, place.nbytes)) for place in places],
            )
            self._mapped.clear()
            for place in places:
                self._add(place.block, self._allocator.placement(place.block), place.nbytes)

    def placement(self, block: int) -> PlacedBlock:
        """Tell where a block lies; see `AccelDevice.placement`."""
        self._kept()
        with self._lock:
            try:
                nbytes = self._blocks[block].nbytes
            except KeyError:
                raise KeyError(f"block {block} does not exist") from None
            place = self._allocator.placement(block)
            return PlacedBlock(block, nbytes, place.chunk, place.offset)

    def clear(self) -> None:
        """Give every block back; chunks that a keeper has stay as they are, and are forgotten."""
        with self._lock:
            if self._keeper is None:
                for block in self._blocks:
                    self._allocator.free(block)
                self._allocator.trim()
            else:
                self._allocator = self._new_allocator()
                self._chunks.clear()
                self._mapped.clear()
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

    def _kept(self) -> None:
        if self._keeper is None:
            raise RuntimeError(
                f"device {self._device} was opened without a keeper: its memory is its process's own"
            )

    def _free(self) -> int:
        """Bytes below the limit: adopted blocks may have gone beyond it."""
        return max(0, self._limit - self._used)

    def _add(self, block: int, place: Placement, nbytes: int) -> None:
        self._blocks[block] = self._chunks[place.chunk][place.offset : place.offset + nbytes]
        self._used += nbytes
        self._peak = max(self._peak, self._used)

    def _new_allocator(self) -> ChunkAllocator:
        return ChunkAllocator(self._make_chunk, self._drop_chunk, first=_FIRST_CHUNK)

    def _make_chunk(self, nbytes: int) -> tuple[int, int]:
        try:
            return self._add_chunk(nbytes)
        except MemoryError:
            self._allocator.trim()
            return self._add_chunk(nbytes)

    def _add_chunk(self, nbytes: int) -> tuple[int, int]:
        # Each try under an id of its own: a keeper that failed may have told others of the last one.
        self._last_chunk += 1
        chunk = self._last_chunk
        memory = _private(nbytes) if self._keeper is None else _exported(self._keeper, chunk, nbytes)
        self._chunks[chunk] = memory
        return chunk, memory.nbytes

    def _drop_chunk(self, chunk: int) -> None:
        del self._chunks[chunk]
        if self._keeper is not None:
            self._keeper.drop(chunk)

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for when the machine itself has no more.

        Args:
            requested: Bytes that were asked for; 0 where that is not known.
        """
        return self._error(requested, min(self._free(), available_bytes()))

    def _error(self, requested: int, free: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"{requested or 'an unknown number of'} bytes requested, {free} free of {self._limit}: release"
            " arrays, or open the device with a larger memory_limit if the machine has more",
            requested=requested,
            free=free,
            total=self._limit,
            device=self._device,
        )


def _private(nbytes: int) -> HostArray:
    """Memory of this process alone; NumPy aligns it to 16 bytes only."""
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.__array_interface__["data"][0] % ALIGNMENT
    return whole[start : start + nbytes]


def _exported(keeper: ChunkKeeper, chunk: int, nbytes: int) -> HostArray:
    # The system would promise more than there is, and end the process that takes it at its word.
    available = available_bytes()
    if nbytes > available:
        raise MemoryError(f"a chunk of {nbytes} bytes, {available} available")
    try:
        memory, descriptor = make_shared(nbytes)
    except OSError as error:
        raise MemoryError(f"a chunk of {nbytes} bytes: {error}") from error
    try:
        keeper.keep(chunk, memory.nbytes, descriptor)
    finally:
        os.close(descriptor)
    return memory
