"""The blocks of one device, against a model that knows the contents of each."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from trio_accel.backends.base import BlockMemory, OutOfMemoryError
from trio_accel.backends.base.kit.chunks import ALIGNMENT as A

Bytes = npt.NDArray[Any]
LIMIT = 60 * A
KEEP = 8 * A


class Source:
    """Makes chunks of host memory."""

    first = 8 * A
    keep = KEEP

    def __init__(self) -> None:
        self.alive: dict[int, Bytes] = {}

    def make(self, nbytes: int) -> tuple[Bytes, int]:
        size = -(-nbytes // A) * A
        chunk = np.zeros(size, np.uint8)
        self.alive[id(chunk)] = chunk
        return chunk, size

    def make_kept(self, nbytes: int, keeper: object, chunk: int) -> tuple[Bytes, int]:
        raise AssertionError("there is no keeper")

    def map(self, nbytes: int, descriptor: int) -> Bytes:
        raise AssertionError("there is no other process")

    def drop(self, chunk: Bytes) -> None:
        del self.alive[id(chunk)]

    def block(self, chunk: Bytes, offset: int, nbytes: int) -> Bytes:
        return chunk[offset : offset + nbytes]

    def available(self) -> int:
        return LIMIT


class Blocks(RuleBasedStateMachine):
    there = Bundle("there")

    def __init__(self) -> None:
        super().__init__()
        self.source = Source()
        self.memory: BlockMemory[Bytes, Bytes] = BlockMemory("d", LIMIT, self.source)
        self.sizes: dict[int, int] = {}
        self.peak = 0
        self.ids = itertools.count()

    # A few sizes, so that one follows another of the same; two of them take as much, of the alignment.
    @rule(target=there, nbytes=st.sampled_from([0, 1, A - 7, A, A + 1, 2 * A, 9 * A]))
    def allocate(self, nbytes: int) -> int:
        block = next(self.ids)
        if sum(self.sizes.values()) + nbytes > LIMIT:
            with pytest.raises(OutOfMemoryError):
                self.memory.allocate(block, nbytes)
            return block
        self.memory.allocate(block, nbytes)
        self.sizes[block] = nbytes
        self.peak = max(self.peak, sum(self.sizes.values()))
        self.memory.block(block)[0][:] = block % 251
        return block

    @rule(block=there)
    def free(self, block: int) -> None:
        if self.sizes.pop(block, None) is None:
            with pytest.raises(KeyError, match="does not exist"):
                self.memory.free(block)
        else:
            self.memory.free(block)

    @rule()
    def clear(self) -> None:
        self.memory.clear()
        self.sizes.clear()
        assert not self.source.alive

    @invariant()
    def every_block_has_its_own_memory(self) -> None:
        for block, nbytes in self.sizes.items():
            held, size = self.memory.block(block)
            assert (size, held.nbytes) == (nbytes, nbytes)
            assert (held == block % 251).all()

    @invariant()
    def counts_are_true(self) -> None:
        statistics = self.memory.statistics()
        assert statistics.used == sum(self.sizes.values())
        assert statistics.blocks == len(self.sizes)
        assert statistics.peak == self.peak
        assert statistics.reserved == sum(chunk.nbytes for chunk in self.source.alive.values())

    @invariant()
    def so_much_is_kept_empty_and_no_more(self) -> None:
        used = {id(self.memory.block(block)[0].base) for block in self.sizes}
        assert sum(chunk.nbytes for key, chunk in self.source.alive.items() if key not in used) <= KEEP


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)


def test_a_block_takes_the_address_of_a_freed_block_of_its_size() -> None:
    memory: BlockMemory[Bytes, Bytes] = BlockMemory("d", LIMIT, Source())
    for block in range(3):
        memory.allocate(block, A)
    where = memory.block(1)[0]
    memory.free(1)
    memory.allocate(3, A)
    assert memory.block(3)[0] is where
    memory.free(3)
    memory.allocate(4, A - 1)
    memory.block(4)[0][:] = 7
    assert (where[:-1] == 7).all()


def test_freed_memory_serves_another_size() -> None:
    source = Source()
    memory: BlockMemory[Bytes, Bytes] = BlockMemory("d", LIMIT, source)
    for block in range(8):
        memory.allocate(block, A)
    for block in range(1, 8):
        memory.free(block)
    memory.allocate(8, 7 * A)
    assert len(source.alive) == 1


def test_results_of_many_sizes_one_after_the_other_find_each_its_place_of_before() -> None:
    source = Source()
    memory: BlockMemory[Bytes, Bytes] = BlockMemory("d", 1 << 20, source)
    memory.allocate(0, A)
    sizes = [(1 + number % 3) * A for number in range(9)]
    places: list[dict[int, int]] = []
    for lap in range(3):
        found: dict[int, int] = {}
        for number, nbytes in enumerate(sizes):
            block = 1 + lap * len(sizes) + number
            memory.allocate(block, nbytes)
            found[nbytes] = memory.block(block)[0].__array_interface__["data"][0]
            memory.free(block)
        places.append(found)
    assert places[0] == places[1] == places[2]
    assert len(set(places[0].values())) == 3
    assert len(source.alive) == 1
    # Memory kept for them serves a larger one before the memory grows.
    memory.allocate(100, 7 * A)
    assert len(source.alive) == 1
