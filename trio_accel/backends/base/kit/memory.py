"""The blocks of one device: their bytes, their places, and the keeper of their chunks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar

from ..contract.errors import OutOfMemoryError
from ..contract.protocols import ChunkKeeper, MemoryStatistics, PlacedBlock
from .chunks import ALIGNMENT, ChunkAllocator, Placement

__all__ = ["BlockMemory", "ChunkSource"]

_MOST_SPARES = 64

ChunkT = TypeVar("ChunkT")
BlockT = TypeVar("BlockT")
BlockT_co = TypeVar("BlockT_co", covariant=True)


# Place of a block: its id in the allocator, its chunk, and bytes from the chunk's start.
_Location: TypeAlias = tuple[int, int, int]


def no_such_block(block: int) -> KeyError:
    """Make the error for a block that does not exist."""
    return KeyError(f"block {block} does not exist")


class ChunkSource(Protocol[ChunkT, BlockT_co]):
    """A backend's source of chunks."""

    @property
    def first(self) -> int:
        """Bytes of the first chunk."""
        ...

    @property
    def keep(self) -> int:
        """The most bytes of empty chunks to keep."""
        ...

    def make(self, nbytes: int) -> tuple[ChunkT, int]:
        """Make a chunk of at least `nbytes` for this process only; return it and its size.

        Raises:
            MemoryError: The device has too little left.
        """
        ...

    def make_kept(self, nbytes: int, keeper: ChunkKeeper, chunk: int) -> tuple[ChunkT, int]:
        """Make a chunk and pass it to a keeper; return it and its size.

        Raises:
            MemoryError: The device has too little left.
            Exception: The error of the keeper.
        """
        ...

    def map(self, nbytes: int, descriptor: int, *, write: bool) -> ChunkT:
        """Map a chunk of another process; the caller still owns the descriptor."""
        ...

    def share(self, chunk: ChunkT) -> ChunkT:
        """Map a chunk of another device in this process for reading. Its memory exists until `drop`."""
        ...

    def drop(self, chunk: ChunkT) -> None:
        """Give a chunk of this process back."""

    def block(self, chunk: ChunkT, offset: int, nbytes: int) -> BlockT_co:
        """Make the backend's handle of a block, such as an address or an array."""
        ...

    def available(self) -> int:
        """Return the bytes that the device has left."""
        ...


