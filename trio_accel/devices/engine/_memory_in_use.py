"""The blocks of one context: which there are, who uses them, and what must wait for whom because of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

from ...backends.base import AccelDevice, AccelStream, OutOfMemoryError, PlacedBlock
from ..arrays._blocks import BlockTable
from ._in_flight import BlockUse, BlockUses

__all__ = ["MemoryInUse"]


class MemoryInUse:
    """Frees blocks that were let go as soon as nothing in flight, and no lease, uses them.

    It also knows what of their use is not finished: read-after-write, write-after-read and
    write-after-write. Work on one stream is ordered by the stream; only other streams' events are waited
    for, and only on the device: the host never waits.

    Args:
        device: Whose memory it is.

    Attributes:
        fresh: Blocks that were made where they were not before, unless somebody has taken note of where.
        uses: The uses of blocks that are there, or in use.
    """

    __slots__ = ("_device", "fresh", "uses")

    def __init__(self, device: AccelDevice) -> None:
        self._device = device
        self.fresh: set[int] = set()
        self.uses: BlockUses = BlockUses()

    def adopt(self, blocks: Iterable[int]) -> None:
        """Take over blocks that are there from the context before."""
        for block in blocks:
            self.use(block).is_allocated = True

    def use(self, block: int) -> BlockUse:
        """The use of a block; also of one that is not there."""
        return self.uses[block]

    def exchange(self, table: BlockTable, wanted: Sequence[tuple[int, int]]) -> None:
        """Free what the program has let go, each as soon as nothing uses it, and make other blocks.

        Args:
            table: Has what was let go.
            wanted: Ids and sizes of the others.

        Raises:
            OutOfMemoryError: As for `allocate`.
        """
        if table.dropped:
            self.release_all(table.take_some())
        if wanted:
            self.allocate(wanted, table.drain)

    def allocate(self, blocks: Iterable[tuple[int, int]], drain: Callable[[], None]) -> None:
        """Make blocks; one that is there is made anew where it lies.

        A program that makes one result after the other has the same block for all.

        Args:
            blocks: Their ids and sizes.
            drain: Gives back what the program has let go.

        Raises:
            OutOfMemoryError: There is no memory, also when garbage was collected.
        """
        uses = self.uses
        for block, nbytes in blocks:
            use = uses.get(block)
            if use is not None and use.is_allocated:
                use.is_dropped = False
                if not use.pins:
                    use.last_write = use.reads = None
                self._device.renew(block)
                continue
            try:
                self._device.allocate(block, nbytes)
            except OutOfMemoryError:
                # Arrays in reference cycles, such as those of an error's frames, wait to be collected.
                gc.collect()
                drain()
                self._device.allocate(block, nbytes)
            self.fresh.add(block)
            if block in uses:
                uses[block].is_allocated = True
            else:
                uses[block] = BlockUse(block, is_allocated=True)

    def order(self, stream: AccelStream, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Make a stream wait for everything that work on these blocks must follow."""
        use_of = self.uses.get
        for block in reads:
            use = use_of(block)
            if use is not None and use.last_write is not None and use.last_write[0] is not stream:
                use.order(stream, is_write=False)
        for block in writes:
            use = use_of(block)
            if use is not None and (use.last_write is not None or use.reads is not None):
                use.order(stream, is_write=True)

    def release(self, block: int) -> None:
        """Free a block, as soon as nothing uses it."""
        self.release_all((block,))

    def release_all(self, blocks: Iterable[int]) -> None:
        """Free blocks, each as soon as nothing uses it."""
        uses = self.uses
        for block in blocks:
            use = uses.get(block)
            if use is None or not use.is_allocated:
                # Its operation was withdrawn before it was launched.
                continue
            if use.pins:
                use.is_dropped = True
            else:
                del uses[block]
                self.fresh.discard(block)
                self._device.free(block)

    def placed(self, block: int) -> PlacedBlock | None:
        """Where a block of a chunk that is kept lies; None if it is freed, or will be as soon as it may."""
        use = self.uses.get(block)
        if use is None or not use.is_allocated or use.is_dropped:
            return None
        return self._device.placement(block)

    def pin(self, block: int) -> BlockUse:
        """It is used."""
        use = self.use(block)
        use.pins += 1
        return use

    def unpin(self, use: BlockUse) -> None:
        """A use of a block is over."""
        use.pins -= 1
        if use.pins:
            return
        if use.is_dropped:
            self.release(use.block)
        elif not use.is_allocated:
            del self.uses[use.block]
