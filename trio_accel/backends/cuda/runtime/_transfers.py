"""Copies between host and device, and pieces of pinned host memory for them."""

from __future__ import annotations

import bisect
import ctypes
import threading
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from ...base import as_bits
from ...base.host import address_of
from ...base.ops import HostUse
from ._context import CudaContext
from ._stream import CudaStream

__all__ = ["SMALL", "PinnedMemory", "Transfers"]

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


HostArray: TypeAlias = npt.NDArray[Any]

SMALL = 64 << 10
"""Arrays up to so many bytes go by way of a slot of pinned memory that is filled, or read, on the spot."""

_SLOTS = 64


class Transfers:
    """What moves arrays of the host: registered ones go straight, small ones by way of pinned memory.

    The driver copies from and to pageable memory while its caller waits. So an actor's device is given
    large arrays in registered memory, and only where there is none does the caller wait here. To hold the
    stream for a thread that copies would be worse: NVIDIA's libraries wait for the whole context when they
    load what they need first, and every other launch with them, that of the thread too.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        # Starts of registered ranges, sorted, and their ends.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._slots: list[HostArray] = []
        self._areas: list[int] = []
        self._lock = threading.Lock()
        # Held while pages are pinned, which takes long: never wanted where nothing may block.
        self._pinning = threading.Lock()
        self._is_closed = False

    def prepare(self) -> None:
        """Take the first pinned memory; blocks."""
        self._add_slots()

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
            # By a device that was closed while a stream of it was stuck: contexts of a process are one.
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
        """Where an array begins that the device transfers by itself; None of another."""
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
            stream: Where.
            host: The array.
            start: What `straight` says of it.
            address: Where it is copied to.

        Returns:
            How the array is used from now on; None if the device reads it.
        """
        nbytes = host.nbytes
        if start is not None:
            self._context.check(driver.cuMemcpyHtoDAsync(address, start, nbytes, stream.native))
            return None
        if nbytes <= SMALL:
            slot = self._take_slot()
            _copy(_shaped(slot, host), host)
            stream.after(partial(self._give_slot_back, slot))
            self._context.check(
                driver.cuMemcpyHtoDAsync(address, slot.ctypes.data, host.nbytes, stream.native)
            )
        else:
            packed = np.ascontiguousarray(host)
            self._context.check(
                driver.cuMemcpyHtoDAsync(address, packed.ctypes.data, host.nbytes, stream.native)
            )
        return HostUse(None)

    def to_host(self, stream: CudaStream, address: int, host: HostArray, start: int | None) -> HostUse | None:
        """Enqueue the copy of device memory to a host array, in C order; it is there at the next event.

        Args:
            stream: Where.
            address: What is copied.
            host: The array.
            start: What `straight` says of it.

        Returns:
            How the array is used from now on; None if the device writes it.
        """
        nbytes = host.nbytes
        if start is not None:
            self._context.check(driver.cuMemcpyDtoHAsync(start, address, nbytes, stream.native))
            return None
        if nbytes <= SMALL:
            slot = self._take_slot()
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
        self._slots.clear()
        areas, self._areas = self._areas, []
        for area in areas:
            driver.cuMemFreeHost(area)
        with self._pinning:
            self._is_closed = True
            for start in tuple(self._starts):
                self._forget(start)

    def _take_slot(self) -> HostArray:
        while True:
            with self._lock:
                if self._slots:
                    return self._slots.pop()
            # Without the lock: a fault that shows here has what others hold given back.
            self._add_slots()

    def _add_slots(self) -> None:
        area, memory = self._pinned(_SLOTS * SMALL)
        self._areas.append(area)
        self._slots += [memory[start : start + SMALL] for start in range(0, _SLOTS * SMALL, SMALL)]

    def _give_slot_back(self, slot: HostArray) -> None:
        with self._lock:
            self._slots.append(slot)

    def _fetch(self, slot: HostArray, use: HostUse) -> None:
        host = use.begin()
        try:
            if host is not None:
                _copy(host, _shaped(slot, host))
        finally:
            use.end()
            self._give_slot_back(slot)

    def _pinned(self, nbytes: int) -> tuple[int, HostArray]:
        with self._context:
            flags = driver.CU_MEMHOSTALLOC_PORTABLE
            area = int(self._context.check(driver.cuMemHostAlloc(nbytes, flags)))
        return area, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(area))


def _shaped(slot: HostArray, like: HostArray) -> HostArray:
    return slot[: like.nbytes].view(like.dtype).reshape(like.shape)


def _copy(target: HostArray, source: HostArray) -> None:
    np.copyto(as_bits(target), as_bits(source))
