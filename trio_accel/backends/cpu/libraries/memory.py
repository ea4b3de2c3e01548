"""Copies and fills."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...base import AccelStream, HostArray, HostCall, as_bits, kernel, ops, scalar
from ...base.kit.library import ComputingCall
from ..kit._library import CpuLibrary
from ..runtime._memory import convert


class CpuMemoryLibrary(CpuLibrary):
    """Copies between device and host can be withdrawn until they begin."""

    def call_of(self, spec: ops.OperationSpec, stream: AccelStream) -> ComputingCall:
        """Make a launch; see `ComputingLibrary.call_of`."""
        if isinstance(spec, (ops.CopyFromHostSpec, ops.CopyToHostSpec)):
            # The use is noted before the kernel runs: the engine may want to withdraw the copy before that.
            spec.note_use(ops.HostUse(as_bits(spec.host)))
        return super().call_of(spec, stream)


@kernel(ops.CopyFromHostSpec, backend="cpu")
def copy_from_host(spec: ops.CopyFromHostSpec, call: HostCall) -> None:
    """Copy a host array of any strides."""
    out = as_bits(call.array(spec.out))
    _use(spec).run(partial(np.copyto, out))


@kernel(ops.CopyToHostSpec, backend="cpu")
def copy_to_host(spec: ops.CopyToHostSpec, call: HostCall) -> None:
    """Copy to a host array of any strides."""
    source = as_bits(call.array(spec.source))
    _use(spec).run(lambda host: np.copyto(host, source))


def _use(spec: ops.CopyFromHostSpec | ops.CopyToHostSpec) -> ops.HostUse:
    assert spec.use is not None  # see `CpuMemoryLibrary`
    return spec.use


@kernel(ops.CopySpec, backend="cpu")
def copy(spec: ops.CopySpec, call: HostCall) -> None:
    """Copy, and convert as `numpy.ndarray.astype` does."""
    _copy(spec.source, call.array(spec.source), spec.out, call.array(spec.out))


def _copy(source: ops.ArraySpec, array: HostArray, out: ops.ArraySpec, to: HostArray) -> None:
    if source.dtype is out.dtype:
        np.copyto(as_bits(to), as_bits(array))
        return
    if source.dtype.kind == "complex" and out.dtype.kind in ("float", "int", "uint"):
        # Convert as `astype` does, without its warning: that would be given in the stream's thread.
        array = np.real(array)
    convert(array, to)


@kernel(ops.FillSpec, backend="cpu")
def fill(spec: ops.FillSpec, call: HostCall) -> None:
    """Set all elements to one value."""
    np.copyto(as_bits(call.array(spec.out)), as_bits(scalar(spec.value, spec.out.dtype)))


@kernel(ops.JoinSpec, backend="cpu")
def join(spec: ops.JoinSpec, call: HostCall) -> None:
    """Copy to places in one array."""
    out = call.array(spec.out)
    if spec.is_padded:
        np.copyto(as_bits(out), as_bits(scalar(spec.pad, spec.out.dtype)))
    for start, source in spec.source_starts:
        region = [slice(extent) for extent in source.shape]
        region[spec.axis] = slice(start, start + source.shape[spec.axis])
        _copy(source, call.array(source), spec.out, out[tuple(region)])
