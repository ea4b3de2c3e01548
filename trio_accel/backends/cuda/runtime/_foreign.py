"""Arrays lent to programs and to other libraries of the process; and their streams and arrays."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import attrs
import numpy as np
from cuda.bindings import driver

from ...base import (
    ContextPoisonedError,
    DeviceArray,
    DeviceInfo,
    DType,
    ForeignArray,
    Ints,
    StaleRefError,
)
from ._context import CudaContext
from ._stream import CudaEvent, CudaStream

if TYPE_CHECKING:
    from cuda.core.utils import StridedMemoryView

_LEGACY = int(driver.CU_STREAM_LEGACY)
_NO_ORDER = -1
# The number is from dlpack.h.
_CUDA = 2
_VERSIONED = (1, 0)
_CODES = {DType.bfloat16: 4, DType.float8_e4m3fn: 10, DType.float8_e5m2: 12}
_TYPE_IN_TENSOR = 20
_TENSOR_IN_VERSIONED = 32
# Types without a name in NumPy's type strings go through `cuda.core` as numbers of the same size.
_CARRIERS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@attrs.define(eq=False, repr=False)
class CudaArray:
    """An array of a CUDA device, as long as it is leased. Made by `AccelRef.lease`.

    All work enqueued on the device before is done with it, so no consumer has to wait for a stream. Libraries
    take it by `__dlpack__` or by `__cuda_array_interface__`::

        async with ref.lease(write=True) as array:
            cupy.asarray(array)[0] = 1.0
    """

    _array: DeviceArray
    _info: DeviceInfo
    _context: CudaContext
    _is_read_only: bool = attrs.field(kw_only=True, alias="is_read_only")
    _is_over: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        state = ", lease over" if self._is_over else ", read-only" if self._is_read_only else ""
        return f"<CudaArray {self._array.dtype} {self.shape} on {self._info.name}{state}>"

    @property
    def shape(self) -> Ints:
        """Elements along each axis."""
        return self._array.shape

    @property
    def strides(self) -> Ints:
        """Bytes from one element to the next along each axis."""
        return self._array.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type, as a NumPy dtype."""
        return self._array.dtype.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return self._array.nbytes

    @property
    def is_read_only(self) -> bool:
        """Whether it must not be written to: the lease is for reading."""
        return self._is_read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array by version 3 of Numba's protocol.

        Raises:
            StaleRefError: The lease is over.
            AttributeError: The protocol cannot carry the element type.
        """
        self._check()
        if self._array.dtype in _CODES:
            # An AttributeError, so that `hasattr` is False, and a library with both protocols takes the other
            # one.
            raise AttributeError(
                f"__cuda_array_interface__ does not support {self._array.dtype}; use DLPack, by the "
                "from_dlpack of the library that takes the array"
            )
        return {
            "shape": self.shape,
            "strides": None if self._array.is_contiguous else self.strides,
            "typestr": self.dtype.str,
            "data": (self._array.address if self._array.size else 0, self._is_read_only),
            "version": 3,
            # All earlier work is done at the begin of a lease, so there is nothing to wait for.
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """CUDA, and the number of the device."""
        return _CUDA, self._info.index

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return the array as a DLPack capsule over the same memory.

        Args:
            stream: Stream of the consumer; not used, because there is nothing to wait for.
            max_version: The newest DLPack version that the consumer knows. Before 1.0 there is no flag for
                read-only arrays, so they are refused.
            dl_device: The device that the consumer requests, which must be the array's own.
            copy: Whether it must be a copy, which it never is.

        Raises:
            StaleRefError: The lease is over.
            BufferError: The array cannot be exported in this way.
        """
        self._check()
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"dl_device: the array is on {self.__dlpack_device__()}, not on {dl_device}")
        if copy:
            raise BufferError("copy: a lease hands out the memory itself; copy it with ref.copy()")
        is_versioned = max_version is not None and tuple(max_version) >= _VERSIONED
        self._let_in(stream, is_versioned=is_versioned)
        view = self._view(is_read_only=self._is_read_only and is_versioned)
        capsule = view.__dlpack__(stream=-1, max_version=max_version)
        code = _CODES.get(self._array.dtype)
        if code is not None:
            _set_code(capsule, code, is_versioned=is_versioned)
        return capsule

    def _let_in(self, stream: object, *, is_versioned: bool) -> None:
        """Let a consumer of DLPack in, who waits for nothing; older ones know no read-only arrays."""
        if self._is_read_only and not is_versioned:
            raise BufferError(
                "the array is read-only, which DLPack can say from version 1.0 on, and the consumer asks for "
                "an older one; use __cuda_array_interface__, or lease it with write=True"
            )

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("the array is in the memory of a GPU; use await ref.to_host()")

    def end(self) -> None:
        """End the lease: the array is refused from now on."""
        self._is_over = True

    def _check(self) -> None:
        if self._is_over:
            raise StaleRefError("the lease of this array is over; lease it again", device=self._info.name)

    def _view(self, *, is_read_only: bool) -> StridedMemoryView:
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        array = self._array
        size = array.dtype.itemsize
        if any(stride % size for stride in array.strides):
            raise BufferError(f"strides: DLPack counts in elements of {size} bytes, got {array.strides}")
        carrier = _CARRIERS[size] if array.dtype in _CODES else array.dtype.dtype
        with self._context:
            # The capsule keeps this object, and nothing else: the memory is the lease's.
            buffer = Buffer.from_handle(array.address, array.nbytes, owner=self)
            return StridedMemoryView.from_buffer(
                buffer,
                array.shape,
                tuple(stride // size for stride in array.strides),
                itemsize=size,
                dtype=carrier,
                is_readonly=is_read_only,
            )


@attrs.define(eq=False, repr=False)
class ProgramArray(CudaArray):
    """An array of a program: an argument of a call, or of its constructor.

    Libraries take it without a copy. Their work on the call's stream is in order; on another stream they wait
    for that work, as their protocols require. A read-only array is marked for libraries that can read the
    mark: PyTorch refuses `__cuda_array_interface__` with it, and DLPack has it from version 1.0 on.

    Args:
        array: Its place and layout.
        info: Description of the device.
        context: Its context.
        stream: The stream of the call; None if all work with it is done.
        is_read_only: Whether it must not be written to.
    """

    _stream: CudaStream | None

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "NumPy does not take an array in the memory of a GPU: use a library that does, by "
            "x = torch.from_dlpack(x), or x = cupy.asarray(x)"
        )

    @property
    def array(self) -> DeviceArray:
        """Its place and layout."""
        return self._array

    def mark(self, *, is_read_only: bool) -> None:
        """Mark it for libraries that take it from now on as read-only or writable."""
        self._is_read_only = is_read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array by version 3 of Numba's protocol; see `CudaArray`."""
        interface = super().__cuda_array_interface__
        address, _ = interface["data"]
        handle = None if self._stream is None else self._stream.handle
        return {**interface, "data": (address, False), "stream": handle}

    def _let_in(self, stream: object, *, is_versioned: bool) -> None:
        """Let the consumer's stream wait for the call's."""
        consumer = _LEGACY if stream is None else operator.index(cast("SupportsIndex", stream))
        if self._stream is not None and consumer not in (_NO_ORDER, self._stream.handle):
            self._context.order(self._stream.handle, consumer)

    def _check(self) -> None:
        if self._is_over:
            raise StaleRefError(
                "the call is over for which the program got this array; copy what is to be kept",
                device=self._info.name,
            )


