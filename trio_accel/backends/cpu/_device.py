"""An open device of the CPU backend."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from ..base import (
    AccelDevice,
    AccelStream,
    ChunkKeeper,
    DeviceInfo,
    LibraryUsage,
    MemoryStatistics,
    OutOfMemoryError,
    PlacedBlock,
    Poison,
)
from ..base.ops import ArraySpec
from .kit._library import CpuLibrary
from .manifest import LIBRARIES, open_library
from .runtime._memory import CpuMemory, HostArray, HostLease
from .runtime._stream import CpuFault, CpuHold, CpuStream

__all__ = ["CpuDevice"]


class CpuDevice:
    """The machine's processor and a share of its memory."""

    def __init__(self, info: DeviceInfo, memory_limit: int, keeper: ChunkKeeper | None = None) -> None:
        self._info = info
        self._memory = CpuMemory(info.name, memory_limit, keeper)
        self._streams: list[CpuStream] = []
        self._is_closed = False
        self._fault = CpuFault(info.name)
        # See `HostDevice`; without a call in between.
        self.host_view: Callable[[ArraySpec], HostArray] = self._memory.view

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        return self._info

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the libraries, sorted."""
        return tuple(sorted(LIBRARIES))

    def open_stream(self, name: str, priority: int = 0) -> CpuStream:
        """Make a stream; its thread starts with the first work. The system knows no priority of one."""
        self._check_open()
        stream = CpuStream(name, self._fault)
        # A long-lived device opens a stream for each restart of a library: forget those that ended.
        self._streams = [other for other in self._streams if not other.has_ended]
        self._streams.append(stream)
        return stream

    def open_library(self, name: str) -> CpuLibrary:
        """Load a library; blocks while its modules are imported.

        Args:
            name: One of `libraries`, or the import path of a module of kernels; a program has an argument.

        Raises:
            NotSupportedError: There is no such library.
        """
        self._check_open()
        return open_library(name, self)

    def allocate(self, block: int, nbytes: int) -> None:
        """Make a memory block; see `CpuMemory.allocate`."""
        self._check_open()
        self._memory.allocate(block, nbytes)

    def free(self, block: int) -> None:
        """Give a memory block back; see `CpuMemory.free`."""
        self._memory.free(block)

    def renew(self, block: int) -> None:
        """Nothing is known of what lay in a block; see `AccelDevice.renew`."""

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Make a chunk of another process addressable; see `AccelDevice.map_chunk`."""
        try:
            self._check_open()
            self._memory.map_chunk(chunk, nbytes, descriptor)
        finally:
            os.close(descriptor)

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk; see `AccelDevice.unmap_chunk`."""
        self._memory.unmap_chunk(chunk)

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        """Know blocks in mapped chunks, to be read; see `AccelDevice.expect`."""
        self._check_open()
        self._memory.expect(blocks)

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        """Take over the mapped chunks with their blocks; see `AccelDevice.adopt`."""
        self._check_open()
        self._memory.adopt(blocks)

    def placement(self, block: int) -> PlacedBlock:
        """Tell where a block lies; see `AccelDevice.placement`."""
        return self._memory.placement(block)

    def register_host(self, array: HostArray) -> None:
        """Nothing to do: the host's memory is the device's."""

    def unregister_host(self, array: HostArray) -> None:
        """Nothing to do."""

    def spin(self, stream: AccelStream, block: int | None = None) -> CpuHold:
        """Hold a stream back by what does not end; see `AccelDevice.spin`."""
        if not isinstance(stream, CpuStream):
            raise TypeError(f"stream: the CPU backend has its own streams, not {stream!r}")
        return stream.hold() if block is None else stream.hold_writing(self._memory.block(block)[0])

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        """Make the context unusable; see `AccelDevice.poison`.

        What has not run by then does not, events are done with the error, and nobody is rung: the same
        as on a GPU whose context is lost.
        """

        def fail() -> None:
            self._fault.reason = reason

        if isinstance(stream, CpuStream):
            stream.enqueue(fail)
        else:
            fail()

    def give_up(self, reason: str) -> None:
        """Count the context as lost; see `AccelDevice.give_up`."""
        self._fault.reason = self._fault.reason or reason

    @property
    def is_dead(self) -> bool:
        """False: a thread may be in the middle of a kernel."""
        return False

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for memory that a kernel needs for itself; see `BlockMemory.exhausted`."""
        return self._memory.exhausted(requested)

    def check_peer(self, other: AccelDevice) -> None:
        """Nothing to refuse: all memory is the processor's."""

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> HostLease:
        """Let the program have a host array over a block; see `AccelDevice.lend`."""
        return HostLease(self._memory.view(array), write=write, stream=stream)

    def memory(self) -> MemoryStatistics:
        """Count the memory."""
        return self._memory.statistics()

    def usage(self) -> dict[str, LibraryUsage]:
        """Nothing: no library of this backend keeps plans."""
        return {}

    def close(self, grace: float) -> bool:
        """Finish every stream and free everything; blocks for `grace` seconds at most in all.

        Returns:
            Whether all streams ended in time. Memory that a stuck one still uses stays with its
            work and is given back when that ends. Chunks that a keeper has are not dropped.
        """
        self._is_closed = True
        deadline = time.monotonic() + grace
        for stream in self._streams:
            stream.close()
        for stream in self._streams:
            stream.join(deadline)
        self._memory.clear()
        has_ended = all(stream.has_ended for stream in self._streams)
        if not has_ended:
            self.give_up("the device was closed")
        return has_ended

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"device {self._info.name} is closed")
