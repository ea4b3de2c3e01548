"""Memory that a library needs for itself while it computes."""

from __future__ import annotations

from cuda.bindings import driver

from ..runtime._context import CudaContext
from ..runtime._memory import CudaMemory
from ..runtime._stream import CudaStream

__all__ = ["Workspace"]


class Workspace:
    """One area for each stream, which grows to what was needed at most; the stream orders its uses.

    From the driver's stream-ordered pool, and not from the chunks of arrays: it is lost with the context. It
    counts in the statistics of the device's memory, and the limit concerns it not.

    Args:
        context: The device's context.
        memory: Counts the bytes.
        library: Name of the library.
    """

    def __init__(self, context: CudaContext, memory: CudaMemory, library: str) -> None:
        self._context = context
        self._memory = memory
        self._library = library
        self._areas: dict[CudaStream, tuple[int, int]] = {}

    def reserve(self, stream: CudaStream, nbytes: int) -> int:
        """The address of at least so many bytes, free for the next operation on a stream.

        Raises:
            CudaMemoryError: There is not so much.
        """
        address, size = self._areas.get(stream, (0, 0))
        if size >= nbytes:
            return address
        larger = int(self._context.check(driver.cuMemAllocAsync(nbytes, stream.orders_memory.handle)))
        if size:
            self._context.check(driver.cuMemFreeAsync(address, stream.orders_memory.handle))
        self._areas[stream] = larger, nbytes
        self._memory.add_fixed_workspace(self._library, nbytes - size)
        return larger

    def close(self) -> None:
        """Give everything back, behind what uses it. The context is current."""
        for stream, (address, size) in self._areas.items():
            self._memory.add_fixed_workspace(self._library, -size)
            order = stream.orders_memory
            if order.is_destroyed:
                # It has ended, and with it all that used the area.
                driver.cuMemFreeAsync(address, 0)
            else:
                # Closed or not: work that nobody waits for any more may be on it.
                self._context.check(driver.cuMemFreeAsync(address, order.handle))
        self._areas.clear()
