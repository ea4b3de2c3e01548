"""Memory of one CPU device: blocks under ids that the caller chose."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...base import BlockMemory, ChunkKeeper
from ...base.chunks import ALIGNMENT
from ...base.host import available_bytes, make_shared, map_shared
from ...base.ops import ArraySpec

__all__ = ["CpuMemory", "HostArray"]

HostArray: TypeAlias = npt.NDArray[Any]


class CpuMemory(BlockMemory[HostArray, HostArray]):
    """The blocks of one device, as host arrays.

    A chunk lives as long as a work item that uses it: an operation that is stuck when its device is
    closed writes to memory that is still its own. Fresh memory costs a page fault for every 4 KiB, which
    made a copy to it half as fast.

    Args:
        device: Name of the device.
        limit: The most bytes that its blocks may take.
        keeper: Gets the chunks, which are shared memory then.
    """

    def __init__(self, device: str, limit: int, keeper: ChunkKeeper | None = None) -> None:
        super().__init__(device, limit, _Source(), keeper)

    def view(self, array: ArraySpec) -> HostArray:
        """Make the array of a specification.

        Raises:
            KeyError: There is no such block.
            ValueError: The array does not lie within it.
        """
        memory, _ = self.block(array.block)
        return np.ndarray(array.shape, array.dtype.dtype, memory.data, array.offset, array.strides)


class _Source:
    """Chunks of the machine's memory."""

    # The system gives pages when they are written to: what is not used costs nothing.
    first = 64 << 20
    keep = 256 << 20

    def make(self, nbytes: int) -> tuple[HostArray, int]:
        # NumPy aligns to 16 bytes only.
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -whole.__array_interface__["data"][0] % ALIGNMENT
        return whole[start : start + nbytes], nbytes

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

    def map(self, nbytes: int, descriptor: int) -> HostArray:
        return map_shared(descriptor, nbytes)

    def drop(self, chunk: HostArray) -> None:
        """The mapping goes with the last array over it."""

    def block(self, chunk: HostArray, offset: int, nbytes: int) -> HostArray:
        return chunk[offset : offset + nbytes]

    def available(self) -> int:
        return available_bytes()
