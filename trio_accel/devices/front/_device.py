"""An open device: the front of its dispatch, and its supervised address."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import (
    Actor,
    ActorContext,
    ActorSystem,
    Directive,
    NotAwaited,
    SupervisorScope,
    TaskLock,
    leavable_context,
    named_arguments,
    not_copied,
    opens,
    run_in_thread,
    to_await,
)
from ...backends.base import (
    AccelBackend,
    AccelError,
    DeviceInfo,
    DeviceLostError,
    DType,
    DTypeLike,
    ForeignArray,
    HostArray,
    Ints,
    Isolation,
    NotSupportedError,
    SharesCudaMemory,
    host_array,
)
from ...backends.base.contract.foreign_names import elsewhere
from ..base._host_pool import MAX_INLINE_BYTES, Copying
from ..base._options import DeviceOptions
from ..base._progress import chosen_listener
from ..base._refusals import shown, what_to_do
from ..base._statistics import DeviceStatistics, KeptStatistics, RecoveryCost
from ..base._views import check_apart
from ..dispatch import Borrowed, LeftMemory, Stay, WorkerDispatch, spin_together
from ..dispatch._inline_dispatch import InlineDispatch
from ..dispatch._loans import InlineBorrowed, Loan
from ..engine._device_state import DeviceState
from ..engine._recovery import recovery_policy
from ..operations._blocks import ForeignMemory, held
from ..operations._chain import ArrayFunction, Chain, ChainStep, Layouts
from ..operations._hooks import Around, Ask, EngineHook, LaunchRecorder
from ..operations._operation import Operation, refuse_recording
from ..operations._pending import Pending, ReplyT
from ..operations._ref import AccelRef, Device, DeviceRequest, LibraryT, owned
from ._ahead import Body
from ._chains import Chains
from ._html import html_table
from ._memory import Copy, Empty, PeerCopy, Put, copy_between, is_large, refuse_as_method

__all__ = ["DeviceActor", "Lent", "OpenDevice", "Stay", "exclusive", "lend", "opened", "poll_answers"]


class OpenDevice(Device):
    """A `Device` with its runtime.

    Attributes:
        state: The state that its parts share.
        dispatch: Takes its operations over all its generations: in this process, or for workers.
    """

    def __init__(
        self,
        backend: AccelBackend,
        info: DeviceInfo,
        options: DeviceOptions,
        path: str,
        system: ActorSystem,
        adopted: LeftMemory | None = None,
    ) -> None:
        blocks = None if adopted is None else adopted.blocks
        self.state: DeviceState = DeviceState(backend, info, options, path, system, blocks)
        if adopted is not None:
            # Generations continue, so that no array has a generation above the device's.
            self.state.availability.generation = adopted.generation
        self._have_blocks()
        self.dispatch: InlineDispatch | WorkerDispatch = (
            WorkerDispatch(self.state, adopted) if self.isolation == "process" else InlineDispatch(self.state)
        )
        # `exclusive` takes this lock.
        self.turn: TaskLock = TaskLock()
        self._around: list[Around] = []
        self._recorders: list[LaunchRecorder] = []
        self._set_ask()
        self.chains: Chains = Chains(self, self.state)
        # Set directly, to save a coroutine.
        self.ask_chain = self.chains.ask  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # with it, type checkers would find every attribute

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else elsewhere(name)
            raise AttributeError(f"a Device has no attribute {name!r}{hint}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a Device", "open one where it is needed, and send arrays by await ref.to_host()")

    def __repr__(self) -> str:
        return f"<Device {self.path}, {self.condition}, generation {self.generation}>"

    def _repr_html_(self) -> str:
        return html_table(
            ("device", self.path),
            (
                ("hardware", f"{self.info.description}, {self.info.total_memory / 2**30:.1f} GiB"),
                ("state", self.condition),
                ("generation", self.generation),
                ("losses", self.losses),
                ("isolation", self.isolation),
                ("waiting requests", self.pending),
            ),
        )

    @property
    def condition(self) -> str:
        """A word for its state: ready, closed, rebuilding or pausing."""
        availability = self.state.availability
        if availability.is_shut and not availability.is_ended:
            return "given up for now"
        return "ready" if availability.is_ready else "closed" if availability.is_ended else "rebuilding"

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
    def system(self) -> ActorSystem:
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
    def outage(self) -> DeviceLostError | None:
        """See `Device.outage`."""
        return self.state.outage() if self.state.availability.is_shut else None

    @property
    def descriptors(self) -> Ints:
        """The descriptors of its memory, and of its host arrays' memory."""
        pool = self.state.host_pool
        slabs = () if pool is None else pool.slabs.values()
        return (
            *self.dispatch.descriptors,
            *(slab.descriptor for slab in slabs if slab.descriptor is not None),
        )

    def ask_chain(self, chain: Chain, /) -> Awaitable[Any]:
        """See `Device.ask_chain`."""
        return self.chains.ask(chain)

    def look_ahead(self, step: ChainStep, /) -> Layouts:
        """See `Device.look_ahead`."""
        call = self.state.system.call
        if call is not None and not self.state.is_own_run():
            layouts: Layouts = call(partial(self.chains.look_ahead, step))
            return layouts
        self.state.check_run("shape")
        return self.chains.look_ahead(step)

    def body_of(self, step: ChainStep, is_whole: Callable[[ArrayFunction], bool], /) -> Body:
        """Return the operations that a composed function asks for, without a launch.

        Args:
            step: A call of the function.
            is_whole: Whether the body's calls of another composed function are kept as calls.

        Raises:
            NotSupportedError: The body writes to an array, reads elements on the host, or waits.
        """
        call = self.state.system.call
        if call is not None and not self.state.is_own_run():
            body: Body = call(partial(self.chains.body_of, step, is_whole))
            return body
        return self.chains.body_of(step, is_whole)

    async def ask(self, operation: DeviceRequest[LibraryT, ReplyT], /, **_unknown: Never) -> ReplyT:
        """See `Device.ask`."""
        return await self.dispatch.ask(cast("Operation[LibraryT, ReplyT]", operation), **_unknown)

    @contextmanager
    def observed(self, hook: EngineHook, around: Around) -> Generator[None]:
        """Observe operations inside the ``with``, at every step and around each `ask`.

        Args:
            hook: Called at every step of every operation. If the device runs in a worker, all steps after the
                validation are reported at the end, and `Launch.times` has their times.
            around: Returns a replacement of the dispatch, for the caller's task.
        """
        self.state.hooks.append(hook)
        self.state.on_hooks()
        try:
            with self._asked_by(around):
                yield
        finally:
            self.state.hooks.remove(hook)
            self.state.on_hooks()

    @contextmanager
    def recorded(self, recorder: LaunchRecorder) -> Generator[None]:
        """Call a recorder with operations and writes inside the ``with``."""
        self._recorders.append(recorder)
        self.state.validators.append(recorder.validated)
        try:
            with self._asked_by(recorder.around):
                yield
        finally:
            self.state.validators.remove(recorder.validated)
            self._recorders.remove(recorder)

    @contextmanager
    def _asked_by(self, around: Around) -> Generator[None]:
        self._around.append(around)
        self._set_ask()
        try:
            yield
        finally:
            self._around.remove(around)
            self._set_ask()

    def _set_ask(self) -> None:
        cls = type(self)
        # Set directly, to save a coroutine that every operation would wake. A subclass may have its own.
        ask: Ask = self.dispatch.ask if cls.ask is OpenDevice.ask else partial(cls.ask, self)
        for around in self._around:
            ask = around(ask)
        self.ask = ask  # type: ignore[method-assign, assignment]

    @named_arguments
    def submit(self, operation: DeviceRequest[LibraryT, ReplyT], /) -> Pending[ReplyT]:
        """See `Device.submit`."""
        asked = cast("Operation[LibraryT, ReplyT]", operation)
        pending = self.dispatch.submit(asked)
        for recorder in self._recorders:
            recorder.submitted(pending)
        return pending

    @to_await("device.put(...)")
    @named_arguments
    async def put(self, host: npt.ArrayLike | SharesCudaMemory, *, pinned: bool = False) -> AccelRef:
        """See `Device.put`."""
        try:
            _check_host(host)
            if pinned:
                return await self.ask(Put(await self._pinned(host)))
            foreign = ForeignArray.of(host)
            if foreign is not None:
                self._check_foreign()
                return await self.ask(Put(foreign))
            array = host_array("put: host", host)
            if chosen_listener() is not None and is_large(array):
                return await copy_between(self.state.backend, array, self)
            return await self.ask(Put(array))
        except (TypeError, ValueError, AccelError) as error:
            refuse_as_method("put", error)
            raise

    @to_await("device.full(...)")
    @named_arguments
    async def full(
        self, shape: int | Sequence[int], value: complex, dtype: DTypeLike = "float64"
    ) -> AccelRef:
        """See `Device.full`."""
        try:
            return await self.ask(Empty(_extents(shape), DType.of(dtype), value))
        except (TypeError, ValueError, AccelError) as error:
            refuse_as_method("full", error)
            raise

    @named_arguments
    def host_empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64") -> HostArray:
        """See `Device.host_empty`."""
        extents = _extents(shape)
        if any(isinstance(extent, bool) or operator.index(extent) < 0 for extent in extents):
            raise ValueError(f"host_empty: shape must hold sizes of at least 0, got {shape!r}")
        element, pool = DType.of(dtype).dtype, self.state.host_pool
        if pool is None or pool.is_closed or not self.state.is_own_run():
            return np.empty(extents, element)
        return pool.empty(tuple(map(operator.index, extents)), element)

    @leavable_context
    @enable_ki_protection
    async def lease(
        self, ref: AccelRef, *, write: bool = False, stream: object = None
    ) -> AsyncGenerator[Any]:
        """See `AccelRef.lease`."""
        if ref.device is not self:
            raise ValueError(f"lease: the array is on {ref.device.path}, not on {self.path}")
        if write:
            ref.block.check_writable("lease")
            check_apart("lease: the array", ref.spec)
        self.state.check_run("lease")
        refuse_recording("lease", "hold the array before the capture, or after a replay")
        owned_ref = owned("lease", ref)
        try:
            async with opened(owned_ref.device).dispatch.lease(
                owned_ref, write=write, stream=stream
            ) as array:
                hold = owned_ref.block.hold()
                if not isinstance(array, np.ndarray):
                    # A library keeps this object in the arrays that it makes of a GPU's array. The object
                    # refuses use after the lease.
                    weakref.finalize(array, _let_go, hold).atexit = False
                    yield array
                    return
                host = held(cast("HostArray", array), hold)
                try:
                    yield host
                finally:
                    host.flags.writeable = False
        finally:
            for recorder in self._recorders if write else ():
                recorder.written(owned_ref.block)

    @opens("the array is not borrowed yet: async with device.borrow(ref) as borrowed")
    @enable_ki_protection
    async def borrow(self, ref: AccelRef) -> AsyncGenerator[AccelRef]:
        """See `Device.borrow`."""
        self.state.check_run("borrow")
        refuse_recording("borrow", "copy the array to the device before the capture")
        if not isinstance(cast("object", ref), AccelRef):
            description = f"{type(ref).__name__}{what_to_do(ref)}"
            raise TypeError(f"borrow: ref must be an AccelRef of another device, got {description}")
        ref = owned("borrow", ref)
        ref.block.check("borrow", ref.spec)
        if ref.device is self:
            yield ref
            return
        async with lend("borrow", [ref], [self]) as lent, lent.to(self) as borrowed:
            yield borrowed[0]

    @enable_ki_protection
    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.state.check_run("synchronize")
        self.state.blocks.spare = None
        await self.dispatch.synchronize()

    @enable_ki_protection
    async def close_library(self, path: str) -> None:
        """See `Device.close_library`."""
        self.state.check_run("close_library")
        await self.dispatch.close_library(path)

    def watch_generation(self) -> AsyncGenerator[int]:
        """See `Device.watch_generation`."""
        return self.state.availability.watch()

    @named_arguments
    @enable_ki_protection
    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        self.state.check_run("statistics")
        statistics = await self.dispatch.statistics()
        chains = KeptStatistics.of(self.chains.kept.counts)
        return attrs.evolve(statistics, plan_caches={"application": chains, **statistics.plan_caches})

    @enable_ki_protection
    async def close(self) -> None:
        """See `Device.close`."""
        self.state.check_run("close")
        self.state.blocks.spare = None
        if self.state.actor is not None:
            with trio.CancelScope(shield=True):
                # The actor's grace limits the time.
                await self.state.actor.stop()

    async def wait_ended(self) -> bool:
        """Return whether the device has ended. If it is ending, wait for the end first."""
        await trio.lowlevel.checkpoint()
        if not self.state.availability.is_ended or self.state.actor is None:
            return False
        await self.state.actor.wait_terminated()
        return True

    async def start(self, parent: ActorSystem | SupervisorScope) -> None:
        """Start the device's actors, below the system or one of its supervisors."""
        options = self.options
        await self.dispatch.prepare()
        self.state.actor = await parent.spawn(
            DeviceActor,
            self.state,
            self.dispatch,
            name=self.path.rpartition("/")[2],
            policy=recovery_policy(
                options,
                directives={Exception: Directive.STOP},
                grace=options.close_grace + 10.0,
                reopens=options.on_failure == "reopen",
            ),
        )
        self.dispatch.started()

    def take_back(self, memory: LeftMemory) -> None:
        """Take the memory back, because the adopting device could not be opened."""
        self._have_blocks()
        assert isinstance(self.dispatch, WorkerDispatch)  # others do not leave memory
        self.dispatch.take_back(memory)

    def _have_blocks(self) -> None:
        state = self.state
        state.blocks.move(self, state.availability, keeps=self.options.memory_limit is None)

    async def _copy_from(self, ref: AccelRef) -> AccelRef:
        ref = owned("copy_to", ref)
        if ref.device is self:
            return await self.ask(Copy(ref))
        source = opened(ref.device)
        source.state.check_run("copy_to")
        if not await _reaches(self, source):
            return await copy_between(source.state.backend, ref, self)
        async with lend("copy_to", [ref], [self]) as lent, lent.to(self) as borrowed:
            return await self.ask(PeerCopy(borrowed[0]))

    async def _pinned(self, array: object) -> HostArray:
        """Return the copy of a read-only array that the device transfers on its own, or make it.

        If no copy is needed, return the array.
        """
        host, pool = _check_lasting(array), self.state.host_pool
        if (
            pool is None
            or pool.is_closed
            or host.nbytes <= MAX_INLINE_BYTES
            or isinstance(host, np.ma.MaskedArray)
        ):
            return host
        self.state.check_run("put")
        try:
            DType.of(host.dtype)
        except TypeError:
            # `Put` refuses it.
            return host
        copy = pool.copy_of(host)
        if copy is None:
            copy = pool.stage(host.nbytes).array(host.shape, host.dtype)
            await run_in_thread(Copying(copy, host).run)
            pool.keep(host, copy)
        return copy

    def _check_foreign(self) -> None:
        """Refuse arrays of other CUDA libraries if the device cannot address their memory."""
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
    """Return the device with its runtime, which every device has.

    Raises:
        TypeError: It is not a device of a system.
    """
    if not isinstance(device, OpenDevice):
        raise TypeError(f"a device must be opened by a system, got {device!r}")
    return device


