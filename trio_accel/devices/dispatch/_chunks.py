"""The application's view of device memory: descriptors of chunks, and the blocks in the chunks (D3)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from ...backends.base import AccelBackend, ArraySpec, HostArray, NotSupportedError
from ...backends.base.kit.chunks import ALIGNMENT
from ...backends.base.kit.host import check_shared, read_only, total_bytes
from ..base._errors import out_of_descriptors
from ..base._views import reach
from ..operations._blocks import BlockTable
from ..wire import _orders
from ..wire._messages import expect
from ..wire._protocol import Address, NonsenseError
from ._link import WorkerLink
from ._loans import next_abroad

__all__ = ["INTACT", "LeftMemory", "Stay", "free_left_memory"]

if TYPE_CHECKING:
    from ...actors import ActorSystem
    from ..launcher._launcher import Launcher

# The address of a block before its request is answered.
_UNKNOWN = 0, inf, 0, 0
# More than a worker's allocator makes.
_MAX_CHUNKS = 4096

INTACT = "; its arrays are intact: system.open_device(adopt=device) opens a device that has them"
"""The end of the reason why a device failed for good, if it left memory."""


@attrs.define(eq=False)
class Chunk:
    """Memory that a worker has made.

    Attributes:
        number: Its id on the device.
        nbytes: Its size.
        descriptor: Its file descriptor.
        is_host: Whether it is the descriptor of a file.
        abroad: Its id in workers of other devices.
        borrowers: The workers that must keep it mapped, and whether each has confirmed the mapping.
        loans: The number of its arrays that are being read there.
    """

    number: int
    nbytes: int
    descriptor: int
    is_host: bool
    mapped: npt.NDArray[np.uint8] | None = None
    abroad: int = attrs.field(factory=next_abroad)
    borrowers: weakref.WeakKeyDictionary[WorkerLink, bool] = attrs.field(
        factory=weakref.WeakKeyDictionary["WorkerLink", bool], init=False
    )
    loans: int = 0
    _is_dropped: bool = False

    def send(self, worker: WorkerLink) -> None:
        """Make a worker of its device map the chunk."""
        worker.send(_orders.chunk(self.number, self.nbytes), (self.descriptor,))

    def open_to_read(self) -> int:
        """Open it read-only for a worker of another device; the caller closes it.

        Raises:
            OSError: There are too many open files.
        """
        # The driver has only one kind of descriptor; then the mapping is read-only.
        return read_only(self.descriptor) if self.is_host else os.dup(self.descriptor)

    def unmap(self, borrower: WorkerLink) -> None:
        """Make a worker unmap it once nothing there reads it."""
        if self.borrowers.pop(borrower, None) is not None:
            borrower.send(_orders.unchunk(self.abroad))

    def drop(self) -> None:
        """Free it now, or when no other device reads an array in it."""
        self._is_dropped = True
        self._close_if_unused()

    def end_loan(self) -> None:
        """Stop reading an array in it."""
        self.loans -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        # A reader's next worker may also need the descriptor.
        if self._is_dropped and not self.loans:
            os.close(self.descriptor)
            for borrower in tuple(self.borrowers):
                self.unmap(borrower)


@attrs.define(eq=False)
class Stay:
    """Memory of other devices that workers keep mapped between loans, until this ends.

    A world lends the same arrays for each collective, and would otherwise map them again each time.

    Attributes:
        is_over: Whether it has ended.
    """

    is_over: bool = attrs.field(default=False, init=False)
    _chunks: weakref.WeakKeyDictionary[Chunk, weakref.WeakSet[WorkerLink]] = attrs.field(
        factory=weakref.WeakKeyDictionary["Chunk", "weakref.WeakSet[WorkerLink]"], init=False
    )

    def add(self, chunk: Chunk, borrower: WorkerLink) -> None:
        """Record that a worker must keep a chunk mapped."""
        chunk.borrowers.setdefault(borrower, False)
        self._chunks.setdefault(chunk, weakref.WeakSet()).add(borrower)

    def end(self) -> None:
        """Unmap all of it. Another `Stay` with the same chunk maps it again."""
        self.is_over = True
        for chunk, borrowers in tuple(self._chunks.items()):
            for borrower in tuple(borrowers):
                chunk.unmap(borrower)
        self._chunks.clear()


class ChunkTable:
    """The chunks and blocks of a device.

    It outlives every worker, and passes all memory and blocks to the next one.

    Args:
        backend: The backend of the device.
        on_drop: Called with the id of each freed chunk.
        is_kept: Whether workers pass the chunks that they make to the application.

    Attributes:
        chunks: The chunks by id.
        blocks: The addresses of the blocks of the program's arrays, by block id.
        missing: The reason why this process has no descriptor of a worker's chunk, by id.
        on_drop: Called with the id of each freed chunk.
    """

    def __init__(
        self, backend: AccelBackend, on_drop: Callable[[int], None], *, is_kept: bool = True
    ) -> None:
        self._is_kept = is_kept
        self.chunks: dict[int, Chunk] = {}
        self.blocks: dict[int, Address] = {}
        self.missing: dict[int, OSError] = {}
        self.on_drop: Callable[[int], None] = on_drop
        self._backend = backend
        self._launcher: Launcher | None = None

    def open(self, launcher: Launcher) -> None:
        """Make the launcher empty the memory if this process dies."""
        if launcher is self._launcher:
            return
        self._launcher = launcher
        for chunk in self.chunks.values():
            # The previous launcher, which kept them, has ended.
            launcher.keep_chunk(chunk.descriptor)

    def check_new(self, number: int, nbytes: int, descriptor: int) -> None:
        """Check a worker's description of a new chunk.

        Raises:
            NonsenseError: It is impossible.
        """
        is_new = number not in self.chunks and len(self.chunks) < _MAX_CHUNKS
        expect(is_new, f"chunk {number}: there are {len(self.chunks)}, and it may be one of them")
        expect(nbytes, f"chunk {number} is empty")
        if self._backend.shares_memory_with_host:
            try:
                check_shared(descriptor, nbytes)
            except ValueError as error:
                raise NonsenseError(f"chunk {number}: {error}") from error
            expect(nbytes <= total_bytes(), f"chunk {number}: no machine has {nbytes} bytes")

    def check_address(self, address: Address) -> None:
        """Check the address that a worker reports for a block.

        Raises:
            NonsenseError: The chunk does not exist, or ends before the block.
        """
        block, nbytes, number, offset = address
        if not self._is_kept:
            return
        chunk = self.chunks.get(number)
        if number not in self.missing and (chunk is None or offset + nbytes > chunk.nbytes):
            raise NonsenseError(f"block {block} cannot lie at {offset} of chunk {number}")

    def check_array(self, number: int, offset: int, array: ArraySpec) -> None:
        """Check the place that a worker reports for an array, with the arguments of `view`.

        Raises:
            NonsenseError: The chunk does not exist, or does not contain the whole array.
        """
        chunk = self.chunks.get(number)
        start, end = reach(array)
        is_in = chunk is not None and offset + start >= 0 and offset + end <= chunk.nbytes
        if not is_in and array.size and number not in self.missing:
            raise NonsenseError(f"an array of block {array.block} cannot lie at {offset} of chunk {number}")

    def drop_unsound(self) -> None:
        """Forget blocks with impossible places: outside of all chunks, or overlapping another.

        A worker with damaged memory may have reported them, and the next worker could not take them over.
        """
        ends = dict.fromkeys(self.chunks, 0)
        for address in sorted(self.blocks.values(), key=lambda address: address[2:]):
            block, nbytes, number, offset = address
            chunk = self.chunks.get(number)
            end = offset + max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
            if chunk is None or offset % ALIGNMENT or offset < ends[number] or end > chunk.nbytes:
                del self.blocks[block]
            else:
                ends[number] = end

    def keep(self, number: int, nbytes: int, descriptor: int) -> Chunk:
        """Add a chunk, and take over its descriptor.

        Raises:
            OSError: There are too many open files.
        """
        assert self._launcher is not None
        # The launcher frees the memory if this process dies, so it must know of the chunk before its first
        # use.
        self._launcher.keep_chunk(descriptor)
        self.missing.pop(number, None)
        is_host = self._backend.shares_memory_with_host
        chunk = self.chunks[number] = Chunk(number, nbytes, descriptor, is_host)
        return chunk

    def check_gone(self, number: int) -> None:
        """Check a worker's report that a chunk was freed.

        Raises:
            NonsenseError: The chunk does not exist, or contains an array of the program.
        """
        is_empty = all(chunk != number for _, _, chunk, _ in self.blocks.values())
        expect(number in self.chunks and is_empty, f"unchunk: chunk {number} is not there, or not empty")

    def drop(self, number: int) -> None:
        """Free a chunk; the program's arrays over it keep their mapping."""
        chunk = self.chunks.pop(number)
        if self._launcher is not None:
            self._launcher.forget_chunk(chunk.descriptor)
        chunk.drop()
        self.on_drop(number)

    def drop_empty(self) -> None:
        """Free all chunks without blocks. Only while no worker makes blocks."""
        full = {chunk for _, _, chunk, _ in self.blocks.values()}
        for number in [number for number in self.chunks if number not in full]:
            self.drop(number)

    def chunk(self, number: int, nbytes: int) -> Chunk:
        """Return a chunk, for a block of `nbytes` bytes.

        Raises:
            NotSupportedError: Only the worker can reach the memory.
            OutOfMemoryError: There are too many open files.
        """
        if not self._is_kept:
            raise NotSupportedError(
                "other processes cannot reach the memory of this device; copy by to_host() or copy_to()",
                backend=self._backend.name,
            )
        if number in self.missing:
            raise out_of_descriptors(nbytes, self.missing[number]) from self.missing[number]
        return self.chunks[number]

    def view(self, chunk: int, offset: int, array: ArraySpec) -> HostArray:
        """Make a host array over an array of the device.

        Args:
            chunk: Its chunk.
            offset: The offset of its block in the chunk, in bytes.
            array: Its layout in the block.

        Raises:
            NotSupportedError: The host cannot address the device's memory.
            OutOfMemoryError: There are too many open files or mappings.
        """
        try:
            held = self.chunk(chunk, array.size * array.dtype.itemsize)
            if held.mapped is None:
                held.mapped = self._backend.map_host(held.descriptor, held.nbytes)
        except OSError as error:
            raise out_of_descriptors(array.size * array.dtype.itemsize, error) from error
        return np.ndarray(
            array.shape, array.dtype.dtype, held.mapped.data, offset + array.offset, array.strides
        )

    def record(self, addresses: Iterable[Address]) -> None:
        """Record the addresses of blocks."""
        for address in addresses:
            self.blocks[address[0]] = address

    def forget_addresses(self, allocations: Iterable[tuple[int, int]]) -> None:
        """Forget the addresses of these blocks."""
        for block, _ in allocations:
            self.blocks.pop(block, None)

    def forget(self, blocks: Iterable[int]) -> float:
        """Forget blocks without an array of the program.

        Returns:
            Their total bytes; infinity if a size is unknown.
        """
        nbytes = 0.0
        for block in blocks:
            nbytes += self.blocks.pop(block, _UNKNOWN)[1]
        return nbytes

    def close(self) -> None:
        """Free everything."""
        self.blocks.clear()
        self.drop_empty()


