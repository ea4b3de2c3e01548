"""Contexts in worker processes: operations go to the worker that serves, and survive its death."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Never, TypeVar

import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ....actors import ActorContext
from ....backends.base import DeviceLostError
from ...arrays._pending import Pending
from ...arrays._ref import AccelRef
from ...base._statistics import DeviceStatistics
from ...base._waits import Alarms
from ...completion._strategies import SyncCompletion
from ...engine._completer import grace_in
from ...engine._context import context_policy
from ...engine._device_state import DeviceState
from ...host._host_pool import SMALL
from ...operations._operation import Operation, Planned, Planner, admit
from ..launcher._launcher import Launcher, WorkerProcess, open_launcher
from ._actors import MeasuredRequest, Measures
from ._calls import Leases, Questions
from ._chunks import INTACT, ChunkTable, LeftMemory
from ._copy_service import CopyService
from ._generations import Generations, WorkerContextActor
from ._outcomes import OutcomePolicy
from ._pool import WorkerPool, check_options
from ._request import HostArrays, OperationRequest, RemoteRequest, Staging
from ._requests import RequestSender

__all__ = ["WorkerDispatch"]

LibraryT = TypeVar("LibraryT")
ReplyT = TypeVar("ReplyT")

# A host array is being copied: seconds between two looks at it.
_COPYING = 0.001


class WorkerDispatch:
    """Serves a device from worker processes, one at a time; memory and requests outlive them.

    Attributes:
        left: The memory that this device leaves to be adopted.
        adopted_by: The device that has adopted it.
    """

    def __init__(self, device: DeviceState, adopted: LeftMemory | None) -> None:
        check_options(device)
        self._device = device
        self._options = device.options
        device.tell_arrays = self._tell_arrays
        device.on_hooks = self._observe
        # Memory that was another device's, until this one is open.
        self._adopted = adopted
        self.left: LeftMemory | None = None
        self.adopted_by: str | None = None
        if adopted is None:
            self._chunks = ChunkTable(device.backend, self._unshare)
        else:
            self._chunks = adopted.chunks
            self._chunks.on_drop = self._unshare
        self._copies = copies = CopyService()
        self._outcomes = outcomes = OutcomePolicy(device, copies)
        self._pool = pool = WorkerPool(device, self._chunks)
        self._sender = sender = RequestSender(device, self._chunks, copies, outcomes)
        self._requests = sender.requests
        self._calls = calls = Questions(device, sender)
        self._alarms = alarms = Alarms()
        self._generations = Generations(device, self._chunks, copies, outcomes, pool, sender, calls, alarms)
        self._answers = self._generations.answers
        self._measures = Measures(device, self._answers.actors)
        self._leases = Leases(device, self._sender, self._chunks)
        # With `SyncCompletion` the worker's loop blocks, and cannot be told of copies: all arrays go by
        # value.
        self._by_value = sys.maxsize if isinstance(self._options.completion, SyncCompletion) else SMALL
        self._token = trio.lowlevel.current_trio_token()
        self._staging = None if device.host_pool is None else Staging(device.host_pool, self._pump_soon)
        self._launcher: Launcher

    @property
    def process(self) -> WorkerProcess | None:
        """The worker that serves, if one does now."""
        return None if self._sender.link is None else self._sender.link.process

    @property
    def spares(self) -> int:
        """Workers that stand ready."""
        return self._pool.spares

    @property
    def pending(self) -> int:
        """Requests that wait for a context."""
        return 0 if self._sender.link is not None else self._requests.waiting

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those of the chunks."""
        return tuple(chunk.descriptor for chunk in self._chunks.chunks.values())

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries of the current context."""
        return self._sender.serving().libraries

    async def prepare(self) -> None:
        """Have the launcher of the system started: it must outlive the device's actor."""
        self._launcher = await open_launcher(self._device.system)
        self._chunks.open(self._launcher)

    def started(self) -> None:
        """Adopted memory is this device's from now on."""
        self._adopted = None

    def _tell_arrays(self) -> str:
        """Fate of the arrays of a device that was given up."""
        if self.adopted_by is not None:
            return f"; its arrays were adopted by the next device, {self.adopted_by}"
        return INTACT if self.left is not None and self.left.chunks.blocks else ""

    def have_back(self, memory: LeftMemory) -> None:
        """Take the memory back: the device that was to adopt it could not be opened."""
        self.left, self.adopted_by = memory, None
        memory.leave(self._device.system)

    @asynccontextmanager
    async def open(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the memory and the workers."""
        observers = self._device.system.observers
        given_up: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._alarms.run)
                self._sender.open(nursery)
                self._copies.open(nursery)
                self._generations.open(self._launcher, nursery)
                observers.on_change(self, self._observe)
                self._observe()
                try:
                    yield
                except BaseException as error:
                    given_up = self._generations.last_error or error
                    raise
                finally:
                    observers.off_change(self)
                    self._device.availability.end()
                    self._generations.end(
                        given_up, INTACT if self._chunks.blocks and self._leaves(context) else ""
                    )
                    with trio.CancelScope(shield=True):
                        # Bounded by the kernel: the workers are killed.
                        await self._pool.close()
                        await self._copies.wait_idle()
                nursery.cancel_scope.cancel(reason="the device ends")
        finally:
            self._leave_memory(context)

    def _leaves(self, context: ActorContext) -> bool:
        """Tell whether the memory stays for another device: this one was not closed, or never had it."""
        is_broken = self._device.memory_failure is not None
        return self._adopted is not None or not (context.is_stopping or is_broken)

    def _leave_memory(self, context: ActorContext) -> None:
        if not self._leaves(context):
            self._chunks.close()
            return
        device = self._device
        device.leaves_memory = True
        self.left = self._adopted or LeftMemory(self._chunks, device.blocks)
        self.left.leave(device.system)

    async def start_context(self, context: ActorContext) -> None:
        """Start the context's actor."""
        await context.spawn(
            WorkerContextActor, self._generations.serve, name="context", policy=context_policy(self._options)
        )

    @enable_ki_protection
    async def ask(self, operation: Operation[LibraryT, ReplyT], **_unknown: Never) -> ReplyT:
        """See `Device.ask`."""
        recording = admit(self._device, operation, "ask", _unknown)
        if recording is not None:
            return await recording.ask(self._device, operation)
        # A request that is done at a cancellation still returns: without this look a loop of them would never
        # end.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._device.availability.is_ended:
            raise await self._device.lost()
        request, planned = self._plan(operation, invalidates=False)
        try:
            self._requests.add(request)
            link = self._sender.link
            if link is not None and self._requests.sent == 1 and link.channel.may_spin:
                # D38, D43: a lone asker polls for the answer in its own task, which saves the receiver's
                # wake-up.
                await link.channel.spin(
                    partial(self._answers.take_own, link, request),
                    partial(self._answers.is_waited_for, request),
                )
                if request.is_over:
                    request.take()
                    return planned.result()
            await request.wait(self._cancel)
        finally:
            if not request.is_left:
                request.launch.forget()
        return planned.result()

    @enable_ki_protection
    def submit(self, operation: Operation[LibraryT, ReplyT]) -> Pending[ReplyT]:
        """See `Device.submit`."""
        recording = admit(self._device, operation, "submit", ())
        if recording is not None:
            return recording.submit(self._device, operation)
        if self._device.availability.is_ended:
            gone = f"the device is closed, or was given up{self._tell_arrays()}"
            raise DeviceLostError(gone, device=self._device.name)
        window = self._device.window
        window.check_room(operation.library)
        request, planned = self._plan(operation, invalidates=True)
        pending = Pending(request.launch.name, planned)
        settle = window.enter(operation.library, pending)

        def done(result: outcome.Outcome[None]) -> None:
            request.launch.forget()
            settle(result.error if isinstance(result, outcome.Error) else None)

        request.on_done = done
        self._requests.add(request)
        return pending

    def _plan(
        self, operation: Operation[LibraryT, ReplyT], *, invalidates: bool
    ) -> tuple[OperationRequest, Planned[ReplyT]]:
        device = self._device
        if not device.availability.is_ready:
            device.check_pending(self._requests.waiting)
        planner = Planner(device, operation)
        planned = operation.plan(planner)
        launch = planner.launch(planned)
        if device.hooks:
            device.validated(launch)
        hosts = HostArrays(self._by_value, self._staging)
        number = self._requests.next_number()
        if device.system.observers.meter is None:
            return OperationRequest(number, launch, hosts, invalidates=invalidates), planned
        return MeasuredRequest(number, launch, hosts, self._measures, invalidates=invalidates), planned

    def _cancel(self, request: RemoteRequest) -> bool:
        """Take the request of a cancelled asker back, or give it the grace to end."""
        if self._requests.withdraw(request):
            if not request.copies:
                return True
            # A lost worker had it, or its host array is being copied for the next one.
            self._copies.cancel(request)
            request.unwind_after_copies()
            return False
        link = self._sender.link
        if link is not None and self._requests.get(request.number) is request:
            link.send(("cancel", request.number), now=True)
        self._leave_in(request, grace_in(request.context, self._options.cancel_grace))
        return False

    def _leave_in(self, request: RemoteRequest, seconds: float) -> None:
        self._alarms.set(request, trio.current_time() + seconds, lambda: self._leave(request))

    def _leave(self, request: RemoteRequest) -> None:
        """Let a cancelled asker go, except for copies of its arrays, which end soon."""
        if request.is_over:
            return
        if self._requests.get(request.number) is not request:
            # The worker is done with it: only copies of its results are still running.
            self._copies.cancel(request)
            request.unwind_after_copies()
            return
        assert isinstance(request, OperationRequest)
        if request.hosts.are_direct(request.launch):
            # D72: the device itself uses memory of the program, so the asker must wait.
            return
        if not (request.makes_all_it_writes or request.hosts.is_copied):
            # Its changes would have no valid result.
            self._leave_in(request, _COPYING)
            return
        self._copies.cancel(request)
        request.leave()

    def lease(self, ref: AccelRef, *, write: bool, stream: object) -> AbstractAsyncContextManager[Any]:
        """See `AccelRef.lease`."""
        return self._leases.hold(ref, write=write, stream=stream)

    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        # Arrays that end while the first call waits are dropped by the second.
        for _ in range(2):
            self._device.blocks.drain()
            await self._calls.ask("synchronize")

    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        self._device.blocks.drain()
        statistics: DeviceStatistics = await self._calls.ask("count")
        return statistics

    async def close_library(self, path: str) -> None:
        """See `Device.close_library`."""
        self._pool.forget(path)
        if self._device.availability.is_ended:
            await trio.lowlevel.checkpoint()
            return
        with suppress(DeviceLostError):
            await self._calls.ask("close", path)
        self._sender.forget_library(path)
        self._pool.forget(path)

    def poison(self, reason: str) -> None:
        """See `trio_accel.testing.poison`."""
        self._sender.serving().send(("poison", reason), now=True)

    def _pump_soon(self) -> None:
        # Not here: this is called in the midst of the end of a request.
        if self._requests.waiting:
            self._token.run_sync_soon(self._requests.pump, idempotent=True)

    def _observe(self) -> None:
        device = self._device
        self._pool.observe(
            is_observed=bool(device.system.observers.of_every_message), is_timed=bool(device.hooks)
        )

    def _unshare(self, number: int) -> None:
        self._pool.unshare(number, but=self._sender.link)
