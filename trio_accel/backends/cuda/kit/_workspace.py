"""Memory that kernels and libraries need for themselves while they compute.

It is from the driver's stream-ordered pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress

import attrs
from cuda.bindings import driver

from ...base import OutOfMemoryError
from ..runtime._context import CudaContext, CudaMemoryError
from ..runtime._memory import CudaMemory
from ..runtime._stream import CudaStream

__all__ = ["Arena", "Workspace", "scratch"]

# As the driver aligns what it gives.
_ALIGNMENT = 256


class Arena:
    """The workspace of a device: the operations of a stream use one area, one after the other.

    From the driver's stream-ordered pool, and not from the chunks of arrays: it is lost with the context. It
    counts as memory of the device. When blocks need the room, areas of idle streams are given back.

    Args:
        context: The device's context.
        memory: Counts the bytes.
    """

    def __init__(self, context: CudaContext, memory: CudaMemory) -> None:
        self._context = context
        self._memory = memory
        # By stream: where its area begins, and its size.
        self._areas: dict[CudaStream, tuple[int, int]] = {}
        # By stream: the library that used its area last.
        self._users: dict[CudaStream, str] = {}
        memory.relieve = self.give_back_idle

    @property
    def nbytes(self) -> int:
        """Bytes of all areas."""
        return sum(size for _, size in tuple(self._areas.values()))

    def by_library(self) -> Counter[str]:
        """Bytes of the areas, by the library that used them last."""
        found: Counter[str] = Counter()
        for stream, (_, size) in tuple(self._areas.items()):
            found[self._users.get(stream, "")] += size
        return found

    def begin(self, stream: CudaStream, library: str) -> Region:
        """Take the area of a stream for one operation of a library: until it ends, nobody gives it back."""
        self._users[stream] = library
        return Region(self, stream, *self._areas.pop(stream, (0, 0)))

    def take(self, stream: CudaStream, nbytes: int) -> int:
        """Take memory in the order of a stream.

        Raises:
            OutOfMemoryError: The limit leaves not so much.
            CudaMemoryError: The device has not so much.
        """
        self._memory.take_workspace(nbytes)
        try:
            return int(self._context.check(driver.cuMemAllocAsync(nbytes, stream.orders_memory.handle)))
        except BaseException:
            self._memory.give_workspace(nbytes)
            raise

    def free(self, stream: CudaStream, address: int, nbytes: int) -> None:
        """Give memory back, behind what the stream has been given."""
        self._memory.give_workspace(nbytes)
        if not self._context.is_dead:
            # Of a stream that has ended, nothing uses it any more.
            order = stream.orders_memory
            driver.cuMemFreeAsync(address, 0 if order.is_destroyed else order.handle)

    def put(self, stream: CudaStream, address: int, nbytes: int) -> None:
        """Make this the area of a stream."""
        self._areas[stream] = address, nbytes

    def place(self, stream: CudaStream) -> tuple[int, int]:
        """Where the area of a stream begins, and its size: what was captured uses it there."""
        return self._areas.get(stream, (0, 0))

    def reserve(self, stream: CudaStream, nbytes: int) -> None:
        """Make the area of a stream as large as this at least; raises as `take` does."""
        address, size = self.place(stream)
        if size < nbytes:
            larger = self.take(stream, nbytes)
            if size:
                self.free(stream, address, size)
            self.put(stream, larger, nbytes)

    def drop(self, stream: CudaStream) -> None:
        """Give the area of a stream back."""
        self._users.pop(stream, None)
        address, nbytes = self._areas.pop(stream, (0, 0))
        if nbytes:
            self.free(stream, address, nbytes)

    def give_back_idle(self) -> bool:
        """Give back the areas of streams with nothing to do; returns whether there were any."""
        # A thread that enqueues may take or put an area meanwhile.
        idle = [
            stream
            for stream in tuple(self._areas)
            if stream.is_destroyed or stream.refresh() >= stream.timeline.sequence
        ]
        if not idle or self._context.is_lost:
            return False
        with self._context:
            for stream in idle:
                self.drop(stream)
                if not stream.is_destroyed:
                    # It has nothing to do, so this does not block; the driver's pool gives back what is free.
                    driver.cuStreamSynchronize(stream.handle)
        return True

    def close(self) -> None:
        """Give everything back; the context is current, or dead."""
        for stream in tuple(self._areas):
            self.drop(stream)


@attrs.define(eq=False)
class Region:
    """What one operation takes of its stream's area: piece after piece, all free again behind it.

    Args:
        arena: The arena.
        stream: The stream.
        address: Where the area begins.
        size: Its size.
    """

    _arena: Arena
    _stream: CudaStream
    _address: int
    _size: int
    _used: int = attrs.field(default=0, init=False)
    # Pieces for which the area had no room.
    _more: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]], init=False)

    def take(self, nbytes: int) -> int:
        """The address of so many bytes; raises as `Arena.take` does."""
        whole = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start = self._used
        if start + whole <= self._size:
            address = self._address + start
        else:
            if self._size and not start:
                # Nothing of the area is used yet: a larger one takes its place.
                self._arena.free(self._stream, self._address, self._size)
                self._size = 0
            address = self._arena.take(self._stream, whole)
            self._more.append((address, whole))
        self._used += whole
        return address

    def end(self) -> None:
        """The operation is enqueued, or was refused: the next one has an area as large as this one needed."""
        arena, stream, pieces = self._arena, self._stream, self._more
        if self._size:
            pieces.append((self._address, self._size))
        if len(pieces) <= 1:
            # Nearly always: the operation had room enough, or is the first one.
            for address, nbytes in pieces:
                arena.put(stream, address, nbytes)
            return
        for address, nbytes in pieces:
            arena.free(stream, address, nbytes)
        # The operation has what it needs. If there is no room for one area, the next one says so.
        with suppress(OutOfMemoryError, CudaMemoryError):
            arena.put(stream, arena.take(stream, self._used), self._used)


class Workspace:
    """One area for each stream, which grows to what was needed at most; the stream orders its uses.

    From the driver's stream-ordered pool, and not from the chunks of arrays: it is lost with the context. It
    counts in the statistics of the device's memory, and the limit concerns it not.

    Args:
        context: The device's context.
        memory: Counts the bytes.
        library: Name of the library.
    """

    def __init__(self, context: CudaContext, memory: CudaMemory, library: str) -> None:
        self._context = context
        self._memory = memory
        self._library = library
        self._areas: dict[CudaStream, tuple[int, int]] = {}

    def reserve(self, stream: CudaStream, nbytes: int) -> int:
        """The address of at least so many bytes, free for the next operation on a stream.

        Raises:
            CudaMemoryError: There is not so much.
        """
        address, size = self._areas.get(stream, (0, 0))
        if size >= nbytes:
            return address
        larger = int(self._context.check(driver.cuMemAllocAsync(nbytes, stream.orders_memory.handle)))
        if size:
            self._context.check(driver.cuMemFreeAsync(address, stream.orders_memory.handle))
        self._areas[stream] = larger, nbytes
        self._memory.add_fixed_workspace(self._library, nbytes - size)
        return larger

    def close(self) -> None:
        """Give everything back, behind what uses it. The context is current."""
        for stream, (address, size) in self._areas.items():
            self._memory.add_fixed_workspace(self._library, -size)
            order = stream.orders_memory
            if order.is_destroyed:
                # It has ended, and with it all that used the area.
                driver.cuMemFreeAsync(address, 0)
            else:
                # Closed or not: work that nobody waits for any more may be on it.
                self._context.check(driver.cuMemFreeAsync(address, order.handle))
        self._areas.clear()


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
