"""Memory as a worker has it: blocks, chunks, slabs of host memory, and copies that the application does."""

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

# At so many arrays of a slab all are forgotten: they are made again in a moment.
_MOST_ARRAYS = 256
_Copy: TypeAlias = CopyFromHostSpec | CopyToHostSpec


class WorkerBlocks(dict[int, Block]):
    """Blocks by their ids; an id that the application has released gives a released block.

    To be changed by its methods alone.

    Args:
        blocks: Makes them.

    Attributes:
        changes: How often it was changed: what was found in it holds until the next time.
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
        """Know a block that is there."""
        self.changes += 1
        self[number] = self._blocks.new(nbytes, number)

    def name(self, allocations: Iterable[tuple[int, int]]) -> None:
        """Know the blocks that an operation is to make, given their ids and sizes."""
        for number, nbytes in allocations:
            known = self.get(number)
            if known is not None:
                # The application names one block for one array after the other (D22).
                if known.damaged_by is None:
                    continue
                known.is_released = True
            self.adopt(number, nbytes)

    def remove(self, number: int) -> None:
        """Forget a block that is not the device's own."""
        self.changes += 1
        # The table does not give it back.
        self.pop(number).is_released = True

    def let_go(self, numbers: Iterable[int]) -> None:
        """Note that the application has dropped blocks; the next operation gives them back, or `drain`."""
        dropped = self._blocks.dropped
        for number in numbers:
            block = self.pop(number, None)
            if block is None:
                continue
            self.changes += 1
            if not block.is_released:
                # `release` would wake the loop, which is awake.
                block.is_released = True
                dropped.append((number, block.nbytes, None))


@attrs.frozen(eq=False)
class _Slab:
    memory: npt.NDArray[np.uint8]
    registered: Arrival = attrs.field(factory=Arrival)
    # Arrays that operations used, by offset, type and shape: a program uses the same again and again.
    arrays: dict[tuple[int, str, Ints], HostArray] = attrs.field(
        factory=dict[tuple[int, str, Ints], "HostArray"]
    )


class WorkerSlabs(Registrations):
    """The slabs of the application's pool, mapped and made known to the device.

    Before an array in a slab is used, the slab must be registered, since the driver copies other memory while
    its caller waits, and the application must have copied to it (D60).
    """

    def __init__(self) -> None:
        super().__init__()
        self._slabs: dict[int, _Slab] = {}
        # The copies, by the application's numbers, as long as an operation still needs them.
        self._copies: WeakValueDictionary[int, Arrival] = WeakValueDictionary()

    def add(self, device: AccelDevice, number: int, nbytes: int, descriptor: int) -> None:
        """Map a slab, and have the device know it soon.

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
        """Return an array in a slab; the same for the same offset, type and shape.

        Args:
            arrivals: Takes what must be over before the array is used.
            number: The slab.
            offset: Where the array begins in it.
            dtype: Its type.
            shape: Its shape; it is contiguous.
            transfer: Which copy of the application's is to fill it first.
        """
        slab = self._slabs[number]
        if not slab.registered.is_over:
            arrivals.append(slab.registered)
        if transfer is not None:
            # The application sends the same number again with a repeated request.
            arrivals.append(self._copies.setdefault(transfer, Arrival()))
        key, arrays = (offset, dtype, shape), slab.arrays
        array = arrays.get(key)
        if array is None:
            if len(arrays) >= _MOST_ARRAYS:
                arrays.clear()
            array = arrays[key] = np.ndarray(shape, DType(dtype).dtype, slab.memory.data, offset)
        return array

    def on_filled(self, transfer: int) -> None:
        """End an arrival that the application has copied: operations that wait for it are launched."""
        arrival = self._copies.get(transfer)
        if arrival is not None:
            arrival.end()

    def remove(self, device: AccelDevice, number: int, wait_idle: Callable[[], Awaitable[None]]) -> None:
        """Forget a slab: no array of the application is in it.

        Args:
            device: The device, which forgets it, too.
            number: Which one; the application may not have been able to tell of it.
            wait_idle: Waits until nothing uses it: an operation that failed may have left a transfer behind.
        """
        slab = self._slabs.pop(number, None)
        if slab is not None:
            self.unregister(device, slab.memory, slab.registered, wait_idle)


class WorkerMemory:
    """Tells the application of chunks that the device makes, and the device of what the application has.

    The device calls `keep` and `drop` while it allocates, on the Trio thread or in that of `adopt`.

    Args:
        channel: Where the application is told.

    Attributes:
        device: The device, once it is open.
        slabs: The slabs that it has been told of.
    """

    def __init__(self, channel: Channel) -> None:
        self.device: AccelDevice
        self.slabs: WorkerSlabs = WorkerSlabs()
        self._channel = channel
        # Size and descriptor of chunks that the application has not acknowledged.
        self._told: dict[int, tuple[int, int]] = {}
        # The number of blocks that are read in each chunk of other devices; and chunks that stay mapped
        # without any.
        self._borrowed: Counter[int] = Counter()
        self._staying: set[int] = set()

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Give memory that was made to the application, too.

        Raises:
            MemoryError: There are too many open files.
        """
        try:
            # D74: the application may have no descriptor left for it now, and asks again later.
            self._told[chunk] = nbytes, os.dup(descriptor)
            self._tell(chunk)
        except OSError as error:
            self.on_kept(chunk)
            raise MemoryError(f"a chunk of {nbytes} bytes: {error}") from error

    def drop(self, chunk: int) -> None:
        """Memory is gone."""
        self.on_kept(chunk)
        self._channel.send(_answers.unchunk(chunk))

    def _tell(self, chunk: int) -> None:
        told = self._told.get(chunk)
        if told is not None:
            nbytes, descriptor = told
            self._channel.send(_answers.chunk(chunk, nbytes), (descriptor,))

    def on_tell_chunk(self, number: int) -> None:
        """Send a chunk again that the application had no room for; it asks again if this fails."""
        with suppress(OSError):
            self._tell(number)

    def on_kept(self, number: int) -> None:
        """Close the own descriptor of a chunk, which the application has, or needs no more."""
        told = self._told.pop(number, None)
        if told is not None:
            os.close(told[1])

    def on_chunk(self, number: int, nbytes: int, *descriptors: int) -> None:
        """Have the device map a chunk that there is."""
        self.device.map_chunk(number, nbytes, *descriptors)

    def borrow(self, place: PlacedBlock, nbytes: int, *descriptor: int, stays: bool) -> None:
        """Know a block of another device, or one that this device has lent itself.

        Args:
            place: The block. Ids of chunks of other devices are negative.
            nbytes: Size of its chunk.
            descriptor: The descriptor of the chunk, where it may not be mapped. It can only be read.
            stays: Whether the chunk stays mapped until `remove_chunk`.

        Raises:
            ValueError, OSError: It cannot be mapped.
        """
        chunk = place.chunk
        if descriptor:
            # Another request may have come with it: then it is there.
            with suppress(ValueError):
                self.device.map_chunk(chunk, nbytes, *descriptor, write=False)
        if stays:
            self._staying.add(chunk)
        self._borrowed[chunk] += 1
        try:
            self.device.expect((place,))
        except BaseException:
            self.give_back(chunk)
            raise

    def give_back(self, chunk: int) -> None:
        """Have one block less in a chunk that was borrowed; without any, its mapping ends."""
        self._borrowed[chunk] -= 1
        self._unmap_unused(chunk)

    def _unmap_unused(self, chunk: int) -> None:
        if chunk < 0 and not self._borrowed[chunk] and chunk not in self._staying:
            del self._borrowed[chunk]
            with suppress(KeyError):
                self.device.unmap_chunk(chunk)

    def remove_chunk(self, number: int) -> None:
        """Unmap a chunk that is gone, or that was borrowed: that one when nothing reads it any more."""
        if number < 0:
            self._staying.discard(number)
            self._unmap_unused(number)
            return
        # This worker itself may have given it back.
        with suppress(KeyError, ValueError):
            self.device.unmap_chunk(number)


