"""A simulation of the module ``cuda.compute`` of the package cuda-cccl: its radix sort, as one kernel.

Programs on the simulated driver find a copy of this file under that name.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from cuda.bindings import driver as bindings
from cuda.core import Program, ProgramOptions

__all__ = ["DoubleBuffer", "ProxyArray", "SortOrder", "deserialize", "make_radix_sort"]

# Its stubs accept only numbers where it takes tuples.
driver: Any = bindings
ProxyArray = np.dtype
SortOrder = {"ASCENDING": b"\0", "DESCENDING": b"\1"}


@attrs.define
class DoubleBuffer:
    """Two arrays: the sorted one, and one of the same size. `selector` is the index of the result."""

    current: Any = None
    alternate: Any = None
    selector: int = 0


class _RadixSort:
    def __init__(self, code: bytes) -> None:
        self._code = code
        self._library = _checked(driver.cuLibraryLoadData(code[1:], [], [], 0, [], [], 0))
        self._kernel = _checked(driver.cuLibraryGetKernel(self._library, b"radix_sort"))

    def serialize(self) -> bytes:
        return self._code

    def __del__(self) -> None:
        driver.cuLibraryUnload(self._library)

    def __call__(
        self, temp_storage: Any, d_in_keys: Any, d_in_values: Any, num_items: int, stream: Any, **bits: Any
    ) -> int:
        if temp_storage is not None:
            both = d_in_keys, d_in_values or DoubleBuffer()
            arrays = [array for pair in both for array in (pair.current, pair.alternate)]
            begin, end = bits["begin_bit"], bits["end_bit"]
            key, value = arrays[0].dtype, arrays[2] and arrays[2].dtype
            sizes = ord(key.kind), key.itemsize, value.itemsize if value else 0, self._code[0]
            addresses = [0 if array is None else array.data_ptr() for array in arrays]
            values = (*addresses, num_items, begin, end, *sizes), (ctypes.c_uint64,) * 11
            handle = stream.__cuda_stream__()[1]
            _checked(driver.cuLaunchKernel(self._kernel, 1, 1, 1, 1, 1, 1, 0, handle, values, 0))
            for pair in both:
                pair.selector = -(-(end - begin) // 8) % 2
        return 1


def make_radix_sort(*, order: bytes, compute_capability: int, **_: Any) -> _RadixSort:
    """Compile a sort, of whatever types."""
    source = Path(__file__).with_name("radix_sort.cu").read_text()
    program = Program(source, "c++", ProgramOptions(arch=f"sm_{compute_capability}"))
    return _RadixSort(order + bytes(program.compile("cubin").code))


deserialize = _RadixSort


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a call without its code."""
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[-1]
