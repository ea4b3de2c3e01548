"""Copies between host and device, and pieces of pinned host memory for them."""

from __future__ import annotations

import bisect
import ctypes
import threading
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from ...base import as_bits
from ...base.host import address_of
from ...base.ops import HostUse
from ...base.pools import PagePool
from ._context import CudaContext
from ._stream import CudaStream

__all__ = ["SMALL", "PinnedMemory", "Transfers"]

_LEAST = 64
# Number of the smallest pieces that are made at the start: an allocation takes the driver a while.
_FIRST = 256


@attrs.define(eq=False)
class _Pieces(PagePool[int]):
    """Addresses of pieces of one size; the context is current."""

    _context: CudaContext
    _nbytes: int
    _count: int

    def make_page(self) -> tuple[int, list[int]]:
        size = self._nbytes * self._count
        start = int(self._context.check(driver.cuMemHostAlloc(size, 0)))
        return start, list(range(start, start + size, self._nbytes))

    def free_page(self, page: int) -> None:
        driver.cuMemFreeHost(page)


class PinnedMemory:
    """Pieces by their size, a power of two; the context is current where they are taken."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._pools: dict[int, _Pieces] = {}
        with context:
            self._pool(_LEAST).add_page()

    def take(self, nbytes: int) -> int:
        """Return the address of at least so many bytes.

        Raises:
            CudaMemoryError: The machine has not so much.
        """
        return self._pool(nbytes).take()

    def give_back(self, nbytes: int, address: int) -> None:
        """Take back a piece of so many bytes."""
        self._pool(nbytes).give_back(address)

    def close(self) -> None:
        """Free everything; no stream runs."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, nbytes: int) -> _Pieces:
        size = max(_LEAST, 1 << (max(nbytes, 1) - 1).bit_length())
        pool = self._pools.get(size)
        if pool is None:
            # Two threads may come here together: `setdefault` gives both the pool that was stored first.
            count = _FIRST if size == _LEAST else 1
            pool = self._pools.setdefault(size, _Pieces(self._context, size, count))
        return pool


HostArray: TypeAlias = npt.NDArray[Any]

SMALL = 64 << 10
"""Arrays up to so many bytes go by way of a slot of pinned memory that is filled, or read, on the spot."""

_SLOTS = 64


@attrs.define(eq=False)
class _Slots(PagePool[HostArray]):
    """Pinned memory for small arrays, one each."""

    _context: CudaContext

    def make_page(self) -> tuple[int, list[HostArray]]:
        nbytes = _SLOTS * SMALL
        with self._context:
            area = int(self._context.check(driver.cuMemHostAlloc(nbytes, driver.CU_MEMHOSTALLOC_PORTABLE)))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(area))
        return area, [memory[start : start + SMALL] for start in range(0, nbytes, SMALL)]

    def free_page(self, page: int) -> None:
        driver.cuMemFreeHost(page)


