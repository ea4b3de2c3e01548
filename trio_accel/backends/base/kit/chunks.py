"""Placing blocks in chunks of memory, which are kept for the next blocks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import attrs

__all__ = ["ChunkAllocator", "Placement"]

ALIGNMENT = 512
"""Blocks start at multiples of this many bytes, which suits every vendor's library."""


class Placement(NamedTuple):
    """The place of a block.

    Attributes:
        chunk: Id of the chunk.
        offset: Bytes from its start.
        nbytes: Bytes reserved, a multiple of the alignment.
    """

    chunk: int
    offset: int
    nbytes: int


@attrs.define(eq=False)
class ChunkAllocator:
    """Best fit in chunks that grow by doubling; arrays of half the next chunk's size get their own chunk.

    Invariants: the free gaps of a chunk do not touch each other; gaps and blocks together cover every chunk
    exactly. `_gaps` is sorted by size, so the first gap that fits fits best.

    Args:
        make_chunk: Makes a chunk of at least the given size; returns its id and its size.
        drop_chunk: Gives a chunk back that holds no block.
        first: Size of the first chunk in bytes; each later one is twice as large, up to `largest`.
        largest: The largest size of a chunk for several blocks.
        keep: The most bytes of empty chunks to keep, so that a loop need not make them again.
        max_chunks: The most chunks.

    Attributes:
        used: Bytes reserved for blocks.
    """

    _make_chunk: Callable[[int], tuple[int, int]]
    _drop_chunk: Callable[[int], None]
    _next: int = attrs.field(default=256 << 20, kw_only=True, alias="first")
    _largest: int = attrs.field(default=4 << 30, kw_only=True, alias="largest")
    _keep: int = attrs.field(default=256 << 20, kw_only=True, alias="keep")
    _max_chunks: int = attrs.field(default=512, kw_only=True, alias="max_chunks")
    used: int = attrs.field(default=0, init=False)
    _chunks: dict[int, int] = attrs.field(factory=dict[int, int], init=False)
    _placements: dict[int, Placement] = attrs.field(factory=dict[int, Placement], init=False)
    _gaps: list[tuple[int, int, int]] = attrs.field(factory=list[tuple[int, int, int]], init=False)
    # The same gaps, found by (chunk, start) and (chunk, end).
    _by_start: dict[tuple[int, int], int] = attrs.field(factory=dict[tuple[int, int], int], init=False)
    _by_end: dict[tuple[int, int], int] = attrs.field(factory=dict[tuple[int, int], int], init=False)

    @property
    def reserved(self) -> int:
        """Bytes of all chunks."""
        return sum(self._chunks.values())

    @property
    def blocks(self) -> int:
        """The number of placed blocks."""
        return len(self._placements)

    def placement(self, block: int) -> Placement:
        """Return the place of a block.

        Raises:
            KeyError: No block has this id.
        """
        return self._placements[block]

    def rename(self, block: int, to: int) -> None:
        """Give a block another, unused id."""
        self._placements[to] = self._placements.pop(block)

    def has_gap(self, nbytes: int) -> bool:
        """Return whether a block of `nbytes` bytes fits into the existing chunks."""
        return bool(self._gaps) and self._gaps[-1][0] >= _reserved(nbytes)

    def allocate(self, block: int, nbytes: int) -> Placement:
        """Place a block, in a new chunk if no gap is large enough.

        Raises:
            ValueError: A block of this id is placed already.
            MemoryError: There are as many chunks as there may be.
            Exception: The error of `make_chunk`.
        """
        if block in self._placements:
            raise ValueError(f"block {block} is placed already")
        size = _reserved(nbytes)
        index = bisect.bisect_left(self._gaps, (size, 0, 0))
        if index == len(self._gaps):
            self._grow(size)
            index = bisect.bisect_left(self._gaps, (size, 0, 0))
        gap, chunk, start = self._gaps.pop(index)
        end = start + gap
        del self._by_start[chunk, start]
        if gap > size:
            # The rest of the gap ends where the gap ended.
            bisect.insort(self._gaps, (gap - size, chunk, start + size))
            self._by_start[chunk, start + size] = end
            self._by_end[chunk, end] = start + size
        else:
            del self._by_end[chunk, end]
        self._placements[block] = placement = Placement(chunk, start, size)
        self.used += size
        return placement

    def free(self, block: int) -> None:
        """Remove a block; keep its chunk or give it back if the chunk is now empty.

        Raises:
            KeyError: No block has this id.
        """
        placement = self._placements.pop(block)
        self.used -= placement.nbytes
        chunk, start, end = placement.chunk, placement.offset, placement.offset + placement.nbytes
        gap_start = self._by_end.get((chunk, start))
        if gap_start is not None:
            self._remove_gap(chunk, gap_start, start)
            start = gap_start
        gap_end = self._by_start.get((chunk, end))
        if gap_end is not None:
            self._remove_gap(chunk, end, gap_end)
            end = gap_end
        self._add_gap(chunk, start, end)
        if end - start == self._chunks[chunk]:
            self._keep_some_empty()

    def adopt(self, chunks: Mapping[int, int], blocks: Iterable[tuple[int, Placement]]) -> None:
        """Take over chunks that exist already, with all the blocks in them.

        Empty chunks among them are given back like its own empty chunks.

        Args:
            chunks: Sizes by id.
            blocks: Id and place of each; the reserved size is rounded up.

        Raises:
            ValueError: A chunk or a block exists already, blocks overlap, or a block is outside of these
                chunks. Nothing was taken over.
        """
        duplicates = sorted(chunks.keys() & self._chunks.keys())
        if duplicates:
            raise ValueError(f"chunks {duplicates} are there already")
        placed, gaps = self._lay_out(chunks, blocks)
        self._chunks.update(chunks)
        self._placements.update(placed)
        self.used += sum(placement.nbytes for placement in placed.values())
        for gap in gaps:
            self._add_gap(*gap)
        self._next = min(max([self._next, *(2 * size for size in chunks.values())]), self._largest)
        self._keep_some_empty()

    def _lay_out(
        self, chunks: Mapping[int, int], blocks: Iterable[tuple[int, Placement]]
    ) -> tuple[dict[int, Placement], list[tuple[int, int, int]]]:
        """Check existing blocks; return their places and the gaps between them."""
        placed: dict[int, Placement] = {}
        gaps: list[tuple[int, int, int]] = []
        ends = dict.fromkeys(chunks, 0)
        for block, placement in sorted(blocks, key=lambda item: (item[1].chunk, item[1].offset)):
            chunk, start, end = (
                placement.chunk,
                placement.offset,
                placement.offset + _reserved(placement.nbytes),
            )
            if block in self._placements or block in placed:
                raise ValueError(f"block {block} is placed already")
            if chunk not in chunks:
                raise ValueError(f"block {block} is in no chunk that is taken over: {placement}")
            if start % ALIGNMENT or placement.nbytes < 0 or start < ends[chunk] or end > chunks[chunk]:
                raise ValueError(
                    f"block {block} overlaps another, is not aligned or is outside of its chunk: {placement}"
                )
            if start > ends[chunk]:
                gaps.append((chunk, ends[chunk], start))
            ends[chunk] = end
            placed[block] = Placement(chunk, start, end - start)
        gaps += [(chunk, end, chunks[chunk]) for chunk, end in ends.items() if end < chunks[chunk]]
        return placed, gaps

    def _grow(self, size: int) -> None:
        if len(self._chunks) >= self._max_chunks:
            raise MemoryError(f"there are {self._max_chunks} chunks already, the most that there may be")
        requested = size if 2 * size > self._next else self._next
        chunk, nbytes = self._make_chunk(requested)
        self._chunks[chunk] = nbytes
        self._add_gap(chunk, 0, nbytes)
        if requested != size:
            self._next = min(2 * self._next, self._largest)

    def trim(self) -> int:
        """Give every chunk back that holds no block; returns their bytes."""
        trimmed = 0
        for chunk, size in tuple(self._chunks.items()):
            if self._is_empty(chunk):
                trimmed += size
                self._drop(chunk)
        return trimmed

    def _is_empty(self, chunk: int) -> bool:
        return self._by_start.get((chunk, 0)) == self._chunks[chunk]

    def _keep_some_empty(self) -> None:
        """Give empty chunks back, but for the largest that may be kept together."""
        empty = [chunk for chunk in self._chunks if self._is_empty(chunk)]
        spare_bytes = 0
        for chunk in sorted(empty, key=self._chunks.__getitem__, reverse=True):
            if spare_bytes + self._chunks[chunk] <= self._keep:
                spare_bytes += self._chunks[chunk]
            else:
                self._drop(chunk)

    def _drop(self, chunk: int) -> None:
        self._remove_gap(chunk, 0, self._chunks[chunk])
        del self._chunks[chunk]
        self._drop_chunk(chunk)

    def _add_gap(self, chunk: int, start: int, end: int) -> None:
        bisect.insort(self._gaps, (end - start, chunk, start))
        self._by_start[chunk, start] = end
        self._by_end[chunk, end] = start

    def _remove_gap(self, chunk: int, start: int, end: int) -> None:
        index = bisect.bisect_left(self._gaps, (end - start, chunk, start))
        del self._gaps[index]
        del self._by_start[chunk, start]
        del self._by_end[chunk, end]


def _reserved(nbytes: int) -> int:
    """Round up the size of a block in its chunk: whole alignments, and one of its own for an empty block."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
