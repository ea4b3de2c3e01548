"""The allocator of chunks, against a model that knows only intervals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from trio_accel.backends.base.kit.chunks import ALIGNMENT, ChunkAllocator, Placement

KEEP = 100 * ALIGNMENT


class Source:
    """Makes chunks of whole pages of four alignments, and remembers them."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.alive: dict[int, int] = {}

    def make(self, nbytes: int) -> tuple[int, int]:
        chunk = next(self.ids)
        page = 4 * ALIGNMENT
        self.alive[chunk] = -(-nbytes // page) * page
        return chunk, self.alive[chunk]

    def drop(self, chunk: int) -> None:
        del self.alive[chunk]


class Chunks(RuleBasedStateMachine):
    placed = Bundle("placed")

    def __init__(self) -> None:
        super().__init__()
        self.source = Source()
        self.allocator = self._new()
        self.blocks: dict[int, tuple[Placement, int]] = {}
        self.ids = itertools.count(1)

    def _new(self) -> ChunkAllocator:
        return ChunkAllocator(
            self.source.make,
            self.source.drop,
            first=8 * ALIGNMENT,
            largest=64 * ALIGNMENT,
            keep=KEEP,
            max_chunks=10_000,
        )

    @rule(target=placed, nbytes=st.integers(0, 40 * ALIGNMENT))
    def allocate(self, nbytes: int) -> int:
        block = next(self.ids)
        placement = self.allocator.allocate(block, nbytes)
        self.blocks[block] = placement, nbytes
        return block

    @rule(block=placed)
    def free(self, block: int) -> None:
        if block in self.blocks:
            self.allocator.free(block)
            del self.blocks[block]

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """A new process takes over: live blocks stay in place, in any order of the reports."""
        adopted = self._new()
        places = {
            block: Placement(placement.chunk, placement.offset, nbytes)
            for block, (placement, nbytes) in self.blocks.items()
        }
        adopted.adopt(dict(self.source.alive), data.draw(st.permutations(list(places.items()))))
        assert {block: adopted.placement(block) for block in self.blocks} == {
            block: placement for block, (placement, _) in self.blocks.items()
        }
        self.allocator = adopted

    @rule()
    def trim(self) -> None:
        before = self.allocator.reserved
        trimmed = self.allocator.trim()
        assert self.allocator.reserved == before - trimmed
        occupied = {placement.chunk for placement, _ in self.blocks.values()}
        assert set(self.source.alive) == occupied

    @invariant()
    def blocks_are_apart_aligned_and_inside(self) -> None:
        ends: dict[int, int] = {}
        ordered = sorted(self.blocks.values(), key=lambda item: (item[0].chunk, item[0].offset))
        for placement, nbytes in ordered:
            assert placement.offset % ALIGNMENT == 0
            assert placement.nbytes >= nbytes
            assert placement.offset >= ends.get(placement.chunk, 0)
            ends[placement.chunk] = placement.offset + placement.nbytes
            assert ends[placement.chunk] <= self.source.alive[placement.chunk]

    @invariant()
    def counts_are_true(self) -> None:
        assert self.allocator.used == sum(placement.nbytes for placement, _ in self.blocks.values())
        assert self.allocator.reserved == sum(self.source.alive.values())
        assert self.allocator.blocks == len(self.blocks)

    @invariant()
    def so_much_is_kept_empty_and_no_more(self) -> None:
        occupied = {placement.chunk for placement, _ in self.blocks.values()}
        empty = [size for chunk, size in self.source.alive.items() if chunk not in occupied]
        assert sum(empty) <= KEEP


TestChunks = Chunks.TestCase
TestChunks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_chunks_double_and_large_blocks_have_their_own() -> None:
    source = Source()
    allocator = ChunkAllocator(source.make, source.drop, first=8 * ALIGNMENT, largest=32 * ALIGNMENT)
    for block in range(30):
        allocator.allocate(block, 4 * ALIGNMENT)
    assert sorted(source.alive.values()) == [size * ALIGNMENT for size in (8, 16, 32, 32, 32)]
    allocator.allocate(100, 100 * ALIGNMENT)
    assert max(source.alive.values()) == 100 * ALIGNMENT
    allocator.free(100)
    assert max(source.alive.values()) == 100 * ALIGNMENT  # the largest stays, for the next time
    first = allocator.allocate(101, 50 * ALIGNMENT)
    assert first.chunk == allocator.allocate(102, 50 * ALIGNMENT).chunk


def test_a_chunk_too_large_to_keep_is_given_back_at_once() -> None:
    source = Source()
    allocator = ChunkAllocator(source.make, source.drop, first=8 * ALIGNMENT, keep=16 * ALIGNMENT)
    for size in (4, 12, 20):
        allocator.allocate(size, size * ALIGNMENT)
    for size in (20, 12, 4):
        allocator.free(size)
    assert list(source.alive.values()) == [12 * ALIGNMENT]


def test_the_largest_chunks_within_the_limit_are_kept() -> None:
    source = Source()
    allocator = ChunkAllocator(source.make, source.drop, first=4 * A, keep=30 * A)
    for block, size in enumerate([4, 8, 16, 32]):
        allocator.allocate(block, size * A)
    assert sorted(source.alive.values()) == [4 * A, 8 * A, 16 * A, 32 * A]
    for block in (0, 1, 2, 3):
        allocator.free(block)
    assert sorted(source.alive.values()) == [4 * A, 8 * A, 16 * A]
    allocator.allocate(9, 5 * A)
    allocator.allocate(10, 20 * A)
    allocator.free(10)
    # Two empty chunks, and one more that would be too much with them.
    assert sorted(source.alive.values()) == [4 * A, 8 * A, 20 * A]


def test_an_empty_chunk_is_kept_next_to_one_in_use() -> None:
    source = Source()
    allocator = ChunkAllocator(source.make, source.drop, first=8 * ALIGNMENT)
    allocator.allocate(1, 8 * ALIGNMENT)
    made = allocator.allocate(2, 8 * ALIGNMENT).chunk
    allocator.free(2)
    assert allocator.allocate(3, 8 * ALIGNMENT).chunk == made


def test_best_fit_takes_the_smallest_sufficient_gap() -> None:
    source = Source()
    allocator = ChunkAllocator(source.make, source.drop, first=64 * ALIGNMENT)
    offsets = [
        allocator.allocate(block, size * ALIGNMENT).offset for block, size in enumerate([10, 1, 4, 1, 6, 1])
    ]
    gaps = {block: offsets[block] for block in (0, 2, 4)}
    for block in gaps:
        allocator.free(block)
    assert allocator.allocate(10, 5 * ALIGNMENT).offset == gaps[4]
    assert allocator.allocate(11, 4 * ALIGNMENT).offset == gaps[2]
    assert allocator.allocate(12, 7 * ALIGNMENT).offset == gaps[0]


def test_the_number_of_chunks_is_bounded() -> None:
    source = Source()
    allocator = ChunkAllocator(source.make, source.drop, first=ALIGNMENT, largest=ALIGNMENT, max_chunks=2)
    allocator.allocate(1, 4 * ALIGNMENT)
    allocator.allocate(2, 4 * ALIGNMENT)
    with pytest.raises(MemoryError, match="there are 2 chunks already"):
        allocator.allocate(3, 4 * ALIGNMENT)
    with pytest.raises(ValueError, match="block 2 is placed already"):
        allocator.allocate(2, 1)
    with pytest.raises(KeyError):
        allocator.free(7)


A = ALIGNMENT


@pytest.mark.parametrize(
    ("chunks", "blocks", "message"),
    [
        ({1: 8 * A}, [(1, Placement(1, 0, 2 * A)), (2, Placement(1, A, A))], "block 2 overlaps another"),
        ({1: 8 * A}, [(1, Placement(1, 0, 1)), (2, Placement(1, 0, 0))], "overlaps another"),
        ({2: A}, [(3, Placement(2, 0, A + 1))], "block 3 .* is outside of its chunk"),
        ({2: A}, [(3, Placement(2, -A, A))], "block 3 .* is outside of its chunk"),
        ({2: 8 * A}, [(3, Placement(2, 1, 1))], "block 3 .* is not aligned"),
        ({2: 8 * A}, [(3, Placement(2, A, -1))], "block 3 "),
        ({2: 8 * A}, [(3, Placement(1, 0, 1))], "block 3 is in no chunk"),
        ({1: 8 * A}, [(3, Placement(1, 0, 1)), (3, Placement(1, A, 1))], "block 3 is placed already"),
        ({1: 8 * A}, [(50, Placement(1, 0, 1))], "block 50 is placed already"),
        ({100: 8 * A}, [], r"chunks \[100\] are there already"),
    ],
)
def test_a_refused_takeover_changes_nothing(chunks, blocks, message) -> None:
    source = Source()
    source.ids = itertools.count(100)
    allocator = ChunkAllocator(source.make, source.drop, first=4 * A)
    first = allocator.allocate(50, A)
    with pytest.raises(ValueError, match=message):
        allocator.adopt(chunks, blocks)
    assert (allocator.used, allocator.reserved, allocator.blocks) == (A, 4 * A, 1)
    for block in (51, 52, 53):  # the gaps are the old ones
        assert allocator.allocate(block, A).chunk == first.chunk
    assert list(source.alive) == [first.chunk]


def test_of_empty_chunks_taken_over_the_largest_are_kept() -> None:
    source = Source()
    source.alive = {1: 8 * A, 2: 4 * A, 3: 16 * A, 4: 64 * A}
    allocator = ChunkAllocator(source.make, source.drop, first=4 * A, keep=20 * A)
    allocator.adopt(dict(source.alive), [(1, Placement(2, A, 1))])
    assert source.alive == {2: 4 * A, 3: 16 * A}
    assert allocator.allocate(2, 16 * A) == Placement(3, 0, 16 * A)
    assert allocator.allocate(3, 2 * A) == Placement(2, 2 * A, 2 * A)
    assert allocator.allocate(4, A) == Placement(2, 0, A)


def test_chunks_continue_to_grow_after_a_takeover() -> None:
    source = Source()
    source.ids = itertools.count(2)
    source.alive = {1: 32 * A}
    allocator = ChunkAllocator(source.make, source.drop, first=4 * A)
    allocator.adopt({1: 32 * A}, [(1, Placement(1, 0, 32 * A))])
    allocator.allocate(2, A)
    assert source.alive == {1: 32 * A, 2: 64 * A}