def _set_code(capsule: object, code: int, *, is_versioned: bool) -> None:
    """Name an element type in a capsule, before a consumer gets it."""
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    tensor = _pointer(capsule, name) + (_TENSOR_IN_VERSIONED if is_versioned else 0)
    ctypes.c_uint8.from_address(tensor + _TYPE_IN_TENSOR).value = code


@attrs.define(eq=False)
class Lending:
    """Leases of a device's arrays to the program, and the streams on which later work waits for their ends.

    Each lease has a stream of its own until its event is done. On a shared stream, a program with one stream
    that waits for another could wait for itself.

    Args:
        info: Description of the device.
        context: Its context.
        open_stream: Makes a stream of the device.

    Attributes:
        info: The argument.
        context: The argument.
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
            # In a context that only counts as lost, the program's work continues, and `close` waits for it.
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
    """Return the driver's handle for a stream of any library.

    Args:
        stream: A handle, an object with ``__cuda_stream__`` (`cuda.core`), ``ptr`` (CuPy) or ``cuda_stream``
            (PyTorch), a stream of `cuda.bindings`, or None for the legacy default stream.

    Raises:
        TypeError: It is of another type.
        ValueError: The handle is negative.
    """
    handle = _number_of(stream)
    if handle is None:
        raise TypeError(
            "lease: stream must be a handle, or an object with __cuda_stream__, .ptr or .cuda_stream, "
            f"got {stream!r}"
        )
    if handle < 0:
        raise ValueError(f"lease: stream: {handle} is not a handle of a stream")
    # The meaning of 0 depends on the configuration of the bindings.
    return handle or _LEGACY


def _number_of(stream: object) -> int | None:
    if stream is None:
        return _LEGACY
    if isinstance(stream, SupportsIndex) and not isinstance(stream, bool):
        # An array of one element also has an index.
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


def described(value: Any) -> tuple[DType, Ints]:
    """Return dtype and shape of any library's array.

    Raises:
        TypeError: Devices do not support this dtype.
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
