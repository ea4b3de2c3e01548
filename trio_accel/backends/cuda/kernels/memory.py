"""Copies and fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec
from .._arrays import DeviceArray
from .._library import CudaLibrary
from .._stream import CudaStream
from .._workspace import Workspace

if TYPE_CHECKING:
    from .._device import CudaDevice

__all__ = ["MemoryLibrary"]


class MemoryLibrary(CudaLibrary):
    """What every device can do with its memory."""

    name = "memory"

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._packed = Workspace(self._context)
        self._table = {
            CopyFromHostSpec: self._copy_from_host,
            CopyToHostSpec: self._copy_to_host,
            CopySpec: self._copy,
            FillSpec: self._fill,
        }

    def _copy_from_host(self, spec: CopyFromHostSpec, stream: CudaStream) -> None:
        out = self._device.at(spec.out)
        if not out.size:
            return
        if out.is_contiguous:
            self._device.transfers.to_device(stream, spec.host, out.address)
            return
        packed = self._pack(stream, out)
        self._device.transfers.to_device(stream, spec.host, packed.address)
        self._device.arrays.convert(stream, packed, out)

    def _copy_to_host(self, spec: CopyToHostSpec, stream: CudaStream) -> None:
        source = self._device.at(spec.source)
        if not source.size:
            return
        if not source.is_contiguous:
            packed = self._pack(stream, source)
            self._device.arrays.convert(stream, source, packed)
            source = packed
        self._device.transfers.to_host(stream, source.address, spec.host)

    def _copy(self, spec: CopySpec, stream: CudaStream) -> None:
        self._device.arrays.convert(stream, self._device.at(spec.source), self._device.at(spec.out))

    def _fill(self, spec: FillSpec, stream: CudaStream) -> None:
        self._device.arrays.fill(stream, self._device.at(spec.out), spec.value)

    def _pack(self, stream: CudaStream, array: DeviceArray) -> DeviceArray:
        return DeviceArray.packed(self._packed.reserve(stream, array.nbytes), array.dtype, array.shape)

    def _destroy(self) -> None:
        self._packed.close()
