"""References to arrays in device memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import DType, DTypeLike
from ...backends.base.ops import ArraySpec
from ..base._refusals import NoOperators, what_to_do
from ..base._views import Index, indexed, reshaped, transposed
from ._blocks import Block

if TYPE_CHECKING:
    from ..front._device import Device
    from ..operations._memory import ToHost

__all__ = ["AccelRef"]


@cache
def _to_host() -> type[ToHost]:
    """The message, whose module needs this one; to import it at each call takes longer than to make it."""
    from ..operations._memory import ToHost

    return ToHost


class AccelRef(NoOperators):
    """An array in the memory of a device, or a view of one. Made by `Device.put` and by operations.

    The memory is given back when the last reference to it is gone, or by `release`; work that
    still uses it is finished first. Every use is checked before the device is touched.

    A reference has no operators, because what they would do has to be awaited: their use is a `TypeError`
    that names the function. That includes ``==`` and ``!=`` with arrays, numbers, lists, tuples and other
    references. ``a == a`` is True for the same reference, and ``==`` with anything else is False. Two
    references are told apart by ``is``; as members of sets and keys of dictionaries they go by identity.

    Attributes:
        block: The memory block, for the runtime's own use.
        spec: Where it lies and how it is laid out, for operations that lower themselves.
    """

    __slots__ = ("block", "spec")

    def __init__(self, block: Block, spec: ArraySpec) -> None:
        # No properties: they are looked at with each operation.
        self.block: Block = block
        self.spec: ArraySpec = spec

    def __repr__(self) -> str:
        if self.block.is_released:
            state = ", released"
        elif self.block.damaged_by is not None:
            state = f", damaged by {self.block.damaged_by}"
        elif self.block.is_lost:
            state = f", lost with generation {self.block.generation}"
        else:
            state = ""
        return f"<AccelRef {self.dtype} {self.shape} on {self.device.name}{state}>"

    @property
    def device(self) -> Device:
        """The device whose memory it is: after an adoption (`System.open_device`), the new one."""
        return self.block.table.device

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.spec.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        return self.spec.strides

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.spec.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return self.spec.size * self.spec.dtype.itemsize

    @property
    def generation(self) -> int:
        """Generation of the device in which the memory was made."""
        return self.block.generation

    def __getitem__(self, index: Index) -> AccelRef:
        """A view of a part, by NumPy's basic indexing; it shares the memory.

        Raises:
            TypeError: An index that is no whole number, slice, ``...`` or ``None``.
            IndexError: Out of range, or too many.
        """
        return AccelRef(self.block, indexed(self.spec, index))

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "an AccelRef is not iterable: its elements are on the device; use await ref.to_host()"
        )

    def reshape(self, shape: int | Sequence[int], *sizes: int) -> AccelRef:
        """A view of the elements in C order under another shape; one size may be -1.

        Raises:
            ValueError: Another number of elements, or a layout of which there is no such view.
        """
        first = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
        return AccelRef(self.block, reshaped(self.spec, (*first, *sizes)))

    @property
    def T(self) -> AccelRef:  # noqa: N802  # NumPy's name
        """A view with the axes in the opposite order."""
        return AccelRef(self.block, transposed(self.spec))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an AccelRef without axes; await ref.item() gives its element")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError(
            "an AccelRef has no truth value: its elements are on the device; use await ref.item(), or ask "
            "whether there is one: ref is not None"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AccelRef is bound to its device and can be neither pickled nor copied by the copy module; "
            "use await ref.copy(), or await ref.to_host() to take its contents elsewhere"
        )

    def __array__(self, *args: object, **kwargs: object) -> npt.NDArray[Any]:
        raise TypeError("an AccelRef is no host array; use await ref.to_host()")

    async def to_host(self, *, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy the array to host memory, after everything that writes it.

        Args:
            out: Array of the same shape and dtype to fill; by default a new one.

        Returns:
            `out`, or a new C-contiguous array that belongs to the caller.

        Raises:
            ValueError: `out` has another shape or dtype, is read-only, or has elements that share memory.
            StaleRefError: The array must not be used any more.
        """
        return await self.device.ask(_to_host()(self, out))

    async def item(self) -> Any:
        """Copy the only element to the host, as a Python scalar.

        Raises:
            ValueError: There is not exactly one element.
        """
        if self.size != 1:
            raise ValueError(f"item: the array must have exactly one element, got shape {self.shape}")
        return (await self.to_host()).item()

    @asynccontextmanager
    @enable_ki_protection
    async def lease(self, *, write: bool = False, stream: object = None) -> AsyncGenerator[Any, None]:
        """Hold the array itself, without a copy, for code that is not the device's.

        On the CPU backend that is a NumPy array over the same memory. On CUDA in this process it is an
        object with ``__dlpack__`` and ``__cuda_array_interface__``, of which ``cupy.asarray`` and
        ``torch.from_dlpack`` make arrays of theirs.

        Earlier operations are waited for as far as they concern it. Until the end of the ``async
        with`` it counts as a reader, or a writer: later operations on the same memory wait, and behind
        them what is asked of the same library. So do not wait inside for an operation that must come
        after the lease, and do not keep the array.

        What was enqueued on a stream of the program meanwhile may still run at the end. Later operations
        on the same memory follow it on the device, and your program does not wait for it.

        Args:
            write: Whether the array is to be changed; otherwise it is read-only.
            stream: CUDA only: the stream on which the array is used. A stream of CuPy or PyTorch, an object
                with ``__cuda_stream__``, or a handle; by default the legacy default stream, as in both.

        Raises:
            NotSupportedError: The array cannot be had without a copy; or a stream, and the device has none.
            StaleRefError: The array must not be used any more.
            ContextPoisonedError, DeviceLostError: The context ended while the array was waited for.
            TypeError: The stream is none.
        """
        async with self.device.lease(self, write=write, stream=stream) as array:
            yield array

    async def copy_to(self, device: Device) -> AccelRef:
        """Copy the array to another device, through host memory.

        A large one is copied in pieces of 16 MiB. Several pieces are on their way at the same time, and no
        more host memory than these need is taken. The copy is contiguous.

        Returns:
            The copy, once all of it is there. If the call fails or is cancelled, nothing is left of it.

        Raises:
            OutOfMemoryError: There is not enough memory there.
            StaleRefError: The array must not be used any more.
            ContextPoisonedError, DeviceLostError: One of the devices was lost meanwhile.
            TypeError: It is no open device.
        """
        from ..front._device import Device
        from ..front._transfer import copy_between

        if not isinstance(device, Device):
            raise TypeError(
                f"copy_to: device must be an open Device, got {type(device).__name__}{what_to_do(device)}"
            )
        return await (self.copy() if device is self.device else copy_between(self, device))

    async def copy(self) -> AccelRef:
        """Copy the array to new memory of its device."""
        from ..operations._memory import Copy

        return await self.device.ask(Copy(self))

    async def cast(self, dtype: DTypeLike) -> AccelRef:
        """Copy the array to new memory with another element type, as `numpy.ndarray.astype` does.

        Raises:
            TypeError: Not an element type, or complex to real.
        """
        from ..operations._memory import Copy

        return await self.device.ask(Copy(self, DType.of(dtype)))

    async def fill(self, value: complex) -> AccelRef:
        """Set every element to one value; returns this reference.

        Raises:
            TypeError, ValueError: The dtype cannot hold the value.
        """
        from ..operations._memory import Fill

        return await self.device.ask(Fill(self, value))

    @enable_ki_protection
    def release(self) -> None:
        """Give the memory back now, for every view of it too; work in flight is finished first."""
        self.block.release()
        if trio.lowlevel.in_trio_task():
            self.device.blocks.drain()