@attrs.define(eq=False)
class LeftMemory:
    """Chunks, and the program's arrays in them, after their device has ended.

    The memory exists until another device of the system adopts it, or the system ends. A chunk is freed
    earlier if the program has dropped its last array in it.

    Attributes:
        chunks: The memory.
        blocks: The blocks of the program's arrays.
        generation: The number of the last context that used it.
    """

    chunks: ChunkTable
    blocks: BlockTable
    generation: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return sum(nbytes for _, nbytes, _, _ in self.chunks.blocks.values())

    def leave(self, system: ActorSystem) -> None:
        """Leave the memory to the system, because no device owns it any longer."""
        _left_memory.setdefault(system, set()).add(self)
        self.generation = max(self.generation, self.blocks.availability.generation)
        # No worker maps the chunks any longer.
        self.chunks.on_drop = lambda chunk: None
        self.blocks.leave(self._release)
        self.chunks.drop_empty()

    def take(self, system: ActorSystem) -> None:
        """Take it back for a device."""
        _left_memory.get(system, set()).discard(self)

    def free(self) -> None:
        """Free everything; the arrays are lost."""
        self.blocks.close()
        self.chunks.close()

    def _release(self, blocks: Iterable[int]) -> None:
        self.chunks.forget(blocks)
        self.chunks.drop_empty()


# The table must not keep the system alive.
_left_memory: weakref.WeakKeyDictionary[ActorSystem, set[LeftMemory]] = weakref.WeakKeyDictionary()


def free_left_memory(system: ActorSystem) -> None:
    """End with the system: the memory that its devices left can no longer be adopted."""
    for memory in _left_memory.pop(system, set()):
        memory.free()
