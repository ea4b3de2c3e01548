"""Dispatch to contexts in this process: operations are sent directly to the library actors.

Host arrays reach a device in this process through the pool of host memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, Never, TypeAlias, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import (
    ActorContext,
    ActorError,
    ActorFailedError,
    ActorStoppedError,
    DirectReply,
    Ref,
    TaskEvent,
    idle_actor,
    leavable_context,
    run_apart,
    unobserved_actor,
)
from ...backends.base import (
    AccelDevice,
    AccelError,
    ContextLostError,
    DeviceLostError,
    HostArray,
    Ints,
    NotSupportedError,
    QueueFullError,
)
from ...backends.base.contract.ops import CopyFromHostSpec, CopyToHostSpec, OperationSpec
from ...backends.base.kit.host import ON_THE_SPOT
from ..base._errors import OPENING
from ..base._host_pool import COPIES_AT_ONCE, Copying, HostPool, HostRegistrar
from ..base._library_paths import LibrariesInUse, by_title
from ..base._options import DeviceOptions
from ..base._statistics import (
    CacheStatistics,
    DeviceStatistics,
    KeptStatistics,
    LibraryStatistics,
    ProcessStatistics,
)
from ..base._waits import Arrival
from ..engine._context import ContextActor, Session, context_policy
from ..engine._device_state import DeviceState
from ..engine._engine import Engine
from ..engine._in_place import InPlace
from ..engine._library import LibraryActor
from ..engine._library_opener import CloseLibrary, OpenLibrary
from ..engine._recovery import STEADY
from ..operations._blocks import Block, BlockTable, BorrowedBlock
from ..operations._hooks import EngineHook
from ..operations._operation import Launch, Operation, Planner, admit
from ..operations._pending import Pending, ReplyT
from ..operations._ref import AccelRef, LibraryT
from ._loans import InlineBorrowed, InlineLoan, Loan
from ._loss import LossPolicy

_SpecT = TypeVar("_SpecT", bound=OperationSpec)
_OnDone: TypeAlias = Callable[["BaseException | None"], None]


WITH_HOST = (CopyFromHostSpec, CopyToHostSpec)
"""The specifications with a host array."""


class Travel:
    """The host arrays of one launch in transit.

    Attributes:
        launch: The launch, with arrays in the pool.
    """

    def __init__(self, copies: InlineCopies, launch: Launch) -> None:
        self._copies = copies
        self._uploads: list[tuple[Copying, Arrival]] = []
        self._downloads: list[Copying] = []
        self._replaced: list[HostArray] = []
        arrivals: list[Arrival] = []
        self.launch: Launch = attrs.evolve(
            launch,
            spec=self._through(launch.spec, arrivals),
            staged=tuple([self._through(staged, arrivals) for staged in launch.staged]),
            arrivals=arrivals,
            # The device uses regions in the pool instead.
            keep=tuple([item for item in launch.keep if not any(item is host for host in self._replaced)]),
        )

    def _through(self, spec: _SpecT, arrivals: list[Arrival]) -> _SpecT:
        """Return the specification, through the pool if the device cannot transfer its host array."""
        if not isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)):
            return spec
        host, copies = spec.host, self._copies
        slab_position = copies.pool.find(host) if host.flags.c_contiguous else None
        if slab_position is not None:
            copies.await_slab(slab_position[0], arrivals)
            return spec
        if host.nbytes <= ON_THE_SPOT:
            return spec
        region = copies.pool.stage(host.nbytes)
        copies.await_slab(region.slab.number, arrivals)
        staged = region.array(host.shape, host.dtype)
        self._replaced.append(host)
        if isinstance(spec, CopyToHostSpec):
            self._downloads.append(Copying(host, staged))
        else:
            filled = Arrival()
            arrivals.append(filled)
            self._uploads.append((Copying(staged, host), filled))
            copies.nursery.start_soon(copies.fill, *self._uploads[-1])
        same: Any = spec
        changed: _SpecT = attrs.evolve(same, host=staged)
        return changed

    async def fetch(self) -> None:
        """Fill the program's arrays, after the operation is done."""
        with trio.CancelScope(shield=True):
            # Shielded, because the threads write to arrays of the program.
            for copying in self._downloads:
                await trio.to_thread.run_sync(copying.run, limiter=self._copies.limiter)

    async def end(self) -> None:
        """Stop reading arrays of the program; wait for the present piece. Must not be cancelled."""
        for copying, _ in self._uploads:
            copying.cancel()
        over = TaskEvent()
        for _, filled in self._uploads:
            if not filled.is_over:
                filled.tell(over.set)
                await over.wait()
                over = TaskEvent()

    def end_by(self, done: _OnDone) -> _OnDone:
        """Return the callback for the operation's end. It calls `done` when the arrays are filled."""

        def over(error: BaseException | None) -> None:
            for copying, _ in self._uploads:
                copying.cancel()
            if error is not None or not self._downloads:
                done(error)
            else:
                self._copies.nursery.start_soon(self._fetch_for, done)

        return over

    @enable_ki_protection
    async def _fetch_for(self, done: _OnDone) -> None:
        error: Exception | None = None
        try:
            await self.fetch()
        except Exception as failure:  # noqa: BLE001  # it belongs to the operation
            error = failure
        done(error)


