"""Host memory that a device transfers from and to on its own: its pool, registration, and copies."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio
from numpy.lib.array_utils import byte_bounds
from trio.lowlevel import enable_ki_protection

from ...actors import describe
from ...backends.base import (
    AccelDevice,
    ChunkAllocator,
    HostArray,
    Ints,
    OutOfMemoryError,
    as_bits,
)
from ...backends.base.kit.host import address_of, available_bytes, make_shared, total_bytes
from ._bridge import LoopNotifier
from ._errors import is_out_of_files, out_of_descriptors
from ._waits import Arrival

# The unit of allocation is a whole page, so that no two arrays share one.
_PAGE = 4096
_FIRST = 64 << 20
_LARGEST = 256 << 20
# D32: empty slabs are cached up to a share of the host's memory, within these limits. Making a gigabyte,
# registering it with the driver and unregistering it takes longer than copying it.
_CACHE_SHARE, _CACHE_LEAST, _CACHE_MOST = 32, 256 << 20, 2 << 30
_MAX_SLABS = 512
# Dropped regions are freed with the next array, or soon if they are large or there are many.
_LARGE_PIECE_BYTES = 1 << 20
_MAX_DROPPED_PIECES = 64


@attrs.frozen(eq=False)
class Slab:
    """A piece of memory for several arrays. It is unmapped when the last array over it is dropped.

    Attributes:
        number: Its id in the pool.
        memory: The memory.
        address: Its start address.
        descriptor: Its file descriptor for other processes; None if it is not shared.
    """

    number: int
    memory: npt.NDArray[np.uint8]
    address: int
    descriptor: int | None

    @property
    def nbytes(self) -> int:
        """The size of the slab."""
        return self.memory.nbytes


@attrs.define(eq=False)
class SlabRegion:
    """Memory for one array in a slab. It returns to the pool when nothing refers to it.

    NumPy keeps the origin of an array alive as its base. In a chain of arrays it keeps only the first, so the
    origin must not be an array itself: every view, however deep, keeps this object alive.
    """

    _number: int
    slab: Slab
    offset: int
    nbytes: int
    _drop: Callable[[int, int], None]

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self.slab.address + self.offset, False),
        }

    def array(self, shape: Ints, dtype: np.dtype[Any]) -> HostArray:
        """Return an array over its start, contiguous in C order."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory: npt.NDArray[np.uint8] = np.asarray(cast("Any", self))
        return memory[:nbytes].view(dtype).reshape(shape)

    def __del__(self) -> None:
        self._drop(self._number, self.nbytes)


_ADDRESS = attrgetter("address")