@leavable_context
@enable_ki_protection
async def lend(
    reader: str, refs: Sequence[AccelRef], devices: Sequence[Device], stay: Stay | None = None
) -> AsyncGenerator[Lent]:
    """Lease arrays to devices that read them. Operations that write to them wait until the last reader ends.

    If a device cannot reach an array, the array is first copied to it through the host, and is not leased.

    Operations inside must not wait for an operation that waits for these arrays, or for another operation of
    its library. So they must belong to a library that never writes to an existing array, such as
    `PeerCopyActor`.

    Args:
        reader: The name of the reader, for errors.
        refs: The arrays.
        devices: The devices.
        stay: Determines how long their workers keep the memory mapped; None while they read the arrays.

    Raises:
        StaleRefError, DeviceLostError: As for a lease.
        OutOfMemoryError: There is not enough memory for a copy.
    """
    refuse_recording(reader, "read arrays of other devices before or after a replay")
    owners = [owned(reader, ref) for ref in refs]
    for ref in owners:
        ref.block.check(reader, ref.spec)
    homes, readers = [opened(ref.device) for ref in owners], [opened(device) for device in devices]
    await trio.lowlevel.checkpoint_if_cancelled()
    copies: dict[tuple[int, Device], AccelRef] = {}
    loans: dict[int, Loan] = {}
    try:
        reached: dict[int, AccelRef] = {}
        for number, ref in enumerate(owners):
            for device in readers:
                if await _reaches(device, homes[number]):
                    reached[number] = ref
                else:
                    copies[number, device] = await ref.copy_to(device)
        await _have_contexts(homes)
        # The loop does not contain a checkpoint. So all callers that lease the same arrays take their turns
        # in one order, and none waits for a write that waits for another caller.
        for number, ref in reached.items():
            loans[number] = homes[number].dispatch.lend(ref)
        for loan in loans.values():
            await loan.wait(reader)
        yield Lent(reader, len(owners), loans, copies, stay)
    finally:
        for loan in loans.values():
            loan.end()
        for copy in copies.values():
            copy.release()


