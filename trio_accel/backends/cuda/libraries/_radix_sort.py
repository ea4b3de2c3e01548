"""The radix sort of CUB, by the package cuda-cccl, which compiles it for certain types."""

from __future__ import annotations

import importlib
from typing import Any

import attrs
import numpy as np

from ...base import DType, NotSupportedError
from ..kit._library import KernelCall

__all__ = ["RadixSort"]


class _Memory:
    """Memory of the device, as cuda.compute takes arrays, and room for what it computes.

    Args:
        address: Its address.
        dtype: NumPy's dtype of its elements.
        size: How many there are.
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


@attrs.frozen(eq=False)
class _Stream:
    """A stream, as cuda.compute takes it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


_BYTES = np.dtype(np.uint8)


class RadixSort:
    """A `Sorter`. It is compiled when it is made, which blocks for some seconds; the context is current.

    Args:
        key: Dtype of the keys.
        value: Dtype of what is beside them; None for nothing.
        descending: Whether the largest come first.

    Raises:
        NotSupportedError: The package cuda-cccl, or what it needs, cannot be imported.
    """

    def __init__(self, key: DType, value: DType | None, *, descending: bool) -> None:
        self._key, self._value = key.dtype, None if value is None else value.dtype
        try:
            compute: Any = importlib.import_module("cuda.compute")
            self._double_buffer: Any = compute.DoubleBuffer
            beside = None if value is None else compute.ProxyArray(value.dtype)
            self._sort: Any = compute.make_radix_sort(
                d_in_keys=compute.ProxyArray(key.dtype),
                d_out_keys=compute.ProxyArray(key.dtype),
                d_in_values=beside,
                d_out_values=beside,
                order=compute.SortOrder.DESCENDING if descending else compute.SortOrder.ASCENDING,
            )
        # Without a library or a header that it needs, it is not an import that fails.
        except (ImportError, AttributeError, RuntimeError) as error:
            raise NotSupportedError(
                f"sorting needs the package cuda-cccl, which does not work here ({error}): "
                "pip install '.[cuda13]' in a checkout, or '.[cuda12]'",
                backend="cuda",
            ) from error

    def __call__(
        self, call: KernelCall, keys: tuple[int, int], values: tuple[int, int] | None, count: int, bits: int
    ) -> int:
        """Enqueue it; see `Sorter`."""
        both = self._double_buffer(*[_Memory(one, self._key, count) for one in keys])
        beside: Any = None
        if values is not None and self._value is not None:
            beside = self._double_buffer(*[_Memory(one, self._value, count) for one in values])
        arguments: dict[str, Any] = {
            "d_in_keys": both, "d_out_keys": None, "d_in_values": beside, "d_out_values": None,
            "num_items": count, "begin_bit": 0, "end_bit": bits, "stream": _Stream(call.handle),
        }  # fmt: skip
        # The first call says how much room it needs.
        nbytes = max(int(self._sort(temp_storage=None, **arguments)), 1)
        self._sort(temp_storage=_Memory(call.workspace(nbytes), _BYTES, nbytes), **arguments)
        return int(both.selector)
