"""Copies and fills."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...base import as_bits, scalar
from ...base.kernels import kernel
from ...base.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, HostUse, StackSpec
from ..kit._pieces import convert
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work

__all__ = ["copy", "copy_from_host", "copy_to_host", "fill", "stack"]


@kernel(CopyFromHostSpec, backend="cpu")
def copy_from_host(spec: CopyFromHostSpec, memory: CpuMemory) -> Work:
    """Prepare a copy of a host array of any strides."""
    out, use = as_bits(memory.view(spec.out)), HostUse(as_bits(spec.host))
    spec.note_use(use)
    return partial(_with_host, use, partial(np.copyto, out))


@kernel(CopyToHostSpec, backend="cpu")
def copy_to_host(spec: CopyToHostSpec, memory: CpuMemory) -> Work:
    """Prepare a copy to a host array of any strides."""
    use, source = HostUse(as_bits(spec.host)), as_bits(memory.view(spec.source))
    spec.note_use(use)
    return partial(_with_host, use, lambda host: np.copyto(host, source))


def _with_host(use: HostUse, copy: Callable[[HostArray], None]) -> None:
    """Copy from or to the host array, unless that was withdrawn."""
    host = use.begin()
    if host is not None:
        try:
            copy(host)
        finally:
            use.end()


@kernel(CopySpec, backend="cpu")
def copy(spec: CopySpec, memory: CpuMemory) -> Work:
    """Prepare a copy that converts as `numpy.ndarray.astype` does."""
    source, out = memory.view(spec.source), memory.view(spec.out)
    if spec.source.dtype is spec.out.dtype:
        return partial(np.copyto, as_bits(out), as_bits(source))
    if spec.source.dtype.kind == "complex" and spec.out.dtype.kind in ("float", "int", "uint"):
        # What `astype` does but for its warning, which would go to whatever thread runs this.
        source = np.real(source)
    return partial(convert, source, out)


@kernel(FillSpec, backend="cpu")
def fill(spec: FillSpec, memory: CpuMemory) -> Work:
    """Prepare a fill; the value becomes bits here, where an error is still the caller's."""
    return partial(np.copyto, as_bits(memory.view(spec.out)), as_bits(scalar(spec.value, spec.out.dtype)))


@kernel(StackSpec, backend="cpu")
def stack(spec: StackSpec, memory: CpuMemory) -> Work:
    """Prepare copies to places in one array; the value of the padding becomes bits here, as in `fill`."""
    out = as_bits(memory.view(spec.out))
    pad = as_bits(scalar(spec.pad, spec.out.dtype)) if spec.is_padded else None
    return partial(_stack, [as_bits(memory.view(source)) for source in spec.sources], pad, out)


def _stack(sources: list[HostArray], pad: HostArray | None, out: HostArray) -> None:
    if pad is not None:
        np.copyto(out, pad)
    for index, source in enumerate(sources):
        # The ellipsis makes a view also where that is one element.
        place: tuple[Any, ...] = (index, *map(slice, source.shape), ...)
        np.copyto(out[place], source)
