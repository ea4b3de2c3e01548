"""Copies and fills."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import attrs
import numpy.typing as npt
from cuda.bindings import driver

from ...base import CopyFromForeignSpec, DriverError, LibraryError, NotSupportedError
from ...base.foreign import ForeignArray
from ...base.host import address_of
from ...base.kernels import kernel
from ...base.ops import CopyFromHostSpec, CopySpec, CopyToHostSpec, FillSpec, HostUse
from ..kit._call import Call
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary
from ..kit._plan_cache import PlanCache
from ..runtime._device_array import DeviceArray
from ..runtime._foreign import follow

__all__ = ["MemoryLibrary"]

_Copy: TypeAlias = Callable[[], tuple[Any]]


@attrs.frozen
class _BoundCopy:
    """A copy for which the driver needs nobody's help.

    Attributes:
        host: The host's array; nothing here keeps it.
        start: Where that begins.
        copy: Enqueues the copy.
    """

    host: ref[npt.NDArray[Any]]
    start: int
    copy: _Copy


_DEVICE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class MemoryLibrary(CudaLibrary):
    """What every device can do with its memory."""

    name = "memory"

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        # By the device's array, and the stream; of each one host array, the last.
        self._up: PlanCache[_BoundCopy] = PlanCache(device.addresses)
        self._down: PlanCache[_BoundCopy] = PlanCache(device.addresses)

    @kernel(CopyFromHostSpec, backend="cuda")
    def _copy_from_host(self, spec: CopyFromHostSpec, call: Call) -> None:
        stream = call.stream
        if self._is_replayed(self._up.find(spec.out, stream), spec.host):
            return
        out, transfers = self._device.at(spec.out), self._device.transfers
        if not out.size:
            return
        start = transfers.straight(spec.host)
        if not out.is_contiguous:
            packed = DeviceArray.packed(call.workspace(out.nbytes), out.dtype, out.shape)
            use = transfers.to_device(stream, spec.host, start, packed.address)
            self._note_use(spec, use)
            call.convert(packed, out)
            return
        if start is None:
            self._note_use(spec, transfers.to_device(stream, spec.host, start, out.address))
            return
        to = driver.CUdeviceptr(out.address)
        copy: _Copy = partial(driver.cuMemcpyHtoDAsync, to, start, out.nbytes, stream.native)
        self._context.check(copy())
        self._up.store(spec.out, stream, _BoundCopy(ref(spec.host), start, copy))

    @kernel(CopyToHostSpec, backend="cuda")
    def _copy_to_host(self, spec: CopyToHostSpec, call: Call) -> None:
        stream = call.stream
        if self._is_replayed(self._down.find(spec.source, stream), spec.host):
            return
        source, transfers = self._device.at(spec.source), self._device.transfers
        if not source.size:
            return
        start = transfers.straight(spec.host)
        if not source.is_contiguous:
            packed = call.copy_of(spec.source)
            self._note_use(spec, transfers.to_host(stream, packed.address, spec.host, start))
            return
        if start is None:
            self._note_use(spec, transfers.to_host(stream, source.address, spec.host, start))
            return
        source_of = driver.CUdeviceptr(source.address)
        copy: _Copy = partial(driver.cuMemcpyDtoHAsync, start, source_of, source.nbytes, stream.native)
        self._context.check(copy())
        self._down.store(spec.source, stream, _BoundCopy(ref(spec.host), start, copy))

    def _note_use(self, spec: CopyFromHostSpec | CopyToHostSpec, use: HostUse | None) -> None:
        if use is not None:
            spec.note_use(use)

    def _is_replayed(self, bound: _BoundCopy | None, host: npt.NDArray[Any]) -> bool:
        """Copy as before, if it was between the same arrays and the host's still lies as it did."""
        if (
            bound is None
            or bound.host() is not host
            or not host.flags.c_contiguous
            or address_of(host) != bound.start
        ):
            return False
        self._context.check(bound.copy())
        return True

    @kernel(CopySpec, backend="cuda")
    def _copy(self, spec: CopySpec, call: Call) -> None:
        call.convert(call.array(spec.source), call.array(spec.out))

    @kernel(CopyFromForeignSpec, backend="cuda")
    def _copy_from_foreign(self, spec: CopyFromForeignSpec, call: Call) -> None:
        source, out = spec.source, self._device.at(spec.out)
        if not out.size:
            return
        device = driver.cuPointerGetAttribute(_DEVICE, source.address)
        if device[0] or int(device[1]) != self._device.info.index:
            raise NotSupportedError("the array is on no memory of this device", backend="cuda")
        _check_alignment(source, out.dtype.itemsize)
        if source.stream is not None:
            try:
                follow(call.stream, source.stream, self._context)
            except DriverError as error:
                raise LibraryError(
                    f"the stream that the array names cannot be waited for: {error}",
                    library=self.name,
                    code=error.code,
                ) from error
        array = DeviceArray(source.address, out.dtype, source.shape, source.strides)
        call.convert(array, out)

    @kernel(FillSpec, backend="cuda")
    def _fill(self, spec: FillSpec, call: Call) -> None:
        call.fill(spec.out, spec.value)


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
