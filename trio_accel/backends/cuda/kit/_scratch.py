"""A stream and memory for what is run once, such as the first use of a vendor's routine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from cuda.bindings import driver

from ..runtime._context import CudaContext

__all__ = ["scratch"]

_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
_LEAST = 256


@contextmanager
def scratch(context: CudaContext, *rooms: int) -> Generator[tuple[int, list[int]]]:
    """A stream, and the addresses of so many bytes each, zero at first; at the end waits for the stream."""
    check, rooms = context.check, tuple(max(room, _LEAST) for room in rooms)
    stream = int(check(driver.cuStreamCreate(_NON_BLOCKING)))
    try:
        places = [int(check(driver.cuMemAllocAsync(room, stream))) for room in rooms]
        for place, room in zip(places, rooms, strict=True):
            check(driver.cuMemsetD8Async(place, 0, room, stream))
        yield stream, places
        for place in places:
            check(driver.cuMemFreeAsync(place, stream))
        check(driver.cuStreamSynchronize(stream))
        context.settle()
    finally:
        driver.cuStreamDestroy(stream)
