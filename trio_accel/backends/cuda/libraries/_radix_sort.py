"""The radix sort of CUB, by the package cuda-cccl, which compiles it for certain types."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import numpy as np
from cuda.bindings import nvrtc

from ...base import DType, NotSupportedError
from ...base.kit.code_cache import CompiledCode, code_key, default_code_cache
from ..kit._library import KernelCall
from ..runtime._current_streams import StreamHandle


class _SortMemory:
    """Memory of the device, in the form of arrays and workspace for cuda.compute.

    Args:
        address: Its address.
        dtype: NumPy's dtype of its elements.
        size: The number of elements.
    """

    __slots__ = ("_address", "dtype", "nbytes", "shape")

    def __init__(self, address: int, dtype: np.dtype[Any], size: int) -> None:
        self._address = address
        self.dtype = dtype
        self.shape = (size,)
        self.nbytes = size * dtype.itemsize

    # It asks for this first, and it is made in less time than the dictionary below.
    def data_ptr(self) -> int:
        """Return the address."""
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described = {"shape": self.shape, "typestr": self.dtype.str, "strides": None, "version": 3}
        return {**described, "data": (self._address, False)}


_BYTES = np.dtype(np.uint8)
# No memory is there: nothing reads it.
_NOT_NULL = 16


class RadixSort:
    """A `Sorter`. Its constructor blocks, for some seconds if the sort is not in the cache of compiled code.

    Args:
        key: Dtype of the keys.
        value: Dtype of the numbers that are sorted with the keys; None for none.
        descending: Whether the largest keys come first.
        architecture: Compute capability of the device, whose context is current.

    Raises:
        NotSupportedError: The package cuda-cccl, or a package that it needs, is missing.
    """

    def __init__(self, key: DType, value: DType | None, *, descending: bool, architecture: str) -> None:
        self._key, self._value = key.dtype, None if value is None else value.dtype
        order = "DESCENDING" if descending else "ASCENDING"
        try:
            compute: Any = importlib.import_module("cuda.compute")
            self._double_buffer: Any = compute.DoubleBuffer
            cache_key = code_key(
                what="radix sort of cuda.compute",
                types=(str(key), str(value), order, architecture),
                versions=(version("cuda-cccl"), ".".join(map(str, nvrtc.nvrtcVersion()[1:]))),
            )
            code = default_code_cache().compiled(
                cache_key, lambda: _compiled(compute, key, value, compute.SortOrder[order], architecture)
            )
        # A missing library or header does not raise an ImportError.
        except (ImportError, AttributeError, RuntimeError) as error:
            raise NotSupportedError(
                f"sorting needs the package cuda-cccl, which does not work here ({error}): "
                "pip install '.[cuda13]' in a checkout, or '.[cuda12]'",
                backend="cuda",
            ) from error
        # The package keeps sorts itself, which will not do: they are for one thread, and outlive the context.
        self._sort: Any = compute.deserialize(code.code)
        # It is loaded at its first call, which asks for nothing but the room that it needs.
        self._sort(
            temp_storage=None, **self._arguments((0, 0), None if value is None else (0, 0), 1, 1, 0)[1]
        )

    def _arguments(
        self, keys: tuple[int, int], values: tuple[int, int] | None, count: int, bits: int, stream: int
    ) -> tuple[Any, dict[str, Any]]:
        both, beside = self._buffer(keys, self._key, count), None
        if values is not None and self._value is not None:
            beside = self._buffer(values, self._value, count)
        return both, {
            "d_in_keys": both,
            "d_out_keys": None,
            "d_in_values": beside,
            "d_out_values": None,
            "num_items": count,
            "begin_bit": 0,
            "end_bit": bits,
            "stream": StreamHandle(stream),
        }

    def _buffer(self, addresses: tuple[int, int], dtype: np.dtype[Any], count: int) -> Any:
        return self._double_buffer(*[_SortMemory(address, dtype, count) for address in addresses])

    def __call__(
        self, call: KernelCall, keys: tuple[int, int], values: tuple[int, int] | None, count: int, bits: int
    ) -> int:
        """Enqueue it; see `Sorter`."""
        both, arguments = self._arguments(keys, values, count, bits, call.handle)
        nbytes = max(int(self._sort(temp_storage=None, **arguments)), 1)
        self._sort(temp_storage=_SortMemory(call.workspace(nbytes), _BYTES, nbytes), **arguments)
        return int(both.selector)


def _compiled(compute: Any, key: DType, value: DType | None, order: Any, architecture: str) -> CompiledCode:
    # It compiles a sort of keys only if the address of the values is 0, as for a `ProxyArray`.
    beside = None if value is None else _SortMemory(_NOT_NULL, value.dtype, 1)
    sort = compute.make_radix_sort(
        d_in_keys=compute.ProxyArray(key.dtype),
        d_out_keys=compute.ProxyArray(key.dtype),
        d_in_values=beside,
        d_out_values=beside,
        order=order,
        compute_capability=int(architecture),
    )
    return CompiledCode(bytes(sort.serialize()))
