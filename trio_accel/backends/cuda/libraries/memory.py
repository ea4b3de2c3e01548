"""Copies and fills."""

from __future__ import annotations

from cuda.bindings import driver

from ...base import CopyFromForeignSpec, DriverError, LibraryError, NotSupportedError
from ...base.device_array import DeviceArray
from ...base.foreign import ForeignArray
from ...base.kernels import kernel
from ...base.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, HostUse, StackSpec
from ..kit._library import CudaLibrary, KernelCall

__all__ = ["MemoryLibrary"]

_DEVICE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class MemoryLibrary(CudaLibrary):
    """Operations of every device on its memory."""

    name = "memory"

    @kernel(CopyFromHostSpec, backend="cuda")
    def _copy_from_host(self, spec: CopyFromHostSpec, call: KernelCall) -> None:
        out, transfers = call.array(spec.out), self._device.transfers
        if not out.size:
            return
        packed = out if out.is_contiguous else call.room(out)
        start = transfers.straight(spec.host)
        _note(spec, transfers.to_device(call.stream, spec.host, start, packed.address))
        if packed is not out:
            call.convert(packed, out)

    @kernel(CopyToHostSpec, backend="cuda")
    def _copy_to_host(self, spec: CopyToHostSpec, call: KernelCall) -> None:
        source, transfers = call.array(spec.source), self._device.transfers
        if not source.size:
            return
        start = transfers.straight(spec.host)
        packed = source if source.is_contiguous else call.copy_of(source)
        _note(spec, transfers.to_host(call.stream, packed.address, spec.host, start))

    @kernel(CopySpec, backend="cuda")
    def _copy(self, spec: CopySpec, call: KernelCall) -> None:
        call.convert(call.array(spec.source), call.array(spec.out))

    @kernel(CopyFromForeignSpec, backend="cuda")
    def _copy_from_foreign(self, spec: CopyFromForeignSpec, call: KernelCall) -> None:
        source, out = spec.source, self._device.at(spec.out)
        if not out.size:
            return
        device = driver.cuPointerGetAttribute(_DEVICE, source.address)
        if device[0] or int(device[1]) != self._device.info.index:
            raise NotSupportedError("the array is on no memory of this device", backend="cuda")
        _check_alignment(source, out.dtype.itemsize)
        if source.stream is not None:
            try:
                self._context.order(source.stream, call.handle)
            except DriverError as error:
                raise LibraryError(
                    f"the stream that the array names cannot be waited for: {error}",
                    library=self.name,
                    code=error.code,
                ) from error
        array = DeviceArray(source.address, out.dtype, source.shape, source.strides)
        call.convert(array, out)

    @kernel(FillSpec, backend="cuda")
    def _fill(self, spec: FillSpec, call: KernelCall) -> None:
        call.fill(spec.out, spec.value)

    @kernel(StackSpec, backend="cuda")
    def _stack(self, spec: StackSpec, call: KernelCall) -> None:
        out = call.array(spec.out)
        if spec.is_padded:
            call.fill(out, spec.pad)
        for index, source in enumerate(spec.sources):
            # The beginning of its place.
            address = out.address + index * out.strides[0]
            call.convert(call.array(source), DeviceArray(address, out.dtype, source.shape, out.strides[1:]))


def _note(spec: CopyFromHostSpec | CopyToHostSpec, use: HostUse | None) -> None:
    """Say how the host array is used from now on, unless the device itself uses it."""
    if use is not None:
        spec.note_use(use)


def _check_alignment(source: ForeignArray, itemsize: int) -> None:
    """Refuse elements that a kernel cannot read: that would end CUDA for the whole process.

    Raises:
        LibraryError: An element does not begin at a multiple of its size, or of 8 bytes.
    """
    step = min(itemsize, 8)
    strides = [stride for extent, stride in zip(source.shape, source.strides, strict=True) if extent > 1]
    if any(number % step for number in (source.address, *strides)):
        raise LibraryError(
            f"host: its elements of {itemsize} bytes must lie at multiples of {step}; it begins at address "
            f"{source.address:#x} and has strides {source.strides}: give a contiguous copy",
            library="memory",
            code="misaligned",
        )
