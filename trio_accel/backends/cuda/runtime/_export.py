"""An array as other CUDA libraries of the process and programs take it, without a copy."""

from __future__ import annotations

import ctypes
import operator
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import attrs
import numpy as np
from cuda.bindings import driver

from ...base import DType, StaleRefError

if TYPE_CHECKING:
    from cuda.core.utils import StridedMemoryView

    from ...base import DeviceInfo
    from ...base.device_array import DeviceArray
    from ._context import CudaContext
    from ._stream import CudaStream

__all__ = ["CudaArray", "ProgramArray"]

_LEGACY = int(driver.CU_STREAM_LEGACY)
_NO_ORDER = -1
# As in dlpack.h.
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

    Everything that was enqueued on the device before is done with it, so no consumer has to wait for a
    stream. Libraries take it by `__dlpack__` or by `__cuda_array_interface__`::

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
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self._array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        return self._array.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type, as NumPy has it."""
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
        return self._interface()

    def _interface(self) -> dict[str, Any]:
        self._check()
        if self._array.dtype in _CODES:
            # An AttributeError, so that `hasattr` is False, and a library with both protocols takes the other
            # one.
            raise AttributeError(
                f"__cuda_array_interface__ has no {self._array.dtype}; DLPack has: use the from_dlpack of "
                "the library that is to take the array"
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
            stream: Stream of the consumer; not used, as there is nothing to wait for.
            max_version: The newest DLPack that the consumer knows. Before 1.0 there is no flag for arrays
                that are read-only, so they are refused.
            dl_device: Where the consumer wants it: nowhere else than it is.
            copy: Whether it must be a copy, which it never is.

        Raises:
            StaleRefError: The lease is over.
            BufferError: It cannot be had so.
        """
        self._check()
        self._check_export(dl_device, copy)
        if self._is_read_only and not _is_versioned(max_version):
            raise BufferError(
                "the array is read-only, which DLPack can say from version 1.0 on, and the consumer asks for "
                "an older one; use __cuda_array_interface__, or lease it with write=True"
            )
        return self._capsule(max_version)

    def _check_export(self, dl_device: tuple[int, int] | None, copy: bool | None) -> None:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"dl_device: the array is on {self.__dlpack_device__()}, not on {dl_device}")
        if copy:
            raise BufferError("copy: a lease hands out the memory itself; copy it with ref.copy()")

    def _capsule(self, max_version: tuple[int, int] | None) -> object:
        is_versioned = _is_versioned(max_version)
        view = self._view(is_read_only=self._is_read_only and is_versioned)
        capsule = view.__dlpack__(stream=-1, max_version=max_version)
        code = _CODES.get(self._array.dtype)
        if code is not None:
            _set_code(capsule, code, is_versioned=is_versioned)
        return capsule

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

    Libraries take it without a copy. Their work on the call's stream is in order; on another stream
    they wait for that, as their protocols say. An array that is only read is marked so where a library can
    read the mark: PyTorch refuses `__cuda_array_interface__` with it, and DLPack has it from version 1.0 on.

    Args:
        array: Its place and layout.
        info: Description of the device.
        context: Its context.
        stream: The stream of the call; None where all work with it is done.
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

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array by version 3 of Numba's protocol; see `CudaArray`."""
        interface = self._interface()
        address, _ = interface["data"]
        handle = None if self._stream is None else self._stream.handle
        return {**interface, "data": (address, False), "stream": handle}

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The array as a DLPack capsule over the same memory; the consumer's stream waits for the call's."""
        self._check()
        self._check_export(dl_device, copy)
        consumer = _LEGACY if stream is None else operator.index(cast("SupportsIndex", stream))
        if self._stream is not None and consumer not in (_NO_ORDER, self._stream.handle):
            self._context.order(self._stream.handle, consumer)
        return self._capsule(max_version)

    def _check(self) -> None:
        if self._is_over:
            raise StaleRefError(
                "the call is over for which the program got this array; copy what is to be kept",
                device=self._info.name,
            )


def _is_versioned(max_version: tuple[int, int] | None) -> bool:
    return max_version is not None and tuple(max_version) >= _VERSIONED


def _set_code(capsule: object, code: int, *, is_versioned: bool) -> None:
    """Name an element type in a capsule, before a consumer gets it."""
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    tensor = _pointer(capsule, name) + (_TENSOR_IN_VERSIONED if is_versioned else 0)
    ctypes.c_uint8.from_address(tensor + _TYPE_IN_TENSOR).value = code
