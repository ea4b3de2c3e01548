"""Memory of one CPU device: its blocks as host arrays, leases of them, and large ones in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from ...base import (
    ArraySpec,
    BlockMemory,
    ChunkKeeper,
    DType,
    HostArray,
    NotSupportedError,
    by_way_of_int64,
)
from ...base.kit.chunks import ALIGNMENT
from ...base.kit.host import available_bytes, make_shared, map_shared


class CpuMemory(BlockMemory[HostArray, HostArray]):
    """The blocks of one device, as host arrays.

    A chunk lives as long as a work item that uses it, so a stuck operation writes to memory of its own even
    after its device is closed. Fresh memory costs a page fault for every 4 KiB, which made a copy to it half
    as fast.

    Args:
        device: Name of the device.
        limit: The most bytes that its blocks may take.
        keeper: Gets the chunks, which are then shared memory.
    """

    def __init__(self, device: str, limit: int, keeper: ChunkKeeper | None = None) -> None:
        super().__init__(device, limit, _HostChunks(), keeper)

    def view(self, array: ArraySpec, *, write: bool = True) -> HostArray:
        """Make the array of a specification; without `write`, it cannot be made writable.

        Raises:
            KeyError: No block has this id.
            ValueError: The array is not within it.
        """
        memory, _ = self.block(array.block)
        # A view's flag can be set back if an array below it is writable. NumPy looks through a memoryview,
        # but not below `frombuffer`, which is the base of everything made from this view, and of nothing
        # else.
        data = np.frombuffer(memory.data if write else memory.data.toreadonly(), np.uint8)
        return np.ndarray(array.shape, array.dtype.dtype, data, array.offset, array.strides)


class _HostChunks:
    """Chunks of the machine's memory."""

    # The system allocates pages when they are written to, so unused memory costs nothing.
    first = 64 << 20
    keep = 256 << 20

    def make(self, nbytes: int) -> tuple[HostArray, int]:
        # NumPy aligns to 16 bytes only.
        padded = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -padded.__array_interface__["data"][0] % ALIGNMENT
        return padded[start : start + nbytes], nbytes

    def make_kept(self, nbytes: int, keeper: ChunkKeeper, chunk: int) -> tuple[HostArray, int]:
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
        return memory, memory.nbytes

    def map(self, nbytes: int, descriptor: int, *, write: bool) -> HostArray:
        return map_shared(descriptor, nbytes, write=write)

    def share(self, chunk: HostArray) -> HostArray:
        # The flag cannot be set back, because it belongs to a view of a read-only buffer.
        return np.frombuffer(chunk.data.toreadonly(), np.uint8)

    def drop(self, chunk: HostArray) -> None:
        """Do nothing, because the mapping ends with the last array over it."""

    def block(self, chunk: HostArray, offset: int, nbytes: int) -> HostArray:
        return chunk[offset : offset + nbytes]

    def available(self) -> int:
        return available_bytes()


class HostLease:
    """A host array that the program has; its work with it is done when it gives it back.

    Args:
        array: An array object of its own over the memory.
        stream: Refused, as there are none that a program could have.

    Attributes:
        array: The array.
    """

    __slots__ = ("array",)

    def __init__(self, array: HostArray, *, stream: object = None) -> None:
        if stream is not None:
            raise NotSupportedError("lease: stream: the CPU backend computes on no streams of others")
        self.array: HostArray = array

    def take_back(self) -> None:
        """Make the array read-only."""
        self.array.flags.writeable = False


# Large enough that a thread that takes the interpreter's lock back after each piece spends its time
# computing (0.02 ms from bfloat16, 0.3 ms from float16, 1.3 ms from float8), small enough for the caches.
_ELEMENTS = 1 << 18


def pieces(*arrays: HostArray) -> Iterator[tuple[HostArray, ...]]:
    """Cut arrays of one shape into views of at most 2**18 elements, alike in all of them."""
    first = arrays[0]
    if first.size <= _ELEMENTS:
        yield arrays
        return
    rows = _ELEMENTS // (first.size // len(first))
    if rows == 0:
        for row in range(len(first)):
            yield from pieces(*(array[row] for array in arrays))
        return
    for start in range(0, len(first), rows):
        yield tuple(array[start : start + rows] for array in arrays)


def convert(source: HostArray, out: HostArray) -> None:
    """Copy to another type of element, as `numpy.ndarray.astype` does."""
    # Up to 0.5.1 ml_dtypes converts with the interpreter's lock held: 1.3 ms for a piece at most.
    is_numpys_own = source.dtype.isbuiltin == out.dtype.isbuiltin == 1 and out.dtype != np.uint32
    for source_piece, out_piece in [(source, out)] if is_numpys_own else pieces(source, out):
        np.copyto(out_piece, by_way_of_int64(source_piece, out.dtype), casting="unsafe")


def to_float32(source: HostArray) -> HostArray:
    """Copy to a new array of float32, with axes in the same order in memory."""
    out: HostArray = np.empty_like(source, np.float32)
    convert(source, out)
    return out


def widened(array: HostArray) -> HostArray:
    """Return an array in the type that it is computed in."""
    return to_float32(array) if DType.of(array.dtype).is_half else array
