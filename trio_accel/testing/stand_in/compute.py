"""A stand-in for the module ``cuda.compute`` of the package cuda-cccl: its radix sort, as one kernel.

Programs on the stand-in find a copy of this file under that name.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

__all__ = ["DoubleBuffer", "ProxyArray", "SortOrder", "deserialize", "make_radix_sort"]

ProxyArray = np.dtype


class SortOrder(enum.Enum):
    """Which elements come first."""

    ASCENDING = 0
    DESCENDING = 1


class DoubleBuffer:
    """Two arrays: one that is sorted, and room for as much. `selector` says where the result is."""

    def __init__(self, current: Any, other: Any) -> None:
        self.buffers, self.selector = (current, other), 0


class _RadixSort:
    def __init__(self, image: bytes, order: SortOrder) -> None:
        self._image, self._order = image, order
        self._library = _checked(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0))
        self._kernel = _checked(driver.cuLibraryGetKernel(self._library, b"radix_sort"))

    def __del__(self) -> None:
        driver.cuLibraryUnload(self._library)

    def serialize(self) -> bytes:
        return bytes([self._order.value]) + self._image

    def __call__(
        self, temp_storage: Any, d_in_keys: Any, d_in_values: Any, num_items: int, stream: Any, **options: Any
    ) -> int:
        if temp_storage is None:
            return 1
        both = [d_in_keys, d_in_values or DoubleBuffer(None, None)]
        addresses = [0 if one is None else one.data_ptr() for pair in both for one in pair.buffers]
        begin, end = options["begin_bit"], options["end_bit"]
        key, value = (pair.buffers[0] and pair.buffers[0].dtype for pair in both)
        sizes = [key.itemsize, value.itemsize if value else 0, self._order.value]
        values = (*addresses, num_items, begin, end, ord(key.kind), *sizes)
        handle = stream.__cuda_stream__()[1]
        parameters = values, (ctypes.c_uint64,) * len(values)
        _checked(driver.cuLaunchKernel(self._kernel, 1, 1, 1, 1, 1, 1, 0, handle, parameters, 0))
        for pair in both:
            pair.selector = -(-(end - begin) // 8) % 2
        return 1


def make_radix_sort(*, order: SortOrder, **_: Any) -> _RadixSort:
    """Compile a sort, of whatever types."""
    source = Path(__file__).with_name("radix_sort.cu").read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"radix_sort.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, 0, []))
    image = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return _RadixSort(image, order)


def deserialize(data: bytes) -> _RadixSort:
    """Load a sort that was compiled."""
    return _RadixSort(data[1:], SortOrder(data[0]))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call gave beside its code."""
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) > 1 else None