@leavable_context
@enable_ki_protection
async def exclusive(devices: Iterable[Device]) -> AsyncGenerator[None]:
    """Reserve several devices for work that runs on all of them at once. Such tasks take turns.

    Operations of a single device are not affected.
    """
    held: list[TaskLock] = []
    try:
        # All callers take the locks in one order, so that no two wait for each other.
        for device in sorted(map(opened, devices), key=attrgetter("path")):
            # A free lock is taken without a checkpoint, because small collectives cannot afford it.
            try:
                device.turn.acquire_nowait()
            except trio.WouldBlock:
                await device.turn.acquire()
            held.append(device.turn)
        yield
    finally:
        for lock in held:
            lock.release()


@enable_ki_protection
async def poll_answers(devices: Iterable[Device], goes_on: Callable[[], bool]) -> None:
    """Poll for due answers of several workers in the task that waits for them (D171).

    It may return at once. The caller waits for the missing answers.

    Args:
        devices: The devices.
        goes_on: Returns whether an answer is still awaited.
    """
    dispatches = [opened(device).dispatch for device in devices]
    due = [dispatch.due() for dispatch in dispatches if isinstance(dispatch, WorkerDispatch)]
    ends = [end for end in due if end is not None]
    if ends:
        await spin_together(ends, goes_on)