class BlockMemory(Generic[ChunkT, BlockT]):
    """The blocks of one device, and how many bytes they take.

    Blocks are placed in chunks. Empty chunks are kept for later blocks, because fresh memory from the system
    costs more than the search for a place. The lock is needed because the engine allocates in Trio's thread,
    but closes the device in another.

    The place of a freed block is kept as a spare, with the backend's handle, for the next block of its size.
    The allocator counts spares as taken. It gets all of them back when no gap is large enough for a new
    block, and when a chunk has no block left. So a program with results of many sizes finds a place for each
    of them without a search.

    Args:
        device: Name of the device.
        limit: The most bytes that its blocks may take.
        source: Makes the chunks.
        keeper: Gets the chunks.

    Attributes:
        blocks: For each id, the backend's handle of the block, its size and its place. Do not change it from
            outside.
        read_only: Blocks in chunks mapped for reading, where a kernel's write would end the process.
        fixed_workspace: Workspace by library that the limit excludes, in bytes.
        freed: The number of times that anything was freed: while it is the same, no block has moved.
        relieve: Gives idle workspace back; returns whether there was any.
    """

    def __init__(
        self, device: str, limit: int, source: ChunkSource[ChunkT, BlockT], keeper: ChunkKeeper | None = None
    ) -> None:
        self._device = device
        self._limit = limit
        self._source = source
        self._keeper = keeper
        self._used = 0
        self._peak = 0
        self._workspace = 0
        self.fixed_workspace: Counter[str] = Counter()
        self.relieve: Callable[[], bool] | None = None
        self.blocks: dict[int, tuple[BlockT, int, _Location]] = {}
        self.freed: int = 0
        # The allocator knows places by ids of their own, because a place stays taken when its block is freed.
        # They count down from -1, so they never equal the id of a block.
        self._last_place = 0
        # Freed places with their handles, by size in whole alignments.
        self._spares: dict[int, list[tuple[BlockT, int, _Location]]] = {}
        self._spare_count = 0
        self._chunks: dict[int, tuple[ChunkT, int]] = {}
        # The number of blocks in each chunk.
        self._counts: dict[int, int] = {}
        # Mapped chunks of another process or device, not adopted yet.
        self._mapped: set[int] = set()
        # Blocks in mapped chunks, which libraries may read before they are adopted.
        self._expected: set[int] = set()
        self._read_only_chunks: set[int] = set()
        self.read_only: set[int] = set()
        self._last_chunk = 0
        self._allocator = self._new_allocator()
        # Reentrant, because `relieve` gives workspace back, which takes the lock, during the search for a
        # place.
        self._lock = threading.RLock()

    def allocate(self, block: int, nbytes: int) -> None:
        """Make a block of uninitialised memory.

        Raises:
            OutOfMemoryError: The limit, or the machine, leaves too little.
            KeyError: The id is taken.
            ValueError: The size is negative.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes: {nbytes} is negative")
        size = -(-nbytes // ALIGNMENT) or 1
        with self._lock:
            if block in self.blocks:
                raise KeyError(f"block {block} exists already")
            if nbytes > self._limit - self._used and nbytes > self._free():
                raise self._error(nbytes, self._free())
            spares = self._spares.get(size)
            if spares:
                entry = spares.pop()
                self._spare_count -= 1
                if entry[1] != nbytes:
                    entry = self._make_entry(entry[2], nbytes)
            else:
                entry = self._make_entry(self._locate(nbytes), nbytes)
            self.blocks[block] = entry
            self._counts[entry[2][1]] += 1
            self._used = used = self._used + nbytes
            if used > self._peak:  # noqa: PLR1730  # `max` would take longer than all the rest of it
                self._peak = used
            is_over = used + self._workspace > self._limit
        if is_over and self._workspace and self.relieve is not None:
            # Blocks go before workspace, because workspace can be made again.
            self.relieve()

    def take_workspace(self, nbytes: int) -> None:
        """Count memory that kernels need for themselves.

        Raises:
            OutOfMemoryError: The limit leaves too little, even without idle workspace.
        """
        if nbytes > self._room() and self.relieve is not None:
            self.relieve()
        with self._lock:
            if nbytes > self._room():
                raise self._error(nbytes, self._room())
            self._workspace += nbytes

    def add_fixed_workspace(self, library: str, nbytes: int) -> None:
        """Count memory that a library cannot work without, in the statistics only: the limit excludes it.

        Args:
            library: Its name.
            nbytes: How much more it is; below 0 for less.
        """
        with self._lock:
            self.fixed_workspace[library] += nbytes

    def give_workspace(self, nbytes: int) -> None:
        """Take memory off the count of `take_workspace`."""
        with self._lock:
            self._workspace -= nbytes

    def _room(self) -> int:
        """Return the bytes that the limit leaves for workspace."""
        return max(0, self._limit - self._used - self._workspace)

    def free(self, block: int) -> None:
        """Give a block back.

        Raises:
            KeyError: No block has this id.
        """
        with self._lock:
            try:
                entry = self.blocks.pop(block)
            except KeyError:
                raise no_such_block(block) from None
            self.freed += 1
            if block in self._expected:
                # The block is in memory that the device does not own.
                self._expected.remove(block)
                self.read_only.discard(block)
                return
            _, nbytes, location = entry
            counts, spares, chunk = self._counts, self._spares, location[1]
            self._used -= nbytes
            counts[chunk] = remaining = counts[chunk] - 1
            if not remaining:
                # The allocator gives a chunk back only when all of it is free, so its spares must go.
                self._give_spares_back()
            elif self._spare_count < _MOST_SPARES:
                size = -(-nbytes // ALIGNMENT) or 1
                spares.setdefault(size, []).append(entry)
                self._spare_count += 1
                return
            self._allocator.free(location[0])

    def _locate(self, nbytes: int) -> _Location:
        """Have the allocator find a place."""
        if not self._allocator.has_gap(nbytes):
            self._give_spares_back()
        self._last_place -= 1
        try:
            placement = self._allocate(nbytes)
        except MemoryError as error:
            failed = self.exhausted(nbytes)
            if isinstance(error.__cause__, OSError):
                # There may be enough, and a limit of the process in the way.
                failed.add_note(f"the system refused {error}; see the limits of the process (ulimit -a)")
            raise failed from error
        return self._last_place, placement.chunk, placement.offset

    def _allocate(self, nbytes: int) -> Placement:
        """Find a place; if memory is short, give idle workspace back and try once more."""
        try:
            return self._allocator.allocate(self._last_place, nbytes)
        except MemoryError:
            if not self._workspace or self.relieve is None:
                raise
        self.relieve()
        return self._allocator.allocate(self._last_place, nbytes)

    def _make_entry(self, location: _Location, nbytes: int) -> tuple[BlockT, int, _Location]:
        """Make the entry of a block in this place: the backend's handle, size and place."""
        _, chunk, offset = location
        return self._source.block(self._chunks[chunk][0], offset, nbytes), nbytes, location

    def _give_spares_back(self) -> None:
        spares_by_size, self._spares, self._spare_count = self._spares, {}, 0
        for spares in spares_by_size.values():
            for _, _, location in spares:
                self._allocator.free(location[0])

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int, *, write: bool = True) -> None:
        """Map a chunk of another process; see `AccelDevice.map_chunk`. The caller keeps the descriptor."""
        self._add_mapped(chunk, self._source.map(nbytes, descriptor, write=write), nbytes, write=write)

    def map_peer(self, chunk: int, owner: BlockMemory[ChunkT, BlockT], number: int) -> None:
        """Map a chunk of another device in this process; see `AccelDevice.map_peer`."""
        memory, nbytes = owner._chunks[number]
        self._add_mapped(chunk, self._source.share(memory), nbytes, write=False)

    def _add_mapped(self, chunk: int, memory: ChunkT, nbytes: int, *, write: bool) -> None:
        with self._lock:
            is_new = chunk not in self._chunks
            if is_new:
                self._chunks[chunk] = memory, nbytes
                self._counts[chunk] = 0
                self._mapped.add(chunk)
                if not write:
                    self._read_only_chunks.add(chunk)
                self._last_chunk = max(self._last_chunk, chunk)
        if not is_new:
            self._source.drop(memory)
            raise ValueError(f"chunk {chunk} is there already")

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk; see `AccelDevice.unmap_chunk`."""
        with self._lock:
            if chunk not in self._mapped:
                raise KeyError(f"chunk {chunk} is none that was mapped and not adopted")
            self._mapped.remove(chunk)
            self._read_only_chunks.discard(chunk)
            for block in [block for block in self._expected if self.blocks[block][2][1] == chunk]:
                self._expected.remove(block)
                self.read_only.discard(block)
                del self.blocks[block]
            memory, _ = self._chunks.pop(chunk)
            del self._counts[chunk]
        self._source.drop(memory)

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        """Note blocks in chunks that may be read; see `AccelDevice.expect`."""
        with self._lock:
            placed_blocks = [placed for placed in blocks if not self._is_own(placed.block)]
            for block, nbytes, chunk, offset in placed_blocks:
                if chunk not in self._chunks or not 0 <= offset <= self._chunks[chunk][1] - nbytes:
                    raise ValueError(f"block {block} is outside of the chunks")
            for block, nbytes, chunk, offset in placed_blocks:
                # The allocator does not know the place yet: `adopt` takes the whole chunk.
                self.blocks[block] = self._make_entry((0, chunk, offset), nbytes)
                self._expected.add(block)
                if chunk in self._read_only_chunks:
                    self.read_only.add(block)

    def _is_own(self, block: int) -> bool:
        """Return whether the block exists and is not only expected."""
        return block in self.blocks and block not in self._expected

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        """Take over the mapped chunks with their blocks; see `AccelDevice.adopt`."""
        if self._keeper is None:
            raise RuntimeError(
                f"device {self._device} was opened without a keeper: its memory is its process's own"
            )
        placed_blocks = tuple(blocks)
        with self._lock:
            for block in [placed.block for placed in placed_blocks if self._is_own(placed.block)]:
                raise ValueError(f"block {block} is placed already")
            self._allocator.adopt(
                {chunk: self._chunks[chunk][1] for chunk in self._mapped},
                [
                    (placed.block, Placement(placed.chunk, placed.offset, placed.nbytes))
                    for placed in placed_blocks
                ],
            )
            self._mapped.clear()
            self._read_only_chunks.clear()
            self.read_only.clear()
            for placed in placed_blocks:
                self._last_place -= 1
                self._allocator.rename(placed.block, self._last_place)
                taken = self._last_place, placed.chunk, placed.offset
                # Replaced in one step: a thread that makes a program may look an expected block up just now.
                self.blocks[placed.block] = self._make_entry(taken, placed.nbytes)
                self._expected.discard(placed.block)
                self._counts[placed.chunk] += 1
                self._used += placed.nbytes
            for block in self._expected:
                del self.blocks[block]
            self._expected.clear()
            self.freed += 1
            self._peak = max(self._peak, self._used)

    def placement(self, block: int) -> PlacedBlock:
        """Return the place of a block; see `AccelDevice.placement`."""
        _, nbytes = self.block(block)
        _, chunk, offset = self.blocks[block][2]
        return PlacedBlock(block, nbytes, chunk, offset)

    def clear(self) -> None:
        """Give every block back; chunks that a keeper has stay as they are, and are forgotten."""
        with self._lock:
            self._allocator = self._new_allocator()
            for memory, _ in self._chunks.values():
                self._source.drop(memory)
            self._chunks.clear()
            self._counts.clear()
            self._mapped.clear()
            self._expected.clear()
            self._read_only_chunks.clear()
            self.read_only.clear()
            self._spares, self._spare_count = {}, 0
            self.blocks.clear()
            self.freed += 1
            self._used = 0

    def block(self, block: int) -> tuple[BlockT, int]:
        """Return the backend's handle of a block, and its size.

        Raises:
            KeyError: No block has this id.
        """
        try:
            handle, nbytes, _ = self.blocks[block]
        except KeyError:
            raise no_such_block(block) from None
        return handle, nbytes

    def statistics(self) -> MemoryStatistics:
        """Count the blocks and their bytes."""
        with self._lock:
            return MemoryStatistics(
                used=self._used,
                reserved=self._allocator.reserved,
                peak=self._peak,
                blocks=len(self.blocks) - len(self._expected),
                limit=self._limit,
                workspace=self._workspace + sum(self.fixed_workspace.values()),
            )

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for a device that has run out of memory.

        Args:
            requested: The number of bytes requested; 0 if it is not known.
        """
        return self._error(requested, min(self._free(), self._source.available()))

    def _free(self) -> int:
        """Return the bytes below the limit; 0 if adopted blocks exceed it."""
        return max(0, self._limit - self._used)

    def _new_allocator(self) -> ChunkAllocator:
        source = self._source
        return ChunkAllocator(self._make_chunk, self._drop_chunk, first=source.first, keep=source.keep)

    def _make_chunk(self, nbytes: int) -> tuple[int, int]:
        try:
            return self._add_chunk(nbytes)
        except MemoryError:
            self._allocator.trim()
            return self._add_chunk(nbytes)

    def _add_chunk(self, nbytes: int) -> tuple[int, int]:
        # Each try has an id of its own, because a failed keeper may have sent the last id to others.
        self._last_chunk += 1
        chunk = self._last_chunk
        if self._keeper is None:
            memory, size = self._source.make(nbytes)
        else:
            memory, size = self._source.make_kept(nbytes, self._keeper, chunk)
        self._chunks[chunk] = memory, size
        self._counts[chunk] = 0
        return chunk, size

    def _drop_chunk(self, chunk: int) -> None:
        memory, _ = self._chunks.pop(chunk)
        del self._counts[chunk]
        self._source.drop(memory)
        if self._keeper is not None:
            self._keeper.drop(chunk)

    def _error(self, requested: int, free: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"{requested or 'an unknown number of'} bytes requested, {free} free of {self._limit}: release"
            " arrays, or open the device with a larger memory_limit if the machine has more",
            requested=requested,
            free=free,
            total=self._limit,
            device=self._device,
        )
