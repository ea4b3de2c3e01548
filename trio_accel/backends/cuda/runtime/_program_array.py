"""Arrays as programs get them, and arrays of other libraries that programs return."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex, cast

from cuda.bindings import driver

from ...base import DeviceInfo, DType, StaleRefError
from ...base.device_array import DeviceArray
from ...base.foreign import ForeignArray
from ._context import CudaContext
from ._export import CudaArray
from ._stream import CudaStream

__all__ = ["ProgramArray", "described", "foreign_array"]

_LEGACY = int(driver.CU_STREAM_LEGACY)
_UNTIMED = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_NO_ORDER = -1


class ProgramArray(CudaArray):
    """An array of a program: an argument of a call, or of its constructor.

    Libraries take it without a copy. What they enqueue on the call's stream is in order; on another stream
    they wait for that, as their protocols say. An array that is only read is marked so where a library can
    read the mark: PyTorch refuses `__cuda_array_interface__` with it, and DLPack has it from version 1.0 on.

    Args:
        array: Where it lies.
        info: What the device is.
        context: Its context.
        stream: The stream of the call; None where everything is done with it.
        is_read_only: Whether it must not be written to.
    """

    __slots__ = ("_stream",)

    def __init__(
        self,
        array: DeviceArray,
        info: DeviceInfo,
        context: CudaContext,
        stream: CudaStream | None,
        *,
        is_read_only: bool,
    ) -> None:
        super().__init__(array, info, context, is_read_only=is_read_only)
        self._stream = stream

    @property
    def array(self) -> DeviceArray:
        """Where it lies."""
        return self._array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array by version 3 of Numba's protocol; see `CudaArray`."""
        interface = self._interface()
        address, _ = interface["data"]
        handle = None if self._stream is None else self._stream.handle
        return {**interface, "data": (address, False), "stream": handle}

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The array as a DLPack capsule over the same memory; the consumer's stream waits for the call's."""
        self._check()
        self._check_export(dl_device, copy)
        consumer = _LEGACY if stream is None else operator.index(cast("SupportsIndex", stream))
        if self._stream is not None and consumer not in (_NO_ORDER, self._stream.handle):
            _order(self._stream.handle, consumer, self._context)
        return self._capsule(max_version)

    def _check(self) -> None:
        if self._is_over:
            raise StaleRefError(
                "the call is over for which the program got this array; copy what is to be kept",
                device=self._info.name,
            )


def foreign_array(value: Any, stream: CudaStream, device: int) -> tuple[DeviceArray, object] | None:
    """Where an array of another library lies, once a stream of ours waits for what computes it.

    Args:
        value: The array: it has DLPack, or the CUDA array interface.
        stream: The stream.
        device: Number of the device.

    Returns:
        Where it lies, and what keeps its memory; None if it lies on no GPU.

    Raises:
        TypeError: It lies on another GPU.
    """
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(value, stream_ptr=stream.handle)
    if not view.is_device_accessible:
        return None
    if view.device_id != device:
        raise TypeError(f"an array on GPU {view.device_id}; copy it to GPU {device} first")
    assert view.dtype is not None
    dtype, shape = DType.of(view.dtype), view.shape
    if view.strides is None:
        return DeviceArray.packed(view.ptr, dtype, shape), view
    strides = tuple(step * dtype.itemsize for step in view.strides)
    return DeviceArray(view.ptr, dtype, shape, strides), view


def described(value: Any) -> tuple[DType, tuple[int, ...]]:
    """Dtype and shape of an array of any library.

    Raises:
        TypeError: Devices have no such dtype.
    """
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        foreign = ForeignArray.of(value)
        if foreign is None:
            raise TypeError(f"an array of {type(value).__name__} that has neither dtype nor shape")
        return DType.of(foreign.dtype), foreign.shape
    shape = tuple(int(extent) for extent in value.shape)
    name = str(value.dtype)
    # PyTorch has dtypes of its own, with the same names.
    if name.startswith("torch."):
        try:
            return DType(name.removeprefix("torch.")), shape
        except ValueError:
            raise TypeError(f"an array of {name}, which devices do not have") from None
    return DType.of(value.dtype), shape


def _order(first: int, then: int, context: CudaContext) -> None:
    """Hold a stream back until what was enqueued on another is done; both by their handles."""
    with context:
        event = context.check(driver.cuEventCreate(_UNTIMED))
        try:
            context.check(driver.cuEventRecord(event, first))
            context.check(driver.cuStreamWaitEvent(then, event, 0))
        finally:
            driver.cuEventDestroy(event)
