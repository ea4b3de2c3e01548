"""Arrays in device memory, and their view of the device."""

# A reference and its device share a module, because the reference uses private methods of the device.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import abc
import inspect
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from operator import attrgetter
from types import FunctionType
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar, cast

import attrs
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorSystem, NotAwaited, Request, named_arguments, opens, to_await
from ...backends.base import (
    ArraySpec,
    DeviceInfo,
    DeviceLostError,
    DTypeLike,
    HostArray,
    Isolation,
    NotSupportedError,
    SharesCudaMemory,
)
from ..base._options import DeviceOptions
from ..base._refusals import what_to_do
from ..base._statistics import DeviceStatistics, RecoveryCost
from ..base._views import Index, indexed, permuted, reshaped, transposed, view_layout
from ._blocks import Block, BorrowedBlock
from ._calls import Operators
from ._chain import DEVICE_OF, METHODS, NO_DEVICE, ArrayFunction, Chain, ChainStep, Layouts
from ._pending import Pending, ReplyT

__all__ = ["AccelRef", "Device", "check_device", "device_of"]

LibraryT = TypeVar("LibraryT")
LibraryT_contra = TypeVar("LibraryT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class AccelRef(Operators["AccelRef"]):
    """An array in the memory of a device, or a view of one. Made by `Device.put` and by operations.

    Its memory is freed when the last reference is dropped, or by `release`; work that still uses it is
    finished first. Every use is checked before the device is called.

    The operators of the array API make calls, which you await: ``y = await (x @ w + b)``. So ``==`` also
    compares element by element. Compare references with ``is``; in sets and as keys of dictionaries they are
    compared by identity. An array does not have a truth value, and ``x += 1`` binds the name to a call.

    Attributes:
        block: The memory block, for use by the package itself.
        spec: The place and layout, for operations that lower themselves.
    """

    __slots__ = ("block", "spec")
    noun = "an AccelRef"
    first = "ref"

    def __init__(self, block: Block, spec: ArraySpec) -> None:
        # Attributes instead of properties, because each operation reads them.
        self.block: Block = block
        self.spec: ArraySpec = spec  # pyright: ignore[reportIncompatibleMethodOverride]  # of a call

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
        """The device of its memory. After an adoption (`ActorSystem.open_device`), this is the new device."""
        return self.block.table.device  # type: ignore[return-value]  # the owner of blocks is a device

    @property
    def generation(self) -> int:
        """The generation of the device in which the memory was made."""
        return self.block.generation

    @property
    def is_usable(self) -> bool:
        """Whether operations accept the array now: it is not released, lost or damaged; its device is open.

        This does not ask the device. When an inline context is lost, its arrays are usable until the device
        has the next context. An operation that uses one meanwhile raises `StaleRefError`.
        """
        block = self.block
        return not block.table.availability.is_ended and block.is_usable_as(self.spec)

    def __getitem__(self, index: Index) -> AccelRef:
        """Return a view of a part, by NumPy's basic indexing; it shares the memory.

        Raises:
            TypeError: An index is not an integer, a slice, ``...`` or ``None``.
            IndexError: An index is out of range, or there are too many.
        """
        return AccelRef(self.block, indexed(self.spec, index))

    def reshape(self, shape: int | Sequence[int], *sizes: int) -> AccelRef:
        """Return a view of the elements in C order with another shape; one size may be -1.

        Raises:
            ValueError: The number of elements differs, or the layout permits no such view.
        """
        first = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
        return AccelRef(self.block, reshaped(self.spec, (*first, *sizes)))

    @property
    def T(self) -> AccelRef:  # noqa: N802  # NumPy's name
        """A view with the axes in opposite order."""
        return AccelRef(self.block, transposed(self.spec))

    @property
    def mT(self) -> AccelRef:  # noqa: N802  # NumPy's name
        """A view of the stack with each matrix transposed."""
        return AccelRef(self.block, view_layout(self.spec, lambda array: array.mT))

    def transpose(self, axes: int | Sequence[int], *more_axes: int) -> AccelRef:
        """Return a view with the axes in another order; negative axes count from the end.

        Raises:
            ValueError: `axes` does not contain each axis once.
        """
        order = (axes, *more_axes) if isinstance(axes, SupportsIndex) else tuple(axes)
        return AccelRef(self.block, permuted(self.spec, order))

    @named_arguments
    @opens("the array is not leased yet: async with ref.lease() as array")
    @enable_ki_protection
    async def lease(self, *, write: bool = False, stream: object = None) -> AsyncGenerator[Any]:
        """Hold the array itself, without a copy, for code outside the device.

        On the CPU backend this gives a NumPy array over the same memory. On CUDA in this process it gives an
        object with ``__dlpack__`` and ``__cuda_array_interface__``, which ``cupy.asarray`` and
        ``torch.from_dlpack`` convert to their arrays.

        The lease waits for earlier operations as far as they concern the array. Until the end of the ``async
        with`` it counts as a reader, or a writer: later operations on the same memory wait, and so do later
        requests of the same libraries. So do not wait inside for an operation that must follow the lease, and
        do not keep the array. If you keep it, its memory stays, even after `release`, until the array and
        everything made from it are dropped; on CUDA until the device is closed.

        Work that you enqueued on your own stream meanwhile may still run at the end. Later operations on the
        same memory follow it on the device, and your program does not wait for it.

        Args:
            write: Whether you will change the array; otherwise it is read-only.
            stream: CUDA only: the stream on which you use the array. A stream of CuPy or PyTorch, an object
                with ``__cuda_stream__``, or a handle; by default the legacy default stream, as in both.

        Raises:
            NotSupportedError: The array is not accessible without a copy; or `stream` is given, and the
                device does not have streams.
            StaleRefError: The array is no longer valid.
            ContextLostError, DeviceLostError: The context ended during the wait for the array.
            TypeError: `stream` is not a stream.
        """
        async with self.device.lease(self, write=write, stream=stream) as array:
            yield array

    @to_await("x.copy_to(...)")
    @named_arguments
    async def copy_to(self, device: Device) -> AccelRef:
        """Copy the array to another device. The copy is contiguous.

        If `device` can read the memory, it copies directly from there; see `Device.borrow`. Otherwise the
        copy passes through host memory. Then a large array is copied in pieces of 16 MiB. Several pieces are
        in transit at the same time, and no more host memory is used than they need.

        Returns:
            The complete copy. If the call fails or is cancelled, nothing is left of the copy.

        Raises:
            OutOfMemoryError: The other device does not have enough memory.
            StaleRefError: The array is no longer valid.
            ContextLostError, DeviceLostError: One of the devices was lost meanwhile.
            TypeError: `device` is not an open device.
        """
        check_device("copy_to", device)
        if device is self.device:
            return await self.copy()
        return await device._copy_from(self)  # noqa: SLF001

    @enable_ki_protection
    def release(self) -> None:
        """Free the memory now, and with it all views of the array; work in flight is finished first.

        Memory that other code still uses is freed when that code drops it: a NumPy array from a lease,
        anything made from it, or an array that another library has by DLPack.

        Raises:
            ValueError: An open program uses the array.
        """
        self.block.check_writable("release")
        self.block.release()
        if trio.lowlevel.in_trio_task():
            self.block.table.drain()


class DeviceRequest(Request[LibraryT_contra, ReplyT_co]):
    """A request to a device: the base of `Operation`.

    Attributes:
        library: The import path of the library actor, ``"package.module:Class"``.
    """

    __slots__ = ()
    library: ClassVar[str]


class Device(abc.ABC):
    """An open device. Made by `ActorSystem.open_device`; also an async context manager that closes it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()  # noqa: ASYNC102  # it shields itself

    @abc.abstractmethod
    def _repr_html_(self) -> str:
        """Return a table of the known facts, without asking the device, for notebooks."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the hardware, such as ``"cpu:0"``."""

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """The path of the device's actor in the tree."""

    @property
    @abc.abstractmethod
    def info(self) -> DeviceInfo:
        """The description of the device."""

    @property
    @abc.abstractmethod
    def system(self) -> ActorSystem:
        """The actor system of the device."""

    @property
    @abc.abstractmethod
    def options(self) -> DeviceOptions:
        """The options with which it was opened."""

    @property
    @abc.abstractmethod
    def generation(self) -> int:
        """The number of the present context, counted from 1."""

    @property
    @abc.abstractmethod
    def losses(self) -> int:
        """The number of lost contexts since the device was opened."""

    @property
    @abc.abstractmethod
    def recovery(self) -> RecoveryCost:
        """The expected duration of the next recovery, as measured so far, and its reasons."""

    @property
    @abc.abstractmethod
    def isolation(self) -> Isolation:
        """The place of the context: a worker process, or this process."""

    @property
    @abc.abstractmethod
    def libraries(self) -> Sequence[str]:
        """The names of the device's libraries.

        Raises:
            DeviceLostError: The device is closed or lost, or its context is being rebuilt.
        """

    @property
    @abc.abstractmethod
    def pending(self) -> int:
        """The number of requests that wait while the context is being rebuilt; 0 while it exists."""

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether the device was opened, even if it has ended since."""

    @property
    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether the device has a context now. If not, requests wait for the next, unless `is_ended`."""

    @property
    @abc.abstractmethod
    def is_ended(self) -> bool:
        """Whether the device has ended for good: it was closed, or has failed for good."""

    @property
    @abc.abstractmethod
    def outage(self) -> DeviceLostError | None:
        """The reason why the device refuses requests; None while they are served or wait.

        If the device will be opened again, the error's `retry_after` contains the seconds until then.
        """

    @abc.abstractmethod
    async def ask(self, operation: DeviceRequest[LibraryT, ReplyT], /) -> ReplyT:
        """Run an operation and wait for its reply, which arrives when the device has completed it.

        The operation is validated in the calling task. While the device's context is being rebuilt, the
        request waits for it.

        If you cancel the call, a queued operation is withdrawn. A running operation is awaited for
        `cancel_grace` seconds; then the call ends, while the operation keeps its buffers until its end. The
        call ends later if the device uses host memory of your program: while a host array is being copied,
        which ends soon; and until the operation ends if the device transfers an array of `host_empty`, or
        reads an array of another GPU library. If an operation changes an array in place, the call also waits
        until its large host operands are copied.

        Raises:
            TypeError, ValueError: An argument is wrong; nothing was launched.
            StaleRefError: An array is no longer valid; nothing was launched.
            NotSupportedError: The backend does not have the operation.
            LibraryError, OutOfMemoryError: The library refused it; the device stays usable.
            ActorFailedError: The library's actor crashed because of it and was restarted.
            ContextLostError: The context was lost while it was in flight, or while its library was
                opened for it.
            DeviceLostError: The device is closed, or has failed for good.
            QueueFullError: Too many requests wait for the context.
        """

    @abc.abstractmethod
    def submit(self, operation: DeviceRequest[LibraryT, ReplyT], /) -> Pending[ReplyT]:
        """Submit an operation without waiting; its arrays can be used in further operations at once.

        Submitted operations take effect in the order of their submission, even those of different libraries:
        if they touch the same memory, the device keeps the order, and your program does not wait in between.

        Returns:
            The operation: ``pending.value`` is its reply, ``await pending.wait()`` waits for its completion.
            It does not run if an operation that makes its input has failed; then its error is
            `InputFailedError`. When it fails, the arrays that it was to write or change are damaged, and
            their use is refused.

        Raises:
            QueueFullError: The number of unfinished operations of the library has reached `in_flight`, or the
                context is being rebuilt.
            TypeError, ValueError, StaleRefError, NotSupportedError: As for `ask`; nothing was submitted.
            DeviceLostError: The device is closed, or has failed for good.
        """

    @abc.abstractmethod
    def ask_chain(self, chain: Chain, /) -> Awaitable[Any]:
        """Run a call and all its operands as one request, as awaiting the call does."""

    @abc.abstractmethod
    def look_ahead(self, step: ChainStep, /) -> Layouts:
        """Return the layout of a call's result, for `Call.shape` and similar properties.

        Raises:
            NotSupportedError: The layout depends on computed values.
        """

    @abc.abstractmethod
    async def put(self, host: npt.ArrayLike | SharesCudaMemory, *, pinned: bool = False) -> AccelRef:
        """Copy an array to the device; it returns when you may change the original again.

        With `pinned`, a device with its own memory copies the array to pinned host memory once, and keeps
        that copy while the array object lives, or until the device is closed. Each later call with the same
        object is only a transfer. The copy takes as much host memory as the array. On the CPU backend, and
        for arrays of at most 64 KiB, there is no gain, and no copy is made. If you cancel the first call, it
        still waits for the copy on the host.

        Args:
            host: A NumPy array of any strides and a device dtype (native byte order), or an object that
                `numpy.asarray` converts to one. A CUDA device in this process also takes arrays of CuPy,
                PyTorch and others, by ``__cuda_array_interface__``: they are copied on the device, after the
                stream that they name, or the legacy default stream if they cannot name one.
            pinned: Whether you put `host` often. It must be a read-only NumPy array, and not a view of a
                writable one, on every backend, because a copy of changing data would be out of date. For an
                array that changes use `host_empty`, because its arrays are already pinned.

        Raises:
            TypeError: The dtype is not an element type of a device; or, with `pinned`, `host` is not a NumPy
                array.
            ValueError: With `pinned`, `host` is writable.
            NotSupportedError: The array is on a GPU that the device's context does not address.
            OutOfMemoryError: There is not enough device memory.
        """

    @to_await("device.zeros(...)")
    @named_arguments
    async def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array of zeros."""
        return await _filled("zeros", self.full(shape, 0, dtype))

    @to_await("device.empty(...)")
    @named_arguments
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array to be written. It is like `zeros`, so that it shows no data of other programs."""
        return await _filled("empty", self.full(shape, 0, dtype))

    @abc.abstractmethod
    async def full(
        self, shape: int | Sequence[int], value: complex, dtype: DTypeLike = "float64"
    ) -> AccelRef:
        """Make an array with every element set to a value.

        Raises:
            ValueError, TypeError: A size is negative, or the dtype cannot hold the value.
            OutOfMemoryError: There is not enough device memory.
        """

    @abc.abstractmethod
    def host_empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> HostArray:
        """Make an uninitialised host array for transfers without an intermediate copy.

        `put` and ``to_host(out=)`` copy it once: the device itself does, or it is copied directly to the
        device's memory. The same holds for its contiguous parts. On the CPU backend that is true of any host
        array; a device with its own memory needs such an array. You may keep the array as long as you like,
        even after the end of the device. Its memory is used again when no array over it is left.

        If you call this in another thread than the device's own, or when the device is closed, you get an
        ordinary array.

        Raises:
            ValueError, TypeError: A size is negative, or the dtype is not an element type.
            MemoryError: The machine does not have enough memory.
        """

    @abc.abstractmethod
    def lease(
        self, ref: AccelRef, *, write: bool = False, stream: object = None
    ) -> AbstractAsyncContextManager[Any]:
        """Hold an array without a copy; see `AccelRef.lease`."""

    @abc.abstractmethod
    def borrow(self, ref: AccelRef) -> AbstractAsyncContextManager[AccelRef]:
        """Hold an array of another device, so that operations of this device read it in place.

        ``async with device.borrow(x) as borrowed:`` gives an array of this device over the same memory.
        Operations and views take it like any other. It is read-only, and `x` does not change meanwhile:
        operations of its own device that write to it wait, as they do for `AccelRef.lease`. So do not wait
        inside for one of these.

        Both devices must be of one backend, and a device in a worker reads only those in workers. In other
        cases, and if the hardware cannot reach the memory, `borrowed` is a copy, which is freed at the end.
        An array of this device is returned unchanged.

        If one of the devices is lost meanwhile, `borrowed` exists afterwards: operations have the same
        outcome as with the device's own arrays. Only `x` itself is lost if its device is inline.

        Raises:
            StaleRefError: The array is no longer valid.
            DeviceLostError: One of the devices is closed, or has failed for good.
            OutOfMemoryError: It has to be copied, and there is not enough memory.
        """

    @abc.abstractmethod
    async def synchronize(self) -> None:
        """Wait until all launched work is complete and all dropped memory is freed."""

    @abc.abstractmethod
    async def close_library(self, path: str) -> None:
        """End the actor of a library, once it has served all requests.

        It frees its memory, and is not opened in advance in the next context. The next operation with this
        library starts another actor. On a closed device, or while it rebuilds its context, nothing happens.

        Args:
            path: The import path of the actor, with its argument if any.
        """

    @abc.abstractmethod
    def watch_generation(self) -> AsyncGenerator[int]:
        """Iterate over the generations: the current one first, then each new one; ends with the device.

        A slow reader gets only the latest generation. Close the iterator (``aclosing``) if you leave the loop
        early.
        """

    @abc.abstractmethod
    async def statistics(self) -> DeviceStatistics:
        """Count operations and memory of the current generation."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish work in flight within `close_grace`, and close the device."""

    @abc.abstractmethod
    def _copy_from(self, ref: AccelRef) -> Awaitable[AccelRef]:
        """Copy an array of another device; see `AccelRef.copy_to`."""


def check_device(operation: str, device: object) -> None:
    """Refuse an object other than an open device.

    Raises:
        TypeError: It is not.
        NotSupportedError: The object does not have a device in this process, such as an entity of a cluster.
    """
    if not isinstance(device, Device):
        if without := getattr(device, "without_device", None):
            raise NotSupportedError(f"{operation}: {without}")
        description = type(device).__name__
        if isinstance(device, str):
            description += f"; open it: await system.open_device({device!r})"
        elif isinstance(device, (type, FunctionType)):
            description = f"{device.__name__}; pass the device before it"
        elif hasattr(device, "devices"):
            description += "; pass one of its devices, such as group.devices[0]"
        else:
            description += what_to_do(device, is_array=False)
        raise TypeError(f"{operation}: device must be an open Device, got {description}")


def owned(operation: str, ref: AccelRef) -> AccelRef:
    """Return a borrowed array as its own device has it; return any other array unchanged.

    Raises:
        StaleRefError: The borrowed array was given back.
    """
    block = ref.block
    if not isinstance(block, BorrowedBlock) or block.source.table is block.table:
        return ref
    block.check(operation)
    return AccelRef(block.source, attrs.evolve(ref.spec, block=block.source.id))


def device_of(operation: str, *operands: Any) -> Device:
    """Return the device of an operation: the device of its first operand with one.

    Raises:
        TypeError: No operand is on a device.
    """
    for operand in operands:
        if type(operand) is AccelRef:
            return operand.device
        device = operand if isinstance(operand, Device) else getattr(operand, "device", None)
        if isinstance(device, Device):
            return device
    for operand in operands:
        if inspect.isawaitable(operand) or isinstance(operand, NotAwaited):
            raise TypeError(f"{operation}: an operand is a {type(operand).__name__}{what_to_do(operand)}")
        kind = type(cast("object", operand))
        several: Any = operand if kind in (list, dict) or issubclass(kind, tuple) else ()
        if any(isinstance(member, Operators) for member in (several.values() if kind is dict else several)):
            description = f"a {kind.__name__}, which holds an array; pass its arrays one by one"
            raise TypeError(f"{operation}: an operand is {description}, or in one list")
    raise TypeError(
        f"{operation}: {NO_DEVICE}; copy one there first (await device.put(array)), "
        "or ask the device itself (await device.ask(message))"
    )


def _viewing(name: str) -> ArrayFunction:
    return ArrayFunction(f"AccelRef.{name}", getattr(AccelRef, name), "value")


def _part(value: Any, index: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return cast("Sequence[Any]", value)[index]
    return AccelRef.__getitem__(value, index)


def _item(array: AccelRef | HostArray) -> Any:
    if isinstance(array, AccelRef) and array.size == 1:
        raise ValueError(
            "item: the number is not known before the call has run; leave item() out, because operations "
            "also take an array of one element"
        )
    if isinstance(array, AccelRef) or array.size != 1:
        raise ValueError(f"item: the array must have exactly one element, got shape {array.shape}")
    return array.item()


async def _item_of(ref: AccelRef) -> Any:
    return _item(ref if ref.size != 1 else await ref.to_host())


DEVICE_OF.append(device_of)


async def _filled(method: str, full: Awaitable[AccelRef]) -> AccelRef:
    """Wait for an array of `Device.full`; errors have the name of the method."""
    try:
        return await full
    except (TypeError, ValueError) as error:
        text = str(error)
        if text.startswith("full: "):
            raise type(error)(text.replace("full", method, 1)) from None
        raise


METHODS["__getitem__"] = ArrayFunction("AccelRef.__getitem__", _part, "value")
METHODS.update({name: _viewing(name) for name in ("reshape", "transpose")})
METHODS.update({name: ArrayFunction(f"AccelRef.{name}", attrgetter(name), "value") for name in ("T", "mT")})
_ITEM = "item gives a number of the host"
METHODS["item"] = ArrayFunction("AccelRef.item", _item, "value", result_on_host=_ITEM)
METHODS["item of ref"] = ArrayFunction(
    "AccelRef.item", _item_of, "awaitable", is_direct=True, result_on_host=_ITEM
)
