"""The base class of open devices on all backends: its memory blocks, its streams, and how it is closed.

A `BlockDevice` owns three things, which end in this order:

1. The streams. `add_stream` keeps a stream until it has ended; the next call releases it. `close` closes all
   streams first and then waits until they are idle, because enqueued operations may still use memory.
2. The facts about the contents of blocks (`validated_blocks`), such as a plan's assumption that an array is
   unchanged (D26). `renew` calls the functions that drop the facts, so each writer of a block must call
   `renew`. `free` calls it also, because the id of a freed block may be used again.
3. The memory, a `BlockMemory`. `end` clears it.

Three rules hold:

* A closed device takes no more work. `close` sets `is_closed` first, and replaces `allocate` by a function
  that raises. `allocate` is an attribute and not a method, because it is called for each result, and a method
  would cost a second call.
* `close` never waits longer than its grace. If a stream is stuck, `end` runs with `is_idle=False` and must
  not free memory that the stream may use. The CUDA backend overrides `end` for this. The CPU backend may free
  everything, because the work of a stuck stream keeps its own references to memory. Another `close` repeats
  the attempt, until all streams have ended.
* `map_chunk` owns its descriptor, and closes it even if it raises.

The engine calls the methods in Trio's thread, except `close`, which blocks and therefore runs in another
thread. `BlockMemory` has its own lock for that reason.
"""

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

_POLL_INTERVAL = 0.0005  # seconds


StreamT = TypeVar("StreamT", bound=AccelStream)
ChunkT = TypeVar("ChunkT")
BlockT = TypeVar("BlockT")


class BlockDevice(Generic[StreamT, ChunkT, BlockT]):
    """Base of open devices: most of `AccelDevice`, for a device that shares nothing with others.

    A backend adds `open_stream`, `open_library`, `spin`, `poison`, `give_up`, `lend` and the names of its
    libraries, and overrides methods of this class that do too little for it.

    Args:
        info: Description of the device.
        blocks: The blocks of its memory.

    Attributes:
        info: Description of the device.
        blocks: The blocks of its memory.
        streams: The open streams, and ended streams not yet released.
        is_closed: Whether it takes no more work.
        validated_blocks: See `AccelDevice.validated_blocks`.
        read_only: Blocks that libraries refuse to write to; see `BlockMemory.read_only`.
        plan_counts: See `AccelDevice.plan_counts`.
        allocate: See `AccelDevice.allocate`. An attribute, to save a call.
        placement: See `AccelDevice.placement`. An attribute, to save a call.
    """

    def __init__(self, info: DeviceInfo, blocks: BlockMemory[ChunkT, BlockT]) -> None:
        self.info: DeviceInfo = info
        self.blocks: BlockMemory[ChunkT, BlockT] = blocks
        self.streams: list[StreamT] = []
        self.is_closed: bool = False
        # For each block the functions to call when its contents change (D26).
        self._validated_blocks: dict[int, set[Callable[[int], None]]] = {}
        self.validated_blocks: Collection[int] = self._validated_blocks
        self.read_only: AbstractSet[int] = blocks.read_only
        self.plan_counts: KeptCounts = KeptCounts()
        self.allocate: Callable[[int, int], None] = blocks.allocate
        self.placement: Callable[[int], PlacedBlock] = blocks.placement
        self._has_ended = False

    def free(self, block: int) -> None:
        """Give a memory block back; see `AccelDevice.free`."""
        self.blocks.free(block)
        if block in self._validated_blocks:
            self.renew(block)

    def renew(self, block: int) -> None:
        """Drop the facts about the contents of a block; see `AccelDevice.renew`."""
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
        """Make a chunk of another device in this process addressable; see `AccelDevice.map_peer`."""
        self.check_open()
        self.blocks.map_peer(chunk, owner.blocks, number)

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk; see `AccelDevice.unmap_chunk`."""
        self.blocks.unmap_chunk(chunk)

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        """Make blocks in mapped chunks readable; see `AccelDevice.expect`."""
        self.check_open()
        self.blocks.expect(blocks)

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        """Take over the mapped chunks with their blocks; see `AccelDevice.adopt`."""
        self.check_open()
        self.blocks.adopt(blocks)

    def register_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Do nothing: copies do not need registered memory; see `AccelDevice.register_host`."""

    def unregister_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Do nothing: no memory was registered; see `AccelDevice.unregister_host`."""

    @property
    def is_dead(self) -> bool:
        """Whether the hardware has ended the context; False if the backend cannot know."""
        return False

    def reaches(self, peer: DeviceInfo) -> bool:
        """Return whether `map_peer` works for a peer; False by default. See `AccelDevice.reaches`."""
        return False

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for scratch memory of a kernel; see `BlockMemory.exhausted`."""
        return self.blocks.exhausted(requested)

    def memory(self) -> MemoryStatistics:
        """Count the blocks and their bytes."""
        return self.blocks.statistics()

    def usage(self) -> dict[str, LibraryUsage]:
        """Count the plans and workspace of its libraries; by default there are none."""
        return {}

    def add_stream(self, stream: StreamT) -> StreamT:
        """Keep a new stream until it has ended, and release the streams that have."""
        # Do not wait for `close`, because a long-lived device opens a stream for each restart of a library.
        ended = [entry for entry in self.streams if entry.has_ended]
        for finished in ended:
            self.give_back(finished)
        self.streams = [*(entry for entry in self.streams if entry not in ended), stream]
        return stream

    def give_back(self, stream: StreamT) -> None:
        """Release the resources of an ended stream; by default there are none."""

    def close(self, grace: float) -> bool:
        """Close all streams and free everything; blocks for at most `grace` seconds.

        Returns:
            Whether everything has ended in time; see `AccelDevice.close`. If not, it may be called again.
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
        """Return whether nothing uses the closed device: by default, whether all streams have ended."""
        return all(stream.has_ended for stream in self.streams)

    def end(self, *, is_idle: bool) -> None:
        """Free everything that is no longer in use.

        Args:
            is_idle: The result of `is_idle`. If False, work may still use memory, which must not be freed.
        """
        self.blocks.clear()
        self._validated_blocks.clear()

    def check_open(self) -> None:
        """Raise if the device is closed.

        Raises:
            RuntimeError: The device is closed.
        """
        if self.is_closed:
            raise RuntimeError(f"device {self.info.name} is closed")

    def _refuse_to_allocate(self, block: int, nbytes: int) -> None:
        self.check_open()
