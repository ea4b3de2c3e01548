"""Large arrays in pieces that fit into the caches."""

from __future__ import annotations

from collections.abc import Iterator

from .._memory import HostArray

__all__ = ["pieces"]

# Large enough that a thread that takes the interpreter's lock back after each piece spends its time
# computing (about 0.3 ms for the slowest conversion, from float16), small enough for the caches.
_ELEMENTS = 1 << 18


def pieces(*arrays: HostArray) -> Iterator[tuple[HostArray, ...]]:
    """Cut arrays of one shape into views of at most 2**18 elements, alike in all of them."""
    first = arrays[0]
    if first.size <= _ELEMENTS:
        yield arrays
        return
    rows = _ELEMENTS // (first.size // len(first))
    if rows == 0:
        for row in range(len(first)):
            yield from pieces(*(array[row] for array in arrays))
        return
    for start in range(0, len(first), rows):
        yield tuple(array[start : start + rows] for array in arrays)