class Transfers:
    """Copies of the host's arrays: registered ones go straight, small ones by way of pinned memory.

    The driver copies from and to pageable memory while its caller waits. So an actor's device is given
    large arrays in registered memory, and only without any does the caller wait here. A hold of the stream
    for a thread that copies would be worse: NVIDIA's libraries wait for the whole context when they load
    kernels, and every other launch waits with them, that of the thread too (D50).
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        # Starts of registered ranges, sorted, and their ends.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._slots = _Slots(context)
        self._lock = threading.Lock()
        # Held while pages are pinned, which takes long. Transfers take `_lock` only, and never wait for it.
        self._pinning = threading.Lock()
        self._is_closed = False

    def prepare(self) -> None:
        """Take the first pinned memory; blocks."""
        self._slots.add_page()

    def register(self, array: HostArray) -> None:
        """Pin memory of the host, so that it is transferred without a copy; blocks.

        Args:
            array: Contiguous; its memory must stay as long as it is registered.

        Raises:
            AccelError: The driver refused.
        """
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        with self._pinning, self._context:
            if self._is_closed:
                return
            result = driver.cuMemHostRegister(start, array.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
            # A device that was closed with a stuck stream leaves its memory registered, and all devices of a
            # process share the context: this is no error.
            if result[0] != driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
                self._context.check(result)
            with self._lock:
                index = bisect.bisect(self._starts, start)
                self._starts.insert(index, start)
                self._ends.insert(index, end)

    def unregister(self, array: HostArray) -> None:
        """Give the pages back to the system; no transfer uses them. Blocks."""
        with self._pinning:
            self._forget(array.ctypes.data)

    def _forget(self, start: int) -> None:
        with self._lock:
            index = bisect.bisect_left(self._starts, start)
            if index == len(self._starts) or self._starts[index] != start:
                return
            del self._starts[index], self._ends[index]
        if not self._context.is_dead:
            with self._context:
                driver.cuMemHostUnregister(start)

    def straight(self, host: HostArray) -> int | None:
        """Return the address of an array that the device transfers by itself; None of another."""
        start = address_of(host)
        return start if host.flags.c_contiguous and self._holds(start, host.nbytes) else None

    def _holds(self, start: int, nbytes: int) -> bool:
        with self._lock:
            index = bisect.bisect_right(self._starts, start) - 1
            return index >= 0 and start + nbytes <= self._ends[index]

    def to_device(
        self, stream: CudaStream, host: HostArray, start: int | None, address: int
    ) -> HostUse | None:
        """Enqueue the copy of a host array, in C order, to device memory. It is read until the next event.

        Args:
            stream: The stream.
            host: The array.
            start: Result of `straight` for it.
            address: Address of the target.

        Returns:
            How the array is used from now on; None if the device reads it.
        """
        use: HostUse | None = HostUse(None)
        if start is not None:
            use = None
        elif host.nbytes <= SMALL:
            slot = self._slots.take()
            _copy(_shaped(slot, host), host)
            stream.after(partial(self._slots.give_back, slot))
            start = int(slot.ctypes.data)
        else:
            # The driver has taken it when the call returns.
            packed = np.ascontiguousarray(host)
            start = int(packed.ctypes.data)
        self._context.check(driver.cuMemcpyHtoDAsync(address, start, host.nbytes, stream.native))
        return use

    def to_host(self, stream: CudaStream, address: int, host: HostArray, start: int | None) -> HostUse | None:
        """Enqueue the copy of device memory to a host array, in C order; it is there at the next event.

        Args:
            stream: The stream.
            address: Address of the source.
            host: The array.
            start: Result of `straight` for it.

        Returns:
            How the array is used from now on; None if the device writes it.
        """
        nbytes = host.nbytes
        if start is not None:
            self._context.check(driver.cuMemcpyDtoHAsync(start, address, nbytes, stream.native))
            return None
        if nbytes <= SMALL:
            slot = self._slots.take()
            self._context.check(
                driver.cuMemcpyDtoHAsync(slot.ctypes.data, address, host.nbytes, stream.native)
            )
            use = HostUse(host)
            stream.after(partial(self._fetch, slot, use))
            return use
        packed = host if host.flags.c_contiguous else np.empty(host.shape, host.dtype)
        self._context.check(driver.cuMemcpyDtoHAsync(packed.ctypes.data, address, host.nbytes, stream.native))
        if packed is not host:
            _copy(host, packed)
        return HostUse(None)

    def close(self) -> None:
        """Free the pinned memory and unregister the rest: no stream uses it any more.

        The context is current.
        """
        self._slots.close()
        with self._pinning:
            self._is_closed = True
            for start in tuple(self._starts):
                self._forget(start)

    def _fetch(self, slot: HostArray, use: HostUse) -> None:
        host = use.begin()
        try:
            if host is not None:
                _copy(host, _shaped(slot, host))
        finally:
            use.end()
            self._slots.give_back(slot)


def _shaped(slot: HostArray, like: HostArray) -> HostArray:
    return slot[: like.nbytes].view(like.dtype).reshape(like.shape)


def _copy(target: HostArray, source: HostArray) -> None:
    np.copyto(as_bits(target), as_bits(source))