async def _have_contexts(devices: Iterable[OpenDevice]) -> None:
    """Wait until devices of this process have contexts. Devices in workers queue their requests."""
    inline = [device.dispatch for device in devices if isinstance(device.dispatch, InlineDispatch)]
    while any(dispatch.session is None for dispatch in inline):
        for dispatch in inline:
            await dispatch.ready()


async def _reaches(reader: OpenDevice, owner: OpenDevice) -> bool:
    """Return whether operations of a device can read the memory of another device, or of the same one."""
    if reader is owner or reader.state.backend is not owner.state.backend:
        return reader is owner
    if isinstance(reader.dispatch, InlineDispatch):
        return (await reader.dispatch.ready()).engine.device.reaches(owner.info)
    # A worker cannot map this process's memory, because it lacks a descriptor.
    return isinstance(owner.dispatch, WorkerDispatch)


@attrs.frozen(eq=False)
class Lent:
    """Arrays leased to reading devices."""

    _reader: str
    _count: int
    _loans: Mapping[int, Loan]
    _copies: Mapping[tuple[int, Device], AccelRef]
    _stay: Stay | None

    @leavable_context
    @enable_ki_protection
    async def to(self, device: Device) -> AsyncGenerator[list[AccelRef]]:
        """Let one of the devices read the arrays; use them only in its operations.

        Raises:
            DeviceLostError: The device is closed, or has failed for good.
            NotSupportedError: The driver cannot map the memory.
        """
        dispatch = opened(device).dispatch
        arrays: list[AccelRef] = []
        borrowed: list[Borrowed | InlineBorrowed] = []
        try:
            for number in range(self._count):
                copy = self._copies.get((number, device))
                if copy is None:
                    borrowed.append(dispatch.borrow(self._loans[number], self._stay))
                    copy = borrowed[-1].array
                arrays.append(copy)
            for loan in borrowed:
                await loan.wait(self._reader)
            yield arrays
        finally:
            for loan in borrowed:
                loan.end()


