"""Arrays in device memory, and the device as they see it."""

# A reference and its device are one module for this: the reference asks the device in its own way.
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

from ...actors import ActorSystem, NotAwaited, Request, named_arguments, opens
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
from ..base._views import Index, indexed, permuted, reshaped, seen, transposed
from ._blocks import Block, BorrowedBlock
from ._calls import Operators
from ._chain import DEVICE_OF, METHODS, ArrayFunction, Chain, Layouts
from ._pending import Pending, ReplyT

__all__ = ["AccelRef", "Device", "check_device", "device_of"]

LibraryT = TypeVar("LibraryT")
LibraryT_contra = TypeVar("LibraryT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class AccelRef(Operators["AccelRef"]):
    """An array in the memory of a device, or a view of one. Made by `Device.put` and by operations.

    The memory is given back when the last reference to it is gone, or by `release`; work that
    still uses it is finished first. Every use is checked before the device is touched.

    The operators of the array API make calls, which are awaited: ``y = await (x @ w + b)``. So ``==`` is by
    element too. Two references are told apart by ``is``; as members of sets and keys of dictionaries they go
    by identity. There is no truth value, and ``x += 1`` binds the name to a call.

    Attributes:
        block: The memory block, for the runtime's own use.
        spec: Its place and layout, for operations that lower themselves.
    """

    __slots__ = ("block", "spec")
    noun = "an AccelRef"
    first = "ref"

    def __init__(self, block: Block, spec: ArraySpec) -> None:
        # No properties: they are looked at with each operation.
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
        """The device whose memory it is: after an adoption (`ActorSystem.open_device`), the new one."""
        return self.block.table.device  # type: ignore[return-value]  # whose blocks these are is a device

    @property
    def generation(self) -> int:
        """Generation of the device in which the memory was made."""
        return self.block.generation

    @property
    def is_usable(self) -> bool:
        """Whether operations take the array now: it is not released, lost or damaged, and its device is open.

        The device is not asked. When an inline context is lost, its arrays are usable until the device has
        the next context, and an operation that uses one meanwhile raises `StaleRefError`.
        """
        block = self.block
        return not block.table.availability.is_ended and block.is_usable_as(self.spec)

    def __getitem__(self, index: Index) -> AccelRef:
        """Return a view of a part, by NumPy's basic indexing; it shares the memory.

        Raises:
            TypeError: An index that is no whole number, slice, ``...`` or ``None``.
            IndexError: Out of range, or too many.
        """
        return AccelRef(self.block, indexed(self.spec, index))

    def reshape(self, shape: int | Sequence[int], *sizes: int) -> AccelRef:
        """Return a view of the elements in C order under another shape; one size may be -1.

        Raises:
            ValueError: Another number of elements, or a layout of which there is no such view.
        """
        first = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
        return AccelRef(self.block, reshaped(self.spec, (*first, *sizes)))

    @property
    def T(self) -> AccelRef:  # noqa: N802  # NumPy's name
        """A view with the axes in the opposite order."""
        return AccelRef(self.block, transposed(self.spec))

    @property
    def mT(self) -> AccelRef:  # noqa: N802  # NumPy's name
        """A view of a stack of matrices, each transposed."""
        return AccelRef(self.block, seen(self.spec, lambda array: array.mT))

    def transpose(self, axes: int | Sequence[int], *more_axes: int) -> AccelRef:
        """Return a view with the axes in another order; negative ones count from the end.

        Raises:
            ValueError: The axes are not all there are, each once.
        """
        order = (axes, *more_axes) if isinstance(axes, SupportsIndex) else tuple(axes)
        return AccelRef(self.block, permuted(self.spec, order))

    @named_arguments
    @opens("the array is not leased yet: async with ref.lease() as array")
    @enable_ki_protection
    async def lease(self, *, write: bool = False, stream: object = None) -> AsyncGenerator[Any]:
        """Hold the array itself, without a copy, for code that is not the device's.

        On the CPU backend that is a NumPy array over the same memory. On CUDA in this process it is an
        object with ``__dlpack__`` and ``__cuda_array_interface__``, of which ``cupy.asarray`` and
        ``torch.from_dlpack`` make arrays of theirs.

        Earlier operations are waited for as far as they concern it. Until the end of the ``async
        with`` it counts as a reader, or a writer: later operations on the same memory wait, and behind
        them later requests of the same library. So do not wait inside for an operation that must come
        after the lease, and do not keep the array. If it is kept, its memory stays, also after `release`,
        until the array and all that was made of it are gone; on CUDA until the device is closed.

        Work that was enqueued on a stream of the program meanwhile may still run at the end. Later operations
        on the same memory follow it on the device, and your program does not wait for it.

        Args:
            write: Whether the array is to be changed; otherwise it is read-only.
            stream: CUDA only: the stream on which the array is used. A stream of CuPy or PyTorch, an object
                with ``__cuda_stream__``, or a handle; by default the legacy default stream, as in both.

        Raises:
            NotSupportedError: The array cannot be had without a copy; or a stream, and the device has none.
            StaleRefError: The array must not be used any more.
            ContextLostError, DeviceLostError: The context ended while the array was waited for.
            TypeError: `stream` is no stream.
        """
        async with self.device.lease(self, write=write, stream=stream) as array:
            yield array

    @named_arguments
    async def copy_to(self, device: Device) -> AccelRef:
        """Copy the array to another device. The copy is contiguous.

        Where `device` can read the memory, it copies it at once from where it is; see `Device.borrow`.
        Otherwise it goes through host memory. Then a large one is copied in pieces of 16 MiB. Several pieces
        are on their way at the same time, and no more host memory than these need is taken.

        Returns:
            The copy, once all of it is there. If the call fails or is cancelled, nothing is left of it.

        Raises:
            OutOfMemoryError: There is not enough memory there.
            StaleRefError: The array must not be used any more.
            ContextLostError, DeviceLostError: One of the devices was lost meanwhile.
            TypeError: It is no open device.
        """
        check_device("copy_to", device)
        if device is self.device:
            return await self.copy()
        return await device._copy_from(self)  # noqa: SLF001

    @enable_ki_protection
    def release(self) -> None:
        """Give the memory back now, for every view of it too; work in flight is finished first.

        Memory that other code still has is given back when that lets it go: a NumPy array that a lease gave,
        or what was made of one, and an array that another library has by DLPack.

        Raises:
            ValueError: A program is open with it.
        """
        self.block.check_writable("release")
        self.block.release()
        if trio.lowlevel.in_trio_task():
            self.block.table.drain()


class DeviceRequest(Request[LibraryT_contra, ReplyT_co]):
    """Request to a device: the base of `Operation`.

    Attributes:
        library: Import path of the library actor, ``"package.module:Class"``.
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
        """Return a table of what is known without asking the device, as notebooks show it."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the hardware, such as ``"cpu:0"``."""

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """Path of the device's actor in the tree."""

    @property
    @abc.abstractmethod
    def info(self) -> DeviceInfo:
        """Description of the device."""

    @property
    @abc.abstractmethod
    def system(self) -> ActorSystem:
        """The system that it was opened in."""

    @property
    @abc.abstractmethod
    def options(self) -> DeviceOptions:
        """The options with which it was opened."""

    @property
    @abc.abstractmethod
    def generation(self) -> int:
        """The number of this context, counting from 1."""

    @property
    @abc.abstractmethod
    def losses(self) -> int:
        """Contexts that it has lost since it was opened."""

    @property
    @abc.abstractmethod
    def recovery(self) -> RecoveryCost:
        """The time that the next recovery takes, as measured by now, and why."""

    @property
    @abc.abstractmethod
    def isolation(self) -> Isolation:
        """The place of its context: a worker process, or this one."""

    @property
    @abc.abstractmethod
    def libraries(self) -> Sequence[str]:
        """Names of the libraries that the device has.

        Raises:
            DeviceLostError: The device is closed, lost or being rebuilt.
        """

    @property
    @abc.abstractmethod
    def pending(self) -> int:
        """Requests that wait while the context is being rebuilt; 0 while there is one."""

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether it was opened; also when it has ended since."""

    @property
    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether it has a context now; if not, requests wait for the next, unless `is_ended`."""

    @property
    @abc.abstractmethod
    def is_ended(self) -> bool:
        """Whether it has ended for good: it was closed or given up."""

    @property
    @abc.abstractmethod
    def outage(self) -> DeviceLostError | None:
        """The reason why it refuses requests: it was closed or given up; None while they are served, or wait.

        Where the device is opened again, the error's `retry_after` says in how many seconds.
        """

    @abc.abstractmethod
    async def ask(self, operation: DeviceRequest[LibraryT, ReplyT], /) -> ReplyT:
        """Run an operation and wait for its reply, which comes when the device has completed it.

        The operation is validated in the calling task. While the device's context is being
        rebuilt, the request waits for it.

        When cancelled, a queued operation is withdrawn. A running one is awaited for `cancel_grace`
        seconds; then the asker is let go, while the operation keeps its buffers until it ends. The asker
        is let go later where the device uses host memory of the program itself: while a host array is
        being copied, which ends soon; and until the operation ends where the device transfers an array of
        `host_empty`, or reads an array of another GPU library. An operation that changes an array in place
        is awaited until its large host operands are copied.

        Raises:
            TypeError, ValueError: A wrong argument; nothing was launched.
            StaleRefError: An array that must not be used any more; nothing was launched.
            NotSupportedError: The backend does not have the operation.
            LibraryError, OutOfMemoryError: The library refused it; the device stays usable.
            ActorFailedError: The library's actor crashed over it and was restarted.
            ContextLostError: The context was lost while it was in flight, or while its library was
                opened for it.
            DeviceLostError: The device is closed, or gave up.
            QueueFullError: Too many requests wait for the context.
        """

    @abc.abstractmethod
    def submit(self, operation: DeviceRequest[LibraryT, ReplyT], /) -> Pending[ReplyT]:
        """Hand an operation over without waiting; its arrays can be used in further operations at once.

        Submitted operations take effect in the order in which they were handed over, also those of
        different libraries: where they touch the same memory, the device keeps the order, and the
        program waits for nothing in between.

        Returns:
            The operation: ``pending.value`` is its reply, ``await pending.wait()`` its completion. One
            whose producer failed does not run; its error is `InputFailedError`. When it fails, the
            arrays that it was to write or change are damaged, and their use is refused.

        Raises:
            QueueFullError: As many operations of the library as `in_flight` allows are not done, or the
                context is being rebuilt.
            TypeError, ValueError, StaleRefError, NotSupportedError: As for `ask`; nothing was handed over.
            DeviceLostError: The device is closed, or gave up.
        """

    @abc.abstractmethod
    def ask_chain(self, chain: Chain, /) -> Awaitable[Any]:
        """Run the calls that a call is made of as one request; awaiting the call does this."""

    @abc.abstractmethod
    def look_ahead(self, chain: Chain, /) -> Layouts:
        """Find the layout of what the last call of a chain makes; `Call.shape` and its kind do this.

        Raises:
            NotSupportedError: It depends on what the device computes.
        """

    @abc.abstractmethod
    async def put(self, host: npt.ArrayLike | SharesCudaMemory, *, pinned: bool = False) -> AccelRef:
        """Copy an array to the device; returns when the original may be changed again.

        With `pinned`, a device with memory of its own copies the array to pinned host memory once, and
        keeps that copy while the array object lives, or until the device is closed. Each later call with the
        same object is a transfer alone. The copy takes as much host memory as the array. On the CPU backend,
        and for arrays of at most 64 KiB, there is nothing to gain, and no copy. Cancelling the first call
        waits for the copy on the host.

        Args:
            host: A NumPy array of any strides and a device dtype (native byte order), or what
                `numpy.asarray` makes one of. A CUDA device in this process also takes arrays of CuPy, PyTorch
                and others, by ``__cuda_array_interface__``: they are copied on the device, after the stream
                that they name, or the legacy default stream where they cannot name one.
            pinned: Whether `host` is put often. It must be a NumPy array that is read-only, and no view of a
                writable one, on every backend: a copy of what changes would be out of date. For an array that
                changes use `host_empty`, whose arrays are pinned already.

        Raises:
            TypeError: Its dtype is no element type of a device; or with `pinned`, no NumPy array.
            ValueError: With `pinned`, a writable array.
            NotSupportedError: An array on a GPU, which the device's context does not address.
            OutOfMemoryError: There is not enough device memory.
        """

    @named_arguments
    async def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array of zeros."""
        return await self.full(shape, 0, dtype)

    @named_arguments
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array to be written; like `zeros`, so that no other program's data shows."""
        return await self.full(shape, 0, dtype)

    @abc.abstractmethod
    async def full(
        self, shape: int | Sequence[int], value: complex, dtype: DTypeLike = "float64"
    ) -> AccelRef:
        """Make an array with every element set to a value.

        Raises:
            ValueError, TypeError: A negative size, or a value that the dtype cannot hold.
            OutOfMemoryError: There is not enough device memory.
        """

    @abc.abstractmethod
    def host_empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> HostArray:
        """Make a host array, not initialised, that travels to and from the device without a copy in between.

        With `put` and ``to_host(out=)`` it is copied once, by the device itself or to where the device
        has it; so are parts of it that are contiguous. On the CPU backend that is so of any host array; a
        device with memory of its own needs such. The array may be kept for as long as you like, beyond the
        end of the device; its memory is used again when no array over it is left.

        Made in another thread than the device's own, or when the device is closed, it is an ordinary array.

        Raises:
            ValueError, TypeError: A negative size, or no element type.
            MemoryError: The machine has not so much.
        """

    @abc.abstractmethod
    def lease(
        self, ref: AccelRef, *, write: bool = False, stream: object = None
    ) -> AbstractAsyncContextManager[Any]:
        """Hold an array without a copy; see `AccelRef.lease`."""

    @abc.abstractmethod
    def borrow(self, ref: AccelRef) -> AbstractAsyncContextManager[AccelRef]:
        """Hold an array of another device, so that operations of this device read it where it is.

        ``async with device.borrow(x) as borrowed:`` gives an array of this device over the same memory.
        Operations and views take it as they take others. It can only be read, and `x` is not changed
        meanwhile: operations of its own device that write to it wait, as they do for `AccelRef.lease`. So do
        not wait inside for one of these.

        Both devices are of one backend, and a device in a worker reads those in workers alone. In other
        cases, and where the hardware cannot reach the memory, `borrowed` is a copy, which is given back at
        the end. An array of this device is given as it is.

        If one of the devices is lost meanwhile, `borrowed` is there afterwards: operations have the outcome
        that they have with arrays of their own. Only `x` itself is lost with an inline device that has it.

        Raises:
            StaleRefError: The array must not be used any more.
            DeviceLostError: One of the devices is closed, or was given up.
            OutOfMemoryError: It has to be copied, and there is not enough memory.
        """

    @abc.abstractmethod
    async def synchronize(self) -> None:
        """Wait until everything launched is complete and all dropped memory is given back."""

    @abc.abstractmethod
    async def close_library(self, path: str) -> None:
        """End the actor of a library, once it has served all requests.

        It gives its memory back, and is not opened ahead in the next context. The next operation that
        names it starts another. On a device that is closed, or rebuilds its context, there is nothing to end.

        Args:
            path: Import path of the actor, with its argument if it has one.
        """

    @abc.abstractmethod
    def watch_generation(self) -> AsyncGenerator[int]:
        """Iterate over the generations: the current one first, then each new one; ends with the device.

        A slow reader sees the latest, and not each one in between. Close it (``aclosing``) if the loop
        is left early.
        """

    @abc.abstractmethod
    async def statistics(self) -> DeviceStatistics:
        """Count operations and memory of the current generation."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish what is in flight, within `close_grace`, and give the device back."""

    @abc.abstractmethod
    def _copy_from(self, ref: AccelRef) -> Awaitable[AccelRef]:
        """Copy an array of another device; see `AccelRef.copy_to`."""


def check_device(where: str, device: object) -> None:
    """Refuse what is no open device.

    Raises:
        TypeError: It is none.
        NotSupportedError: It is what has no device here, such as an entity of a cluster.
    """
    if not isinstance(device, Device):
        if without := getattr(device, "without_device", None):
            raise NotSupportedError(f"{where}: {without}")
        told = type(device).__name__
        if isinstance(device, str):
            told += f"; open it: await system.open_device({device!r})"
        elif isinstance(device, (type, FunctionType)):
            told = f"{device.__name__}; pass the device before it"
        elif hasattr(device, "devices"):
            told += "; pass one of its devices, such as group.devices[0]"
        else:
            told += what_to_do(device, is_array=False)
        raise TypeError(f"{where}: device must be an open Device, got {told}")


def owned(where: str, ref: AccelRef) -> AccelRef:
    """Return a borrowed array as its own device has it; others as they are.

    Raises:
        StaleRefError: It was given back.
    """
    block = ref.block
    if not isinstance(block, BorrowedBlock) or block.source.table is block.table:
        return ref
    block.check(where)
    return AccelRef(block.source, attrs.evolve(ref.spec, block=block.source.id))


def device_of(operation: str, *operands: Any) -> Device:
    """Find the device that an operation runs on: that of its first operand that is on one.

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
        if any(isinstance(each, Operators) for each in (several.values() if kind is dict else several)):
            told = f"a {kind.__name__}, which holds an array; pass its arrays one by one"
            raise TypeError(f"{operation}: an operand is {told}, or in one list")
    raise TypeError(
        f"{operation}: no operand is on a device; copy one there first (await device.put(array)), "
        "or ask the device itself (await device.ask(message))"
    )


def _viewing(name: str) -> ArrayFunction:
    return ArrayFunction(f"AccelRef.{name}", getattr(AccelRef, name), "value")


def _part(value: Any, index: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return cast("Sequence[Any]", value)[index]
    return AccelRef.__getitem__(value, index)


def _item(array: AccelRef | HostArray) -> Any:
    if isinstance(array, AccelRef) or array.size != 1:
        raise ValueError(f"item: the array must have exactly one element, got shape {array.shape}")
    return array.item()


async def _item_of(ref: AccelRef) -> Any:
    return _item(ref if ref.size != 1 else await ref.to_host())


DEVICE_OF.append(device_of)
METHODS["__getitem__"] = ArrayFunction("AccelRef.__getitem__", _part, "value")
METHODS.update({name: _viewing(name) for name in ("reshape", "transpose")})
METHODS.update({name: ArrayFunction(f"AccelRef.{name}", attrgetter(name), "value") for name in ("T", "mT")})
METHODS["item"] = ArrayFunction("AccelRef.item", _item, "value")
METHODS["item of ref"] = ArrayFunction("AccelRef.item", _item_of, "awaitable", is_direct=True)
