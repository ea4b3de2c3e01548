"""The base class of open GPUs, and its parts that all GPU libraries share.

`AddressDevice` finds the address of each array in its block, and owns:

* `ArrayKernels`: conversions, copies between strides, and fills on the device.
* `PinnedMemory`: small pieces of host memory that the device can access.
* `Transfers`: copies between host arrays and the device, and the registered ranges of host memory.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import sys
import threading
from functools import partial
from operator import itemgetter
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ..contract.device_array import DeviceArray, merged
from ..contract.device_info import DeviceInfo
from ..contract.dtypes import DType, HostArray, Ints
from ..contract.ops import ArraySpec, HostUse
from ..contract.protocols import LibraryUsage
from ..contract.values import as_bits, scalar
from ..kit.device import BlockDevice, ChunkT, StreamT
from ..kit.host import ON_THE_SPOT, address_of
from ..kit.memory import BlockMemory, no_such_block
from ..kit.pools import PagePool
from .driver import GpuContext, GpuStream, Kernels, with_axes
from .workspace import Arena

# These layouts match the structures in the source `arrays`.
_CONVERT, _TRANSPOSE, _FILL = "QQqdiiii", "QQqqqqqiii4x", "Qqii16s"
# A transposing copy: threads per square, the square's side in elements if copied by lines, and the shortest
# side of an array that is worth squares.
_SQUARE_THREADS, _SIDE, _LEAST_SIDE = 256, 32, 16
# The number of aligned elements that a thread reads and writes at once, by their size in bytes.
_RUNS = {1: 8, 2: 8, 4: 4, 8: 2}
# The dtype that copies elements of each size unchanged. The widest is first, because `_widened` takes the
# first that fits.
_PLAIN = {16: DType.complex128, 8: DType.int64, 4: DType.int32, 2: DType.int16, 1: DType.int8}
_TYPES = {dtype: code for code, dtype in enumerate(DType)}
# Conversions between two of these are computed in float32.
_SINGLE = {dtype for dtype in DType if dtype.kind == "float"} - {DType.float64} | {DType.complex64}


class ArrayKernels:
    """Converts and fills arrays, by kernels of the source `arrays`.

    The constructor blocks, because it compiles them.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._convert = kernels.function("arrays", "convert", with_axes(_CONVERT, 3, 0).size)
        self._by_lines, self._by_runs, self._narrow = (
            kernels.function("arrays", name, with_axes(_TRANSPOSE, 3, 0).size)
            for name in ("transpose_by_lines", "transpose_by_runs", "transpose_narrow")
        )
        self._fill = kernels.function("arrays", "fill", with_axes(_FILL, 2, 0).size)

    def convert(
        self,
        stream: GpuStream,
        source: DeviceArray,
        out: DeviceArray,
        *,
        scale: float = 1.0,
        conjugate: bool = False,
    ) -> None:
        """Enqueue ``out = source * scale``, or its conjugate, converted as by `numpy.ndarray.astype`.

        The product is computed in float32 if both dtypes are floating or complex and at most single
        precision, otherwise in float64. The arrays have the same shape, and are disjoint or equal.
        """
        assert source.shape == out.shape
        if not out.size:
            return
        is_plain = source.dtype is out.dtype and (scale, conjugate) == (1.0, False)
        if is_plain and source.is_contiguous and out.is_contiguous:
            stream.copy(out.address, source.address, out.nbytes)
            return
        shape, (ins, outs) = merged(source.shape, (source.strides, out.strides))
        types, is_single = (source.dtype, out.dtype), source.dtype in _SINGLE and out.dtype in _SINGLE
        addresses = source.address, out.address
        if is_plain:
            size, shape, ins, outs = _widened(source.dtype.itemsize, addresses, shape, ins, outs)
            if self._try_transpose(stream, addresses, size, shape, ins, outs):
                return
            types = (_PLAIN[size], _PLAIN[size])
        flags = (scale != 1.0) | conjugate << 1 | is_single << 2 | is_plain << 3
        count = math.prod(shape)
        self._convert.run(
            stream.handle,
            count,
            with_axes(_CONVERT, 3, len(shape)),
            *addresses,
            count,
            scale,
            *(_TYPES[dtype] for dtype in types),
            flags,
            len(shape),
            *shape,
            *ins,
            *outs,
        )

    def _try_transpose(
        self,
        stream: GpuStream,
        addresses: tuple[int, int],
        size: int,
        shape: Ints,
        ins: Ints,
        outs: Ints,
    ) -> bool:
        """Enqueue a copy whose arrays are contiguous along different axes, by squares or along a short axis.

        Args:
            stream: The stream.
            addresses: The addresses of the source and the result.
            size: The size of an element in bytes.
            shape: The shape of both arrays.
            ins: The source's strides in bytes.
            outs: The result's strides in bytes.

        Returns:
            False if nothing was enqueued, because the plain kernel suits this copy better.
        """
        if size not in ins or size not in outs:
            return False
        along_source, along_out = ins.index(size), outs.index(size)
        rows, columns = shape[along_source], shape[along_out]
        is_narrow = min(rows, columns) < _LEAST_SIDE
        # Narrow arrays with elements of 16 bytes are faster element by element.
        if along_source == along_out or (is_narrow and (max(rows, columns) < _LEAST_SIDE or size > 8)):
            return False
        other_axes = [axis for axis in range(len(shape)) if axis not in (along_source, along_out)]
        run = _RUNS.get(size, 0)
        # Exclude the contiguous axis by its number, because overlapping windows have its stride on two axes.
        steps = (
            step
            for row, along in ((ins, along_source), (outs, along_out))
            for axis, step in enumerate(row)
            if axis != along
        )
        kernel, side, threads = self._by_lines, _SIDE, _SQUARE_THREADS
        if is_narrow:
            kernel, side, threads = self._narrow, 0, 1
        elif run and math.gcd(*addresses, *steps) % (size * run) == 0:
            kernel, side = self._by_runs, _SQUARE_THREADS // 16 * run
        count = -(-rows // side) * -(-columns // side) if side else max(rows, columns)
        count *= math.prod(shape[axis] for axis in other_axes)
        if count >= 1 << 31:
            return False
        kernel.run(
            stream.handle,
            count * threads,
            with_axes(_TRANSPOSE, 3, len(other_axes)),
            *addresses,
            count,
            rows,
            columns,
            ins[along_out],
            outs[along_source],
            size,
            side,
            len(other_axes),
            *(row[axis] for row in (shape, ins, outs) for axis in other_axes),
            threads=_SQUARE_THREADS,
        )
        return True

    def fill(self, stream: GpuStream, out: DeviceArray, value: complex) -> None:
        """Enqueue a fill of every element with `value`.

        Raises:
            LibraryError: The dtype cannot hold `value`.
        """
        bits = scalar(value, out.dtype).tobytes()
        if not out.size:
            return
        size = out.dtype.itemsize
        shape, (strides,) = merged(out.shape, (out.strides,))
        if strides in ((), (size,)) and bits == bits[:1] * size:
            stream.set_bytes(out.address, bits[0], out.nbytes)
        elif strides in ((), (size,)) and size == 4:
            stream.set_words(out.address, int.from_bytes(bits, "little"), out.size)
        else:
            layout = with_axes(_FILL, 2, len(shape))
            values = out.address, out.size, size, len(shape), bits, *shape, *strides
            self._fill.run(stream.handle, out.size, layout, *values)


def _widened(
    size: int, addresses: tuple[int, int], shape: Ints, ins: Ints, outs: Ints
) -> tuple[int, Ints, Ints, Ints]:
    """Describe a copy by fewer and larger elements, if a contiguous axis of both arrays allows that.

    Returns:
        The size of an element, the shape, and the strides of both arrays in bytes.
    """
    along = [axis for axis in range(len(shape)) if ins[axis] == outs[axis] == size]
    if not along:
        return size, shape, ins, outs
    axis = along[0]
    steps = (step for row in (ins, outs) for index, step in enumerate(row) if index != axis)
    common = math.gcd(*addresses, size * shape[axis], *steps)
    wide = next(wide for wide in _PLAIN if common % wide == 0)
    fewer = (*shape[:axis], size * shape[axis] // wide, *shape[axis + 1 :])
    ins, outs = ((*row[:axis], wide, *row[axis + 1 :]) for row in (ins, outs))
    shape, (ins, outs) = merged(fewer, (ins, outs))
    return wide, shape, ins, outs


# Bytes of small pieces, and of a page of them. Each of these sizes has a page from the start, because an
# allocation by the driver is slow.
_SIZES = tuple(1 << bits for bits in range(6, 19, 2))
_PAGE = 256 << 10


@attrs.define(eq=False)
class _Pieces(PagePool[int]):
    """Addresses of pinned pieces with the same size."""

    _context: GpuContext
    _nbytes: int
    _count: int

    def make_page(self) -> tuple[int, list[int]]:
        size = self._nbytes * self._count
        start = self._context.take_host(size)
        return start, list(range(start, start + size, self._nbytes))

    def free_page(self, page: int) -> None:
        self._context.free_host(page)


class PinnedMemory:
    """Pinned host memory in pieces, whose sizes are powers of four. From any thread.

    The constructor blocks, because the driver allocates a page for each small size.
    """

    def __init__(self, context: GpuContext) -> None:
        self._context = context
        self._pools: dict[int, _Pieces] = {}
        for size in _SIZES:
            self._pool(size).add_page()

    def take(self, nbytes: int) -> int:
        """Return the address of a free piece of at least `nbytes` bytes. A new page blocks the caller.

        Raises:
            MemoryError: The machine does not have enough memory.
        """
        return self._pool(nbytes).take()

    def give_back(self, nbytes: int, address: int) -> None:
        """Take back a piece for which `nbytes` bytes were requested. No enqueued work uses it."""
        self._pool(nbytes).give_back(address)

    def close(self) -> None:
        """Free all pages. No stream may run any longer."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, nbytes: int) -> _Pieces:
        bits = (nbytes - 1).bit_length() if nbytes > _SIZES[0] else 6
        size = 1 << (bits + (bits & 1))
        pool = self._pools.get(size)
        if pool is None:
            # Two threads may get here at once. `setdefault` returns the first stored pool to both.
            pool = self._pools.setdefault(size, _Pieces(self._context, size, max(1, _PAGE // size)))
        return pool


class Transfers:
    """Copies host arrays to and from the device, and registers host memory for that.

    An array in registered memory is transferred directly, and a small array through pinned memory. For all
    others the driver blocks the caller during the copy. Therefore the dispatch of a device stages large
    arrays in registered memory. A stream held for a thread that copies would be worse: vendors' libraries
    wait for the whole context when they load kernels, and every other launch waits with them, including the
    launch of that thread (D50).
    """

    def __init__(self, context: GpuContext, pinned: PinnedMemory) -> None:
        self._context = context
        self._pinned = pinned
        # The registered ranges, sorted: start and end addresses.
        self._ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        # Held while pages are pinned, which takes long. Transfers never wait for that, because they take only
        # `_lock`.
        self._pinning = threading.Lock()
        self._is_closed = False

    def register(self, array: HostArray) -> None:
        """Pin host memory, so that the device transfers it directly; blocks. Does nothing after `close`.

        Args:
            array: A contiguous array, whose memory must exist as long as it is registered.

        Raises:
            AccelError: The driver refused.
        """
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        with self._pinning:
            if self._is_closed:
                return
            self._context.register_host(start, array.nbytes)
            with self._lock:
                bisect.insort(self._ranges, (start, end))

    def unregister(self, array: HostArray) -> None:
        """Unpin registered memory, which no transfer may use any longer; blocks."""
        with self._pinning:
            self._forget(array.ctypes.data)

    def _forget(self, start: int) -> None:
        with self._lock:
            previous, self._ranges = (
                self._ranges,
                [interval for interval in self._ranges if interval[0] != start],
            )
        if len(self._ranges) < len(previous):
            self._context.unregister_host(start)

    def straight(self, host: HostArray) -> int | None:
        """Return the address of a C-contiguous array in registered memory; None for other arrays."""
        start = address_of(host)
        with self._lock:
            index = bisect.bisect_right(self._ranges, start, key=itemgetter(0)) - 1
            is_inside = index >= 0 and start + host.nbytes <= self._ranges[index][1]
        return start if is_inside and host.flags.c_contiguous else None

    def to_device(
        self, stream: GpuStream, host: HostArray, start: int | None, address: int
    ) -> HostUse | None:
        """Enqueue a copy of a host array, in C order, to device memory.

        Args:
            stream: The stream.
            host: The array.
            start: The result of `straight` for the array.
            address: The address of the target.

        Returns:
            The finished use of the array; None if the device reads the array until the stream's next event.
        """
        nbytes = host.nbytes
        if start is not None:
            stream.copy_in(address, start, nbytes)
            return None
        packed = np.ascontiguousarray(host)
        start = address_of(packed)
        if nbytes <= ON_THE_SPOT:
            staging_address = self._pinned.take(nbytes)
            stream.after(partial(self._pinned.give_back, nbytes, staging_address))
            ctypes.memmove(staging_address, start, nbytes)
            start = staging_address
        # If the source is not pinned, the driver has read it when the call returns.
        stream.copy_in(address, start, nbytes)
        return HostUse(None)

    def to_host(self, stream: GpuStream, address: int, host: HostArray, start: int | None) -> HostUse | None:
        """Enqueue a copy of device memory, in C order, to a host array.

        Args:
            stream: The stream.
            address: The address of the source.
            host: The array.
            start: The result of `straight` for the array.

        Returns:
            The use of the array: finished if the driver has copied, otherwise until the stream's next event.
            None if the device writes the array until then.
        """
        nbytes = host.nbytes
        if start is not None:
            stream.copy_out(start, address, nbytes)
            return None
        if nbytes <= ON_THE_SPOT:
            staging_address = self._pinned.take(nbytes)
            use = HostUse(host)
            stream.after(partial(self._fetch, staging_address, use, nbytes))
            stream.copy_out(staging_address, address, nbytes)
            return use
        packed = host if host.flags.c_contiguous else np.empty(host.shape, host.dtype)
        stream.copy_out(address_of(packed), address, nbytes)
        if packed is not host:
            np.copyto(as_bits(host), as_bits(packed))
        return HostUse(None)

    def close(self) -> None:
        """Unregister all ranges. No stream uses them any longer, and the context is current."""
        with self._pinning:
            self._is_closed = True
            for start, _ in tuple(self._ranges):
                self._forget(start)

    def _fetch(self, staging_address: int, use: HostUse, nbytes: int) -> None:
        try:
            use.run(partial(_fill, address=staging_address))
        finally:
            self._pinned.give_back(nbytes, staging_address)


def _fill(host: HostArray, address: int) -> None:
    """Fill a host array with the bytes at an address, in C order."""
    if host.flags.c_contiguous:
        ctypes.memmove(address_of(host), address, host.nbytes)
    else:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * host.nbytes).from_address(address))
        np.copyto(as_bits(host), as_bits(memory.view(host.dtype).reshape(host.shape)))


_MOST_SPANS = 1024

ContextT = TypeVar("ContextT", bound=GpuContext)


class AddressDevice(BlockDevice[StreamT, ChunkT, int], Generic[StreamT, ChunkT, ContextT]):
    """Base of open GPUs: a `BlockDevice` whose memory blocks have addresses.

    The constructor blocks the caller, because it compiles kernels and allocates pinned memory.

    Args:
        info: Description of the device.
        blocks: The blocks of its memory.
        context: Its context.
        kernels: The backend's own kernels.

    Attributes:
        context: Its context, which must be current in a thread that calls the driver.
        kernels: The backend's own kernels.
        arrays: Conversions and fills of arrays.
        transfers: Copies between host and device.
        pinned: Host memory through which status words and small arrays are copied.
        arena: Memory that kernels need while they run.
    """

    def __init__(
        self, info: DeviceInfo, blocks: BlockMemory[ChunkT, int], context: ContextT, kernels: Kernels
    ) -> None:
        super().__init__(info, blocks)
        self.context: ContextT = context
        self.kernels: Kernels = kernels
        self.arrays: ArrayKernels = ArrayKernels(kernels)
        self.arena: Arena = Arena(context, blocks)
        self.pinned: PinnedMemory = PinnedMemory(context)
        self.transfers: Transfers = Transfers(context, self.pinned)
        self._spans: dict[tuple[Ints, Ints, int], tuple[int, int]] = {}
        self._usage: dict[str, LibraryUsage] = {}

    def register_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Let the device transfer from and to host memory directly; see `AccelDevice.register_host`."""
        self.check_open()
        self.transfers.register(array)

    def unregister_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo `register_host`; see `AccelDevice.unregister_host`."""
        self.transfers.unregister(array)

    def usage(self) -> dict[str, LibraryUsage]:
        """Count plans and workspace of its libraries; see `AccelDevice.usage`."""
        held = self.arena.by_library()
        held.update(self.blocks.fixed_workspace)
        by_library = dict(self._usage)
        for name, usage in by_library.items():
            usage.workspace = held[name]
        return by_library

    def usage_of(self, library: str) -> LibraryUsage:
        """Return the counts of a library, which it updates itself. From any thread."""
        return self._usage.setdefault(library, LibraryUsage())

    def device_array(self, array: ArraySpec) -> DeviceArray:
        """Return the address and layout of an array.

        Raises:
            KeyError: The array's block does not exist.
            ValueError: The array is not within its block.
        """
        return DeviceArray(self.address(array), array.dtype, array.shape, array.strides)

    def address(self, array: ArraySpec) -> int:
        """Return the address of an array's first element; raises as `device_array` does."""
        return self.address_within(array, self.span(array))

    def address_within(self, array: ArraySpec, span: tuple[int, int]) -> int:
        """Return the address of an array's first element, given its `span`; raises as `device_array` does."""
        first, reach = span
        offset = array.offset
        try:
            address, nbytes, _ = self.blocks.blocks[array.block]
        except KeyError:
            raise no_such_block(array.block) from None
        if offset < first or offset + reach > nbytes:
            raise ValueError(f"the array does not lie within its block of {nbytes} bytes: {array}")
        return address + offset

    def span(self, array: ArraySpec) -> tuple[int, int]:
        """Return how many bytes an array takes before the address of its first element, and from there on.

        The span follows from shape, strides and dtype, and is cached by layout. The span of an empty array
        fits into every block.
        """
        layout = array.shape, array.strides, array.dtype.itemsize
        span = self._spans.get(layout)
        if span is None:
            if len(self._spans) >= _MOST_SPANS:
                self._spans.clear()
            span = self._spans[layout] = _span(*layout)
        return span


def _span(shape: Ints, strides: Ints, itemsize: int) -> tuple[int, int]:
    if 0 in shape:
        return -sys.maxsize, -sys.maxsize
    reaches = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    lead = -sum(reach for reach in reaches if reach < 0)
    return lead, sum(reach for reach in reaches if reach > 0) + itemsize