def _check_host(host: object) -> None:
    """Refuse device arrays and unfinished results, because NumPy would put them into an object array."""
    if isinstance(host, AccelRef):
        raise TypeError(
            f"put: the array is on {host.device.path} already; await ref.copy() copies it there, and "
            "await ref.copy_to(device) to another device"
        )
    if getattr(type(host), "takes_operators", False):
        raise TypeError(
            "put: host is an array of a blocking namespace, on a device already: pass array.ref to async "
            "functions, and b.xp.asarray(array) copies it to the device of b"
        )
    if inspect.isawaitable(host) or isinstance(host, NotAwaited):
        raise TypeError(f"put: host must be an array, got {type(host).__name__}{what_to_do(host)}")
    if host is None or isinstance(host, (dict, set)):
        advice = "" if host is None else "; put each of its arrays by itself"
        raise TypeError(f"put: host must be an array, got {shown(cast('Any', host))}{advice}")


def _check_lasting(host: object) -> HostArray:
    """Refuse an array that may change between two calls, because its copy would be out of date."""
    if not isinstance(host, np.ndarray):
        raise TypeError(
            f"put: pinned=True takes a NumPy array, for which a copy is kept, got {type(host).__name__}"
            f"{what_to_do(host)}"
        )
    array = cast("HostArray", host)
    owner: object = array
    path = "array"
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            raise ValueError(
                "put: pinned=True keeps a copy, so the array and what it is a view of must be read-only; set "
                f"{path}.flags.writeable = False; an array that changes is best made by "
                "device.host_empty(), and put without pinned=True"
            )
        owner, path = owner.base, f"{path}.base"
    return array


def _extents(shape: int | Sequence[int]) -> Ints:
    if isinstance(shape, (int, np.integer)):
        return (int(shape),)
    if isinstance(shape, Iterable):
        return tuple(shape)
    raise TypeError(f"shape must be a size or a sequence of sizes, got {shown(shape)}")


class DeviceActor(Actor):
    """Restarts the context of a device, within the device's intensity."""

    # Each may wait for its grace, and several that hang would add up.
    ends_together: ClassVar[bool] = True

    def __init__(self, state: DeviceState, dispatch: InlineDispatch | WorkerDispatch) -> None:
        self._state = state
        self._dispatch = dispatch

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the context. The device ends with it."""
        state = self._state
        try:
            async with self._dispatch.open(context):
                context.observe_restarts(state.restarted)
                context.show_note(state.note)
                await self._dispatch.start_context(context)
                yield
        finally:
            state.end(context)


def _let_go(hold: ForeignMemory) -> None:
    """Release an array's memory, because no other library uses it."""
