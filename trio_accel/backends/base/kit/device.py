"""Base of open devices on all backends: blocks, chunks, and the streams that they end with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..contract.device_info import DeviceInfo
from ..contract.errors import OutOfMemoryError
from ..contract.protocols import AccelStream, KeptCounts, LibraryUsage, MemoryStatistics, PlacedBlock
from .memory import BlockMemory

_POLL_INTERVAL = 0.0005


StreamT = TypeVar("StreamT", bound=AccelStream)
ChunkT = TypeVar("ChunkT")
BlockT = TypeVar("BlockT")


class BlockDevice(Generic[StreamT, ChunkT, BlockT]):
    """Base of open devices: most of `AccelDevice`, for a device that shares nothing with others.

    A backend adds `open_stream`, `open_library`, `spin`, `poison`, `give_up`, `lend` and the names of its
    libraries, and overrides the rest where it has more to do.

    Args:
        info: Description of the device.
        blocks: The blocks of its memory.

    Attributes:
        info: Description of the device.
        blocks: Its memory.
        streams: The streams that have not ended.
        is_closed: Whether it takes no more work.
        validated_blocks: See `AccelDevice.validated_blocks`.
        read_only: Blocks that libraries refuse to write to; see `BlockMemory.read_only`.
        kept: See `AccelDevice.kept`.
        allocate: See `AccelDevice.allocate`; without a call in between.
        placement: See `AccelDevice.placement`; without a call in between.
    """

    def __init__(self, info: DeviceInfo, blocks: BlockMemory[ChunkT, BlockT]) -> None:
        self.info: DeviceInfo = info
        self.blocks: BlockMemory[ChunkT, BlockT] = blocks
        self.streams: list[StreamT] = []
        self.is_closed: bool = False
        # The functions to call when the contents of a block change, by the block (D26).
        self._validated_blocks: dict[int, set[Callable[[int], None]]] = {}
        self.validated_blocks: Collection[int] = self._validated_blocks
        self.read_only: AbstractSet[int] = blocks.read_only
        self.kept: KeptCounts = KeptCounts()
        self.allocate: Callable[[int, int], None] = blocks.allocate
        self.placement: Callable[[int], PlacedBlock] = blocks.placement
        self._has_ended = False

    def free(self, block: int) -> None:
        """Give a memory block back; see `AccelDevice.free`."""
        self.blocks.free(block)
        if block in self._validated_blocks:
            self.renew(block)

    def renew(self, block: int) -> None:
        """Forget facts about the contents of a block; see `AccelDevice.renew`."""
        for invalidate in self._validated_blocks.pop(block, ()):
            invalidate(block)

    def invalidate_with(self, block: int, invalidate: Callable[[int], None]) -> None:
        """Have a function called once, when a block's contents change or may change. From any thread."""
        self._validated_blocks.setdefault(block, set()).add(invalidate)

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int, *, write: bool = True) -> None:
        """Make a chunk of another process addressable; see `AccelDevice.map_chunk`."""
        try:
            self.check_open()
            self.blocks.map_chunk(chunk, nbytes, descriptor, write=write)
        finally:
            os.close(descriptor)

    def map_peer(self, chunk: int, owner: Any, number: int) -> None:
        """Make a chunk of another device of this process addressable; see `AccelDevice.map_peer`."""
        self.check_open()
        self.blocks.map_peer(chunk, owner.blocks, number)

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk; see `AccelDevice.unmap_chunk`."""
        self.blocks.unmap_chunk(chunk)

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        """Know blocks in mapped chunks, to be read; see `AccelDevice.expect`."""
        self.check_open()
        self.blocks.expect(blocks)

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        """Take over the mapped chunks with their blocks; see `AccelDevice.adopt`."""
        self.check_open()
        self.blocks.adopt(blocks)

    def register_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Do nothing: copies need no memory that is registered; see `AccelDevice.register_host`."""

    def unregister_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Do nothing: no memory was registered; see `AccelDevice.unregister_host`."""

    @property
    def is_dead(self) -> bool:
        """Whether the hardware has ended the context; False where the backend cannot tell."""
        return False

    def reaches(self, peer: DeviceInfo) -> bool:
        """Tell whether `map_peer` works; False where the backend's memory cannot be mapped again."""
        return False

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for memory that a kernel needs for itself; see `BlockMemory.exhausted`."""
        return self.blocks.exhausted(requested)

    def memory(self) -> MemoryStatistics:
        """Count the memory."""
        return self.blocks.statistics()

    def usage(self) -> dict[str, LibraryUsage]:
        """Count plans and workspace of its libraries: by default there are none."""
        return {}

    def add_stream(self, stream: StreamT) -> StreamT:
        """Keep a new stream until it has ended."""
        # A long-lived device opens a stream for each restart of a library: give back those that ended.
        ended = [other for other in self.streams if other.has_ended]
        for other in ended:
            self.give_back(other)
        self.streams = [*(other for other in self.streams if other not in ended), stream]
        return stream

    def give_back(self, stream: StreamT) -> None:
        """Give back what there is of a stream that has ended; by default nothing."""

    def close(self, grace: float) -> bool:
        """Finish every stream and free everything; blocks for `grace` seconds at most in all.

        Returns:
            Whether all streams ended in time; see `AccelDevice.close`.
        """
        self.is_closed = True
        self.allocate = self._refuse_to_allocate
        if self._has_ended:
            return True
        deadline = time.monotonic() + grace
        for stream in self.streams:
            stream.close()
        while not (is_idle := self.is_idle()) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        self._has_ended = is_idle
        self.end(is_idle=is_idle)
        return is_idle

    def is_idle(self) -> bool:
        """Tell whether nothing uses the device any more, once its streams are closed."""
        return all(stream.has_ended for stream in self.streams)

    def end(self, *, is_idle: bool) -> None:
        """Free everything that nothing uses any more.

        Args:
            is_idle: Whether all streams have ended.
        """
        self.blocks.clear()
        self._validated_blocks.clear()

    def check_open(self) -> None:
        """Refuse what a closed device does not do.

        Raises:
            RuntimeError: It is closed.
        """
        if self.is_closed:
            raise RuntimeError(f"device {self.info.name} is closed")

    def _refuse_to_allocate(self, block: int, nbytes: int) -> None:
        self.check_open()
