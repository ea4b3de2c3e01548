"""Memory of the host that a device transfers from and to by itself: its pool, registration, and copies."""

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

# The unit in which memory is given out: whole pages, so that no two arrays share one.
_PAGE = 4096
_FIRST = 64 << 20
_LARGEST = 256 << 20
# D32: empty slabs are cached up to a share of the host's memory, within these bounds. To make a
# gigabyte, to register it with the driver and to unregister it takes longer than to copy it.
_CACHE_SHARE, _CACHE_LEAST, _CACHE_MOST = 32, 256 << 20, 2 << 30
_MAX_SLABS = 512
# Dropped pieces go back with the next array, or soon if they are large or many.
_LARGE_PIECE_BYTES = 1 << 20
_MAX_DROPPED_PIECES = 64


@attrs.frozen(eq=False)
class Slab:
    """A piece of memory for several arrays. It is unmapped when the last array over it is gone.

    Attributes:
        number: Its id in the pool.
        memory: All of it.
        address: Where it starts.
        descriptor: Its file descriptor for other processes; None if it is not shared.
    """

    number: int
    memory: npt.NDArray[np.uint8]
    address: int
    descriptor: int | None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes


@attrs.define(eq=False)
class SlabRegion:
    """Memory for one array, in a slab: it goes back to the pool when nothing refers to it any more.

    NumPy keeps what an array was made of as its base. It keeps only the first of a chain of arrays, so
    that cannot be an array itself: every view of whatever depth holds on to this.
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
    """Arrays of the host in a few large pieces of memory, which are registered with the device (D11).

    To register memory with a device takes long, so slabs are cached and used again. They grow by doubling;
    a large array has one alone. Arrays outlive the pool: when that is closed, it only forgets them.

    Everything but the end of an array happens on the Trio thread, protected from Ctrl-C (D16): the calls may
    come from the program's own tasks.

    Args:
        is_shared: Whether other processes are to have the memory.

    Attributes:
        slabs: The slabs by id.
        on_make: Called with each slab that is made.
        on_drop: Called with each one that is given back; it has no array any more.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self.slabs: dict[int, Slab] = {}
        self.on_make: Callable[[Slab], None] = lambda slab: None
        self.on_drop: Callable[[Slab], None] = lambda slab: None
        self.is_closed: bool = False
        self._is_shared = is_shared
        cache = min(max(_CACHE_LEAST, total_bytes() // _CACHE_SHARE), _CACHE_MOST)
        self._allocator = ChunkAllocator(
            self._make, self._give_back, first=_FIRST, largest=_LARGEST, keep=cache, most=_MAX_SLABS
        )
        self._slab_numbers = itertools.count(1)
        self._region_numbers = itertools.count(1)
        # Slabs are sorted by their addresses.
        self._sorted: list[Slab] = []
        self._dropped: deque[int] = deque()
        # The copy of each array of the program, by its id; it lives as long as the array. The reference
        # tells.
        self._copies: dict[int, tuple[weakref.ref[HostArray], HostArray]] = {}
        # Regions up to this number may still be written to, and those of them that were dropped meanwhile.
        self._unsure = 0
        self._held_back: list[int] = []
        self._is_notified = False
        self._notifier = LoopNotifier(self.drain)

    @property
    def used(self) -> int:
        """Bytes that arrays take, those included that were dropped since the last one was made."""
        return self._allocator.used

    @property
    def reserved(self) -> int:
        """Bytes of all slabs."""
        return self._allocator.reserved

    def empty(self, shape: Ints, dtype: np.dtype[Any]) -> HostArray:
        """Make an array, not initialised.

        Raises:
            MemoryError: The machine has not so much.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        return self.region(nbytes).array(shape, dtype) if nbytes else np.empty(shape, dtype)

    @enable_ki_protection
    def region(self, nbytes: int) -> SlabRegion:
        """Take memory.

        Raises:
            MemoryError: The machine has not so much.
        """
        self.drain()
        number = next(self._region_numbers)
        try:
            place = self._allocator.allocate(number, -(-nbytes // _PAGE) * _PAGE)
        except MemoryError:
            self._allocator.trim()
            place = self._allocator.allocate(number, -(-nbytes // _PAGE) * _PAGE)
        return SlabRegion(number, self.slabs[place.chunk], place.offset, nbytes, self._drop)

    def stage(self, nbytes: int) -> SlabRegion:
        """Take memory by way of which an array travels.

        Raises:
            OutOfMemoryError: The machine has not so much, or there are too many open files.
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
        """Find an array: id of the slab, and bytes from its start to the first element.

        Returns:
            None if not all of it is in one slab.
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
        """Return the copy of an array that `keep` was given; None without one."""
        # An entry ends with its array, before that id is given to another.
        kept = self._copies.get(id(array))
        return None if kept is None else kept[1]

    def keep(self, array: HostArray, copy: HostArray) -> None:
        """Keep an array's copy, which is in the pool, as long as the array lives."""
        if not self.is_closed:
            copies, number = self._copies, id(array)
            copies[number] = weakref.ref(array, lambda _: copies.pop(number, None)), copy

    def drain(self) -> None:
        """Give dropped regions back now."""
        self._is_notified = False
        if not self.is_closed:
            for _ in range(len(self._dropped)):
                region = self._dropped.popleft()
                if region <= self._unsure:
                    self._held_back.append(region)
                else:
                    self._allocator.free(region)

    def hold_back(self) -> None:
        """Hold arrays in use back from reuse: a device was lost, and may still write to them."""
        self.drain()
        self._unsure = next(self._region_numbers)

    def let_go(self) -> None:
        """Give out again what was held back: no lost device writes any more."""
        self._unsure = 0
        self._dropped.extend(self._held_back)
        self._held_back.clear()
        self.drain()

    def close(self) -> None:
        """Forget everything; arrays stay as they are."""
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
        """Take a region back. Any thread, finalisers included."""
        self._dropped.append(region)
        if (
            nbytes >= _LARGE_PIECE_BYTES or len(self._dropped) >= _MAX_DROPPED_PIECES
        ) and not self._is_notified:
            # The race of `BlockTable.drop`: a thread that finds the flag set has appended before, so `drain`
            # sees it.
            self._is_notified = True
            self._notifier.notify()

    def _make(self, nbytes: int) -> tuple[int, int]:
        # The system promises more memory than there is, and kills a process that uses it all.
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
            # No descriptor is left to give to the workers (D74).
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
    # A shared mapping: in a private one a fork would make pages copy-on-write, and the device would write to
    # the old page while the program reads the new one.
    return np.frombuffer(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)


MAX_INLINE_BYTES = 64 << 10
"""Host arrays up to so many bytes travel with a message, or are copied on the spot."""

COPIES_AT_ONCE = 2
"""Copies are bound by memory: so many saturate it."""

# The most bytes that are copied in a row: an end that is asked for comes soon.
_CHUNK_BYTES = 8 << 20


class Copying:
    """A copy that runs in a thread and can be ended between two pieces."""

    def __init__(self, target: HostArray, source: HostArray) -> None:
        self._target = as_bits(target)
        self._source = as_bits(source)
        self._is_cancelled = False

    def cancel(self) -> None:
        """End it soon. Any thread."""
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
    """Tells a device of memory that comes, and beside that of memory that goes.

    The driver takes its time for that. So a thread does one after the other, and nothing else waits for it.
    If the device refuses some memory, it treats arrays in it as any other.
    """

    def __init__(self) -> None:
        self._coming, come = trio.open_memory_channel[_Change](inf)
        self._going, gone = trio.open_memory_channel[_Change](inf)
        self._pending = come, gone

    async def run(self) -> None:
        """Register and unregister, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for pending in self._pending:
                nursery.start_soon(_make, pending)

    def register(self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival) -> None:
        """Have a device know memory soon; the arrival ends when it does, or has refused."""
        self._coming.send_nowait(partial(self._register, device, memory, registered))

    def unregister(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival, wait_idle: _Change
    ) -> None:
        """Have a device forget memory behind its registration, when the device is idle."""
        go = partial(self._unregister, device, memory, wait_idle)
        # In this order: unregistered first, it would be registered afterwards, and unmapped while the driver
        # has it.
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
    except Exception as error:  # noqa: BLE001  # the device is closed by now, or cannot; it goes on without
        _logger.debug("host memory is not known to the device: %s", describe(error))


class HostRegistrar(Registrations):
    """The registration of all slabs with each new device, and of those that come and go meanwhile.

    A lost device may have a stuck stream, which may still write to arrays of the pool when it goes on. So
    arrays that were in use at the loss are given out again only when such a device has ended.

    Args:
        pool: The slabs.
    """

    def __init__(self, pool: HostPool) -> None:
        super().__init__()
        self._pool = pool
        self._device: AccelDevice | None = None
        self._lost: list[AccelDevice] = []
        # The arrival of each slab: it ends when the current device has registered the slab, or has refused
        # it.
        self._registrations: dict[int, Arrival] = {}
        self._wait_idle: _Change = trio.lowlevel.checkpoint
        pool.on_make = self._add
        pool.on_drop = self._remove

    def attach(self, device: AccelDevice, wait_idle: _Change = trio.lowlevel.checkpoint) -> None:
        """Begin with an open device, which keeps registrations until it is closed; earlier ones are closed.

        Args:
            device: The device.
            wait_idle: Waits until the device is idle, before a slab is to be unregistered.
        """
        self._device = device
        self._wait_idle = wait_idle
        self._registrations.clear()
        if self._lost:
            self._coming.send_nowait(self._settle)
        for slab in self._pool.slabs.values():
            self._add(slab)

    def detach(self) -> None:
        """End with a device that is lost or about to be closed, which makes it forget all registrations."""
        if self._device is not None:
            self._lost.append(self._device)
            self._device = None
            self._pool.hold_back()

    def registration(self, slab: int) -> Arrival | None:
        """Return the arrival of a slab's registration; None if that is over, or the device is lost."""
        registration = self._registrations.get(slab)
        return None if registration is None or registration.is_over else registration

    async def _register(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], registered: Arrival
    ) -> None:
        await self._settle()
        await super()._register(device, memory, registered)

    @enable_ki_protection
    async def _settle(self) -> None:
        """Find out whether the lost devices have ended: `close` may be called again, and returns that."""
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
        # All users of the slab are over: each held a reference to its array.
        if self._device is not None:
            registration = self._registrations.pop(slab.number)
            self.unregister(self._device, slab.memory, registration, self._wait_idle)
