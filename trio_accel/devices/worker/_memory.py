"""A worker's view of memory: blocks, chunks, slabs of host memory, and copies by the application."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import attrs
import numpy as np
import numpy.typing as npt

from ...backends.base import (
    AccelDevice,
    AccelStream,
    DType,
    HostArray,
    Ints,
    KernelLibrary,
    PlacedBlock,
    StreamPause,
)
from ...backends.base.contract.ops import CopyFromHostSpec, CopyToHostSpec, OperationSpec
from ...backends.base.kit.host import map_shared
from ..base._bridge import LoopNotifier
from ..base._host_pool import Registrations
from ..base._waits import Arrival
from ..operations._blocks import Block, BlockTable
from ..wire import _answers
from ..wire._channel import Channel

# When a slab reaches this number of arrays, all are forgotten. Making them again takes little time.
_MOST_ARRAYS = 256
_Copy: TypeAlias = CopyFromHostSpec | CopyToHostSpec


class WorkerBlocks(dict[int, Block]):
    """Blocks by id. An id that the application has released maps to a released block.

    Change it only by its methods.

    Args:
        blocks: Makes the blocks.

    Attributes:
        changes: The number of changes. Found blocks stay valid until it changes.
    """

    __slots__ = ("_blocks", "changes")

    def __init__(self, blocks: BlockTable) -> None:
        super().__init__()
        self._blocks = blocks
        self.changes: int = 0

    def __missing__(self, number: int) -> Block:
        block = self._blocks.new(0, number)
        block.is_released = True
        return block

    def adopt(self, number: int, nbytes: int) -> None:
        """Add an existing block."""
        self.changes += 1
        self[number] = self._blocks.new(nbytes, number)

    def name(self, allocations: Iterable[tuple[int, int]]) -> None:
        """Add the blocks that an operation will make, by their ids and sizes."""
        for number, nbytes in allocations:
            block = self.get(number)
            if block is not None:
                # The application uses one block for one array after the other (D22).
                if block.damaged_by is None:
                    continue
                block.is_released = True
            self.adopt(number, nbytes)

    def remove(self, number: int) -> None:
        """Remove a block that belongs to another device."""
        self.changes += 1
        # The table does not free it.
        self.pop(number).is_released = True

    def let_go(self, numbers: Iterable[int]) -> None:
        """Record that the application has dropped blocks. The next operation or `drain` frees them."""
        dropped = self._blocks.dropped
        for number in numbers:
            block = self.pop(number, None)
            if block is None:
                continue
            self.changes += 1
            if not block.is_released:
                # `release` would wake the loop, which is already awake.
                block.is_released = True
                dropped.append((number, block.nbytes, None))


@attrs.frozen(eq=False)
class _Slab:
    memory: npt.NDArray[np.uint8]
    registered: Arrival = attrs.field(factory=Arrival)
    # The arrays of operations, by offset, type and shape, because a program uses the same ones repeatedly.
    arrays: dict[tuple[int, str, Ints], HostArray] = attrs.field(
        factory=dict[tuple[int, str, Ints], "HostArray"]
    )


class WorkerSlabs(Registrations):
    """The slabs of the application's pool, mapped, and registered with the device.

    Before an array in a slab is used, the slab must be registered, because the driver copies unregistered
    memory while its caller waits. The application must have copied to it as well (D60).
    """

    def __init__(self) -> None:
        super().__init__()
        self._slabs: dict[int, _Slab] = {}
        # The copies by the application's numbers, while an operation needs them.
        self._copies: WeakValueDictionary[int, Arrival] = WeakValueDictionary()

    def add(self, device: AccelDevice, number: int, nbytes: int, descriptor: int) -> None:
        """Map a slab, and register it with the device soon.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            slab = self._slabs[number] = _Slab(map_shared(descriptor, nbytes))
        finally:
            os.close(descriptor)
        self.register(device, slab.memory, slab.registered)

    def array(
        self,
        arrivals: list[Arrival],
        number: int,
        offset: int,
        dtype: str,
        shape: Ints,
        transfer: int | None,
    ) -> HostArray:
        """Return an array in a slab; the same array for the same offset, type and shape.

        Args:
            arrivals: Collects the arrivals that must precede the use of the array.
            number: The slab.
            offset: The offset of the array.
            dtype: Its type.
            shape: Its shape; it is contiguous.
            transfer: The application's copy that must fill it first, if any.
        """
        slab = self._slabs[number]
        if not slab.registered.is_over:
            arrivals.append(slab.registered)
        if transfer is not None:
            # The application sends the same number again when it repeats a request.
            arrivals.append(self._copies.setdefault(transfer, Arrival()))
        key, arrays = (offset, dtype, shape), slab.arrays
        array = arrays.get(key)
        if array is None:
            if len(arrays) >= _MOST_ARRAYS:
                arrays.clear()
            array = arrays[key] = np.ndarray(shape, DType(dtype).dtype, slab.memory.data, offset)
        return array

    def on_filled(self, transfer: int) -> None:
        """End a filled arrival: operations that wait for it are launched."""
        arrival = self._copies.get(transfer)
        if arrival is not None:
            arrival.end()

    def remove(self, device: AccelDevice, number: int, wait_idle: Callable[[], Awaitable[None]]) -> None:
        """Forget a slab without arrays of the application.

        Args:
            device: The device, which also forgets it.
            number: The slab. The application may have failed to announce it.
            wait_idle: Waits until nothing uses it, because a failed operation may have left a transfer.
        """
        slab = self._slabs.pop(number, None)
        if slab is not None:
            self.unregister(device, slab.memory, slab.registered, wait_idle)


