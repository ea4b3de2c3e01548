"""Blocks freed and made in one step, and blocks that become others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel.backends.base import OutOfMemoryError
from trio_accel.devices.engine._in_flight import MemoryInUse

SIZES = st.sampled_from([8, 16])
STREAM: Any = object()
EVENT: Any = object()


class Device:
    """Counts what is there."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.there: dict[int, int] = {}
        self.limit: int = limit
        self.renewed: list[int] = []
        self.validated_blocks: set[int] = set()

    def allocate(self, block: int, nbytes: int) -> None:
        assert block not in self.there
        if sum(self.there.values()) + nbytes > self.limit:
            raise OutOfMemoryError("no more", requested=nbytes, free=0, total=self.limit)
        self.there[block] = nbytes

    def free(self, block: int) -> None:
        del self.there[block]

    def placement(self, block: int) -> str:
        assert block in self.there
        return f"where {block} lies"

    def renew(self, block: int) -> None:
        assert block in self.there
        self.renewed.append(block)


def opened(sizes: dict[int, int], device: Device) -> MemoryInUse:
    of_device: Any = device
    memory = MemoryInUse(of_device)
    memory.exchange(let_go([]), tuple(sizes.items()))
    return memory


class Table:
    """Blocks that the program has let go."""

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self.dropped: list[int] = [*blocks]

    def take_some(self) -> list[int]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def drain(self) -> None:
        """Nothing is left after `take_some`."""

    def make_room(self) -> None:
        """There is nothing else to give back."""


def let_go(blocks: Iterable[int]) -> Any:
    return Table(blocks)


def written(memory: MemoryInUse, block: int) -> Any:
    """Something in flight writes a block."""
    use = memory.pin(block)
    use.write(STREAM, EVENT)
    return use


@given(
    st.dictionaries(st.integers(0, 7), SIZES),
    st.lists(st.integers(0, 9), unique=True),
    st.sets(st.integers(0, 7)),
    st.sets(st.integers(0, 7)),
    st.dictionaries(st.integers(10, 15), SIZES),
)
def test_blocks_after_an_exchange(
    sizes: dict[int, int], dropped: list[int], pinned: set[int], again: set[int], new: dict[int, int]
) -> None:
    device = Device()
    memory = opened(sizes, device)
    device.validated_blocks.update(sizes)
    # A reused block was dropped before, and must not be given back.
    again = again & sizes.keys() - set(dropped)
    uses = [memory.pin(block) for block in sorted(pinned & sizes.keys())]
    wanted = {block: sizes[block] for block in again} | new
    memory.exchange(let_go(dropped), tuple(wanted.items()))
    gone = set(dropped) - pinned
    assert device.there == {block: size for block, size in sizes.items() if block not in gone} | new
    assert set(device.renewed) == again
    for use in uses:
        memory.unpin(use)
    assert device.there == {block: size for block, size in sizes.items() if block not in dropped} | new
    memory.release_all(wanted)
    assert device.there.keys() == sizes.keys() - set(dropped) - again


def test_returned_memory_makes_room_for_new_arrays() -> None:
    device = Device(limit=16)
    memory = opened({1: 16}, device)
    memory.exchange(let_go([1]), ((2, 8), (3, 8)))
    assert device.there == {2: 8, 3: 8}
    with pytest.raises(OutOfMemoryError):
        memory.exchange(let_go([2]), ((4, 8), (5, 8)))
    assert device.there == {3: 8, 4: 8}
    # As for any failing operation, its results up to then are released.
    memory.release_all((4, 5))
    assert device.there == {3: 8}


def test_nothing_of_the_use_of_a_block_is_left_once_it_is_another() -> None:
    device = Device()
    memory = opened({1: 8}, device)
    use = written(memory, 1)
    use.read(STREAM, EVENT)
    memory.unpin(use)
    memory.exchange(let_go([]), ((1, 8),))
    made = memory.uses[1]
    assert (made.block, made.pins, made.last_write, made.reads, made.writer) == (1, 0, None, None, None)
    assert made.is_allocated
    assert not made.is_dropped


def test_work_after_an_operation_in_flight_waits_for_it_and_is_freed_later() -> None:
    """A copy for a failed operation still runs, into a block given back with it."""
    device = Device()
    memory = opened({1: 8}, device)
    use = written(memory, 1)
    memory.release(1)
    memory.exchange(let_go([]), ((1, 8),))
    assert memory.uses[1].last_write == (STREAM, EVENT)
    memory.unpin(use)
    assert device.there == {1: 8}


def test_memory_to_be_freed_has_no_address_any_more() -> None:
    """Another block may have the address by the time that somebody uses it."""
    device = Device()
    memory = opened({1: 8, 2: 8}, device)
    use = memory.pin(1)
    assert memory.placed(1) == "where 1 lies"
    memory.release(1)
    assert 1 in device.there
    assert (memory.placed(1), memory.placed(2), memory.placed(3)) == (None, "where 2 lies", None)
    memory.unpin(use)
    assert 1 not in device.there
    assert memory.placed(1) is None


def test_a_new_array_is_fresh_until_somebody_knows_its_address() -> None:
    memory = opened({1: 8, 2: 8}, Device())
    assert memory.fresh == {1, 2}
    memory.fresh.clear()
    memory.exchange(let_go([]), ((1, 8), (3, 8)))
    # The first has its old address.
    assert memory.fresh == {3}
    memory.release(3)
    assert not memory.fresh