class InlineCopies:
    """Copies between the pool and host arrays that the device cannot transfer itself, in threads (D50).

    Args:
        pool: The memory that the device transfers itself.
        registrar: Registers it with the device.
        nursery: Runs the copies.

    Attributes:
        pool: The pool.
        nursery: The nursery.
        limiter: Limits the number of concurrent copies.
    """

    def __init__(self, pool: HostPool, registrar: HostRegistrar, nursery: trio.Nursery) -> None:
        self.pool: HostPool = pool
        self.nursery: trio.Nursery = nursery
        self.limiter: trio.CapacityLimiter = trio.CapacityLimiter(COPIES_AT_ONCE)
        self._registrar = registrar

    def start(self, launch: Launch) -> Travel | None:
        """Start the transit of a launch's host arrays; return None without any.

        Raises:
            OutOfMemoryError: The host does not have enough memory.
        """
        for spec in (launch.spec, *launch.staged):
            if isinstance(spec, WITH_HOST) and spec.host.size and not self._goes_straight(spec.host):
                return Travel(self, launch)
        return None

    def _goes_straight(self, host: HostArray) -> bool:
        """Return whether the device itself transfers a host array now, or copies it on the spot."""
        slab_position = self.pool.find(host) if host.flags.c_contiguous else None
        if slab_position is None:
            return host.nbytes <= ON_THE_SPOT
        return self._registrar.registration(slab_position[0]) is None

    def await_slab(self, slab: int, arrivals: list[Arrival]) -> None:
        """Add the arrival of a slab's registration, unless it has finished."""
        registration = self._registrar.registration(slab)
        if registration is not None:
            arrivals.append(registration)

    @enable_ki_protection
    async def fill(self, copying: Copying, filled: Arrival) -> None:
        """Copy in a thread."""
        failure: Exception | None = None
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(copying.run, limiter=self.limiter)
        except Exception as error:  # noqa: BLE001  # the system cannot start a thread; the operation fails
            failure = error
        finally:
            # The arrival ends in any case, because operations wait for it.
            filled.end(failure)


