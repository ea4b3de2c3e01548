"""Memory of one CUDA device: chunks of physical memory, mapped where they are used."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import attrs
from cuda.bindings import driver

from ...base import AccelError, BlockMemory, ChunkKeeper
from ...base.kit.pools import Reclaimer
from ._context import CudaContext, CudaMemoryError

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# Seconds to wait for memory whose release may depend on streams that this thread has to release.
_RELEASE_TIMEOUT = 0.5
# D32: a sixteenth of the memory is kept in empty chunks.
_EMPTY_CHUNKS_DIVISOR = 16
_NO_HANDLE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE


@attrs.frozen
class DeviceChunk:
    """A range of device memory.

    Attributes:
        address: Its address.
        nbytes: Its size.
    """

    address: int
    nbytes: int


class CudaMemory(BlockMemory[DeviceChunk, int]):
    """The blocks of one device, as addresses.

    Args:
        context: The device's context.
        device: Name of the device.
        limit: The most bytes that its blocks may take.
        keeper: Gets the chunks, as descriptors: such a chunk lives as long as one is open anywhere.
    """

    def __init__(self, context: CudaContext, device: str, limit: int, keeper: ChunkKeeper | None) -> None:
        self._reclaimer = Reclaimer(device)
        source = _DeviceChunks(context, self._reclaimer, limit, is_kept=keeper is not None)
        super().__init__(device, limit, source, keeper)
        self._chunk_source = source

    def clear(self) -> None:
        """Give every block back, and wait until the driver has the memory; blocks."""
        super().clear()
        self._chunk_source.give_back()
        self._reclaimer.close()


class _DeviceChunks:
    """Chunks of the device's memory (`cuMemCreate`, `cuMemMap`)."""

    first = 256 << 20

    def __init__(self, context: CudaContext, reclaimer: Reclaimer, limit: int, *, is_kept: bool) -> None:
        # A program that makes a large array again and again is not to wait for the driver each time.
        self.keep = max(self.first, limit // _EMPTY_CHUNKS_DIVISOR)
        self._context = context
        self._reclaimer = reclaimer
        self._postponed: list[DeviceChunk] = []
        self._check = context.check
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(context.number)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._properties.requestedHandleTypes = _DESCRIPTOR if is_kept else _NO_HANDLE
        flags = driver.CUmemAccess_flags
        self._access = _access(location, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        self._reading = _access(location, flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(self._check(driver.cuMemGetAllocationGranularity(self._properties, minimum)))

    def make(self, nbytes: int) -> tuple[DeviceChunk, int]:
        size = self._round_up(nbytes)
        with self._context:
            return self._mapped(self._create(size), size, self._access), size

    def make_kept(self, nbytes: int, keeper: ChunkKeeper, chunk: int) -> tuple[DeviceChunk, int]:
        size = self._round_up(nbytes)
        with self._context:
            handle = self._create(size)
            try:
                descriptor = int(self._check(driver.cuMemExportToShareableHandle(handle, _DESCRIPTOR, 0)))
            except BaseException:
                driver.cuMemRelease(handle)
                raise
            mapped = self._mapped(handle, size, self._access)
        try:
            keeper.keep(chunk, size, descriptor)
        except BaseException:
            self.drop(mapped)
            raise
        finally:
            # D3: the keeper has a duplicate by now, or has failed: this one would keep the memory alive for
            # ever.
            os.close(descriptor)
        return mapped, size

    def map(self, nbytes: int, descriptor: int, *, write: bool) -> DeviceChunk:
        # The driver requires a multiple of its page size.
        if nbytes <= 0 or nbytes % self._granularity:
            raise ValueError(
                f"nbytes: {nbytes} is not a size of a chunk: it has whole {self._granularity} bytes"
            )
        with self._context:
            try:
                handle = self._check(driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR))
            except AccelError as error:
                raise OSError(f"descriptor {descriptor} is not memory of this device: {error}") from error
            try:
                return self._mapped(handle, nbytes, self._access if write else self._reading)
            except AccelError as error:
                raise ValueError(f"nbytes: {nbytes} cannot be mapped of this chunk: {error}") from error

    def share(self, chunk: DeviceChunk) -> DeviceChunk:
        # Make a mapping of its own, because the owner may end, and lent memory is not written to.
        with self._context:
            handle = self._check(driver.cuMemRetainAllocationHandle(chunk.address))
            return self._mapped(handle, chunk.nbytes, self._reading)

    def drop(self, chunk: DeviceChunk) -> None:
        # In a context that only counts as lost, abandoned work still runs and uses this memory.
        if self._context.is_lost:
            self._postponed.append(chunk)
        else:
            self._reclaimer.give_back(partial(self._unmap, chunk))

    def give_back(self) -> None:
        """Unmap what was dropped after the context was lost: all streams have ended."""
        postponed, self._postponed = self._postponed, []
        # The end of the process gives the memory back after a fault, not the driver.
        if not self._context.is_dead:
            for chunk in postponed:
                self._reclaimer.give_back(partial(self._unmap, chunk))

    def _unmap(self, chunk: DeviceChunk) -> None:
        # A fault that shows only now is known to the context by then.
        with self._context, suppress(AccelError):
            self._check(driver.cuMemUnmap(chunk.address, chunk.nbytes))
            self._check(driver.cuMemAddressFree(chunk.address, chunk.nbytes))

    def block(self, chunk: DeviceChunk, offset: int, nbytes: int) -> int:
        return chunk.address + offset

    def available(self) -> int:
        with self._context:
            code, free, _ = driver.cuMemGetInfo()
        return 0 if code else int(free)

    # Memory is given back by a thread of its own, as `cuMemUnmap` waits for running work.
    def _create(self, nbytes: int) -> Any:
        """Take physical memory from the driver, if need be when what is on its way back has come."""
        try:
            return self._check(driver.cuMemCreate(nbytes, self._properties, 0))
        except CudaMemoryError:
            if not self._reclaimer.wait(_RELEASE_TIMEOUT):
                raise
            return self._check(driver.cuMemCreate(nbytes, self._properties, 0))

    def _round_up(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._granularity)) * self._granularity

    def _mapped(self, handle: Any, nbytes: int, access: Any) -> DeviceChunk:
        """Map physical memory; the handle is given back, as the mapping holds the memory."""
        with ExitStack() as at_the_end, ExitStack() as undo:
            at_the_end.callback(driver.cuMemRelease, handle)
            address = int(self._check(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
            undo.callback(driver.cuMemAddressFree, address, nbytes)
            self._check(driver.cuMemMap(address, nbytes, 0, handle, 0))
            undo.callback(driver.cuMemUnmap, address, nbytes)
            self._check(driver.cuMemSetAccess(address, nbytes, [access], 1))
            undo.pop_all()
        return DeviceChunk(address, nbytes)


def _access(location: Any, flags: Any) -> Any:
    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = flags
    return access
