"""A device as its libraries see it: places of arrays, and the means that all libraries compute with."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ...base import ChunkKeeper, DeviceInfo, KernelLibrary, LibraryUsage
from ...base.device import BlockDevice
from ...base.device_array import DeviceArray
from ...base.memory import no_such_block
from ...base.ops import ArraySpec
from ...base.workspace import Arena
from ..runtime._context import CudaContext
from ..runtime._graphs import Graphs
from ..runtime._kernels import ArrayKernels, Kernels
from ..runtime._memory import CudaMemory, DeviceChunk
from ..runtime._stream import CudaStream
from ..runtime._transfers import PinnedMemory, Transfers

__all__ = ["LibraryDevice"]

_MOST_SPANS = 1024


class LibraryDevice(BlockDevice[CudaStream, DeviceChunk, int]):
    """The context, the memory and the kernels of one device. Blocks while it is made.

    Args:
        info: Description of the device.
        memory_limit: The most bytes that its blocks may take.
        architecture: Its compute capability, such as ``"90"``.
        keeper: Gets the chunks that blocks are placed in.

    Attributes:
        architecture: Its compute capability.
        context: Its context, to be made current where the driver is called.
        arrays: Element-wise work.
        kernels: Sources of the backend's own.
        transfers: Copies between host and device.
        graphs: Graphs of calls that libraries launch again and again.
        addresses: Addresses of its blocks.
        arena: Memory that kernels need while they run.
        pinned: Host memory that status words are copied to.
        end_loops: Called when the context counts as lost: each ends a loop that may otherwise never end.
    """

    def __init__(
        self, info: DeviceInfo, memory_limit: int, architecture: str, keeper: ChunkKeeper | None
    ) -> None:
        self.architecture: str = architecture
        self.context: CudaContext = CudaContext(info.index, info.name, is_alone=keeper is not None)
        try:
            self.addresses: CudaMemory = CudaMemory(self.context, info.name, memory_limit, keeper)
            super().__init__(info, self.addresses)
            self.kernels: Kernels = Kernels(self.context, architecture, info.compute_units)
            self.arrays: ArrayKernels = ArrayKernels(self.context, self.kernels)
            self.transfers: Transfers = Transfers(self.context)
            self.transfers.prepare()
            self.graphs: Graphs = Graphs(self.context)
            self.arena: Arena = Arena(self.context, self.addresses)
            self.pinned: PinnedMemory = PinnedMemory(self.context)
            self.end_loops: list[Callable[[], None]] = []
        except BaseException:
            self.context.release()
            raise
        # By block: functions to call when its contents change (D26).
        self._to_invalidate: dict[int, set[Callable[[int], None]]] = {}
        self._spans: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[int, int]] = {}
        self._usage: dict[str, LibraryUsage] = {}

    def open_library(self, name: str) -> KernelLibrary:
        """Open another library, for the caller alone; see `AccelDevice.open_library`."""
        raise NotImplementedError

    def usage(self) -> dict[str, LibraryUsage]:
        """Plans and workspace of its libraries; see `AccelDevice.usage`."""
        held = self.arena.by_library()
        held.update(self.addresses.fixed_workspace)
        found = dict(self._usage)
        for name, usage in found.items():
            usage.workspace = held[name]
        return found

    def usage_of(self, library: str) -> LibraryUsage:
        """Return the counts of a library, where it counts its plans. From any thread."""
        return self._usage.setdefault(library, LibraryUsage())

    def free(self, block: int) -> None:
        """Give a memory block back; see `AccelDevice.free`."""
        super().free(block)
        if block in self._to_invalidate:
            self.renew(block)

    def renew(self, block: int) -> None:
        """Forget facts about the contents of a block; see `AccelDevice.renew`."""
        if block in self._to_invalidate:
            for invalidate in self._to_invalidate.pop(block):
                invalidate(block)

    def invalidate_with(self, block: int, invalidate: Callable[[int], None]) -> None:
        """Have a function called, on the Trio thread, when a block's contents change. From any thread."""
        self._to_invalidate.setdefault(block, set()).add(invalidate)

    def at(self, array: ArraySpec) -> DeviceArray:
        """Return the address and layout of an array.

        Raises:
            KeyError: No block has this id.
            ValueError: The array is not within it.
        """
        return DeviceArray(self.address(array), array.dtype, array.shape, array.strides)

    def lent_to(self, other: LibraryDevice, array: ArraySpec) -> DeviceArray:
        """Return the address of an array for kernels of another device; raises as `open_to` does."""
        if int(other.context.number) != int(self.context.number):
            self.addresses.open_to(array.block, int(other.context.number))
        return self.at(array)

    def address(self, array: ArraySpec) -> int:
        """Return the address of an array's first element; raises as `at` does."""
        return self.address_within(array, self.span(array))

    def address_within(self, array: ArraySpec, span: tuple[int, int]) -> int:
        """Return the address of an array's first element, given its `span`; raises as `at` does."""
        first, last = span
        offset = array.offset
        try:
            address, nbytes, _ = self.addresses.blocks[array.block]
        except KeyError:
            raise no_such_block(array.block) from None
        if offset < first or offset + last > nbytes:
            raise ValueError(f"the array does not lie within its block of {nbytes} bytes: {array}")
        return address + offset

    def span(self, array: ArraySpec) -> tuple[int, int]:
        """The bytes that an array takes before its first element, and from there on; of an empty one none.

        It follows from shape, strides and dtype; what it is for a layout is found out once.
        """
        layout = array.shape, array.strides, array.dtype.itemsize
        span = self._spans.get(layout)
        if span is None:
            if len(self._spans) >= _MOST_SPANS:
                self._spans.clear()
            span = self._spans[layout] = _span(*layout)
        return span


def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    if 0 in shape:
        return -sys.maxsize, -sys.maxsize
    reaches = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    before = -sum(reach for reach in reaches if reach < 0)
    return before, sum(reach for reach in reaches if reach > 0) + itemsize
