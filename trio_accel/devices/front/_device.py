"""The front of a device: what programs hold."""

from __future__ import annotations

import inspect
import operator
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import Directive, Ref, describe
from ...backends.base import (
    AccelBackend,
    DeviceInfo,
    DeviceLostError,
    DType,
    DTypeLike,
    ForeignArray,
    Isolation,
    NotSupportedError,
    QueueFullError,
    SharesCudaMemory,
)
from ..arrays._blocks import BlockTable
from ..arrays._pending import Pending
from ..arrays._ref import AccelRef
from ..base._availability import Availability
from ..base._refusals import NotAwaited, what_to_do
from ..base._statistics import DeviceStatistics
from ..engine._options import DeviceOptions
from ..engine._recovery import Losses, recovery_policy
from ..host._host_pool import HostPool
from ..inline._dispatch import InlineDispatch
from ..operations._faults import Faults
from ..operations._hooks import EngineHook, Phase
from ..operations._memory import Empty, Put
from ..operations._operation import Launch, Operation
from ..worker import INTACT, LeftMemory, WorkerDispatch
from ._device_actor import DeviceActor
from ._dispatch import Dispatch
from ._window import SubmitWindow

if TYPE_CHECKING:
    from ...actors import System

__all__ = ["Device", "device_of"]

LibraryT = TypeVar("LibraryT")
ReplyT = TypeVar("ReplyT")

_MAX_PENDING = 1024


