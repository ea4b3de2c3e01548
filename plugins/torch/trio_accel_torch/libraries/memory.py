"""Copies, fills and joins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trio_accel.backends.base import ArraySpec, HostArray, as_bits, kernel, ops, scalar

from .._device import NotingLibrary, use_of
from .._views import BITS, cast, read, write
from ..manifest import BACKEND


class MemoryLibrary(NotingLibrary):
    """Copies between device and host can be withdrawn until they begin."""


@kernel(ops.CopyFromHostSpec, backend=BACKEND)
def copy_from_host(spec: ops.CopyFromHostSpec, call: Any) -> None:
    """Copy a host array of any strides."""
    bits = BITS[spec.out.dtype.itemsize]
    out = call.device.view(spec.out, bits)

    def run(host: HostArray) -> None:
        if out.at.device.type == "cpu" and not out.flips and out.dtype is None:
            # The memory is the host's, so NumPy copies with no array in between.
            np.copyto(as_bits(call.device.host_view(spec.out)), as_bits(host))
        elif host.size:
            raw = torch.from_numpy(np.array(host, order="C").reshape(-1).view(np.uint8))
            out.write(raw.view(bits).reshape(host.shape).to(out.at.device))

    use_of(spec).run(run)


@kernel(ops.CopyToHostSpec, backend=BACKEND)
def copy_to_host(spec: ops.CopyToHostSpec, call: Any) -> None:
    """Copy to a host array of any strides."""

    def run(host: HostArray) -> None:
        value = call.device.view(spec.source, BITS[spec.source.dtype.itemsize]).read()
        if host.size:
            np.copyto(as_bits(host), as_bits(value.cpu().numpy().view(host.dtype)))

    use_of(spec).run(run)


@kernel(ops.CopySpec, backend=BACKEND)
def copy(spec: ops.CopySpec, call: Any) -> None:
    """Copy, and convert as `numpy.ndarray.astype` does."""
    move(call, spec.source, spec.out)


@kernel(ops.FillSpec, backend=BACKEND)
def fill(spec: ops.FillSpec, call: Any) -> None:
    """Set all elements to one value."""
    _set(call, spec.out, spec.value)


@kernel(ops.JoinSpec, backend=BACKEND)
def join(spec: ops.JoinSpec, call: Any) -> None:
    """Copy to places in one array."""
    out, axis = spec.out, spec.axis
    if spec.is_padded:
        _set(call, out, spec.pad)
    for start, source in spec.source_starts:
        shape = (*out.shape[:axis], source.shape[axis], *out.shape[axis + 1 :])
        place = ArraySpec(out.block, out.offset + start * out.strides[axis], out.dtype, shape, out.strides)
        move(call, source, place)


def move(call: Any, source: ArraySpec, out: ArraySpec) -> None:
    """Copy between two arrays, which may share memory."""
    if source.dtype is out.dtype:
        bits = BITS[source.dtype.itemsize]
        value = call.device.view(source, bits).read()
        call.device.view(out, bits).write(value.clone() if source.block == out.block else value)
    else:
        write(call, out, cast(read(call, source), source.dtype, out.dtype).expand(out.shape))


def _set(call: Any, out: ArraySpec, value: complex) -> None:
    bits = BITS[out.dtype.itemsize]
    raw = torch.from_numpy(np.frombuffer(scalar(value, out.dtype).tobytes(), np.uint8).copy())
    view = call.device.view(out, bits)
    view.write(raw.view(bits)[0].to(view.at.device).expand(out.shape))
