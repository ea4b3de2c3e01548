"""The blocks of one context: which there are, and which are in use."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from ..backends.base import AccelDevice, OutOfMemoryError, PlacedBlock
from ._hazards import HazardTracker

__all__ = ["MemoryInUse"]


class MemoryInUse:
    """Frees blocks that were let go as soon as nothing in flight, and no lease, uses them.

    Args:
        device: Whose memory it is.
        hazards: What is remembered of their use; forgotten with them.
    """

    __slots__ = ("_allocated", "_device", "_dropped", "_hazards", "_pins")

    def __init__(self, device: AccelDevice, hazards: HazardTracker) -> None:
        self._device = device
        self._hazards = hazards
        self._allocated: set[int] = set()
        self._pins: dict[int, int] = {}
        self._dropped: set[int] = set()

    def adopt(self, blocks: Iterable[int]) -> None:
        """Take over blocks that are there from the context before."""
        self._allocated.update(blocks)

    def allocate(self, block: int, nbytes: int, drain: Callable[[], None]) -> None:
        """Make a block.

        Args:
            block: Its id.
            nbytes: Its size.
            drain: Gives back what the program has let go.

        Raises:
            OutOfMemoryError: There is no memory, also when garbage was collected.
        """
        try:
            self._device.allocate(block, nbytes)
        except OutOfMemoryError:
            # Arrays in reference cycles, such as those of an error's frames, wait to be collected.
            gc.collect()
            drain()
            self._device.allocate(block, nbytes)
        self._allocated.add(block)

    def release(self, block: int) -> None:
        """Free a block, as soon as nothing uses it."""
        if block not in self._allocated:
            # Its operation was withdrawn before it was launched.
            return
        if self._pins.get(block):
            self._dropped.add(block)
            return
        self._allocated.discard(block)
        self._dropped.discard(block)
        self._hazards.forget(block)
        self._device.free(block)

    def placed(self, block: int) -> PlacedBlock | None:
        """Where a block of a chunk that is kept lies; None if it is freed."""
        return self._device.placement(block) if block in self._allocated else None

    def pin(self, blocks: Iterable[int]) -> None:
        """They are used."""
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """A use of them is over."""
        for block in blocks:
            left = self._pins[block] - 1
            if left:
                self._pins[block] = left
                continue
            del self._pins[block]
            if block in self._dropped:
                self.release(block)
