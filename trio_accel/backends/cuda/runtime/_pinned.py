"""Small pieces of pinned host memory, into which the device copies what the host is to look at."""

from __future__ import annotations

import threading

from cuda.bindings import driver

from ._context import CudaContext

__all__ = ["PinnedMemory"]

_LEAST = 64
# So many of the smallest ones are there from the beginning: to allocate takes the driver a while.
_FIRST = 256


class PinnedMemory:
    """Pieces by their size, a power of two; they stay for the next use until the device is closed."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._free: dict[int, list[int]] = {}
        self._all: list[int] = []
        # A thread of the device may give back while an operation takes.
        self._lock = threading.Lock()
        # In the thread that opens the device.
        with context:
            start = self._allocate(_FIRST * _LEAST)
        self._free[_LEAST] = list(range(start, start + _FIRST * _LEAST, _LEAST))

    def take(self, nbytes: int) -> int:
        """The address of at least so many bytes. The context is current.

        Raises:
            CudaMemoryError: The machine has not so much.
        """
        size = _size(nbytes)
        with self._lock:
            free = self._free.setdefault(size, [])
            if free:
                return free.pop()
        return self._allocate(size)

    def _allocate(self, nbytes: int) -> int:
        address = int(self._context.check(driver.cuMemHostAlloc(nbytes, 0)))
        with self._lock:
            self._all.append(address)
        return address

    def give_back(self, nbytes: int, address: int) -> None:
        """Nobody uses a piece of so many bytes any more."""
        with self._lock:
            self._free[_size(nbytes)].append(address)

    def close(self) -> None:
        """Free everything; the context is current, and no stream runs."""
        with self._lock:
            addresses, self._all = self._all, []
            self._free.clear()
        for address in addresses:
            driver.cuMemFreeHost(address)


def _size(nbytes: int) -> int:
    return max(_LEAST, 1 << (max(nbytes, 1) - 1).bit_length())
