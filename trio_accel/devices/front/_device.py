"""A device that is open: the front of its dispatch, and its supervised address."""

from __future__ import annotations

import inspect
import operator
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Never, cast

import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import Actor, ActorContext, Directive, SupervisorScope, System, named_arguments
from ...backends.base import (
    AccelBackend,
    DeviceInfo,
    DType,
    DTypeLike,
    ForeignArray,
    Isolation,
    NotSupportedError,
    SharesCudaMemory,
)
from .._options import DeviceOptions
from ..arrays._pending import Pending
from ..arrays._ref import AccelRef, Device, DeviceRequest, LibraryT
from ..base._refusals import NotAwaited, what_to_do
from ..base._statistics import DeviceStatistics, RecoveryCost
from ..base._views import check_apart
from ..engine._device_state import DeviceState
from ..engine._recovery import recovery_policy
from ..inline._dispatch import InlineDispatch
from ..operations._hooks import Around, Ask, EngineHook
from ..operations._operation import Operand, Operation, ReplyT, refuse_recording
from ..worker import LeftMemory, WorkerDispatch
from ._memory import Assign, Copy, Empty, Fill, Put, ToHost, copy_between

__all__ = ["DeviceActor", "OpenDevice", "opened"]


class OpenDevice(Device):
    """A `Device`, with the runtime behind it.

    Attributes:
        state: State that its parts share.
        dispatch: Takes its operations, over all its generations: in this process, or to workers.
    """

    def __init__(
        self,
        backend: AccelBackend,
        info: DeviceInfo,
        options: DeviceOptions,
        path: str,
        system: System,
        adopted: LeftMemory | None = None,
    ) -> None:
        blocks = None if adopted is None else adopted.blocks
        self.state: DeviceState = DeviceState(backend, info, options, path, system, blocks)
        if adopted is not None:
            # Generations are counted on, so that no array has one above the device's.
            self.state.availability.generation = adopted.generation
        self._have_blocks()
        self.dispatch: InlineDispatch | WorkerDispatch = (
            WorkerDispatch(self.state, adopted) if self.isolation == "process" else InlineDispatch(self.state)
        )
        self._around: list[Around] = []
        self._set_ask()

    def __repr__(self) -> str:
        availability = self.state.availability
        state = "ready" if availability.is_ready else "closed" if availability.is_ended else "rebuilding"
        return f"<Device {self.path}, {state}, generation {self.generation}>"

    @property
    def name(self) -> str:
        """See `Device.name`."""
        return self.state.name

    @property
    def path(self) -> str:
        """See `Device.path`."""
        return self.state.path

    @property
    def info(self) -> DeviceInfo:
        """See `Device.info`."""
        return self.state.info

    @property
    def system(self) -> System:
        """See `Device.system`."""
        return self.state.system

    @property
    def options(self) -> DeviceOptions:
        """See `Device.options`."""
        return self.state.options

    @property
    def generation(self) -> int:
        """See `Device.generation`."""
        return self.state.availability.generation

    @property
    def losses(self) -> int:
        """See `Device.losses`."""
        return self.state.losses.count

    @property
    def recovery(self) -> RecoveryCost:
        """See `Device.recovery`."""
        return self.state.recoveries.cost()

    @property
    def isolation(self) -> Isolation:
        """See `Device.isolation`."""
        return self.state.isolation

    @property
    def libraries(self) -> Sequence[str]:
        """See `Device.libraries`."""
        return self.dispatch.libraries

    @property
    def pending(self) -> int:
        """See `Device.pending`."""
        return self.dispatch.pending

    @property
    def is_open(self) -> bool:
        """See `Device.is_open`."""
        return self.state.actor is not None

    @property
    def is_ready(self) -> bool:
        """See `Device.is_ready`."""
        return self.state.availability.is_ready

    @property
    def is_ended(self) -> bool:
        """See `Device.is_ended`."""
        return self.state.availability.is_ended

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of its memory, and of that of its host arrays."""
        pool = self.state.host_pool
        slabs = () if pool is None else pool.slabs.values()
        return (
            *self.dispatch.descriptors,
            *(slab.descriptor for slab in slabs if slab.descriptor is not None),
        )

    async def ask(self, operation: DeviceRequest[LibraryT, ReplyT], /, **_unknown: Never) -> ReplyT:
        """See `Device.ask`."""
        return await self.dispatch.ask(cast("Operation[LibraryT, ReplyT]", operation), **_unknown)

    @contextmanager
    def observed(self, hook: EngineHook, around: Around) -> Generator[None, None, None]:
        """Have operations seen, at every step and by their asks, inside the ``with``.

        Args:
            hook: Called at every step of every operation. Where the device works in a worker, all steps
                behind the validation are told at the end, and `Launch.times` says when they were.
            around: Makes what is asked in place of the dispatch, in the task of the asker.
        """
        self.state.hooks.append(hook)
        self.state.on_hooks()
        self._around.append(around)
        self._set_ask()
        try:
            yield
        finally:
            self._around.remove(around)
            self._set_ask()
            self.state.hooks.remove(hook)
            self.state.on_hooks()

    def _set_ask(self) -> None:
        cls = type(self)
        # Without a coroutine in between, which every operation would wake. A subclass may have its own.
        ask: Ask = self.dispatch.ask if cls.ask is OpenDevice.ask else partial(cls.ask, self)
        for around in self._around:
            ask = around(ask)
        self.ask = ask  # type: ignore[method-assign, assignment]

    @named_arguments
    def submit(self, operation: DeviceRequest[LibraryT, ReplyT], /) -> Pending[ReplyT]:
        """See `Device.submit`."""
        return self.dispatch.submit(cast("Operation[LibraryT, ReplyT]", operation))

    @named_arguments
    async def put(self, host: npt.ArrayLike | SharesCudaMemory) -> AccelRef:
        """See `Device.put`."""
        _check_host(host)
        foreign = ForeignArray.of(host)
        if foreign is not None:
            self._check_foreign()
            return await self.ask(Put(foreign))
        # `asarray` would drop the mask of a masked array, which `Put` refuses.
        array: npt.NDArray[Any] = np.asanyarray(host)
        return await self.ask(Put(array))

    @named_arguments
    async def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """See `Device.zeros`."""
        return await self.full(shape, 0, dtype)

    @named_arguments
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> AccelRef:
        """See `Device.empty`."""
        return await self.full(shape, 0, dtype)

    @named_arguments
    async def full(
        self, shape: int | Sequence[int], value: complex, dtype: DTypeLike = "float64"
    ) -> AccelRef:
        """See `Device.full`."""
        return await self.ask(Empty(_extents(shape), DType.of(dtype), value))

    @named_arguments
    def host_empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> npt.NDArray[Any]:
        """See `Device.host_empty`."""
        extents = _extents(shape)
        if any(isinstance(extent, bool) or operator.index(extent) < 0 for extent in extents):
            raise ValueError(f"host_empty: shape must hold sizes of at least 0, got {shape!r}")
        element, pool = DType.of(dtype).dtype, self.state.host_pool
        if pool is None or pool.is_closed or not self.state.is_own_run():
            return np.empty(extents, element)
        return pool.empty(tuple(map(operator.index, extents)), element)

    @asynccontextmanager
    @enable_ki_protection
    async def lease(
        self, ref: AccelRef, *, write: bool = False, stream: object = None
    ) -> AsyncGenerator[Any, None]:
        """See `AccelRef.lease`."""
        if ref.device is not self:
            raise ValueError(f"lease: the array is on {ref.device.path}, not on {self.path}")
        if write:
            ref.block.check_writable("lease")
            check_apart("lease: the array", ref.spec)
        self.state.check_run("lease")
        refuse_recording("lease", "hold the array before the capture, or after a replay")
        async with self.dispatch.lease(ref, write=write, stream=stream) as array:
            yield array

    @enable_ki_protection
    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.state.check_run("synchronize")
        await self.dispatch.synchronize()

    @enable_ki_protection
    async def close_library(self, path: str) -> None:
        """See `Device.close_library`."""
        self.state.check_run("close_library")
        await self.dispatch.close_library(path)

    def watch_generation(self) -> AsyncGenerator[int, None]:
        """See `Device.watch_generation`."""
        return self.state.availability.watch()

    @named_arguments
    @enable_ki_protection
    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        self.state.check_run("statistics")
        return await self.dispatch.statistics()

    @enable_ki_protection
    async def close(self) -> None:
        """See `Device.close`."""
        self.state.check_run("close")
        if self.state.actor is not None:
            with trio.CancelScope(shield=True):
                # Bounded by the actor's grace.
                await self.state.actor.stop()

    async def wait_ended(self) -> bool:
        """Tell whether the device is closed or was given up; waits for the end of one that is ending."""
        await trio.lowlevel.checkpoint()
        if not self.state.availability.is_ended or self.state.actor is None:
            return False
        await self.state.actor.wait_terminated()
        return True

    async def start(self, parent: System | SupervisorScope) -> None:
        """Start the device's actors, below the system or a supervisor in it."""
        options = self.options
        await self.dispatch.prepare()
        self.state.actor = await parent.spawn(
            DeviceActor,
            self.state,
            self.dispatch,
            name=self.path.rpartition("/")[2],
            policy=recovery_policy(
                options, directives={Exception: Directive.STOP}, grace=options.close_grace + 10.0
            ),
        )
        self.dispatch.started()

    def have_back(self, memory: LeftMemory) -> None:
        """Take the memory back: the device that was to adopt it could not be opened."""
        self._have_blocks()
        assert isinstance(self.dispatch, WorkerDispatch)  # others leave nothing
        self.dispatch.have_back(memory)

    def _have_blocks(self) -> None:
        state = self.state
        state.blocks.move(self, state.availability, keeps=self.options.memory_limit is None)

    def _to_host(self, ref: AccelRef, out: npt.NDArray[Any] | None) -> Awaitable[npt.NDArray[Any]]:
        return self.ask(ToHost(ref, out))

    def _copy(self, ref: AccelRef, dtype: DType) -> Awaitable[AccelRef]:
        return self.ask(Copy(ref, dtype))

    def _copy_from(self, ref: AccelRef) -> Awaitable[AccelRef]:
        return copy_between(opened(ref.device).state.backend, ref, self)

    def _assign(self, ref: AccelRef, value: Operand | complex | np.generic) -> Awaitable[AccelRef]:
        return self.ask(Assign(ref, value))

    def _fill(self, ref: AccelRef, value: complex) -> Awaitable[AccelRef]:
        return self.ask(Fill(ref, value))

    def _check_foreign(self) -> None:
        """Refuse arrays of other CUDA libraries where they are in another memory."""
        backend = self.state.backend
        if self.isolation == "process" or backend.shares_memory_with_host:
            raise NotSupportedError(
                f"put: the array is in the memory of a GPU, which {self.path} does not address: that takes "
                'backend "cuda" with isolation="inline"; copy the array to the host first',
                device=self.name,
                operation="put",
                backend=backend.name,
            )


def opened(device: Device) -> OpenDevice:
    """Return the device with the runtime behind it, which every device has.

    Raises:
        TypeError: It is no device of a system.
    """
    if not isinstance(device, OpenDevice):
        raise TypeError(f"a device must be opened by a system, got {device!r}")
    return device


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


class DeviceActor(Actor):
    """Restarts the context of a device, within the device's intensity."""

    def __init__(self, state: DeviceState, dispatch: InlineDispatch | WorkerDispatch) -> None:
        self._state = state
        self._dispatch = dispatch

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the context; when it is given up, so is the device."""
        state = self._state
        try:
            async with self._dispatch.open(context):
                context.observe_restarts(state.losses.restarted)
                context.show_note(lambda: str(state.recoveries.cost()))
                await self._dispatch.start_context(context)
                yield
        finally:
            # One whose opening failed was never a device.
            state.end(is_given_up=state.actor is not None and not context.is_stopping)
