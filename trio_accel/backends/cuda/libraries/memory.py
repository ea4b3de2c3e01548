"""Copies and fills."""

from __future__ import annotations

from cuda.bindings import driver

from ...base import (
    CopyFromForeignSpec,
    DeviceArray,
    DriverError,
    ForeignArray,
    LibraryError,
    NotSupportedError,
    kernel,
)
from ...base.contract.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, JoinSpec
from ...base.gpu.kernels import TransferLibrary
from ..kit._library import CudaLibrary, KernelCall

_DEVICE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class CudaMemoryLibrary(TransferLibrary, CudaLibrary):
    """Operations of every device on its memory."""

    name = "memory"

    kernel(CopyFromHostSpec, backend="cuda")(TransferLibrary.copy_from_host)
    kernel(CopyToHostSpec, backend="cuda")(TransferLibrary.copy_to_host)
    kernel(CopySpec, backend="cuda")(TransferLibrary.copy)
    kernel(FillSpec, backend="cuda")(TransferLibrary.fill)
    kernel(JoinSpec, backend="cuda")(TransferLibrary.join)

    @kernel(CopyFromForeignSpec, backend="cuda")
    def _copy_from_foreign(self, spec: CopyFromForeignSpec, call: KernelCall) -> None:
        source, out = spec.source, self._device.device_array(spec.out)
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
