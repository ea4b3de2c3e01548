"""An open device of the CPU backend."""

from __future__ import annotations

from collections.abc import Callable

from ..base import AccelStream, ChunkKeeper, DeviceInfo, OutOfMemoryError, Poison
from ..base.device import BlockDevice
from ..base.ops import ArraySpec
from .kit._library import CpuLibrary
from .manifest import LIBRARIES, open_library
from .runtime._memory import CpuMemory, HostArray, HostLease
from .runtime._stream import CpuFault, CpuHold, CpuStream

__all__ = ["CpuDevice"]


class CpuDevice(BlockDevice[CpuStream, HostArray, HostArray]):
    """The machine's processor and a share of its memory."""

    def __init__(self, info: DeviceInfo, memory_limit: int, keeper: ChunkKeeper | None = None) -> None:
        memory = CpuMemory(info.name, memory_limit, keeper)
        super().__init__(info, memory)
        self._fault = CpuFault(info.name)
        # See `HostDevice`; without a call in between.
        self.host_view: Callable[[ArraySpec], HostArray] = memory.view

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the libraries, sorted."""
        return tuple(sorted(LIBRARIES))

    def open_stream(self, name: str, priority: int = 0) -> CpuStream:
        """Make a stream; its thread starts with the first work. The system knows no priority of one."""
        self.check_open()
        return self.add_stream(CpuStream(name, self._fault))

    def open_library(self, name: str) -> CpuLibrary:
        """Load a library; blocks while its modules are imported.

        Args:
            name: One of `libraries`, or the import path of a module of kernels; a program has an argument.

        Raises:
            NotSupportedError: There is no such library.
        """
        self.check_open()
        return open_library(name, self)

    def spin(self, stream: AccelStream, block: int | None = None) -> CpuHold:
        """Hold a stream back by what does not end; see `AccelDevice.spin`."""
        if not isinstance(stream, CpuStream):
            raise TypeError(f"stream: the CPU backend has its own streams, not {stream!r}")
        return stream.hold(memory=None if block is None else self.blocks.block(block)[0])

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        """Make the context unusable; see `AccelDevice.poison`.

        Operations that have not run never do, events are done with the error, and no callback comes: the same
        as on a GPU whose context is lost (D9).
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

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for memory that a kernel needs for itself; see `BlockMemory.exhausted`."""
        return self.blocks.exhausted(requested)

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> HostLease:
        """Let the program have a host array over a block; see `AccelDevice.lend`."""
        return HostLease(self.host_view(array), write=write, stream=stream)

    def end(self, *, is_idle: bool) -> None:
        """Free everything: memory that a stuck stream still uses stays with its work until that ends."""
        super().end(is_idle=is_idle)
        if not is_idle:
            self.give_up("the device was closed")
