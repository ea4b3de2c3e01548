"""Blocks that are freed and made in one step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_accel.backends.base import OutOfMemoryError
from trio_accel.devices._memory_in_use import MemoryInUse

SIZES = st.sampled_from([8, 16])


class Device:
    """Counts what is there."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.there: dict[int, int] = {}
        self.limit: int = limit

    def allocate(self, block: int, nbytes: int) -> None:
        assert block not in self.there
        if sum(self.there.values()) + nbytes > self.limit:
            raise OutOfMemoryError("no more", requested=nbytes, free=0, total=self.limit)
        self.there[block] = nbytes

    def free(self, block: int) -> None:
        del self.there[block]

    def replace(self, block: int, new: int) -> None:
        assert new not in self.there
        self.there[new] = self.there.pop(block)


def nothing() -> None:
    """There is nothing else to give back."""


def opened(sizes: dict[int, int], device: Device) -> MemoryInUse:
    of_device: Any = device
    memory = MemoryInUse(of_device)
    memory.allocate(sizes.items(), nothing)
    return memory


@given(
    st.dictionaries(st.integers(0, 7), SIZES),
    st.lists(st.integers(0, 9), unique=True),
    st.sets(st.integers(0, 7)),
    st.dictionaries(st.integers(10, 15), SIZES),
)
def test_what_is_there_afterwards(
    sizes: dict[int, int], dropped: list[int], pinned: set[int], wanted: dict[int, int]
) -> None:
    device = Device()
    memory = opened(sizes, device)
    uses = [memory.pin(block) for block in sorted(pinned & sizes.keys())]
    memory.exchange([(block, sizes.get(block, 8)) for block in dropped], tuple(wanted.items()), nothing)
    gone = set(dropped) - pinned
    assert device.there == {block: size for block, size in sizes.items() if block not in gone} | wanted
    for use in uses:
        memory.unpin(use)
    assert device.there == {block: size for block, size in sizes.items() if block not in dropped} | wanted
    memory.release_all(wanted)
    assert device.there.keys() == sizes.keys() - set(dropped)


def test_one_that_follows_another_needs_no_memory_for_both() -> None:
    device = Device(limit=16)
    memory = opened({1: 16}, device)
    memory.exchange([(1, 16)], ((2, 16),), nothing)
    assert device.there == {2: 16}
    memory.exchange([(2, 16)], ((3, 8), (4, 8)), nothing)
    assert device.there == {3: 8, 4: 8}
    with pytest.raises(OutOfMemoryError):
        memory.exchange([(3, 8)], ((5, 8), (6, 8)), nothing)
    assert device.there == {4: 8, 5: 8}
    # As for any operation that fails, what it has made by then is released.
    memory.release_all((5, 6))
    assert device.there == {4: 8}


def test_nothing_of_the_use_of_the_other_is_left() -> None:
    device = Device()
    memory = opened({1: 8}, device)
    stream: Any = object()
    event: Any = object()
    use = memory.pin(1)
    use.write(stream, event)
    use.read(stream, event)
    memory.unpin(use)
    memory.exchange([(1, 8)], ((2, 8),), nothing)
    made = memory.use(2)
    assert (made.block, made.pins, made.last_write, made.reads, made.writer) == (2, 0, None, None, None)
    assert made.is_allocated
    assert not made.is_dropped
