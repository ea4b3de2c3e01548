"""Contexts in worker processes: the active worker gets the operations, which survive its death."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Never, TypeAlias

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import Actor, ActorContext, ActorSnapshot
from ...backends.base import ContextLostError, DeviceLostError, Ints
from ..base._errors import damage_to_memory
from ..base._host_pool import MAX_INLINE_BYTES
from ..base._options import SyncCompletion
from ..base._statistics import DeviceStatistics
from ..base._waits import Alarms
from ..engine._completer import grace_in
from ..engine._context import context_policy
from ..engine._device_state import DeviceState
from ..engine._recovery import STEADY
from ..launcher._launcher import Launcher, WorkerProcess, open_launcher
from ..operations._operation import Operation, Planned, Planner, admit
from ..operations._pending import Pending, ReplyT
from ..operations._ref import AccelRef, LibraryT
from ..wire import _orders
from ..wire._channel import Channel, Take
from ._answers import AnswerHandler
from ._calls import Borrowed, MeasuredRequest, Measures, Questions, WorkerLeases, WorkerLoan
from ._chunks import INTACT, ChunkTable, LeftMemory, Stay
from ._link import WorkerLink, died
from ._loans import Loan
from ._outcomes import CopyService, OutcomePolicy
from ._pool import WorkerPool, check_options
from ._request import HostArrays, LeaseRequest, OperationRequest, RemoteRequest, Staging
from ._requests import RequestSender, RequestTable

_logger = logging.getLogger("trio_accel.devices")

_CLOSING = 1.0
# After a loss, a context gets one request at a time, until one has completed or these seconds have passed.
_CAREFUL = 0.2

_Serve: TypeAlias = Callable[[ActorContext], AbstractAsyncContextManager[None]]


@attrs.define(eq=False, repr=False)
class Generations:
    """The loop over generations: one worker after the other serves. The requests of a lost worker are sorted.

    Args:
        device: The device.
        chunks: Its memory.
        copies: Copies host arrays of requests.
        outcomes: Delivers the outcomes of requests.
        pool: The workers.
        sender: Knows the requests, and the active worker.
        calls: The questions to workers.
        alarms: The times at which cancelled callers leave their requests.

    Attributes:
        answers: Handles the messages of workers.
        last_error: The error of the last worker's loss, or the reason why none was ready.
    """

    _device: DeviceState
    _chunks: ChunkTable
    _copies: CopyService
    _outcomes: OutcomePolicy
    _pool: WorkerPool
    _sender: RequestSender
    _calls: Questions
    _alarms: Alarms
    answers: AnswerHandler = attrs.field(init=False)
    last_error: BaseException | None = None
    _context: ActorContext | None = None
    _requests: RequestTable = attrs.field(init=False)
    _nursery: trio.Nursery = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._requests = self._sender.requests
        device, chunks, copies, pool = self._device, self._chunks, self._copies, self._pool
        requests, outcomes = self._requests, self._outcomes
        self.answers = AnswerHandler(
            device, requests, chunks, copies, outcomes, pool, self._alarms, self._calls, self._lose
        )

    def open(self, launcher: Launcher, nursery: trio.Nursery) -> None:
        """Begin; tasks of the nursery serve workers."""
        self._nursery = nursery
        self.answers.open(nursery)
        self._pool.open(launcher, nursery, self.answers.handle, self._ended)

    @asynccontextmanager
    async def serve(self, context: ActorContext) -> AsyncGenerator[None]:
        """Serve with one worker, until it is lost or the context's actor ends."""
        try:
            link = await self._pool.take()
        except Exception as error:
            self.last_error = error
            raise
        try:
            # No operation may run on the memory while a copy of the previous generation still writes to it.
            await self._copies.wait_off_device()
            # The chunks are cleaned before the addresses are sent, because the worker refuses overlapping
            # blocks.
            self._chunks.drop_unsound()
            self._chunks.drop_empty()
            number = self._device.generation + 1
            self._context = context
            self._pool.in_use.begin()
            # Another worker may have reported its actors and died before it served.
            self.answers.actors.clear()
            addresses = tuple(self._chunks.blocks.values())
            link.is_asked = partial(self._asks, link)
            link.send(_orders.start(number, addresses), now=True)
            await link.wait(lambda: link.is_started)
            context.show(self._snapshots)
            context.show_process(link.process.pid)
            self._begin(context, link, number, [block for block, *_ in addresses])
            yield
            await self._close(link)
        finally:
            self._lose(link, died("was ended with its context", self._device.name))
            link.kill_worker("was ended with its context")

    def _asks(self, link: WorkerLink) -> bool:
        """Return whether a worker owes an answer: at first, the report that it serves."""
        return not link.is_serving or bool(self._requests.sent or len(self._calls))

    def _snapshots(self) -> tuple[ActorSnapshot, ...]:
        link = self._sender.link
        return self.answers.actors.snapshots({} if link is None else self._requests.queues_by(link.started))

    def _begin(
        self, context: ActorContext, link: WorkerLink, number: int, known_blocks: Iterable[int]
    ) -> None:
        # The callbacks are set before the requests are sent, because they report the first success of these.
        self.answers.on_first_success = partial(self._progress, context)
        self.answers.on_prepared = partial(self._prepared, context)
        self._sender.begin(link, known_blocks)
        self._device.availability.begin(number)
        path, pid = self._device.path, link.process.pid
        extra = {"device": path, "pid": pid, "generation": number}
        _logger.info("device %s: worker process %d serves generation %d", path, pid, number, extra=extra)
        if link.is_prepared:
            # It may have reported that before it served.
            self.answers.on_prepared()
        self._open_requests()
        # D62: do this last, because waiting requests take precedence over the next spare.
        self._pool.refill()

    def _progress(self, context: ActorContext) -> None:
        """Report progress, because the context has completed a request without an error."""
        context.report_progress()
        self._requests.send_ready()

    def _prepared(self, context: ActorContext) -> None:
        """Count the context as working, once it has been complete for a while without a request."""

        def is_steady() -> None:
            self._progress(context)
            self._pool.in_use.keep()

        self._alarms.set(self._pool, trio.current_time() + STEADY, is_steady)

    def _open_requests(self) -> None:
        """Send waiting requests; after a loss one at a time, until one has completed."""
        intensity = self._device.options.intensity
        is_careful = self._device.losses.count > 0 and (intensity is None or not intensity.counts_progress)
        self._requests.open(carefully=is_careful)
        if is_careful:
            self._alarms.set(self._requests, trio.current_time() + _CAREFUL, self._requests.send_ready)

    async def _close(self, link: WorkerLink) -> None:
        """End a worker in order: refuse waiting requests, and let it finish its own within the grace."""
        # The flag is set first, so that a request lost during the end does not run again.
        self._outcomes.is_closing = True
        for request in self._requests.take_waiting():
            self._outcomes.refuse(request, self._outcomes.closed())
        link.send(_orders.close(), now=True)
        seconds = self._device.options.close_grace + _CLOSING
        # Shielded with a limit, so that a device with a cancelled task still ends its worker in order.
        with trio.move_on_after(seconds, shield=True), suppress(Exception):
            # A worker that dies meanwhile is closed as well.
            await link.wait(lambda: not link.is_started)

    def rest(self) -> None:
        """Refuse waiting requests while the device pauses. The program keeps its leases."""
        held: list[RemoteRequest] = []
        for request in self._requests.take_waiting():
            if isinstance(request, LeaseRequest) and request.granted.is_set():
                held.append(request)
            else:
                self._outcomes.refuse(request, self._device.outage())
        # The refusal of a borrowed array may have ended one of these.
        self._requests.put_back([request for request in held if request.stage == "queued"])

    def end(self, given_up: BaseException | None, arrays: str) -> None:
        """End the device; no worker follows.

        Args:
            given_up: The reason, unless it was closed.
            arrays: A text on the fate of its arrays.
        """
        error = self._outcomes.closed()
        if given_up is not None:
            error.message = f"{self._device.path}: the device was given up: {given_up}{arrays}"
            error.generation = self._device.generation
        for request in (*self._requests.close(), *self._requests.take_waiting()):
            # Each gets its own object, because tasks that raise the same object would write to one traceback.
            copied_error = attrs.evolve(error)
            copied_error.__cause__ = given_up
            self._outcomes.refuse(request, copied_error)
        self._calls.lose()

    def _ended(self, link: WorkerLink) -> None:
        """Lose the context of a worker that has ended on its own or by a signal."""
        self._lose(link, died(link.how or "ended", self._device.name))

    def _lose(self, link: WorkerLink, error: Exception) -> None:
        """Lose the context: sort its requests by whether they had begun, and start its replacement."""
        if not link.is_serving:
            return
        # This comes first: from here on `is_serving` is false, so a second report of the same loss does
        # nothing, and new requests wait in the table.
        self._sender.end()
        self.last_error = error
        self._device.memory_failure = self._device.memory_failure or damage_to_memory(error)
        self._device.blocks.drain()
        self._device.availability.interrupt()
        self._copies.cancel_on_device()
        self._chunks.missing.clear()
        self._calls.lose()
        self._alarms.drop(self._requests)
        self._alarms.drop(self._pool)
        had = self._requests.close()
        if not link.is_silent:
            self._keep_until_gone(link, had)
        for request in had:
            self._alarms.drop(request)
            if isinstance(request, OperationRequest):
                # Its outputs may have been made again, or not at all.
                self._chunks.forget_addresses(request.launch.allocations)
        # D59: requests not yet begun return to their old positions in the queue, before the actor's crash
        # starts the next generation.
        lost_blocks: frozenset[int] = frozenset()
        if not self._device.info.keeps_memory:
            lost_blocks = frozenset(self._chunks.blocks)
            self._chunks.blocks.clear()
            self._device.blocks.lose()
            self._device.blocks.valid_since = self._device.generation + 1
        repeated = self._outcomes.sort(had, link, error, self.answers.actors.handled, lost_blocks)
        if not self._device.info.keeps_memory:
            waiting = [*repeated, *self._requests.take_waiting()]
            repeated = list(self._outcomes.without_lost(waiting, lost_blocks))
        self._requests.put_back(repeated)
        self.answers.actors.clear()
        if self._context is not None and not self._outcomes.is_closing:
            self._context.crash(error)

    def _keep_until_gone(self, link: WorkerLink, requests: Iterable[RemoteRequest]) -> None:
        """Keep memory that a lost worker may still write to in use until the worker is dead (D4)."""
        written = [
            request
            for request in requests
            if isinstance(request, OperationRequest) and request.hosts.are_written(request.launch)
        ]
        if written:
            for request in written:
                request.copies += 1
            self._nursery.start_soon(self._wait_until_gone, link, written)

    @enable_ki_protection
    async def _wait_until_gone(self, link: WorkerLink, written: list[OperationRequest]) -> None:
        # Wait without a deadline, because the worker is being killed, but may write to these arrays until it
        # is dead.
        with trio.CancelScope(shield=True):
            await link.wait_gone()
        for request in written:
            request.copy_over()


