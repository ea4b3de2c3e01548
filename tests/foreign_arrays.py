"""Another library's view of an array, by either protocol: it has the memory until its release.

NumPy shows the memory, so on a GPU it has to be the stand-in's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ByDlpack", "ByInterface"]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_NAME, _USED = b"dltensor_versioned", b"used_dltensor_versioned"
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]


class ByDlpack:
    """A consumer of a float64 capsule, which calls its deleter in the end.

    Attributes:
        seen: The memory.
    """

    def __init__(self, array: Any) -> None:
        _wait(array)
        capsule = array.__dlpack__(max_version=(1, 0))
        self._address = _pointer(capsule, _NAME)
        _rename(capsule, _USED)
        tensor = _Managed.from_address(self._address).tensor
        assert (tensor.code, tensor.bits, tensor.lanes) == (2, 64, 1)
        axes = range(tensor.ndim)
        strides = [8 * tensor.strides[axis] for axis in axes] if tensor.strides else None
        address = (tensor.data or 0) + tensor.offset
        self.seen: npt.NDArray[Any] = _seen(address, [tensor.shape[axis] for axis in axes], strides)

    def __array__(self, *_: object, **__: object) -> npt.NDArray[Any]:
        return self.seen

    def __del__(self) -> None:
        _Managed.from_address(self._address).deleter(self._address)


class ByInterface:
    """A consumer of NumPy's or Numba's interface of float64, which keeps the array.

    Attributes:
        seen: The memory.
    """

    def __init__(self, array: Any) -> None:
        _wait(array)
        self._array = array
        interface: Any = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
        assert interface["typestr"] == "<f8"
        self.seen: npt.NDArray[Any] = _seen(
            interface["data"][0], interface["shape"], interface.get("strides")
        )

    def __array__(self, *_: object, **__: object) -> npt.NDArray[Any]:
        return self.seen


def _wait(array: Any) -> None:
    """Wait for the stream of an array, if there is one."""
    stream = getattr(array, "__cuda_array_interface__", {}).get("stream")
    if stream is not None:
        from cuda.bindings import driver

        assert not int(driver.cuStreamSynchronize(stream)[0])


def _seen(address: int, shape: Any, strides: Any) -> npt.NDArray[Any]:
    """Show memory without keeping anything of its owner."""
    steps = strides or np.empty(shape).strides
    reach = 8 + sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True))
    return np.ndarray(shape, np.float64, (ctypes.c_char * reach).from_address(address), 0, steps)