class WorkerMemory:
    """Reports the device's chunks to the application, and maps the application's memory on the device.

    The device calls `keep` and `drop` while it allocates, on the Trio thread or in the thread of `adopt`.

    Args:
        channel: The channel to the application.

    Attributes:
        device: The device, once open.
        slabs: The slabs that the application has announced.
    """

    def __init__(self, channel: Channel) -> None:
        self.device: AccelDevice
        self.slabs: WorkerSlabs = WorkerSlabs()
        self._channel = channel
        # The size and descriptor of chunks that the application has not acknowledged.
        self._told: dict[int, tuple[int, int]] = {}
        # The number of read blocks in each foreign chunk, and the chunks that stay mapped without one.
        self._borrowed: Counter[int] = Counter()
        self._staying: set[int] = set()

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Pass new memory to the application as well.

        Raises:
            MemoryError: There are too many open files.
        """
        try:
            # D74: the application may lack a free descriptor now, and asks again later.
            self._told[chunk] = nbytes, os.dup(descriptor)
            self._tell(chunk)
        except OSError as error:
            self.on_chunk_received(chunk)
            raise MemoryError(f"a chunk of {nbytes} bytes: {error}") from error

    def drop(self, chunk: int) -> None:
        """Report freed memory."""
        self.on_chunk_received(chunk)
        self._channel.send(_answers.unchunk(chunk))

    def _tell(self, chunk: int) -> None:
        entry = self._told.get(chunk)
        if entry is not None:
            nbytes, descriptor = entry
            self._channel.send(_answers.chunk(chunk, nbytes), (descriptor,))

    def on_tell_chunk(self, number: int) -> None:
        """Send a chunk again after the application lacked a descriptor; it asks again if this fails."""
        with suppress(OSError):
            self._tell(number)

    def on_chunk_received(self, number: int) -> None:
        """Close the descriptor of a chunk that the application has received, or no longer needs."""
        entry = self._told.pop(number, None)
        if entry is not None:
            os.close(entry[1])

    def on_chunk(self, number: int, nbytes: int, *descriptors: int) -> None:
        """Map an existing chunk on the device."""
        self.device.map_chunk(number, nbytes, *descriptors)

    def borrow(self, placed: PlacedBlock, nbytes: int, *descriptor: int, stays: bool) -> None:
        """Make a block readable that another device, or this device itself, has lent.

        Args:
            placed: The block. Ids of other devices' chunks are negative.
            nbytes: The size of its chunk.
            descriptor: The read-only descriptor of the chunk, unless it is certainly mapped.
            stays: Whether the chunk stays mapped until `remove_chunk`.

        Raises:
            ValueError, OSError: The chunk cannot be mapped.
        """
        chunk = placed.chunk
        if descriptor:
            # Another request may have brought the chunk. Then it is already mapped.
            with suppress(ValueError):
                self.device.map_chunk(chunk, nbytes, *descriptor, write=False)
        if stays:
            self._staying.add(chunk)
        self._borrowed[chunk] += 1
        try:
            self.device.expect((placed,))
        except BaseException:
            self.give_back(chunk)
            raise

    def give_back(self, chunk: int) -> None:
        """End the use of one block in a borrowed chunk; without other blocks, the chunk is unmapped."""
        self._borrowed[chunk] -= 1
        self._unmap_unused(chunk)

    def _unmap_unused(self, chunk: int) -> None:
        if chunk < 0 and not self._borrowed[chunk] and chunk not in self._staying:
            del self._borrowed[chunk]
            with suppress(KeyError):
                self.device.unmap_chunk(chunk)

    def remove_chunk(self, number: int) -> None:
        """Unmap a freed chunk, or a borrowed chunk as soon as nothing reads it."""
        if number < 0:
            self._staying.discard(number)
            self._unmap_unused(number)
            return
        # This worker may have freed it itself.
        with suppress(KeyError, ValueError):
            self.device.unmap_chunk(number)


@attrs.frozen
class RemoteArray:
    """The placeholder of the application's host array in a specification.

    Attributes:
        request: The number of its request.
        index: Its index among the request's host arrays.
    """

    request: int
    index: int


class RemoteCopies:
    """Holds a stream at the position of a copy, until the application has copied.

    This is used if the application has the device's memory mapped, because it saves one of two copies.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[StreamPause, LoopNotifier]] = {}

    def wrap(self, device: AccelDevice) -> AccelDevice:
        """Return the device, with a memory library that accepts such arrays."""
        return cast("AccelDevice", _Device(device, self))

    def enqueue(self, copy: _Copy, device: AccelDevice, stream: AccelStream) -> None:
        """Hold a stream, and let the application copy when the stream gets there."""
        array = copy.source if isinstance(copy, CopyToHostSpec) else copy.out
        host = cast("RemoteArray", copy.host)
        placement = device.placement(array.block)
        transfer = next(self._numbers)
        plain = array.block, array.offset, array.dtype.value, array.shape, array.strides
        message = _answers.copy(transfer, host.request, host.index, placement.chunk, placement.offset, plain)
        notifier = LoopNotifier(lambda: self._send(message, now=True))
        self._waiting[transfer] = stream.hold(notifier), notifier

    def on_copied(self, transfer: int) -> None:
        """Release the stream, because the application has copied."""
        hold, notifier = self._waiting.pop(transfer)
        notifier.close()
        hold.release()


class _Device:
    """A device with this module's memory library."""

    def __init__(self, device: AccelDevice, copies: RemoteCopies) -> None:
        self._device = device
        self._copies = copies
        # Every operation uses these.
        self.allocate = device.allocate
        self.free = device.free
        self.renew = device.renew
        self.validated_blocks = device.validated_blocks
        self.placement = device.placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def open_library(self, name: str) -> KernelLibrary:
        library = self._device.open_library(name)
        if name != "memory":
            return library
        return _RemoteCopies(library.name, library.operations, library, self._device, self._copies)


@attrs.frozen(eq=False)
class _RemoteCopies:
    """A memory library that lets the application copy its own arrays."""

    name: str
    operations: frozenset[str]
    _library: KernelLibrary
    _device: AccelDevice
    _copies: RemoteCopies

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        return self._library.prepare(spec)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        host = cast("object", spec.host) if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)) else None
        # A specification's array types include only NumPy's.
        if type(host) is RemoteArray:
            self._copies.enqueue(cast("_Copy", spec), self._device, stream)
        else:
            self._library.enqueue(spec, stream)

    def close(self) -> None:
        self._library.close()
