"""The memory of a device that was given up, for the device that adopts it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from ...arrays._blocks import BlockTable
from ._chunks import ChunkTable

if TYPE_CHECKING:
    from ....actors import System

__all__ = ["INTACT", "LeftMemory", "free_left_memory"]

INTACT = "; its arrays are intact: system.open_device(adopt=device) opens a device that has them"
"""What is said behind the reason for which a device was given up, if it left any."""


@attrs.define(eq=False)
class LeftMemory:
    """Chunks, and the arrays of the program that lie in them.

    They are there until another device of the system adopts them, or the system ends. A chunk is given back
    earlier if no array of the program lies in it any more.

    Attributes:
        chunks: The memory.
        blocks: The blocks of the program's arrays.
        generation: Number of the last context that used it.
    """

    chunks: ChunkTable
    blocks: BlockTable
    generation: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(nbytes for _, nbytes, _, _ in self.chunks.blocks.values())

    def leave(self, system: System) -> None:
        """No device has it any more."""
        _left.setdefault(system, set()).add(self)
        self.generation = max(self.generation, self.blocks.availability.generation)
        self.chunks.on_drop = _nobody
        self.blocks.leave(self._release)
        self.chunks.drop_empty()

    def take(self, system: System) -> None:
        """A device has it again."""
        _left.get(system, set()).discard(self)

    def free(self) -> None:
        """Give everything back; the arrays are lost."""
        self.blocks.close()
        self.chunks.close()

    def _release(self, blocks: Iterable[int]) -> None:
        self.chunks.forget(blocks)
        self.chunks.drop_empty()


# The system is not kept alive by it.
_left: weakref.WeakKeyDictionary[System, set[LeftMemory]] = weakref.WeakKeyDictionary()


def free_left_memory(system: System) -> None:
    """The system has ended: nobody can adopt what its devices left."""
    for memory in _left.pop(system, set()):
        memory.free()


def _nobody(chunk: int) -> None:
    """No worker has it mapped."""