class Device:
    """An open device. Made by `System.open_device`; also an async context manager that closes it."""

    def __init__(
        self,
        backend: AccelBackend,
        info: DeviceInfo,
        options: DeviceOptions,
        path: str,
        system: System,
        adopted: LeftMemory | None = None,
    ) -> None:
        self.backend = backend
        self.options = options
        self.system = system
        self.availability: Availability = Availability()
        # Memory that was another device's, until this one is open; what this one leaves; and who has that.
        self.adopted: LeftMemory | None = adopted
        self.left: LeftMemory | None = None
        self.adopted_by: str | None = None
        self.is_given_up: bool = False
        # What the hardware has said of its memory, if that is broken.
        self.memory_failure: BaseException | None = None
        # Arrays that the program holds by `lease`, where they outlive the context.
        self.leases = 0
        self.blocks: BlockTable
        if adopted is None:
            self.blocks = BlockTable(info.name, self.availability, keeps=options.memory_limit is None)
            self.blocks.device = self
        else:
            # Generations are counted on, so that none of an array's is above the device's.
            self.availability.generation = adopted.generation
            self._have(adopted)
        self.faults: Faults = Faults()
        self.losses: Losses = Losses(path, self.availability)
        self.hooks: list[EngineHook] = []
        self.window: SubmitWindow = SubmitWindow(info.name, options.in_flight)
        # Where the device has memory of its own, its transfers are fast from and to memory that it knows.
        self.host_pool: HostPool | None = None
        self._info = info
        self._path = path
        self._actor: Ref[DeviceActor] | None = None
        self._token = trio.lowlevel.current_trio_token()
        if not backend.shares_memory_with_host:
            self.host_pool = HostPool(is_shared=self.isolation == "process")
        self.dispatch: Dispatch = (
            WorkerDispatch(self) if self.isolation == "process" else InlineDispatch(self)
        )
        if type(self).ask is Device.ask:
            # Without a coroutine in between, which every operation would wake.
            self.ask = self.dispatch.ask  # type: ignore[method-assign]

    def __repr__(self) -> str:
        availability = self.availability
        state = "ready" if availability.is_ready else "closed" if availability.is_ended else "rebuilding"
        return f"<Device {self._path}, {state}, generation {self.generation}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()  # noqa: ASYNC102  # it shields itself

    @property
    def name(self) -> str:
        """Name of the hardware, such as ``"cpu:0"``."""
        return self._info.name

    @property
    def path(self) -> str:
        """Path of the device's actor in the tree."""
        return self._path

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        return self._info

    @property
    def generation(self) -> int:
        """Which context this is, counting from 1."""
        return self.availability.generation

    @property
    def isolation(self) -> Isolation:
        """Where its context lives: in a worker process, or in this one."""
        return self.options.isolation or self._info.isolations[0]

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries that the device has.

        Raises:
            DeviceLostError: The device is closed, lost or being rebuilt.
        """
        return self.dispatch.libraries

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of its memory, and of that of its host arrays, for the runtime's own use."""
        slabs = () if self.host_pool is None else self.host_pool.slabs.values()
        return (
            *self.dispatch.descriptors,
            *(slab.descriptor for slab in slabs if slab.descriptor is not None),
        )

    @property
    def pending(self) -> int:
        """Requests that wait while the context is being rebuilt; 0 while there is one."""
        return self.dispatch.pending

    async def ask(self, operation: Operation[LibraryT, ReplyT], /) -> ReplyT:
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
            ContextPoisonedError: The context was lost while it was in flight, or while its library was
                opened for it.
            DeviceLostError: The device is closed, or gave up.
            QueueFullError: Too many requests wait for the context.
        """
        return await self.dispatch.ask(operation)

    def check_ask(self, operation: object) -> None:
        """Refuse what is no operation, and whoever is in another thread or Trio run.

        Raises:
            TypeError: It is no operation.
            RuntimeError: The device is another run's.
        """
        if not _is_operation(type(operation)):  # type: ignore[arg-type]  # mypy takes no class for hashable
            raise _no_operation(operation, "ask")
        try:
            # As `_is_own_run`, without the call.
            if trio.lowlevel.current_trio_token() is self._token:
                return
        except RuntimeError:
            # Nobody's.
            pass
        raise self._foreign_run("ask")

    def submit(self, operation: Operation[LibraryT, ReplyT], /) -> Pending[ReplyT]:
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
        if not _is_operation(type(operation)):  # type: ignore[arg-type]  # mypy takes no class for hashable
            raise _no_operation(operation, "submit")
        self._check_run("submit")
        return self.dispatch.submit(operation)

    async def put(self, host: npt.ArrayLike | SharesCudaMemory) -> AccelRef:
        """Copy an array to the device; returns when the original may be changed again.

        Args:
            host: A NumPy array of any strides and a device dtype (native byte order), or what
                `numpy.asarray` makes one of. A CUDA device in this process also takes arrays of CuPy, PyTorch
                and others, by ``__cuda_array_interface__``: they are copied on the device, after the stream
                that they name, or the legacy default stream where they cannot name one.

        Raises:
            TypeError: Its dtype is no element type of a device.
            NotSupportedError: An array on a GPU, which the device's context does not address.
            OutOfMemoryError: There is not enough device memory.
        """
        _check_host(host)
        foreign = ForeignArray.of(host)
        if foreign is not None:
            self._check_foreign()
            return await self.ask(Put(foreign))
        # `asarray` would drop the mask of a masked array, which `Put` refuses.
        array: npt.NDArray[Any] = np.asanyarray(host)
        return await self.ask(Put(array))

    async def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array of zeros."""
        return await self.full(shape, 0, dtype)

    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """Make an array to be written; like `zeros`, so that no other program's data shows."""
        return await self.full(shape, 0, dtype)

    async def full(
        self, shape: int | Sequence[int], value: complex, dtype: DTypeLike = "float64"
    ) -> AccelRef:
        """Make an array with every element set to a value.

        Raises:
            ValueError, TypeError: A negative size, or a value that the dtype cannot hold.
            OutOfMemoryError: There is not enough device memory.
        """
        return await self.ask(Empty(_extents(shape), DType.of(dtype), value))

    def host_empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> npt.NDArray[Any]:
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
        extents = _extents(shape)
        if any(isinstance(extent, bool) or operator.index(extent) < 0 for extent in extents):
            raise ValueError(f"host_empty: shape must hold sizes of at least 0, got {shape!r}")
        element, pool = DType.of(dtype).dtype, self.host_pool
        if pool is None or pool.is_closed or not self._is_own_run():
            return np.empty(extents, element)
        return pool.empty(tuple(map(operator.index, extents)), element)

    @asynccontextmanager
    @enable_ki_protection
    async def lease(
        self, ref: AccelRef, *, write: bool = False, stream: object = None
    ) -> AsyncGenerator[Any, None]:
        """Hold an array without a copy; see `AccelRef.lease`."""
        if ref.device is not self:
            raise ValueError(f"lease: the array is on {ref.device.path}, not on {self.path}")
        self._check_run("lease")
        async with self.dispatch.lease(ref, write=write, stream=stream) as array:
            yield array

    @enable_ki_protection
    async def synchronize(self) -> None:
        """Wait until everything launched is complete and all dropped memory is given back."""
        self._check_run("synchronize")
        await self.dispatch.synchronize()

    def watch_generation(self) -> AsyncGenerator[int, None]:
        """Iterate over the generations: the current one first, then each new one; ends with the device.

        A slow reader sees the latest, and not each one in between. Close it (``aclosing``) if the loop
        is left early.
        """
        return self.availability.watch()

    @enable_ki_protection
    async def statistics(self) -> DeviceStatistics:
        """Count operations and memory of the current generation."""
        self._check_run("statistics")
        return await self.dispatch.statistics()

    @enable_ki_protection
    async def close(self) -> None:
        """Finish what is in flight, within `close_grace`, and give the device back."""
        self._check_run("close")
        if self._actor is not None:
            with trio.CancelScope(shield=True):
                # Bounded by the actor's grace.
                await self._actor.stop()

    @property
    def is_open(self) -> bool:
        """Whether it was opened; also when it has ended since."""
        return self._actor is not None

    def _have(self, memory: LeftMemory) -> None:
        self.blocks = memory.blocks
        self.blocks.move(self, self.availability, keeps=self.options.memory_limit is None)

    def have_back(self, memory: LeftMemory) -> None:
        """The device that was to adopt what this one left could not be opened."""
        self._have(memory)
        self.left, self.adopted_by = memory, None
        memory.leave(self.system)

    async def wait_ended(self) -> bool:
        """Whether the device is closed or was given up; waits for the end of one that is ending."""
        await trio.lowlevel.checkpoint()
        if not self.availability.is_ended or self._actor is None:
            return False
        await self._actor.wait_terminated()
        return True

    def fate_of_arrays(self) -> str:
        """What becomes of the arrays of a device that was given up, to be put behind the reason."""
        if self.adopted_by is not None:
            return f"; its arrays were adopted by the next device, {self.adopted_by}"
        if self.left is not None and self.left.chunks.blocks:
            return INTACT
        return ""

    async def start(self, name: str) -> None:
        """Start the device's actors."""
        options = self.options
        await self.dispatch.prepare()
        self._actor = await self.system.spawn(
            DeviceActor,
            self,
            name=name,
            policy=recovery_policy(
                options, directives={Exception: Directive.STOP}, grace=options.close_grace + 10.0
            ),
        )
        self.adopted = None

    def end(self, *, is_given_up: bool) -> None:
        """The device is closed or given up: no context follows."""
        self.availability.end()
        self.is_given_up = is_given_up
        if is_given_up:
            self.losses.given_up(self.fate_of_arrays())
        if self.left is None:
            self.blocks.close()
        if self.host_pool is not None:
            self.host_pool.close()

    def check_pending(self, pending: int) -> None:
        """Refuse a request more than may wait for a context.

        Raises:
            QueueFullError: So many wait already.
        """
        if pending >= _MAX_PENDING:
            raise QueueFullError(
                f"{_MAX_PENDING} requests wait already for the context to be rebuilt", device=self.name
            )

    def validated(self, launch: Launch) -> None:
        """Tell the hooks of an operation that was validated."""
        for hook in tuple(self.hooks):
            hook(Phase.VALIDATE, launch)

    async def lost(self) -> DeviceLostError:
        """Why there is no device any more; a fresh instance for every asker."""
        if self._actor is None:
            return DeviceLostError("the device was never opened", device=self.name)
        error = (await self._actor.wait_terminated()).error
        if error is None:
            return DeviceLostError("the device is closed", device=self.name)
        # What made it hopeless says more than who failed over it.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DeviceLostError):
            cause = cause.__cause__
        why = describe(error) if cause is None else cause.message
        lost = DeviceLostError(
            f"{self._path}: the device was given up: {why}{self.fate_of_arrays()}",
            device=self.name,
            generation=self.generation,
        )
        lost.__cause__ = error
        return lost

    def _check_foreign(self) -> None:
        """Refuse arrays of other CUDA libraries where they are in another memory."""
        if self.isolation == "process" or self.backend.shares_memory_with_host:
            raise NotSupportedError(
                f"put: the array is in the memory of a GPU, which {self.path} does not address: that takes "
                'backend "cuda" with isolation="inline"; copy the array to the host first',
                device=self.name,
                operation="put",
                backend=self.backend.name,
            )

    def _check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run."""
        if not self._is_own_run():
            raise self._foreign_run(verb)

    def _foreign_run(self, verb: str) -> RuntimeError:
        return RuntimeError(
            f"{verb}: device {self.path} belongs to another thread or Trio run; from a thread that "
            "the run has started, use trio.from_thread.run"
        )

    def _is_own_run(self) -> bool:
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False


def _check_host(host: object) -> None:
    """Refuse what is there, or is not there yet: NumPy would make an array of objects of it."""
    if isinstance(host, AccelRef):
        raise TypeError(
            f"put: the array is on {host.device.path} already; await ref.copy() copies it there, and "
            "await ref.copy_to(device) to another device"
        )
    if inspect.iscoroutine(host) or isinstance(host, NotAwaited):
        raise TypeError(f"put: host must be an array, got {type(host).__name__}{what_to_do(host)}")


def _extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, (int, np.integer)):
        return (int(shape),)
    if isinstance(shape, Iterable):
        return tuple(shape)
    raise TypeError(f"shape must be a size or a sequence of sizes, got {shape!r}")


@cache
def _is_operation(cls: Any) -> bool:
    library: object = getattr(cls, "library", None)
    return issubclass(cls, Operation) and isinstance(library, str)


def _no_operation(operation: object, verb: str) -> TypeError:
    cls: type[object] = type(operation)
    if not isinstance(operation, Operation):
        return TypeError(f"{verb}: {operation!r} is no operation of a device")
    return TypeError(
        f"{verb}: {cls.__name__} does not say which library actor serves it; "
        "give the class an attribute library = 'package.module:Class'"
    )


def device_of(operation: str, *operands: Any) -> Device:
    """Find the device that an operation runs on: that of its first operand that is on one.

    Raises:
        TypeError: None of the operands is on a device.
    """
    for operand in operands:
        if type(operand) is AccelRef:
            return operand.device
        device = getattr(operand, "device", None)
        if isinstance(device, Device):
            return device
    for operand in operands:
        if inspect.iscoroutine(operand) or isinstance(operand, NotAwaited):
            raise TypeError(f"{operation}: an operand is a {type(operand).__name__}{what_to_do(operand)}")
    raise TypeError(
        f"{operation}: no operand is on a device; copy one there first (await device.put(array)), "
        "or ask the device itself (await device.ask(message))"
    )
