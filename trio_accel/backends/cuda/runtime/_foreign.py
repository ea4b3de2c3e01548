"""Arrays in the hands of other libraries of the process, and streams and arrays of theirs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, SupportsIndex

import attrs
from cuda.bindings import driver

from ...base import ContextPoisonedError, DeviceInfo, DType
from ...base.device_array import DeviceArray
from ...base.foreign import ForeignArray
from ._context import CudaContext
from ._export import CudaArray
from ._stream import CudaEvent, CudaStream

__all__ = ["CudaLease", "Lending", "described", "foreign_array", "handle_of", "reserved_by_others"]

_LEGACY = int(driver.CU_STREAM_LEGACY)


@attrs.define(eq=False)
class Lending:
    """Leases of a device's arrays to the program, and the streams on which later work waits for their ends.

    Each lease has a stream of its own for as long as its event is not done: on a shared one, a program whose
    stream waits for another of its own could wait for itself.

    Args:
        info: Description of the device.
        context: Its context.
        open_stream: Makes a stream of the device.

    Attributes:
        info: As given.
        context: As given.
    """

    info: DeviceInfo
    context: CudaContext
    _open_stream: Callable[[], CudaStream]
    _leases: set[CudaLease] = attrs.field(factory=set["CudaLease"], init=False)
    _returned: list[CudaEvent] = attrs.field(factory=list[CudaEvent], init=False)

    @property
    def is_idle(self) -> bool:
        """Whether no lease is open; the program's earlier work is followed by streams of the device."""
        return not self._leases

    def lend(self, array: DeviceArray, *, write: bool, stream: object) -> CudaLease:
        """Make a lease; see `AccelDevice.lend`."""
        lease = CudaLease(self, array, write=write, stream=stream)
        self._leases.add(lease)
        return lease

    def stream(self) -> CudaStream:
        """Return a stream with nothing on it."""
        for event in self._returned:
            if event.is_done and not event.stream.is_closed:
                self._returned.remove(event)
                # Its event is done, so its next user waits for nothing of the last one.
                return event.stream
        return self._open_stream()

    def returned(self, lease: CudaLease, event: CudaEvent | None) -> None:
        """Note the end of a lease, and keep its stream for another one."""
        self._leases.discard(lease)
        if event is not None:
            self._returned.append(event)


class CudaLease:
    """A lease of an array.

    Attributes:
        array: The program's array.
    """

    def __init__(self, lending: Lending, array: DeviceArray, *, write: bool, stream: object) -> None:
        self._lending = lending
        self._context = lending.context
        self._handle = handle_of(stream)
        # The program's object owns the stream: without a reference the handle could be reused or invalid.
        self._theirs = stream
        self.array: CudaArray = CudaArray(array, lending.info, self._context, is_read_only=not write)
        self._ours = lending.stream()
        try:
            # The program's stream is checked before anything is enqueued on it.
            self._context.order(self._handle, self._ours.handle)
        except BaseException:
            self._ours.close()
            raise

    def take_back(self) -> tuple[CudaStream, CudaEvent] | None:
        """Follow what the program has enqueued; see `Lease.take_back`."""
        self.array.end()
        event: CudaEvent | None = None
        try:
            # In a context that only counts as lost the program's work goes on, and `close` waits for it.
            with suppress(ContextPoisonedError):
                # D36: a stream of ours follows the program's, so hazards, completion and `close` treat the
                # lease as any work.
                self._context.order(self._handle, self._ours.handle)
            if not self._ours.is_closed:
                event = self._ours.record()
        finally:
            self._lending.returned(self, event)
        return None if event is None else (self._ours, event)


def handle_of(stream: object) -> int:
    """Return the driver's handle of a stream of any library.

    Args:
        stream: A handle, an object with ``__cuda_stream__`` (`cuda.core`), ``ptr`` (CuPy) or ``cuda_stream``
            (PyTorch), a stream of `cuda.bindings`, or None for the legacy default stream.

    Raises:
        TypeError: It is something else.
        ValueError: A handle that is negative.
    """
    handle = _number_of(stream)
    if handle is None:
        raise TypeError(
            "lease: stream must be a handle, or an object with __cuda_stream__, .ptr or .cuda_stream, "
            f"got {stream!r}"
        )
    if handle < 0:
        raise ValueError(f"lease: stream: {handle} is no handle of a stream")
    # The meaning of 0 depends on how the bindings were told to read it.
    return handle or _LEGACY


def _number_of(stream: object) -> int | None:
    if stream is None:
        return _LEGACY
    if isinstance(stream, SupportsIndex) and not isinstance(stream, bool):
        # An array has an index, too, if it has one element.
        with suppress(TypeError):
            return operator.index(stream)
    if isinstance(stream, driver.CUstream):
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        match protocol():
            case (0, SupportsIndex() as handle):
                return operator.index(handle)
            case _:
                return None
    handles = (getattr(stream, name, None) for name in ("cuda_stream", "ptr"))
    return next((handle for handle in handles if isinstance(handle, int)), None)


def reserved_by_others(index: int) -> int:
    """Count bytes of a device's memory that PyTorch and CuPy have taken, if they are imported."""
    reserved = 0
    # Another thread may be importing one: then the module does not have all its attributes yet.
    torch: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if hasattr(torch, "memory_reserved") and torch.is_initialized():
        reserved += int(torch.memory_reserved(index))
    cupy: Any = sys.modules.get("cupy")
    if hasattr(cupy, "get_default_memory_pool"):
        with cupy.cuda.Device(index):
            reserved += int(cupy.get_default_memory_pool().total_bytes())
    return reserved


def foreign_array(value: Any, stream: CudaStream, device: int) -> tuple[DeviceArray, object] | None:
    """Find the address of another library's array, and have a stream of ours wait for its work.

    Args:
        value: The array: it has DLPack, or the CUDA array interface.
        stream: The stream.
        device: Number of the device.

    Returns:
        Its address and layout, and the owner of its memory; None if it is on no GPU.

    Raises:
        TypeError: It is on another GPU.
    """
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(value, stream_ptr=stream.handle)
    if not view.is_device_accessible:
        return None
    if view.device_id != device:
        raise TypeError(f"an array on GPU {view.device_id}; copy it to GPU {device} first")
    assert view.dtype is not None
    dtype, shape = DType.of(view.dtype), view.shape
    if view.strides is None:
        return DeviceArray.packed(view.ptr, dtype, shape), view
    strides = tuple(step * dtype.itemsize for step in view.strides)
    return DeviceArray(view.ptr, dtype, shape, strides), view


def described(value: Any) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape of an array of any library.

    Raises:
        TypeError: Devices have no such dtype.
    """
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        foreign = ForeignArray.of(value)
        if foreign is None:
            raise TypeError(f"an array of {type(value).__name__} that has neither dtype nor shape")
        return DType.of(foreign.dtype), foreign.shape
    shape = tuple(int(extent) for extent in value.shape)
    name = str(value.dtype)
    # PyTorch has dtypes of its own, with the same names.
    if name.startswith("torch."):
        try:
            return DType(name.removeprefix("torch.")), shape
        except ValueError:
            raise TypeError(f"an array of {name}, which devices do not have") from None
    return DType.of(value.dtype), shape