@attrs.frozen
class RemoteArray:
    """Stands for a host array of the application in a specification.

    Attributes:
        request: Number of the request that it belongs to.
        index: Which of its host arrays it is.
    """

    request: int
    index: int


class RemoteCopies:
    """Holds a stream where a copy has its place, until the application has copied.

    So it is where the application has the device's memory mapped: there is one copy and not two.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[StreamPause, LoopNotifier]] = {}

    def wrap(self, device: AccelDevice) -> AccelDevice:
        """Return the device, with a memory library that knows such arrays."""
        return cast("AccelDevice", _Device(device, self))

    def enqueue(self, copy: _Copy, device: AccelDevice, stream: AccelStream) -> None:
        """Hold a stream, and have the application copy when it gets there."""
        array = copy.source if isinstance(copy, CopyToHostSpec) else copy.out
        host = cast("RemoteArray", copy.host)
        place = device.placement(array.block)
        transfer = next(self._numbers)
        plain = array.block, array.offset, array.dtype.value, array.shape, array.strides
        message = _answers.copy(transfer, host.request, host.index, place.chunk, place.offset, plain)
        notifier = LoopNotifier(lambda: self._send(message, now=True))
        self._waiting[transfer] = stream.hold(notifier), notifier

    def on_copied(self, transfer: int) -> None:
        """Release the stream: the application has copied."""
        hold, notifier = self._waiting.pop(transfer)
        notifier.close()
        hold.release()


class _Device:
    """A device whose memory library is this one's."""

    def __init__(self, device: AccelDevice, copies: RemoteCopies) -> None:
        self._device = device
        self._copies = copies
        # Used by every operation.
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
    """A memory library that has the application copy its own arrays."""

    name: str
    operations: frozenset[str]
    _library: KernelLibrary
    _device: AccelDevice
    _copies: RemoteCopies

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        return self._library.prepare(spec)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        host = cast("object", spec.host) if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)) else None
        # A specification knows only NumPy's of the array types.
        if type(host) is RemoteArray:
            self._copies.enqueue(cast("_Copy", spec), self._device, stream)
        else:
            self._library.enqueue(spec, stream)

    def close(self) -> None:
        self._library.close()
