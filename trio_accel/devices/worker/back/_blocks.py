"""The blocks that the application has told a worker of."""

from __future__ import annotations

from collections.abc import Iterable

from ...arrays._blocks import Block, BlockTable

__all__ = ["WorkerBlocks"]


class WorkerBlocks(dict[int, Block]):
    """Blocks by their ids; for one that the application has released, one that is gone.

    To be changed by its methods alone.

    Args:
        blocks: Makes them.

    Attributes:
        changes: How often it was changed: what was found in it holds until the next time.
    """

    __slots__ = ("_blocks", "changes")

    def __init__(self, blocks: BlockTable) -> None:
        super().__init__()
        self._blocks = blocks
        self.changes: int = 0

    def __missing__(self, number: int) -> Block:
        block = self._blocks.new(0, number)
        block.is_released = True
        return block

    def adopt(self, number: int, nbytes: int) -> None:
        """Know a block that is there."""
        self.changes += 1
        self[number] = self._blocks.new(nbytes, number)

    def name(self, allocations: Iterable[tuple[int, int]]) -> None:
        """Know the blocks that an operation is to make, given their ids and sizes."""
        for number, nbytes in allocations:
            known = self.get(number)
            if known is not None:
                # The application gives it to one array after the other.
                if known.damaged_by is None:
                    continue
                known.is_released = True
            self.adopt(number, nbytes)

    def let_go(self, numbers: Iterable[int]) -> None:
        """Note that the application has dropped blocks; the next operation gives them back, or `drain`."""
        dropped = self._blocks.dropped
        for number in numbers:
            block = self.pop(number, None)
            if block is None:
                continue
            self.changes += 1
            if not block.is_released:
                # Without waking the loop, which is awake.
                block.is_released = True
                dropped.append((number, block.nbytes, None))
