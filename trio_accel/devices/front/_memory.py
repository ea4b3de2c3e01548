"""Memory operations of every device: messages of the memory actor, and copies between devices."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import apart
from ...backends.base import (
    AccelBackend,
    AccelError,
    ContextLostError,
    CopyFromForeignSpec,
    DType,
    ForeignArray,
    HostArray,
    Ints,
    StaleRefError,
    check_conversion,
    check_plain,
    check_same_kind,
    element,
    host_array,
    name_function,
)
from ...backends.base.contract.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, JoinSpec
from ..base._progress import ProgressReport, chosen_listener, track_progress
from ..base._refusals import shown, what_to_do
from ..base._views import broadcast, indexed, overlaps, overlaps_itself
from ..base._waits import run_together
from ..engine._library import LibraryActor
from ..operations._chain import METHODS, ArrayFunction
from ..operations._operation import Operand, Operation, Planned, Planner, operation_name
from ..operations._pending import ReplyT_co
from ..operations._ref import AccelRef, Device, owned
from ._layout import leaves_of, map_tree

__all__ = [
    "Assign",
    "Copy",
    "Empty",
    "Fill",
    "MemoryActor",
    "PeerCopy",
    "PeerCopyActor",
    "Put",
    "PutFirst",
    "PutPart",
    "Stack",
    "ToHost",
]

_CHUNK_BYTES = 16 << 20
"""The bytes of a piece of a large transfer."""
_HANDED_OVER = 32
"""The number of pieces that are submitted at once: fewer than a library has in flight."""
_IN_FLIGHT = 3
"""The number of pieces in transit: one leaves its device, the host copies one, and one arrives."""

_Part: TypeAlias = tuple[slice, ...]


class MemoryActor(LibraryActor):
    """Copies between host and device, and within the device, on its own stream."""

    library = "memory"


class PeerCopyActor(LibraryActor):
    """Copies arrays of other devices, on its own stream.

    Its operations make new arrays. So they never wait for an operation that waits for the end of reading.
    """

    library = "memory"


class _OfMemory(Operation[MemoryActor, ReplyT_co]):
    """The base of the messages."""

    __slots__ = ()
    library: ClassVar[str] = "trio_accel.devices:MemoryActor"


@attrs.define(eq=False, on_setattr=None)
class Put(_OfMemory[AccelRef]):
    """Copy an array to the device; replies when the original may be changed again."""

    host: npt.NDArray[Any] | ForeignArray

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse objects other than arrays of a device dtype."""
        if isinstance(self.host, ForeignArray):
            out = planner.output(self.host.shape, planner.dtype("host", self.host.dtype))
            planner.keep(self.host)
            return Planned(CopyFromForeignSpec(self.host, out.spec), out)
        if not isinstance(self.host, np.ndarray):
            raise TypeError(f"{planner.name}: host must be a NumPy array, got {type(self.host).__name__}")
        host = self.host if type(self.host) is np.ndarray else host_array(f"{planner.name}: host", self.host)
        out = planner.output(host.shape, planner.dtype("host", host.dtype))
        planner.keep(host)
        return Planned(CopyFromHostSpec(host, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class ToHost(_OfMemory[HostArray]):
    """Copy an array to host memory: into `out`, or a new array."""

    source: AccelRef
    out: npt.NDArray[Any] | None = None

    def plan(self, planner: Planner) -> Planned[npt.NDArray[Any]]:
        """Refuse an `out` with another shape or dtype, with overlapping elements, or without write access."""
        source = planner.read("source", self.source)
        host = self.out
        if host is None:
            # The array is not shared yet, so a cancelled caller need not wait until it is filled.
            host = np.empty(source.shape, source.dtype.dtype)
            return Planned(CopyToHostSpec(host, source), host)
        if not isinstance(host, np.ndarray):
            raise TypeError(
                f"{planner.name}: out must be a NumPy array, got {type(host).__name__}{what_to_do(host)}"
            )
        check_plain(f"{planner.name}: out", host)
        if host.shape != source.shape or host.dtype != source.dtype.dtype or not host.flags.writeable:
            description = (
                "a read-only array" if not host.flags.writeable else f"shape {host.shape}, dtype {host.dtype}"
            )
            raise ValueError(
                f"{planner.name}: out must be a writable array of shape {source.shape} and dtype "
                f"{source.dtype}, got {description}"
            )
        if overlaps_itself(host):
            raise ValueError(
                f"{planner.name}: out must have memory of its own for each element, got an array of shape "
                f"{host.shape} with strides {host.strides}, whose elements overlap; give "
                "np.empty(shape, dtype), or none for a new array"
            )
        planner.keep(host)
        return Planned(CopyToHostSpec(host, source), host)


@attrs.define(eq=False, on_setattr=None)
class Copy(_OfMemory[AccelRef]):
    """Copy an array to new memory of its device, with another dtype if given."""

    source: AccelRef
    dtype: DType | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse a cast that would drop imaginary parts."""
        source = planner.read("source", self.source)
        dtype = self.dtype or source.dtype
        check_conversion(planner.name, "dtype", source.dtype, dtype)
        out = planner.output(source.shape, dtype)
        return Planned(CopySpec(source, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class PeerCopy(Copy):
    """Copy an array of another device, which this device reads in place."""

    library: ClassVar[str] = "trio_accel.devices:PeerCopyActor"


@attrs.define(eq=False, on_setattr=None)
class Fill(_OfMemory[AccelRef]):
    """Set every element of an array to one value; replies with the array."""

    array: AccelRef
    value: complex

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse a value that the dtype cannot hold."""
        array = planner.update("array", self.array)
        return Planned(FillSpec(element(planner.name, "value", self.value, array.dtype), array), self.array)


@attrs.define(eq=False, on_setattr=None)
class Assign(_OfMemory[AccelRef]):
    """Write an array or a number into an array, or a view of one; replies with the array.

    Attributes:
        array: The array to write to, of any strides.
        value: An array on the same device or on the host, which broadcasts to its shape, or a number.
    """

    array: AccelRef
    value: Operand | complex | np.generic

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse values that do not broadcast, or would be narrowed."""
        name, value, array = planner.name, self.value, planner.update("array", self.array)
        if not isinstance(value, (AccelRef, np.ndarray)):
            if not isinstance(cast("object", value), (int, float, complex, np.generic)):
                description = f"{type(value).__name__}{what_to_do(value)}"
                raise TypeError(
                    f"{name}: value must be an AccelRef, a NumPy array or a number, got {description}"
                )
            return Planned(FillSpec(element(name, "value", value, array.dtype), array), self.array)
        dtype = value.dtype if isinstance(value.dtype, DType) else planner.dtype("value", value.dtype)
        check_same_kind(name, "value", dtype, array.dtype)
        if isinstance(value, np.ndarray) and (value.shape, value.dtype) == (array.shape, array.dtype.dtype):
            host = host_array(f"{name}: value", value)
            planner.keep(host)
            return Planned(CopyFromHostSpec(host, array), self.array)
        source = planner.read("value", value)
        try:
            source = broadcast(source, array.shape)
        except ValueError:
            raise ValueError(
                f"{name}: value of shape {source.shape} does not broadcast to the array's {array.shape}"
            ) from None
        if overlaps(source, array):
            # The order of copied elements is undefined.
            source = planner.convert(source, array.dtype)
        return Planned(CopySpec(source, array), self.array)


@attrs.define(eq=False, on_setattr=None)
class Empty(_OfMemory[AccelRef]):
    """Make an array filled with one value."""

    shape: tuple[int, ...]
    dtype: DType
    value: complex = 0

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse negative sizes and values that the dtype cannot hold."""
        for extent in self.shape:
            is_size = isinstance(extent, (int, np.integer)) and not isinstance(extent, bool)
            if not is_size or not 0 <= extent <= sys.maxsize:
                requirement = f"sizes from 0 to 2**63 - 1, got {shown(self.shape)}"
                raise ValueError(f"{planner.name}: shape must hold {requirement}")
        shape = tuple(int(extent) for extent in self.shape)
        out = planner.output(shape, self.dtype)
        return Planned(FillSpec(element(planner.name, "value", self.value, self.dtype), out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Stack(_OfMemory[AccelRef]):
    """Copy arrays next to each other, along a new first axis, as `numpy.stack` does.

    Host arrays are first copied to the device, one by one.

    Attributes:
        arrays: Arrays with one dtype and one number of axes, at least one.
        pad: The value that fills shorter arrays up to the longest along each axis; without it, all must have
            one shape.
    """

    arrays: Sequence[Operand]
    pad: complex | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Refuse arrays that do not fit together, and a padding that the dtype cannot hold."""
        sources = tuple(
            planner.read(f"arrays[{index}]", array) for index, array in enumerate(tuple(self.arrays))
        )
        if not sources:
            raise ValueError(f"{planner.name}: arrays must hold at least one")
        first = sources[0]
        for index, source in enumerate(sources):
            differs = source.shape != first.shape if self.pad is None else source.ndim != first.ndim
            if differs or source.dtype is not first.dtype:
                kind = "shape" if self.pad is None else "number of axes"
                raise ValueError(
                    f"{planner.name}: arrays must share dtype and {kind}, got {first.dtype} "
                    f"{first.shape} and, as number {index}, {source.dtype} {source.shape}"
                )
        max_shape = tuple(max(extents) for extents in zip(*(source.shape for source in sources), strict=True))
        out = planner.output((len(sources), *max_shape), first.dtype)
        pad = element(planner.name, "pad", 0 if self.pad is None else self.pad, first.dtype)
        expanded = tuple([indexed(source, None) for source in sources])
        return Planned(JoinSpec(0, expanded, pad, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class PutFirst(_OfMemory[AccelRef]):
    """Make an array, and copy one part of it from the host; replies when that may be changed again."""

    host: HostArray
    shape: Ints
    part: _Part

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        out = planner.output(self.shape, planner.dtype("host", self.host.dtype))
        planner.keep(self.host)
        return Planned(CopyFromHostSpec(self.host, indexed(out.spec, self.part)), out)


@attrs.define(eq=False, on_setattr=None)
class PutPart(_OfMemory[AccelRef]):
    """Copy another part of the array from the host."""

    host: HostArray
    out: AccelRef
    part: _Part

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        planner.keep(self.host)
        out = indexed(planner.update("out", self.out), self.part)
        return Planned(CopyFromHostSpec(self.host, out), self.out)


@apart
async def copy_between(backend: AccelBackend, source: AccelRef | HostArray, target: Device) -> AccelRef:
    """Copy an array to another device, or from the host, with several pieces in transit at the same time.

    This takes host memory for three pieces of 16 MiB, or none if the host addresses the memory of the source:
    then the pieces are copied from there.

    Args:
        backend: The backend of the source.
        source: The array.
        target: The device.

    Raises:
        ContextLostError, DeviceLostError, StaleRefError: As for `to_host` and `put`; nothing is left.
        OutOfMemoryError: There is not enough memory on the other device.
    """
    losses = 0
    with track_progress(f"copy to {target.name}", total=source.nbytes, unit="B") as report:
        while True:
            try:
                return await _copy(backend, source, target, report)
            except (ContextLostError, StaleRefError) as error:
                losses += 1
                if error.device != target.name or losses > target.options.retry:
                    raise


async def _copy(
    backend: AccelBackend, source: AccelRef | HostArray, target: Device, report: ProgressReport
) -> AccelRef:
    first, *rest = _parts(source.shape, source.dtype.itemsize, _CHUNK_BYTES)
    async with AsyncExitStack() as stack:
        readers: Sequence[_Shared | _Staged]
        if not isinstance(source, AccelRef):
            readers = [_Shared(source)] * _IN_FLIGHT
        elif _is_addressed(backend):
            readers = [_Shared(await stack.enter_async_context(source.lease()))] * _IN_FLIGHT
        else:
            readers = [_Staged(source) for _ in range(_IN_FLIGHT)]
        piece = await readers[0].read(first)
        out, done = await target.ask(PutFirst(piece, source.shape, first)), piece.nbytes
        remaining = iter(rest)

        async def carry(reader: _Shared | _Staged) -> None:
            nonlocal done
            for part in remaining:
                piece = await reader.read(part)
                await target.ask(PutPart(piece, out, part))
                done += piece.nbytes
                report(done)

        try:
            await run_together(partial(carry, reader) for reader in readers)
        except BaseException:
            # A kept error would keep the memory.
            out.release()
            raise
    return out


def _is_addressed(backend: AccelBackend) -> bool:
    """Return whether the host addresses the memory of such a device; tests replace this."""
    return backend.shares_memory_with_host


@attrs.frozen(eq=False)
class _Shared:
    """Returns pieces of an array that the host addresses."""

    _array: HostArray

    async def read(self, part: _Part) -> HostArray:
        """Return a piece."""
        # With the ellipsis it is always an array.
        index: tuple[Any, ...] = (*part, ...)
        piece: HostArray = self._array[index]
        return piece


@attrs.define(eq=False)
class _Staged:
    """Returns pieces through memory to which the source transfers on its own, one at a time."""

    _source: AccelRef
    _memory: HostArray | None = None

    async def read(self, part: _Part) -> HostArray:
        """Return a piece, which the next call overwrites."""
        piece = self._source[part]
        if self._memory is None:
            count = min(max(_CHUNK_BYTES // piece.dtype.itemsize, piece.size), self._source.size)
            self._memory = self._source.device.host_empty(count, piece.dtype)
        host = self._memory[: piece.size].reshape(piece.shape)
        return await self._source.device.ask(ToHost(piece, host))


def _parts(shape: Sequence[int], itemsize: int, nbytes: int) -> Iterator[_Part]:
    """Split an array into parts of at most `nbytes`, each contiguous if the array is."""
    row = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    rows = nbytes // row if row else 0
    if not shape or rows >= shape[0]:
        yield ()
    elif rows:
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
    else:
        for index in range(shape[0]):
            for rest in _parts(shape[1:], itemsize, nbytes):
                yield (slice(index, index + 1), *rest)


def _to_host(ref: Any, out: HostArray | None = None) -> Any:
    """Make the message for an array, or the messages for the arrays of a reply."""
    if isinstance(ref, AccelRef):
        # The owning device reads a borrowed array.
        return ToHost(owned("to_host", ref), out)
    if out is not None or not isinstance(cast("object", ref), (tuple, list)):
        hint = "" if out is None else "; leave out= away"
        raise TypeError(f"to_host: the call must return one array, it returned {shown(ref)}{hint}")
    return map_tree(ref, lambda leaf: _to_host(leaf) if isinstance(leaf, AccelRef) else leaf)


def _ask_owner(message: Any) -> Awaitable[Any]:
    if not isinstance(message, ToHost):
        return _ask_each(message)
    if chosen_listener() is not None and is_large(message.source):
        return _ask_in_pieces(message)
    return message.source.device.ask(message)


def is_large(array: AccelRef | HostArray) -> bool:
    """Return whether the transfer of an array reports its progress, piece by piece."""
    return array.nbytes > _CHUNK_BYTES


@enable_ki_protection
async def _ask_in_pieces(message: ToHost) -> HostArray:
    """Copy an array to the host in pieces, and report each; otherwise as a whole.

    All pieces are submitted at once, so that a later operation cannot change a half-read array (D212).
    """
    source, out, device = message.source, message.out, message.source.device
    if out is not None and not (
        isinstance(out, np.ndarray) and out.shape == source.shape and out.flags.c_contiguous
    ):
        return await device.ask(message)
    host = np.empty(source.shape, source.dtype.dtype) if out is None else out
    parts = _parts(source.shape, source.dtype.itemsize, max(_CHUNK_BYTES, source.nbytes // _HANDED_OVER))
    try:
        pieces = [device.submit(ToHost(source[part], cast("Any", host)[(*part, ...)])) for part in parts]
    except (AccelError, TypeError, ValueError):
        # The queue is full, or the whole message gives the better error.
        with track_progress(f"copy from {device.name}", total=source.nbytes, unit="B") as report:
            host = await device.ask(message)
            report(source.nbytes)
            return host
    done = 0
    try:
        with track_progress(f"copy from {device.name}", total=source.nbytes, unit="B") as report:
            for piece in pieces:
                done += (await piece.wait()).nbytes
                report(done)
    except ContextLostError:
        if not device.options.retry:
            raise
        return await device.ask(message)
    finally:
        if out is not None:
            # From now on the caller may change it.
            with trio.CancelScope(shield=True):
                for piece in pieces:
                    with suppress(AccelError):
                        await piece.wait()
    return host


async def _ask_each(messages: Any) -> Any:
    replies = iter(
        [
            await _ask_owner(message) if isinstance(message, ToHost) else message
            for message in leaves_of(messages)
        ]
    )
    return map_tree(messages, lambda _: next(replies))


def refuse_as_method(method: str, error: Exception, args: tuple[Any, ...] = (), _: object = None) -> None:
    """Raise an error with the name of the method in place of its message's."""
    said = error.message if isinstance(error, AccelError) else str(error)
    head, colon, rest = said.partition(": ")
    if colon and head.startswith("devices."):
        text = f"{'cast' if method == 'copy' and len(args) > 1 else method}: {rest}"
        if isinstance(error, AccelError):
            error.message = text
        elif type(error) in (TypeError, ValueError):
            raise type(error)(text) from None


# Each part of a large array has its own operation.
for _message, _method in {
    Assign: "assign",
    Copy: "copy",
    Empty: "full",
    Fill: "fill",
    PeerCopy: "copy_to",
    Put: "put",
    PutFirst: "put",
    PutPart: "put",
    ToHost: "to_host",
}.items():
    name_function(operation_name(_message), _method)

METHODS["to_host"] = ArrayFunction(
    "AccelRef.to_host",
    _to_host,
    ask=_ask_owner,
    is_direct=True,
    refuse=partial(refuse_as_method, "to_host"),
    result_on_host="to_host gives an array of the host",
)
METHODS["to_host out"] = attrs.evolve(METHODS["to_host"])
METHODS["copy"] = ArrayFunction("AccelRef.copy", Copy, refuse=partial(refuse_as_method, "copy"))
METHODS["fill"] = ArrayFunction("AccelRef.fill", Fill, refuse=partial(refuse_as_method, "fill"))
METHODS["assign"] = ArrayFunction("AccelRef.assign", Assign, refuse=partial(refuse_as_method, "assign"))