class WorkerContextActor(Actor):
    """The context's actor. Each incarnation is one generation of the device, served by one worker."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextLostError,)

    def __init__(self, serve: _Serve) -> None:
        self._serve = serve

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold a worker. The incarnation ends when the worker is lost."""
        async with self._serve(context):
            yield


# Seconds between checks of a host array while it is being copied.
_COPYING = 0.001


class WorkerDispatch:
    """Serves a device from worker processes, one at a time. Memory and requests outlive them.

    Attributes:
        left: The memory that this device leaves for adoption.
        adopted_by: The device that has adopted it.
    """

    def __init__(self, device: DeviceState, adopted: LeftMemory | None) -> None:
        check_options(device)
        self._device = device
        self._options = device.options
        device.tell_arrays = self._tell_arrays
        device.on_hooks = self._observe
        # The memory of another device, until this device is open.
        self._adopted = adopted
        self.left: LeftMemory | None = None
        self.adopted_by: str | None = None
        if adopted is None:
            self._chunks = ChunkTable(device.backend, self._unshare, is_kept=device.info.keeps_memory)
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
        device.on_rest = self._generations.rest
        self._measures = Measures(device, self._answers.actors)
        self._leases = WorkerLeases(device, self._sender, self._chunks)
        # With `SyncCompletion` the worker's loop blocks and gets no messages about copies, so all arrays are
        # sent by value.
        self._by_value = (
            sys.maxsize if isinstance(self._options.completion, SyncCompletion) else MAX_INLINE_BYTES
        )
        self._token = trio.lowlevel.current_trio_token()
        self._staging = None if device.host_pool is None else Staging(device.host_pool, self._pump_soon)
        self._launcher: Launcher

    @property
    def process(self) -> WorkerProcess | None:
        """The active worker, if any."""
        return None if self._sender.link is None else self._sender.link.process

    @property
    def spares(self) -> int:
        """The number of spare workers."""
        return self._pool.spares

    @property
    def pending(self) -> int:
        """The number of requests that wait for a context."""
        return 0 if self._sender.link is not None else self._requests.waiting

    @property
    def unfinished(self) -> int:
        """The number of unfinished operations; leases do not count."""
        return sum(queue.waiting for queue in self._requests.queues({}).values())

    @property
    def descriptors(self) -> Ints:
        """The descriptors of the chunks."""
        return tuple(chunk.descriptor for chunk in self._chunks.chunks.values())

    @property
    def libraries(self) -> Sequence[str]:
        """The names of the present context's libraries."""
        return self._sender.serving().libraries

    async def prepare(self) -> None:
        """Start the system's launcher, which must outlive the device's actor."""
        self._launcher = await open_launcher(self._device.system)
        self._chunks.open(self._launcher)

    def started(self) -> None:
        """Take ownership of adopted memory."""
        self._adopted = None

    def _tell_arrays(self) -> str:
        """Return the fate of a failed device's arrays."""
        if self.adopted_by is not None:
            return f"; its arrays were adopted by the next device, {self.adopted_by}"
        return INTACT if self.left is not None and self.left.chunks.blocks else ""

    def take_back(self, memory: LeftMemory) -> None:
        """Take the memory back, because the adopting device could not be opened."""
        self.left, self.adopted_by = memory, None
        memory.leave(self._device.system)

    @asynccontextmanager
    async def open(self, context: ActorContext) -> AsyncGenerator[None]:
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
                    self._device.begin_end(context)
                    self._generations.end(
                        given_up, INTACT if self._chunks.blocks and self._leaves(context) else ""
                    )
                    with trio.CancelScope(shield=True):
                        # The kernel limits the time, because the workers are killed.
                        await self._pool.close()
                        # The copies' memory is freed after this, so none may touch it any longer.
                        await self._copies.wait_idle()
                nursery.cancel_scope.cancel(reason="the device ends")
        finally:
            # The workers have ended, so nothing writes to the memory.
            self._leave_memory(context)

    def _leaves(self, context: ActorContext) -> bool:
        """Return whether the memory stays for another device: this one was not closed, or never owned it."""
        is_broken = self._device.memory_failure is not None or not self._device.info.keeps_memory
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
        # A request done before its cancellation still returns. Without this check, a loop of such requests
        # would never end.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._device.availability.is_shut:
            raise await self._device.lost()
        request, planned = self._plan(operation)
        try:
            self._requests.add(request)
            link = self._sender.link
            if link is not None and self._requests.sent == 1 and link.channel.may_spin:
                # D38, D43: a lone caller polls for the answer in its own task, which saves waking the
                # receiver.
                await link.channel.spin(
                    partial(self._answers.take_plain, link),
                    partial(self._answers.is_waited_for, request),
                )
                if request.stage == "over":
                    request.take()
                    return planned.result()
            await request.wait(self._cancel)
        finally:
            # If its caller has left, the operation may still run, and keeps its memory.
            if request.stage == "over":
                request.launch.forget()
            elif request.stage != "left":
                request.end_alone(self._cancel)
        return planned.result()

    def in_place(self, _path: str) -> None:
        """Return None, because the memory belongs to the worker."""

    def due(self) -> tuple[Channel, Take] | None:
        """Return the channel of the worker's next answer and its handler, if it may be polled; see D171."""
        link = self._sender.link
        if link is None or not link.channel.may_spin:
            return None
        return link.channel, partial(self._answers.take_plain, link)

    @enable_ki_protection
    def submit(self, operation: Operation[LibraryT, ReplyT]) -> Pending[ReplyT]:
        """See `Device.submit`."""
        recording = admit(self._device, operation, "submit", ())
        if recording is not None:
            return recording.submit(self._device, operation)
        if self._device.availability.is_shut:
            raise self._device.outage()
        window = self._device.window
        window.check_room(operation.library)
        request, planned = self._plan(operation)
        pending = Pending(request.launch.name, planned)
        settle = window.enter(operation.library, pending)

        def done(result: outcome.Outcome[None]) -> None:
            request.launch.forget()
            settle(result.error if isinstance(result, outcome.Error) else None)

        # The callback is set first, because a request may be refused while it is added.
        request.on_done = done
        self._requests.add(request)
        return pending

    def _plan(self, operation: Operation[LibraryT, ReplyT]) -> tuple[OperationRequest, Planned[ReplyT]]:
        device = self._device
        if not device.availability.is_ready:
            device.check_pending(self._requests.waiting)
        armed = operation.armed
        ready = None if armed is None else armed.launch(operation, device)
        if ready is None:
            planner = Planner(device, operation)
            planned = operation.plan(planner)
            launch = planner.launch(planned)
            launch.frame = operation.frame
        else:
            launch, planned = ready
        if device.hooks or device.validators:
            device.validated(launch)
        hosts = HostArrays(self._by_value, self._staging)
        number = self._requests.next_number()
        if device.system.observers.meter is None:
            return OperationRequest(number, launch, hosts), planned
        return MeasuredRequest(number, launch, hosts, self._measures), planned

    def _cancel(self, request: RemoteRequest) -> bool:
        """Withdraw the request of a cancelled caller, or give it the grace to end."""
        if self._requests.withdraw(request):
            if not request.copies:
                return True
            # A lost worker had received it, or its host array is being copied for the next worker.
            self._copies.unwind(request)
            return False
        link = self._sender.link
        if link is not None and self._requests.get(request.number) is request:
            link.send(_orders.cancel(request.number), now=True)
        seconds = self._options.cancel_grace
        # A closed await may have no task that waits.
        self._leave_in(request, seconds if request.task is None else grace_in(request.task.context, seconds))
        return False

    def _leave_in(self, request: RemoteRequest, seconds: float) -> None:
        self._alarms.set(request, trio.current_time() + seconds, lambda: self._leave(request))

    def _leave(self, request: RemoteRequest) -> None:
        """Let a cancelled caller leave, after copies of its arrays, which end soon."""
        if request.stage == "over":
            return
        if self._requests.get(request.number) is not request:
            # The worker has ended it: only copies of its results are still running.
            self._copies.unwind(request)
            return
        assert isinstance(request, OperationRequest)
        if request.hosts.are_direct(request.launch):
            # D72: the device itself uses memory of the program, so the caller must wait.
            return
        if not (request.makes_all_it_writes or request.hosts.is_copied):
            # Otherwise the array that it changes would lack a valid result.
            self._leave_in(request, _COPYING)
            return
        link = self._sender.link
        if link is not None and not request.hosts.is_copied:
            # The worker gets this before the end of the copies, because no kernel may see data that they did
            # not copy.
            link.send(_orders.caller_left(request.number), now=True)
        self._copies.cancel(request)
        request.leave()

    def lease(self, ref: AccelRef, *, write: bool, stream: object) -> AbstractAsyncContextManager[Any]:
        """See `AccelRef.lease`."""
        return self._leases.hold(ref, write=write, stream=stream)

    def lend(self, ref: AccelRef) -> WorkerLoan:
        """Lease an array to devices that read it."""
        return self._leases.lend(ref)

    def borrow(self, loan: Loan, stay: Stay | None) -> Borrowed:
        """Borrow an array that another device holds."""
        return self._leases.borrow(loan, stay)

    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        # The second call releases arrays dropped while the first one waits.
        for _ in range(2):
            await self._device.drain()
            await self._calls.ask("synchronize")

    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        await self._device.drain()
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
        self._sender.serving().send(_orders.poison(reason), now=True)

    def _pump_soon(self) -> None:
        # The pump runs in a later turn, because this is called while a request is ending.
        if self._requests.waiting:
            self._token.run_sync_soon(self._requests.pump, idempotent=True)

    def _observe(self) -> None:
        device = self._device
        self._pool.observe(
            is_observed=bool(device.system.observers.of_every_message), is_timed=bool(device.hooks)
        )

    def _unshare(self, number: int) -> None:
        self._pool.unshare(number, but=self._sender.link)