class HostPool:
    """Host arrays in a few large pieces of memory, which are registered with the device (D11).

    Registering memory takes long, so slabs are cached and reused. Their size doubles; a large array has its
    own slab. Arrays outlive the pool: closing it only forgets them.

    Everything except the end of an array happens on the Trio thread, protected from Ctrl-C (D16), because the
    program's own tasks may make the calls.

    Args:
        is_shared: Whether other processes need the memory.

    Attributes:
        slabs: The slabs by id.
        on_make: Called with each new slab.
        on_drop: Called with each slab that is freed; it no longer contains arrays.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self.slabs: dict[int, Slab] = {}
        self.on_make: Callable[[Slab], None] = lambda slab: None
        self.on_drop: Callable[[Slab], None] = lambda slab: None
        self.is_closed: bool = False
        self._is_shared = is_shared
        cache = min(max(_CACHE_LEAST, total_bytes() // _CACHE_SHARE), _CACHE_MOST)
        self._allocator = ChunkAllocator(
            self._make, self._give_back, first=_FIRST, largest=_LARGEST, keep=cache, max_chunks=_MAX_SLABS
        )
        self._slab_numbers = itertools.count(1)
        self._region_numbers = itertools.count(1)
        # Sorted by address.
        self._sorted: list[Slab] = []
        self._dropped: deque[int] = deque()
        # The copy of each program array, by its `id`. The weak reference removes it with the array.
        self._copies: dict[int, tuple[weakref.ref[HostArray], HostArray]] = {}
        # Devices may still write to regions up to this number; below, the dropped regions among them.
        self._unsure = 0
        self._held_back: list[int] = []
        self._is_notified = False
        self._notifier = LoopNotifier(self.drain)

    @property
    def used(self) -> int:
        """The bytes of all arrays, including arrays dropped since the last one was made."""
        return self._allocator.used

    @property
    def reserved(self) -> int:
        """The bytes of all slabs."""
        return self._allocator.reserved

    def empty(self, shape: Ints, dtype: np.dtype[Any]) -> HostArray:
        """Make an uninitialised array.

        Raises:
            MemoryError: The machine does not have enough memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        return self.region(nbytes).array(shape, dtype) if nbytes else np.empty(shape, dtype)

    @enable_ki_protection
    def region(self, nbytes: int) -> SlabRegion:
        """Allocate memory.

        Raises:
            MemoryError: The machine does not have enough memory.
        """
        self.drain()
        number = next(self._region_numbers)
        try:
            allocation = self._allocator.allocate(number, -(-nbytes // _PAGE) * _PAGE)
        except MemoryError:
            self._allocator.trim()
            allocation = self._allocator.allocate(number, -(-nbytes // _PAGE) * _PAGE)
        return SlabRegion(number, self.slabs[allocation.chunk], allocation.offset, nbytes, self._drop)

    def stage(self, nbytes: int) -> SlabRegion:
        """Allocate memory for the transit of an array.

        Raises:
            OutOfMemoryError: The machine does not have enough memory, or there are too many open files.
        """
        try:
            return self.region(nbytes)
        except MemoryError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and is_out_of_files(cause):
                raise out_of_descriptors(nbytes, cause) from error
            raise OutOfMemoryError(
                f"host memory for staging {nbytes} bytes between host and device is not available; make the "
                "array with device.host_empty(), which is not staged, or in smaller parts",
                requested=nbytes,
                free=available_bytes(),
                total=total_bytes(),
            ) from error

    def find(self, array: HostArray) -> tuple[int, int] | None:
        """Return the slab id of an array, and the byte offset of its first element.

        Returns:
            None if no slab contains the whole array.
        """
        if not self._sorted or not array.size:
            return None
        first = address_of(array)
        is_contiguous = array.flags.c_contiguous
        low, high = (first, first + array.nbytes) if is_contiguous else byte_bounds(array)
        index = bisect.bisect_right(self._sorted, low, key=_ADDRESS) - 1
        slab = self._sorted[index]
        if index < 0 or high > slab.address + slab.nbytes:
            return None
        return slab.number, first - slab.address

    def copy_of(self, array: HostArray) -> HostArray | None:
        """Return the copy of an array passed to `keep`; None if there is none."""
        # An entry ends with its array, before another object can get the same `id`.
        entry = self._copies.get(id(array))
        return None if entry is None else entry[1]

    def keep(self, array: HostArray, copy: HostArray) -> None:
        """Keep an array's copy, which is in the pool, while the array lives."""
        if not self.is_closed:
            copies, number = self._copies, id(array)
            copies[number] = weakref.ref(array, lambda _: copies.pop(number, None)), copy

    def drain(self) -> None:
        """Free dropped regions now."""
        self._is_notified = False
        if not self.is_closed:
            for _ in range(len(self._dropped)):
                region = self._dropped.popleft()
                if region <= self._unsure:
                    self._held_back.append(region)
                else:
                    self._allocator.free(region)

    def hold_back(self) -> None:
        """Prevent the reuse of arrays in use, because a lost device may still write to them."""
        self.drain()
        self._unsure = next(self._region_numbers)

    def let_go(self) -> None:
        """Allow the reuse of these arrays, because no lost device writes to them any longer."""
        self._unsure = 0
        self._dropped.extend(self._held_back)
        self._held_back.clear()
        self.drain()

    def close(self) -> None:
        """Forget everything. Existing arrays stay valid."""
        if self.is_closed:
            return
        self.is_closed = True
        self._notifier.close()
        for slab in self.slabs.values():
            if slab.descriptor is not None:
                os.close(slab.descriptor)
        self.slabs.clear()
        self._sorted.clear()
        self._copies.clear()

    def _drop(self, region: int, nbytes: int) -> None:
        """Take a region back. Any thread, including finalisers."""
        self._dropped.append(region)
        if (
            nbytes >= _LARGE_PIECE_BYTES or len(self._dropped) >= _MAX_DROPPED_PIECES
        ) and not self._is_notified:
            # The race of `BlockTable.drop`: a thread that finds the flag set has appended before, so `drain`
            # sees its region.
            self._is_notified = True
            self._notifier.notify()

    def _make(self, nbytes: int) -> tuple[int, int]:
        # The system promises more memory than exists, and kills a process that uses all of it.
        available = available_bytes()
        if nbytes > available:
            raise MemoryError(f"{nbytes} bytes of host memory, {available} available")
        try:
            memory, descriptor = make_shared(nbytes) if self._is_shared else (_make_private(nbytes), None)
        except OSError as error:
            raise MemoryError(f"{nbytes} bytes of host memory: {error}") from error
        address = address_of(memory)
        slab = Slab(next(self._slab_numbers), memory, address, descriptor)
        self.slabs[slab.number] = slab
        bisect.insort(self._sorted, slab, key=_ADDRESS)
        try:
            self.on_make(slab)
        except OSError as error:
            # The workers have run out of descriptors (D74).
            self._give_back(slab.number)
            raise MemoryError(f"{nbytes} bytes of host memory: {error}") from error
        return slab.number, slab.nbytes

    def _give_back(self, number: int) -> None:
        slab = self.slabs.pop(number)
        self._sorted.remove(slab)
        self.on_drop(slab)
        if slab.descriptor is not None:
            os.close(slab.descriptor)


def _make_private(nbytes: int) -> npt.NDArray[np.uint8]:
    # A shared mapping, because in a private one a fork would make pages copy-on-write. Then the device would
    # write to the old page while the program reads the new one.
    return np.frombuffer(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)


MAX_INLINE_BYTES = 64 << 10
"""Host arrays up to this number of bytes are sent with a message, or copied on the spot."""

COPIES_AT_ONCE = 2
"""The number of concurrent copies that saturates the memory."""

# The maximum bytes of one copy step, because cancelling it must take effect soon.
_CHUNK_BYTES = 8 << 20


class Copying:
    """A copy in a thread that can be cancelled between two pieces."""

    def __init__(self, target: HostArray, source: HostArray) -> None:
        self._target = as_bits(target)
        self._source = as_bits(source)
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the copy soon. Any thread."""
        self._is_cancelled = True

    def run(self) -> None:
        """Copy; blocks."""
        for target, source in _pieces(self._target, self._source):
            if self._is_cancelled:
                return
            np.copyto(target, source)


def _pieces(target: HostArray, source: HostArray) -> Iterator[tuple[HostArray, HostArray]]:
    if target.nbytes <= _CHUNK_BYTES:
        yield target, source
        return
    if target.flags.c_contiguous and source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    rows = max(1, _CHUNK_BYTES // (target.nbytes // len(target)))
    for start in range(0, len(target), rows):
        yield target[start : start + rows], source[start : start + rows]


_logger = logging.getLogger("trio_accel.devices")


_Change: TypeAlias = Callable[[], Awaitable[None]]


class Registrations:
    """Registers and unregisters memory with a device, in two separate queues.

    The driver takes its time for that, so threads do it one after the other, and nothing else waits for them.
    If the device refuses memory, it treats arrays there like any others.
    """

    def __init__(self) -> None:
        self._coming, to_register = trio.open_memory_channel[_Change](inf)
        self._going, to_unregister = trio.open_memory_channel[_Change](inf)
        self._pending = to_register, to_unregister

    async def run(self) -> None:
        """Register and unregister, until cancelled."""
        async with trio.open_nursery() as nursery:
            for pending in self._pending:
                nursery.start_soon(_make, pending)

    def register(self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival) -> None:
        """Register memory soon. The arrival ends when the device has registered or refused it."""
        self._coming.send_nowait(partial(self._register, device, memory, registered))

    def unregister(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival, wait_idle: _Change
    ) -> None:
        """Unregister memory after its registration, when the device is idle."""
        go = partial(self._unregister, device, memory, wait_idle)
        # In this order, because otherwise the memory would be registered after it was unregistered, and
        # unmapped during the driver's use.
        registered.tell(partial(self._going.send_nowait, go))

    @enable_ki_protection
    async def _register(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival
    ) -> None:
        try:
            await _tell_device(device.register_host, memory)
        finally:
            registered.end()

    @enable_ki_protection
    async def _unregister(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], wait_idle: _Change
    ) -> None:
        await wait_idle()
        await _tell_device(device.unregister_host, memory)


async def _make(pending: trio.MemoryReceiveChannel[_Change]) -> None:
    async for change in pending:
        await change()
        # A reference would keep the memory mapped while the task waits.
        del change


async def _tell_device(tell: Callable[[npt.NDArray[np.uint8]], None], memory: npt.NDArray[np.uint8]) -> None:
    try:
        await trio.to_thread.run_sync(tell, memory)
    except Exception as error:  # noqa: BLE001  # the device is closed or refuses; it works without
        _logger.debug("host memory is not known to the device: %s", describe(error))


class HostRegistrar(Registrations):
    """The registration of all slabs with each new device, and of slabs made or freed meanwhile.

    A lost device may have a stuck stream, which may still write to arrays of the pool when it continues. So
    arrays in use at the loss are reused only after such a device has ended.

    Args:
        pool: The slabs.
    """

    def __init__(self, pool: HostPool) -> None:
        super().__init__()
        self._pool = pool
        self._device: AccelDevice | None = None
        self._lost: list[AccelDevice] = []
        # The arrival of each slab ends when the present device has registered or refused the slab.
        self._registrations: dict[int, Arrival] = {}
        self._wait_idle: _Change = trio.lowlevel.checkpoint
        pool.on_make = self._add
        pool.on_drop = self._remove

    def attach(self, device: AccelDevice, wait_idle: _Change = trio.lowlevel.checkpoint) -> None:
        """Begin with an open device, which keeps registrations until its end. Earlier devices are closed.

        Args:
            device: The device.
            wait_idle: Waits until the device is idle, before a slab is unregistered.
        """
        self._device = device
        self._wait_idle = wait_idle
        self._registrations.clear()
        if self._lost:
            self._coming.send_nowait(self._settle)
        for slab in self._pool.slabs.values():
            self._add(slab)

    def detach(self) -> None:
        """End with a device's loss or close, because that ends all registrations."""
        if self._device is not None:
            self._lost.append(self._device)
            self._device = None
            self._pool.hold_back()

    def registration(self, slab: int) -> Arrival | None:
        """Return the arrival of a slab's registration; None if it is over, or the device is lost."""
        registration = self._registrations.get(slab)
        return None if registration is None or registration.is_over else registration

    async def _register(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival
    ) -> None:
        await self._settle()
        await super()._register(device, memory, registered)

    @enable_ki_protection
    async def _settle(self) -> None:
        """Check whether the lost devices have ended. `close` returns that, and may be called again."""
        if not self._lost or self._device is None:
            return
        for device in tuple(self._lost):
            # A device that cannot even be closed counts as not ended.
            with suppress(Exception):
                if await trio.to_thread.run_sync(device.close, 0.0):
                    self._lost.remove(device)
        if not self._lost:
            self._pool.let_go()

    def _add(self, slab: Slab) -> None:
        if self._device is not None:
            registration = self._registrations[slab.number] = Arrival()
            self.register(self._device, slab.memory, registration)

    def _remove(self, slab: Slab) -> None:
        # All users of the slab have ended, because each held a reference to its array.
        if self._device is not None:
            registration = self._registrations.pop(slab.number)
            self.unregister(self._device, slab.memory, registration, self._wait_idle)
