"""Copies and fills."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...base import DType, LibraryError
from ...base.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec
from .._library import Kernels
from .._memory import CpuMemory, HostArray
from .._stream import Work
from ._pieces import convert

__all__ = ["KERNELS"]


def copy_from_host(spec: CopyFromHostSpec, memory: CpuMemory) -> Work:
    """Prepare a copy of a host array of any strides."""
    return partial(np.copyto, _bits(memory.view(spec.out)), _bits(spec.host))


def copy_to_host(spec: CopyToHostSpec, memory: CpuMemory) -> Work:
    """Prepare a copy to a host array of any strides."""
    return partial(np.copyto, _bits(spec.host), _bits(memory.view(spec.source)))


def copy(spec: CopySpec, memory: CpuMemory) -> Work:
    """Prepare a copy that converts as `numpy.ndarray.astype` does."""
    source, out = memory.view(spec.source), memory.view(spec.out)
    if spec.source.dtype is spec.out.dtype:
        return partial(np.copyto, _bits(out), _bits(source))
    if spec.source.dtype.kind == "complex" and spec.out.dtype.kind in ("float", "int", "uint"):
        # What `astype` does but for its warning, which would go to whatever thread runs this.
        source = np.real(source)
    return partial(convert, source, out)


def fill(spec: FillSpec, memory: CpuMemory) -> Work:
    """Prepare a fill; the value becomes bits here, where an error is still the caller's."""
    return partial(np.copyto, _bits(memory.view(spec.out)), _bits(_scalar(spec.value, spec.out.dtype)))


def _scalar(value: complex, dtype: DType) -> HostArray:
    if dtype.kind != "complex":
        if value.imag:
            raise _bad_value(value, dtype)
        value = value.real  # of an int an int: exact at any size
    try:
        return np.array(value, dtype.dtype)
    except (ValueError, OverflowError) as error:
        raise _bad_value(value, dtype) from error


def _bad_value(value: complex, dtype: DType) -> LibraryError:
    return LibraryError(f"value: {value!r} is no value of {dtype}", library="memory", code="invalid_value")


def _bits(array: HostArray) -> HostArray:
    # Copied as integers, every bit pattern survives (also NaNs that signal), and the types that
    # NumPy does not know itself are as fast as its own.
    integer: np.dtype[Any] | None = _INTEGERS.get(array.itemsize)
    return array if integer is None else array.view(integer)


_INTEGERS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

KERNELS: Kernels = {
    CopyFromHostSpec: copy_from_host,
    CopyToHostSpec: copy_to_host,
    CopySpec: copy,
    FillSpec: fill,
}