class InlineDispatch:
    """The dispatch of a device with its engine in this process. Each context has its own memory."""

    def __init__(self, device: DeviceState) -> None:
        self._device = device
        pool = device.host_pool
        self._registrar = None if pool is None else HostRegistrar(pool)
        self._copies: InlineCopies | None = None
        self._context_ref: Ref[ContextActor] | None = None
        self.pending: int = 0
        self._asking = 0
        self._in_use = LibrariesInUse()
        self._policy = LossPolicy(device.options)
        self.session: Session | None = None
        # A context's memory ends with it, so descriptors are not needed, and each context opens the device.
        self.descriptors: Ints = ()
        self.opened: AccelDevice | None = None
        # The owner's attributes, which the context reads.
        self.options: DeviceOptions = device.options
        self.hooks: list[EngineHook] = device.hooks
        self.blocks: BlockTable = device.blocks
        self.program_opened: Callable[[str, float, float], None] = device.recoveries.record_program
        # Operations have the submitter's context variables, and no other process counts their launches.
        self.variables: Context | None = None
        self.nursery: trio.Nursery
        # The arrays of other devices that this device reads.
        self.borrowed: set[InlineBorrowed] = set()
        self.launching: Callable[[Launch], None] | None = None
        self._place: InPlace | None = None

    @property
    def next_generation(self) -> int:
        """The number of the opening context."""
        return self._device.generation + 1

    @property
    def in_use(self) -> Sequence[str]:
        """The import paths of the libraries that the previous context used."""
        return self._in_use.paths

    @property
    def libraries(self) -> Sequence[str]:
        """The names of the present context's libraries."""
        return tuple(self._engine().device.libraries)

    async def prepare(self) -> None:
        """Prepare nothing, because everything is made with the device's actor."""
        await trio.lowlevel.checkpoint()

    def started(self) -> None:
        """Do nothing, because nothing was held for the start."""

    @asynccontextmanager
    async def open(self, context: ActorContext) -> AsyncGenerator[None]:
        """Register the pool of host memory, if any, with the device of each context."""
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            if self._registrar is not None:
                pool = self._device.host_pool
                assert pool is not None
                nursery.start_soon(self._registrar.run)
                self._copies = InlineCopies(pool, self._registrar, nursery)
            yield
            nursery.cancel_scope.cancel(reason="the device ends")

    async def start_context(self, context: ActorContext) -> None:
        """Start the context's actor."""
        self._context_ref = await context.spawn(
            ContextActor, self, name="context", policy=context_policy(self.options)
        )

    def in_place(self, path: str) -> InPlace | None:
        """Return the object that computes chains in their callers' tasks; None if impossible.

        Args:
            path: The import path of the actor of chains.
        """
        session = self.session
        library = None if session is None else session.libraries.get(path)
        unobserved = None if library is None else unobserved_actor(library)
        if session is None or library is None or unobserved is None or not self.options.in_place:
            return None
        actor = unobserved[0]
        if self._place is None or self._place.actor is not actor:
            self._place = InPlace(session.engine, library, actor) if actor.is_plain else None
        return self._place

    def looked(self, number: int, /) -> None:
        """Do nothing, because no other process watches this loop."""

    def is_alone(self) -> bool:
        """Return whether there is only one request."""
        return self._asking == 1

    def open_device(self) -> AccelDevice:
        """Open the device; blocks."""
        device = self._device
        began = time.perf_counter()
        opened = device.backend.open_device(device.info.index, memory_limit=device.options.memory_limit)
        device.recoveries.started(time.perf_counter() - began)
        return opened

    def attach(self, session: Session) -> None:
        """Start the generation of a ready context."""
        self.session = session
        self.progressed: Callable[[], None] = session.context.report_progress
        if self._registrar is not None:
            self._registrar.attach(session.engine.device, session.engine.wait_idle)
        blocks = self._device.blocks
        blocks.valid_since = session.generation
        blocks.release = session.engine.release_all
        for loan in self.borrowed:
            # If the memory of a borrowed array was freed, the array is lost here as well.
            with suppress(AccelError):
                loan.begin(session)
        self._device.availability.begin(session.generation)

    def prepared(self) -> None:
        """Count the context as working, once it has been complete for a while without a request."""
        if self.session is not None:
            due = trio.current_time() + STEADY
            self.session.engine.alarms.set(self, due, self.session.context.report_progress)

    def detach(self, error: BaseException | None) -> None:
        """End the generation, because the context is lost. Requests wait for the next one."""
        self._device.blocks.drain()
        self._device.blocks.lose()
        if self.session is not None:
            self._in_use.begin()
            for path in self.session.libraries:
                self._in_use.add(path)
        self.session = None
        if self._registrar is not None:
            self._registrar.detach()
        self._device.availability.interrupt()

    @enable_ki_protection
    async def ask(  # noqa: C901, PLR0912, PLR0915  # calls that would make it shorter take as long as what they do
        self, operation: Operation[LibraryT, ReplyT], **_unknown: Never
    ) -> ReplyT:
        """See `Device.ask`."""
        recording = admit(self._device, operation, "ask", _unknown)
        if recording is not None:
            return await recording.ask(self._device, operation)
        # An operation done before its cancellation still returns. Without this check, a loop of such
        # operations would never end.
        await trio.lowlevel.checkpoint_if_cancelled()
        losses = 0
        while True:
            session = self.session or await self.ready()
            armed = operation.armed
            ready = None if armed is None else armed.launch(operation, self._device)
            if ready is None:
                planned = operation.plan(planner := Planner(self._device, operation))
                launch = planner.launch(planned)
            else:
                launch, planned = ready
            uses = launch.uses
            path, engine = operation.library, session.engine
            library = session.libraries.get(path)
            if library is None:
                library = await self._open_library(session, launch)
            if library is None or self.session is not session:
                # Its blocks belong to a lost context, so the operation is planned again.
                launch.forget()
                continue
            self._asking += 1
            try:
                if self._device.hooks or self._device.validators:
                    self._device.validated(launch)
                if self._copies is not None and (launch.staged or isinstance(launch.spec, WITH_HOST)):
                    await self._serve_with_copies(launch, library, engine, self._copies)
                else:
                    await _serving(launch, library, engine)
            except ActorStoppedError:
                # It was never executed, because its context is ending. It runs on the next one, if any.
                await library.wait_terminated()
                session.forget(path, library)
                continue
            except (ActorFailedError, ContextLostError) as error:
                losses += 1
                reason = self._policy.why_it_fails(losses, is_repeatable=_are_borrowed(uses))
                self._check_loss(error, launch, library, engine, may_run_again=reason is None)
                continue
            finally:
                self._asking -= 1
                if not launch.is_forgotten:
                    engine.over(launch)
            return planned.result()

    async def _serve_with_copies(
        self, launch: Launch, library: Ref[LibraryActor], engine: Engine, copies: InlineCopies
    ) -> None:
        """Launch an operation with host arrays that may need copies to the pool."""
        travel = copies.start(launch)
        if travel is None:
            await _serving(launch, library, engine)
        else:
            await run_apart(self._serve_and_copy, launch, travel, library, engine)

    async def _serve_and_copy(
        self, launch: Launch, travel: Travel, library: Ref[LibraryActor], engine: Engine
    ) -> None:
        try:
            await _serving(travel.launch, library, engine)
            await travel.fetch()
        finally:
            launch.is_in_flight = travel.launch.is_in_flight
            engine.over(travel.launch)
            with trio.CancelScope(shield=True):
                await travel.end()

    def _check_loss(
        self,
        error: ActorFailedError | ContextLostError,
        launch: Launch,
        library: Ref[LibraryActor],
        engine: Engine,
        *,
        may_run_again: bool,
    ) -> None:
        """Raise the error of an operation, unless its context was lost and it may run again on the next one.

        Called while `error` is handled. An operation may run again if none of its arguments was lost.
        """
        if isinstance(error, ActorFailedError):
            if not library.is_terminated or not launch.is_in_flight:
                raise error
            # The library did not crash because of this operation. It ended for good with its context.
            lost = engine.lost(launch, error)
            if not may_run_again or not isinstance(lost, ContextLostError):
                raise lost from error
        elif not may_run_again:
            raise error

    @enable_ki_protection
    def submit(self, operation: Operation[LibraryT, ReplyT]) -> Pending[ReplyT]:
        """See `Device.submit`."""
        recording = admit(self._device, operation, "submit", ())
        if recording is not None:
            return recording.submit(self._device, operation)
        session, context = self.session, self._context_ref
        if session is None or context is None:
            if self._device.availability.is_shut:
                raise self._device.outage()
            raise QueueFullError("the context is being rebuilt: ask() waits for it", device=self._device.name)
        self._device.window.check_room(operation.library)
        planner = Planner(self._device, operation)
        planned = operation.plan(planner)
        launch = planner.launch(planned)
        self._device.validated(launch)
        travel = None if self._copies is None else self._copies.start(launch)
        pending = Pending(launch.name, planned)
        done = self._device.window.enter(operation.library, pending)
        if travel is not None:
            launch, done = travel.launch, travel.end_by(done)
        session.submissions.submit(context, launch, done)
        return pending

    def lend(self, ref: AccelRef) -> InlineLoan:
        """Lease an array to devices that read it. There is a context."""
        assert self.session is not None
        return InlineLoan(ref, self.session, self.session.engine.leases.hold(ref.block.id, write=False))

    def borrow(self, loan: Loan, stay: object) -> InlineBorrowed:
        """Borrow an array that another device holds. Its memory is mapped until the end."""
        block = BorrowedBlock(self._device.blocks, loan.ref.block)
        array = AccelRef(block, attrs.evolve(loan.ref.spec, block=block.id))
        loan.users += 1
        borrowed = InlineBorrowed(array, loan, self)
        self.borrowed.add(borrowed)
        return borrowed

    @leavable_context
    async def lease(self, ref: AccelRef, *, write: bool, stream: object) -> AsyncGenerator[Any]:
        """See `AccelRef.lease`."""
        session = await self.ready()
        ref.block.check("lease", ref.spec)
        lease = session.engine.leases.lease(ref.block, ref.spec, write=write, stream=stream)
        async with lease as array:
            yield array

    @property
    def unfinished(self) -> int:
        """The number of unfinished operations."""
        queues = () if self.session is None else self.session.engine.queues().values()
        return self.pending + sum(queue.waiting + queue.in_flight for queue in queues)

    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        session = await self.ready()
        await session.engine.synchronize()
        await self._device.drain()

    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        await self._device.drain()
        session = await self.ready()
        engine = session.engine
        return DeviceStatistics(
            generation=session.generation,
            launched=engine.enqueuer.launched,
            completed=engine.completer.completed,
            in_flight=engine.streams.in_flight,
            queues=by_title(engine.queues()),
            memory=engine.device.memory(),
            losses=self._device.losses.count,
            libraries=by_title(
                {
                    path: LibraryStatistics(plans=CacheStatistics.of(used.plans), workspace=used.workspace)
                    for path, used in engine.usage().items()
                }
            ),
            plan_caches={"executor": KeptStatistics.of(engine.device.plan_counts)},
            actors=self._device.blocks.bytes_by_actor(),
            process=ProcessStatistics.of(os.getpid()),
        )

    async def close_library(self, path: str) -> None:
        """See `Device.close_library`."""
        self._in_use.discard(path)
        if self.session is not None and self._context_ref is not None:
            with suppress(ActorError):
                await self._context_ref.ask(CloseLibrary(path))
        self._in_use.discard(path)
        await trio.lowlevel.checkpoint()

    def poison(self, reason: str) -> None:
        """See `trio_accel.testing.poison`."""
        self._engine().device.poison(reason)
        if self._place is not None:
            self._place.stop()

    def _engine(self) -> Engine:
        if self.session is None:
            raise DeviceLostError("the context of the device is being replaced", device=self._device.name)
        return self.session.engine

    async def ready(self) -> Session:
        """Wait for the current generation while the context is being rebuilt."""
        availability = self._device.availability
        if self.session is None and not availability.is_shut:
            self._device.check_pending(self.pending)
            self.pending += 1
            try:
                while self.session is None and not availability.is_shut:
                    await availability.wait_changed()
            finally:
                self.pending -= 1
        if self.session is None:
            raise await self._device.lost()
        return self.session

    async def _open_library(self, session: Session, launch: Launch) -> Ref[LibraryActor] | None:
        """Start the actor of an operation's library on first use; None if the session ended meanwhile.

        The library may already belong to the next session. Without a library, the operation has ended.

        Raises:
            ContextLostError: The context was found lost during this.
            DeviceLostError: The same, while the device closes.
            NotSupportedError: The backend does not have the library.
        """
        assert self._context_ref is not None  # a session belongs to a context
        library = None
        try:
            library = await self._context_ref.ask(OpenLibrary(launch.library, launch.name))
        except NotSupportedError as error:
            session.engine.locate(error, launch)
            raise
        except ActorStoppedError:
            await self._end_of(session)
        except ActorFailedError as error:
            cause = error.__cause__
            if isinstance(cause, ContextLostError):
                # D63: the operation has not begun, but it is not repeated without a request either, because
                # its library may be the reason why contexts are lost.
                raise session.engine.lost_while(launch.name, OPENING, "ask again", cause) from cause
            if not isinstance(cause, (ActorStoppedError, DeviceLostError)):
                raise
            # The context ended during this request, but not because of it.
            await self._end_of(session)
        finally:
            if library is None:
                launch.forget()
        return library

    async def _end_of(self, session: Session) -> None:
        while self.session is session:
            await self._device.availability.wait_changed()


def _are_borrowed(uses: Sequence[tuple[str, Block]]) -> bool:
    """Return whether no argument is lost with the device's context, because all are borrowed."""
    return all(isinstance(block, BorrowedBlock) for _, block in uses)


def _serving(launch: Launch, library: Ref[LibraryActor], engine: Engine) -> Awaitable[object]:
    """Launch an operation, bypassing the mailbox if its actor is idle (D20). Await the result at once."""
    reply = DirectReply(launch)
    actor = idle_actor(library, reply)
    if actor is not None and actor.launch_here(launch, reply):
        return reply.wait()
    engine.enter(launch)
    return library.ask(launch)
