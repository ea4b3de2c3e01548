"""A library of its own as tests need one: it knows arrays by their protocols, and has streams of its own."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import numpy as np
from cuda.bindings import driver

_LEGACY = 1
_AT_LEAST = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


def call(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, driver.CUresult(result[0]).name
    return result[1] if len(result) == 2 else result[1:]


class Gate:
    """Holds streams back, as slow work on them would, until it is opened."""

    def __init__(self) -> None:
        self.address = int(call(driver.cuMemHostAlloc(64, 0)))
        self._word = ctypes.c_uint32.from_address(self.address)
        self._word.value = 0

    def hold(self, stream: int) -> None:
        call(driver.cuStreamWaitValue32(stream, self.address, 1, _AT_LEAST))

    def open(self) -> None:
        self._word.value = 1

    def free(self) -> None:
        self.open()
        call(driver.cuCtxSynchronize())
        call(driver.cuMemFreeHost(self.address))


@attrs.frozen
class Array:
    """An array of this library."""

    address: int
    shape: tuple[int, ...]
    stream: int
    named: dict[str, Any]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        plain = {"shape": self.shape, "typestr": "<f4", "data": (self.address, False), "strides": None}
        return {**plain, **self.named}


class Library:
    """Works in the primary context of the first device; `close` gives everything back."""

    def __init__(self) -> None:
        call(driver.cuInit(0))
        self._device = call(driver.cuDeviceGet(0))
        call(driver.cuCtxPushCurrent(call(driver.cuDevicePrimaryCtxRetain(self._device))))
        self.gate = Gate()
        self._streams: list[int] = []
        self._memory: list[int] = []

    def stream(self) -> int:
        self._streams.append(int(call(driver.cuStreamCreate(_NON_BLOCKING))))
        return self._streams[-1]

    def destroy(self, stream: int) -> None:
        self._streams.remove(stream)
        call(driver.cuStreamDestroy(stream))

    def fill(self, array: Any, value: float, stream: int) -> None:
        """Sets a contiguous array of float32."""
        interface = array.__cuda_array_interface__
        assert interface["typestr"] == "<f4"
        assert interface["strides"] is None
        address, is_read_only = interface["data"]
        assert not is_read_only
        bits = int(np.float32(value).view(np.uint32))
        call(driver.cuMemsetD32Async(address, bits, int(np.prod(interface["shape"])), stream))

    def copy(self, array: Any, stream: int) -> int:
        """Copies a contiguous float32 array to memory of its own; gives the address."""
        interface = array.__cuda_array_interface__
        assert interface["typestr"] == "<f4"
        nbytes = 4 * int(np.prod(interface["shape"]))
        self._memory.append(int(call(driver.cuMemAlloc(nbytes))))
        call(driver.cuMemcpyDtoDAsync(self._memory[-1], interface["data"][0], nbytes, stream))
        return self._memory[-1]

    def array(
        self, shape: tuple[int, ...], *, stream: int = _LEGACY, named: dict[str, Any] | None = None
    ) -> Array:
        """A float32 array of its own, computed on a stream; `named` replaces parts of its description."""
        self._memory.append(int(call(driver.cuMemAlloc(4 * int(np.prod(shape))))))
        return Array(self._memory[-1], shape, stream, named or {"version": 3, "stream": stream})

    def read(self, address: int, count: int, stream: int) -> list[float]:
        call(driver.cuStreamSynchronize(stream))
        host = np.empty(count, np.float32)
        call(driver.cuMemcpyDtoH(host.ctypes.data, address, host.nbytes))
        return host.tolist()

    def close(self) -> None:
        self.gate.free()
        for stream in self._streams:
            call(driver.cuStreamDestroy(stream))
        for address in self._memory:
            call(driver.cuMemFree(address))
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(self._device)


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@attrs.frozen
class Tensor:
    """The contents of a DLPack capsule, with strides in bytes."""

    address: int
    device: tuple[int, int]
    type: tuple[int, int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_read_only: bool | None

    @classmethod
    def of(cls, array: Any, max_version: tuple[int, int] | None = (1, 0)) -> Tensor:
        capsule = array.__dlpack__(stream=_LEGACY, max_version=max_version)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        if max_version is None:
            tensor, read_only = _Tensor.from_address(pointer(capsule, b"dltensor")), None
        else:
            versioned = _Versioned.from_address(pointer(capsule, b"dltensor_versioned"))
            tensor, read_only = versioned.tensor, bool(versioned.flags & 1)
        kind = tensor.dtype
        shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        strides = tuple(tensor.strides[axis] * kind.bits // 8 for axis in range(tensor.ndim))
        address = (tensor.data or 0) + tensor.byte_offset
        device = (tensor.device_type, tensor.device_id)
        return cls(address, device, (kind.code, kind.bits, kind.lanes), shape, strides, read_only)
