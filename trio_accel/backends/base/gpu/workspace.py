"""Memory that kernels and libraries of a GPU need for themselves while they compute.

It is taken and given back in the order of streams, so that nothing has to be waited for.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import attrs

from ..contract.errors import OutOfMemoryError
from ..kit.memory import BlockMemory
from .driver import GpuContext, GpuStream

# Drivers align the memory that they give to as many bytes.
_ALIGNMENT = 256


class Arena:
    """The workspace of a device: the operations of a stream use one area, one after the other.

    In the order of streams, and not from the chunks of arrays: it is lost with the context. It counts as
    memory of the device. When blocks need the room, areas of idle streams are given back.

    Args:
        context: The device's context.
        memory: Counts the bytes.
    """

    def __init__(self, context: GpuContext, memory: BlockMemory[Any, Any]) -> None:
        self._context = context
        self._memory = memory
        # The beginning of each stream's area, and its size.
        self._areas: dict[GpuStream, tuple[int, int]] = {}
        # The library that used each stream's area last.
        self._users: dict[GpuStream, str] = {}
        memory.relieve = self.give_back_idle

    @property
    def nbytes(self) -> int:
        """Bytes of all areas."""
        return sum(size for _, size in tuple(self._areas.values()))

    def by_library(self) -> Counter[str]:
        """Return the bytes of the areas, by the library that used them last."""
        totals: Counter[str] = Counter()
        for stream, (_, size) in tuple(self._areas.items()):
            totals[self._users.get(stream, "")] += size
        return totals

    def begin(self, stream: GpuStream, library: str) -> WorkspaceRegion:
        """Take the area of a stream for one operation of a library; it is not given back until that ends."""
        self._users[stream] = library
        return WorkspaceRegion(self, stream, *self._areas.pop(stream, (0, 0)))

    def take(self, stream: GpuStream, nbytes: int) -> int:
        """Take memory in the order of a stream.

        Raises:
            OutOfMemoryError: The limit leaves too little.
            MemoryError: The device has too little.
        """
        self._memory.take_workspace(nbytes)
        try:
            return stream.take_memory(nbytes)
        except BaseException:
            self._memory.give_workspace(nbytes)
            raise

    def free(self, stream: GpuStream, address: int, nbytes: int) -> None:
        """Free memory after the work that the stream has so far."""
        self._memory.give_workspace(nbytes)
        stream.free_memory(address)

    def put(self, stream: GpuStream, address: int, nbytes: int) -> None:
        """Make this the area of a stream."""
        self._areas[stream] = address, nbytes

    def area_of(self, stream: GpuStream) -> tuple[int, int]:
        """Return the address and size of a stream's area, which captured work uses."""
        return self._areas.get(stream, (0, 0))

    def reserve(self, stream: GpuStream, nbytes: int) -> None:
        """Make the area of a stream as large as this at least; raises as `take` does."""
        address, size = self.area_of(stream)
        if size < nbytes:
            larger = self.take(stream, nbytes)
            if size:
                self.free(stream, address, size)
            self.put(stream, larger, nbytes)

    def drop(self, stream: GpuStream) -> None:
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
            if stream.is_destroyed or stream.refresh() >= stream.launched
        ]
        if not idle or self._context.is_lost:
            return False
        with self._context:
            for stream in idle:
                self.drop(stream)
                if not stream.is_destroyed:
                    # It has nothing to do, so this does not block; the pool gives back what is free.
                    stream.synchronize()
        return True

    def close(self) -> None:
        """Give everything back; the context is current, or dead."""
        for stream in tuple(self._areas):
            self.drop(stream)


@attrs.define(eq=False)
class WorkspaceRegion:
    """The share of one operation in its stream's area: piece after piece, all free again after the operation.

    Args:
        arena: The arena.
        stream: The stream.
        address: The address of the area.
        size: Its size.
    """

    _arena: Arena
    _stream: GpuStream
    _address: int
    _size: int
    _used: int = 0
    # Pieces that did not fit into the area.
    _overflow: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])

    def take(self, nbytes: int) -> int:
        """Return the address of `nbytes` bytes; raise as `Arena.take` does."""
        aligned_bytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start = self._used
        if start + aligned_bytes <= self._size:
            address = self._address + start
        else:
            if self._size and not start:
                # Nothing of the area is used yet: a larger one takes its place.
                self._arena.free(self._stream, self._address, self._size)
                self._size = 0
            address = self._arena.take(self._stream, aligned_bytes)
            self._overflow.append((address, aligned_bytes))
        self._used += aligned_bytes
        return address

    def end(self) -> None:
        """End the operation; the next one has an area as large as this one needed."""
        arena, stream, pieces = self._arena, self._stream, self._overflow
        if self._size:
            pieces.append((self._address, self._size))
        if len(pieces) <= 1:
            # Nearly always: the operation had room enough, or is the first one.
            for address, nbytes in pieces:
                arena.put(stream, address, nbytes)
            return
        for address, nbytes in pieces:
            arena.free(stream, address, nbytes)
        # This operation has all its memory. If one area does not fit, the next operation reports it.
        with suppress(OutOfMemoryError, MemoryError):
            arena.put(stream, arena.take(stream, self._used), self._used)


@attrs.define(eq=False)
class Workspace:
    """One area for each stream, which grows to the largest need so far; the stream orders its uses.

    Its memory is stream-ordered, not from the chunks of arrays, so it is lost with the context. It counts in
    the statistics of the device's memory, and the limit excludes it.

    Args:
        memory: Counts the bytes.
        library: Name of the library.
    """

    _memory: BlockMemory[Any, Any]
    _library: str
    _areas: dict[GpuStream, tuple[int, int]] = attrs.field(
        factory=dict["GpuStream", tuple[int, int]], init=False
    )

    def reserve(self, stream: GpuStream, nbytes: int) -> int:
        """Return the address of at least `nbytes` bytes, free for the next operation on a stream.

        Raises:
            MemoryError: There is too little memory.
        """
        address, size = self._areas.get(stream, (0, 0))
        if size >= nbytes:
            return address
        larger = stream.take_memory(nbytes)
        if size:
            stream.free_memory(address)
        self._areas[stream] = larger, nbytes
        self._memory.add_fixed_workspace(self._library, nbytes - size)
        return larger

    def close(self) -> None:
        """Free all areas after their users. The context is current."""
        for stream, (address, size) in self._areas.items():
            self._memory.add_fixed_workspace(self._library, -size)
            # The area of a closed stream is also freed on that stream, because abandoned work may still run
            # there.
            stream.free_memory(address)
        self._areas.clear()
