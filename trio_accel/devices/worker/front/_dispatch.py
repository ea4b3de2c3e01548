"""Contexts in worker processes: operations go to the worker that serves, and survive its death."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ....actors import ActorContext, ActorEvent, ActorSnapshot, Event, MessageEvent
from ....backends.base import DeviceLostError, MemoryStatistics, NotSupportedError
from ....backends.base.ops import ArraySpec
from ...arrays._pending import Pending
from ...arrays._ref import AccelRef
from ...base._alarms import Alarms
from ...base._cancel_grace import grace_in
from ...base._errors import damage_to_memory, locate
from ...base._nudge import Nudge
from ...base._shortage import lost_descriptors, out_of_descriptors
from ...base._statistics import DeviceStatistics
from ...completion._strategies import SyncCompletion
from ...engine._context import context_policy
from ...engine._device_state import DeviceState
from ...host._copying import SMALL
from ...operations._operation import Operation, Planner
from ..launcher._launcher import Launcher, WorkerProcess, open_launcher
from ..transport._codec import NonsenseError
from ..transport._frames import Address
from ..transport._framing import LOST, Received
from ._calls import CallLostError, Calls
from ._checks import check_addresses, check_copy, check_results, close_descriptors, expect
from ._chunks import ChunkTable
from ._context import WorkerContextActor
from ._copy_service import CopyService
from ._host_arrays import HostArrays, HostCopy, Staging
from ._left_memory import INTACT, LeftMemory
from ._link import WorkerLink, died
from ._logs import record_of
from ._mirror import Mirror
from ._outcomes import OutcomePolicy, TryAgainError
from ._pool import WorkerPool, check_options
from ._request import LeaseRequest, OperationRequest, RemoteRequest
from ._requests import RequestTable

__all__ = ["WorkerDispatch"]

_logger = logging.getLogger("trio_accel.devices")
LibraryT = TypeVar("LibraryT")
ReplyT = TypeVar("ReplyT")

_CLOSING = 1.0
# A host array is being copied: seconds between two looks at it.
_COPYING = 0.001
# Seconds between two attempts to get a descriptor for which there was no room.
_ASKED_AGAIN = 0.1
# Of what the program has let go: so many bytes, or blocks, do not wait for the next operation.
_LARGE = 64 << 20
_MANY = 64
# A context that follows a loss gets one request at a time, until one has completed, and no longer than this.
_CAREFUL = 0.2
# Seconds between two looks for what was dropped, while there are requests.
_DRAINED = 0.1


class WorkerDispatch:
    """Serves a device from worker processes, one at a time; memory and requests outlive them."""

    def __init__(self, device: DeviceState, adopted: LeftMemory | None) -> None:
        check_options(device)
        self._device = device
        self._options = device.options
        device.tell_arrays = self._tell_arrays
        # Memory that was another device's, until this one is open; what this one leaves; and who has that.
        self._adopted = adopted
        self.left: LeftMemory | None = None
        self.adopted_by: str | None = None
        if adopted is None:
            self._chunks = ChunkTable(device.backend, self._unshare)
        else:
            self._chunks = adopted.chunks
            self._chunks.on_drop = self._unshare
        self._copies = CopyService()
        self._requests = RequestTable(device.options.in_flight, self._send)
        self._outcomes = OutcomePolicy(device, self._copies)
        self._pool = WorkerPool(device, self._chunks, self._handle, self._ended)
        self._alarms = Alarms()
        self._mirror = Mirror()
        self._calls = Calls()
        self._link: WorkerLink | None = None
        self._context: ActorContext | None = None
        # Whether the context has completed a request without an error.
        self._has_served = False
        # What the worker is to be told that the program has let go; of some it is not known how large it is.
        self._released: list[int] = []
        self._released_bytes = 0.0
        self._some_released = Nudge()
        # Whoever gives back what is dropped while the worker has requests; it waits while it has none.
        self._first_sent = Nudge()
        self._last_error: BaseException | None = None
        # A worker whose loop blocks cannot be told that something was copied.
        self._by_value = sys.maxsize if isinstance(self._options.completion, SyncCompletion) else SMALL
        self._token = trio.lowlevel.current_trio_token()
        self._staging = None if device.host_pool is None else Staging(device.host_pool, self._pump_soon)
        self._launcher: Launcher
        self._nursery: trio.Nursery
        self._handlers: dict[str, Callable[[WorkerLink, Any, tuple[int, ...]], None]] = {
            "ready": self._on_ready,
            "started": self._on_started,
            "early": self._on_early,
            "done": self._on_done,
            "granted": self._on_granted,
            "copy": self._on_copy,
            "chunk": self._on_chunk,
            "unchunk": self._on_unchunk,
            "result": self._on_result,
            "event": self._on_event,
            "log": self._on_log,
            "lost": self._on_lost,
            "closed": self._on_closed,
        }

    @property
    def process(self) -> WorkerProcess | None:
        """The worker that serves, if one does now."""
        return None if self._link is None else self._link.process

    @property
    def spares(self) -> int:
        """Workers that stand ready."""
        return self._pool.spares

    @property
    def pending(self) -> int:
        """Requests that wait for a context."""
        return 0 if self._link is not None else self._requests.waiting

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those of the chunks."""
        return tuple(chunk.descriptor for chunk in self._chunks.chunks.values())

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries of the current context."""
        return self._serving().libraries

    async def prepare(self) -> None:
        """Have the launcher of the system started: it must outlive the device's actor."""
        self._launcher = await open_launcher(self._device.system)
        self._chunks.open(self._launcher)

    def started(self) -> None:
        """What was adopted is this device's from now on."""
        self._adopted = None

    def _tell_arrays(self) -> str:
        """What became of the arrays of a device that was given up."""
        if self.adopted_by is not None:
            return f"; its arrays were adopted by the next device, {self.adopted_by}"
        return INTACT if self.left is not None and self.left.chunks.blocks else ""

    def have_back(self, memory: LeftMemory) -> None:
        """The device that was to adopt what this one left could not be opened."""
        self.left, self.adopted_by = memory, None
        memory.leave(self._device.system)

    @asynccontextmanager
    async def open(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the memory and the workers."""
        observers = self._device.system.observers
        given_up: BaseException | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._alarms.run)
                self._nursery.start_soon(self._send_released_soon)
                self._nursery.start_soon(self._drain_meanwhile)
                self._copies.open(self._nursery)
                self._pool.open(self._launcher, self._nursery)
                observers.on_change(self, self._observe)
                self._observe()
                try:
                    yield
                except BaseException as error:
                    given_up = self._last_error or error
                    raise
                finally:
                    observers.off_change(self)
                    self._device.availability.end()
                    self._end(given_up, INTACT if self._chunks.blocks and self._leaves(context) else "")
                    with trio.CancelScope(shield=True):
                        # They are killed: this takes as long as the kernel needs for that.
                        await self._pool.close()
                        await self._copies.wait_idle()
                self._nursery.cancel_scope.cancel(reason="the device ends")
        finally:
            self._leave_memory(context)

    def _leaves(self, context: ActorContext) -> bool:
        """Whether the memory stays for another device: this one was not closed, or never had it."""
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
            WorkerContextActor, self.generation, name="context", policy=context_policy(self._options)
        )

    @enable_ki_protection
    async def ask(self, operation: Operation[LibraryT, ReplyT]) -> ReplyT:
        """See `Device.ask`."""
        self._device.check_operation(operation, "ask")
        # One that is done by the time of a cancellation returns: a loop of these must end all the same.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._device.availability.is_ended:
            raise await self._device.lost()
        request, reply = self._plan(operation, invalidates=False)
        try:
            self._requests.add(request)
            link = self._link
            if link is not None and self._requests.sent == 1 and link.may_spin:
                # Its asker sees its end by itself, as long as it is alone.
                await link.spin(
                    request.number,
                    partial(self._take_own, link, request),
                    partial(self._is_waited_for, link, request),
                )
                if request.is_over:
                    request.take_result().unwrap()
                    return reply
            await request.wait(self._cancel)
        finally:
            if not request.is_left:
                request.launch.forget()
        return reply

    @enable_ki_protection
    def submit(self, operation: Operation[LibraryT, ReplyT]) -> Pending[ReplyT]:
        """See `Device.submit`."""
        if self._device.availability.is_ended:
            gone = f"the device is closed, or was given up{self._tell_arrays()}"
            raise DeviceLostError(gone, device=self._device.name)
        window = self._device.window
        window.check_room(operation.library)
        request, reply = self._plan(operation, invalidates=True)
        pending = Pending(request.launch.name, reply)
        settle = window.enter(operation.library, pending)

        def done(error: BaseException | None) -> None:
            request.launch.forget()
            settle(error)

        request.call_back(done)
        self._requests.add(request)
        return pending

    @asynccontextmanager
    async def lease(self, ref: AccelRef, *, write: bool, stream: object) -> AsyncGenerator[Any, None]:
        """See `AccelRef.lease`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._device.availability.is_ended:
            raise await self._device.lost()
        ref.block.check("lease")
        if stream is not None:
            raise NotSupportedError(
                "lease: stream: in a worker process no stream of this one reaches the array"
            )
        if not self._device.backend.shares_memory_with_host:
            raise NotSupportedError(
                "lease: this process cannot address the memory of the device, whose context is in a worker; "
                "copy with to_host(), or open the device with isolation='inline'",
                device=self._device.name,
                operation="lease",
                backend=self._device.backend.name,
            )
        request = LeaseRequest(self._requests.next_number(), ref.spec, write=write)
        try:
            self._requests.add(request)
            await request.granted.wait()
            if request.failure is not None:
                raise request.failure
            # While its turn was waited for, it may have been spoiled or released.
            ref.block.check("lease")
            assert request.address is not None
            _, _, chunk, offset = request.address
            array = self._chunks.view(chunk, offset, ref.spec)
            array.flags.writeable = write
            self._device.leases += 1
            try:
                yield array
            finally:
                self._device.leases -= 1
            array.flags.writeable = False
        finally:
            request.is_given_back = True
            if not self._requests.withdraw(request) and self._link is not None:
                self._link.send(("unlease", request.number), now=True)

    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        # What ends while the first is waited for is dropped by the second.
        for _ in range(2):
            self._device.blocks.drain()
            await self._call("synchronize")

    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        self._device.blocks.drain()
        statistics: DeviceStatistics = await self._call("count")
        return statistics

    def _count(
        self, pid: int, launched: int, completed: int, in_flight: dict[str, int], memory: tuple[int, ...]
    ) -> DeviceStatistics:
        """Add what the worker counts to what waits here: whatever it had done by then is known here."""
        used, reserved, peak, blocks, limit = memory
        return DeviceStatistics(
            generation=self._device.generation,
            pid=pid,
            launched=launched,
            completed=completed,
            in_flight=sum(in_flight.values()),
            queues=self._requests.queues(in_flight),
            memory=MemoryStatistics(used=used, reserved=reserved, peak=peak, blocks=blocks, limit=limit),
            losses=self._device.losses.count,
        )

    def poison(self, reason: str) -> None:
        """See `trio_accel.testing.poison`."""
        self._serving().send(("poison", reason), now=True)

    @asynccontextmanager
    async def generation(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Serve with one worker, until it is lost or the context's actor ends."""
        try:
            link = await self._pool.take()
        except Exception as error:
            self._last_error = error
            raise
        try:
            # Nothing runs on the memory while a copy of before may still write.
            await self._copies.wait_off_device()
            self._chunks.drop_unsound()
            self._chunks.drop_empty()
            number = self._device.generation + 1
            self._context = context
            # Of one that told of its actors and died before it served.
            self._mirror.clear()
            addresses = tuple(self._chunks.blocks.values())
            link.is_asked = partial(self._asks, link)
            link.send(("start", number, addresses), now=True)
            await link.wait(lambda: link.is_started)
            context.show(self._snapshots)
            context.show_process(link.process.pid)
            self._begin(link, number, [block for block, *_ in addresses])
            yield
            await self._close(link)
        finally:
            self._lose(link, died("was ended with its context", self._device.name))
            link.condemn("was ended with its context")

    def _asks(self, link: WorkerLink) -> bool:
        """Whether a worker is to answer something: at first, that it serves."""
        return link is not self._link or bool(self._requests.sent or len(self._calls))

    def _begin(self, link: WorkerLink, number: int, told: Iterable[int]) -> None:
        self._link = link
        self._has_served = False
        # What the program has let go since the worker was told of it.
        self._released, self._released_bytes = [], 0.0
        self._release([block for block in told if block not in self._chunks.blocks])
        self._device.blocks.release = self._release
        self._device.availability.begin(number)
        path, pid = self._device.path, link.process.pid
        _logger.info("device %s: worker process %d serves generation %d", path, pid, number)
        self._open_requests()
        self._pool.refill()

    def _open_requests(self) -> None:
        """Hand over what waits; after a loss one request at a time, until one has completed."""
        intensity = self._options.intensity
        is_careful = self._device.losses.count > 0 and (intensity is None or not intensity.counts_progress)
        self._requests.open(carefully=is_careful)
        if is_careful:
            self._alarms.set(self._requests, trio.current_time() + _CAREFUL, self._requests.hurry)

    async def _close(self, link: WorkerLink) -> None:
        """End a worker in order: what waits is refused, what it has is finished within the grace."""
        self._outcomes.is_closing = True
        for request in self._requests.take_waiting():
            self._outcomes.refuse(request, self._outcomes.closed())
        link.send(("close",), now=True)
        with trio.move_on_after(self._options.close_grace + _CLOSING, shield=True), suppress(Exception):
            # If it dies over that, it is closed as well.
            await link.wait(lambda: not link.is_started)

    def _end(self, given_up: BaseException | None, arrays: str) -> None:
        """The device ends: no worker follows."""
        error = self._outcomes.closed()
        if given_up is not None:
            error.message = f"{self._device.path}: the device was given up: {given_up}{arrays}"
            error.generation = self._device.generation
        for request in (*self._requests.close(), *self._requests.take_waiting()):
            again = attrs.evolve(error)
            again.__cause__ = given_up
            self._outcomes.refuse(request, again)
        self._calls.lose()

    def _ended(self, link: WorkerLink) -> None:
        """A worker has ended by itself, or was killed."""
        self._lose(link, died(link.how or "ended", self._device.name))

    def _lose(self, link: WorkerLink, error: Exception) -> None:
        """The context is lost: sort what it had by whether it was begun, and have it replaced."""
        if link is not self._link:
            return
        self._link = None
        self._last_error = error
        self._device.memory_failure = self._device.memory_failure or damage_to_memory(error)
        self._device.blocks.drain()
        self._device.availability.interrupt()
        self._mirror.clear()
        self._copies.cancel_on_device()
        self._chunks.missing.clear()
        self._calls.lose()
        self._alarms.drop(self._requests)
        had = self._requests.close()
        if not link.is_silent:
            self._keep_until_gone(link, had)
        for request in had:
            self._alarms.drop(request)
            self._forget_addresses(request)
        self._requests.put_back(self._outcomes.sort(had, link, error, retry=self._options.retry))
        if self._context is not None and not self._outcomes.is_closing:
            self._context.crash(error)

    def _plan(
        self, operation: Operation[LibraryT, ReplyT], *, invalidates: bool
    ) -> tuple[OperationRequest, ReplyT]:
        device = self._device
        if not device.availability.is_ready:
            device.check_pending(self._requests.waiting)
        planner = Planner(device, operation)
        planned = operation.plan(planner)
        launch = planner.launch(planned)
        if device.hooks:
            device.validated(launch)
        hosts = HostArrays(self._by_value, self._staging)
        request = OperationRequest(self._requests.next_number(), launch, hosts, invalidates=invalidates)
        return request, planned.reply

    def _send(self, request: RemoteRequest) -> None:
        """Hand a request over; the table has seen to it that it may go."""
        link, library = self._link or self._serving(), request.library
        blocks = self._device.blocks
        if blocks.dropped:
            # It goes along.
            self._note_released(blocks.take_some())
        if self._first_sent.task is not None:
            self._first_sent.wake()
        word = link.words.get(library)
        if word is None:
            word = self._first_word(link, library)
        try:
            message = request.message(word, tuple(self._released), link.templates)
        except Exception as error:  # noqa: BLE001  # it is the asker's
            self._requests.done(request.number)
            if isinstance(request, OperationRequest):
                name, generation = self._device.name, self._device.generation
                locate(error, device=name, operation=request.launch.name, generation=generation)
            self._outcomes.refuse(request, error)
            return
        if self._released:
            self._released, self._released_bytes = [], 0.0
        is_alone = self._requests.sent == 1
        if isinstance(request, OperationRequest) and request.hosts.is_used:
            # It may be large.
            link.send(message, now=is_alone)
            self._copies.stage(request, self._filled)
            return
        link.post(message, now=is_alone)

    def _first_word(self, link: WorkerLink, library: str) -> int:
        """The word of a library that this worker was not asked for yet; of a lease it is none."""
        if not library:
            return 0
        self._pool.warm(library)
        return link.word(library)

    def _note_released(self, blocks: list[int]) -> None:
        self._released_bytes += self._chunks.forget(blocks)
        if self._link is not None:
            self._released.extend(blocks)

    def _release(self, blocks: Iterable[int]) -> None:
        self._note_released(list(blocks))
        if self._link is None:
            return
        if self._released_bytes >= _LARGE or len(self._released) >= _MANY:
            # Small ones, and few, can wait for a request to go with.
            self._some_released.wake()

    @enable_ki_protection
    async def _send_released_soon(self) -> None:
        while True:
            await self._some_released.wait()
            self._send_released()

    @enable_ki_protection
    async def _drain_meanwhile(self) -> None:
        """Give back what is dropped while requests come and go, without being rung for each."""
        blocks = self._device.blocks
        try:
            while True:
                if not self._requests.sent:
                    # In this order: what is dropped from now on rings.
                    blocks.is_watched = False
                    blocks.drain()
                    await self._first_sent.wait()
                blocks.is_watched = True
                await trio.sleep(_DRAINED)
                blocks.drain()
        finally:
            blocks.is_watched = False

    def _send_released(self) -> None:
        if self._released and self._link is not None:
            self._link.send(("release", tuple(self._released)))
            self._released, self._released_bytes = [], 0.0

    def _cancel(self, request: RemoteRequest) -> bool:
        """An asker is cancelled: take its request back, or give it the grace to end."""
        if self._requests.withdraw(request):
            if not request.copies:
                return True
            # The worker that was lost had it, or its host array is on its way for the next one.
            self._copies.cancel(request)
            request.unwind_after_copies()
            return False
        if self._link is not None and self._requests.get(request.number) is request:
            self._link.send(("cancel", request.number), now=True)
        self._leave_in(request, grace_in(request.context, self._options.cancel_grace))
        return False

    def _leave_in(self, request: RemoteRequest, seconds: float) -> None:
        self._alarms.set(request, trio.current_time() + seconds, lambda: self._leave(request))

    def _leave(self, request: RemoteRequest) -> None:
        """A cancelled asker waits no longer, except for copies of its arrays, which end soon."""
        if request.is_over:
            return
        if self._requests.get(request.number) is not request:
            # The worker is done with it: what it has made is on its way to the program.
            self._copies.cancel(request)
            request.unwind_after_copies()
            return
        assert isinstance(request, OperationRequest)
        if request.hosts.are_direct(request.launch):
            # The device itself uses memory of the program.
            return
        if not (request.makes_all_it_writes or request.hosts.is_copied):
            # What it changes would not be worth anything.
            self._leave_in(request, _COPYING)
            return
        self._copies.cancel(request)
        request.leave()

    def _keep_until_gone(self, link: WorkerLink, requests: Iterable[RemoteRequest]) -> None:
        """What a lost worker may still write to counts as used until it is dead."""
        kept = [
            request
            for request in requests
            if isinstance(request, OperationRequest) and request.hosts.is_written
        ]
        if kept:
            for request in kept:
                request.copies += 1
            self._nursery.start_soon(self._wait_until_gone, link, kept)

    @enable_ki_protection
    async def _wait_until_gone(self, link: WorkerLink, kept: list[OperationRequest]) -> None:
        # It is being killed.
        with trio.CancelScope(shield=True):
            await link.wait_gone()
        for request in kept:
            request.copy_over()

    def _pump_soon(self) -> None:
        # Not here, in the midst of what a request ends by.
        if self._requests.waiting:
            self._token.run_sync_soon(self._requests.pump, idempotent=True)

    def _filled(self, copy: HostCopy) -> None:
        """A host array is in shared memory: streams may wait for it, which is the worker's to know."""
        if self._link is not None:
            self._link.send(("filled", copy.transfer), now=True)

    def _serving(self) -> WorkerLink:
        if self._link is None:
            raise DeviceLostError("the device has no context now", device=self._device.name)
        return self._link

    async def _call(self, what: str) -> Any:
        """Ask the worker that serves for something, and the next one if it is lost meanwhile."""
        await trio.lowlevel.checkpoint_if_cancelled()
        availability = self._device.availability
        while True:
            while self._link is None:
                if availability.is_ended:
                    raise await self._device.lost()
                await availability.wait_changed()
            # What the program has let go by now counts.
            self._send_released()
            number = self._calls.begin(what)
            self._link.send(("call", number, what), now=True)
            with suppress(CallLostError):
                return await self._calls.wait(number)

    def _snapshots(self) -> tuple[ActorSnapshot, ...]:
        link = self._link
        return self._mirror.snapshots({} if link is None else self._requests.queues_by(link.started))

    def _observe(self) -> None:
        self._pool.observe(is_observed=bool(self._device.system.observers))

    def _unshare(self, number: int) -> None:
        self._pool.unshare(number, but=self._link)

    def _handle(self, link: WorkerLink, received: list[Received]) -> None:
        handlers: dict[Any, Callable[..., None]] = self._handlers
        taken = 0
        if link.is_distrusted:
            close_descriptors(received)
            return
        try:
            for message, descriptors in received:
                if descriptors:
                    expect(message[0] == "chunk", f"{message[0]}: it came with descriptors")
                handlers[message[0]](link, message[1:], descriptors)
                taken += 1
        except NonsenseError as error:
            # The one place where anything follows from that.
            close_descriptors(received[taken:])
            link.distrust(error)
        # Once for all that are done by now.
        if self._requests.waiting:
            self._requests.pump()

    def _take_own(self, link: WorkerLink, request: OperationRequest, received: list[Received]) -> bool:
        """Take what was received in an asker's task, if all of it belongs there and nothing follows from it.

        What does is told in the task of the worker: it would have the asker's context, and errors of others
        what the asker is just handling.
        """
        message: Any
        for message, _ in received:
            if not (
                self._is_answer(message, request)
                or message[0] == "early"
                or (message[0] == "done" and link.was_early(message[1]))
            ):
                return False
        self._handle(link, received)
        return True

    def _is_answer(self, message: Any, request: OperationRequest) -> bool:
        """Whether a message says that all went well with a request."""
        if message[:2] != ("done", request.number):
            return False
        _, _, _, results, trouble = message
        return not results and trouble is None and self._is_plain(request)

    def _is_plain(self, request: OperationRequest) -> bool:
        """Whether nothing follows from the end of a request that went well."""
        return not (request.hosts.is_used or self._requests.waiting or self._device.hooks)

    def _is_waited_for(self, link: WorkerLink, request: OperationRequest) -> bool:
        """Whether its asker is to look for its end; takes the end if the worker shows it."""
        if request.is_over or self._requests.sent != 1:
            return False
        addresses = request.early
        if addresses is None or not self._is_plain(request) or not link.complete_early(request.number):
            return True
        self._done(request, addresses, (), None)
        return False

    def _on_early(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        number, addresses = message
        request = self._request(link, number)
        if request is not None:
            check_addresses(request, addresses, self._chunks)
            assert isinstance(request, OperationRequest)
            request.early = addresses

    def _on_ready(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        expect(not link.is_ready, "ready: it was before")
        (link.libraries,) = message
        link.is_ready = True
        link.notify()

    def _on_started(self, link: WorkerLink, _: Any, __: tuple[int, ...]) -> None:
        expect(link.is_ready and not link.is_started, "started: it was not told to")
        link.is_started = True
        link.notify()

    def _on_closed(self, link: WorkerLink, _: Any, __: tuple[int, ...]) -> None:
        expect(self._outcomes.is_closing, "closed: it was not told to")
        link.is_started = False
        link.notify()

    def _on_lost(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        error, link.is_silent = message
        self._lose(link, error)
        link.condemn(f"lost its context: {error}", error)

    def _on_done(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        number, addresses, results, trouble = message
        request = None if link.take_early(number) else self._request(link, number)
        if request is not None:
            if addresses:
                check_addresses(request, addresses, self._chunks)
            check_results(request, results, trouble)
            self._done(request, addresses, results, trouble)

    def _done(
        self, request: RemoteRequest, addresses: tuple[Address, ...], results: tuple[bytes, ...], trouble: Any
    ) -> None:
        """The worker is done with a request."""
        self._requests.done(request.number)
        if trouble is None and not self._has_served and self._context is not None:
            self._has_served = True
            self._context.report_progress()
            self._requests.hurry()
        if request.is_cancelled:
            # No other has one.
            self._alarms.drop(request)
        if isinstance(request, OperationRequest):
            if trouble is not None:
                self._forget_addresses(request)
            if self._chunks.missing:
                addresses = self._mapped(request, addresses)
            try:
                placed, error = self._outcomes.done(request, addresses, results, trouble)
            except TryAgainError:
                self._collect(request)
            else:
                self._chunks.record(placed)
                self._mirror.done(request.library, error)

    def _request(self, link: WorkerLink, number: int) -> RemoteRequest | None:
        """The request that a worker speaks of; None if it is no concern of this worker any more.

        Raises:
            NonsenseError: It was not given such a request, or has answered it.
        """
        if link is not self._link:
            return None
        request = self._requests.get(number)
        if request is None:
            raise NonsenseError(f"there is no request {number}")
        return request

    def _mapped(self, request: OperationRequest, addresses: Iterable[Address]) -> tuple[Address, ...]:
        """Of new blocks those that this process has memory for; a request that has others fails."""
        missing = self._chunks.missing
        for _, nbytes, chunk, _ in addresses:
            if chunk in missing and request.failure is None:
                request.failure = error = out_of_descriptors(nbytes, missing[chunk])
                name, generation = self._device.name, self._device.generation
                locate(error, device=name, operation=request.launch.name, generation=generation)
        return tuple([address for address in addresses if address[2] not in missing])

    def _forget_addresses(self, request: RemoteRequest) -> None:
        """Know no more where what a request was to make lies: it may have been made anew, or not at all."""
        if isinstance(request, OperationRequest):
            self._chunks.forget_addresses(request.launch.allocations)

    def _collect(self, request: OperationRequest) -> None:
        """There is no memory for a request: arrays in reference cycles may hold some."""
        if request.is_cancelled:
            self._copies.cancel(request)
            request.unwind_after_copies()
            return
        request.may_collect = False
        gc.collect()
        # Behind all others, so that its number says whether it was begun.
        request.number = self._requests.next_number()
        self._requests.add(request)

    def _on_granted(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        number, address = message
        request = self._request(link, number)
        if request is not None:
            expect(isinstance(request, LeaseRequest), f"granted: request {number} is no lease")
            assert isinstance(request, LeaseRequest)
            expect(address[0] == request.array.block, f"granted: another block than that of request {number}")
            self._chunks.check_address(address)
            request.address = address
            request.granted.set()

    def _on_copy(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        transfer, number, index, chunk, offset, array = cast(
            "tuple[int, int, int, int, int, ArraySpec]", message
        )

        def copied() -> None:
            link.send(("copied", transfer), now=True)

        if link is not self._link:
            return
        request = self._requests.get(number)
        if isinstance(request, OperationRequest):
            check_copy(request, index, array)
            self._chunks.check_array(chunk, offset, array)
        if isinstance(request, OperationRequest) and not request.is_left:
            self._copies.copy_on_device(
                request,
                request.hosts.copies[index],
                lambda: self._chunks.view(chunk, offset, array),
                copied,
            )
        else:
            # It was refused with its operands on their way already, or its asker has left it: the stream is
            # to go on all the same.
            copied()

    def _on_chunk(self, link: WorkerLink, message: Any, descriptors: tuple[int, ...]) -> None:
        number, nbytes = message
        expect(len(descriptors) == 1, f"chunk {number}: it came with {len(descriptors)} descriptors")
        if link is self._link:
            try:
                if descriptors[0] == LOST:
                    raise lost_descriptors()
                self._chunks.check_new(number, nbytes, descriptors[0])
                chunk = self._chunks.keep(number, nbytes, descriptors[0])
            except OSError as error:
                self._chunks.missing[number] = error
                self._nursery.start_soon(self._ask_for_chunk, link, number)
            else:
                link.send(("kept", number))
                self._pool.share(chunk, link)
                return
        # Else of a worker that was given up: nothing lies in it that anybody knows of.
        close_descriptors([(message, descriptors)])

    @enable_ki_protection
    async def _ask_for_chunk(self, link: WorkerLink, number: int) -> None:
        """Have a worker send the descriptor of a chunk again in a moment: there may be room for it then."""
        await trio.sleep(_ASKED_AGAIN)
        if number in self._chunks.missing and link is self._link:
            link.send(("tell_chunk", number))

    def _on_unchunk(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        (number,) = message
        if link is self._link and self._chunks.missing.pop(number, None) is None:
            expect(number in self._chunks.chunks, f"unchunk: there is no chunk {number}")
            self._chunks.drop(number)

    def _on_result(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        number, value = message
        self._calls.check(number, value)
        # Now, and not when its asker runs: more may have happened by then.
        self._calls.answer(number, None if value is None else self._count(link.process.pid, *value))

    def _on_event(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        if link.how is not None:
            return
        event: Event
        event, actor_class = message
        expect(event.path.startswith(f"{self._device.path}/context/"), "event: of another's actor")
        if isinstance(event, ActorEvent):
            event = attrs.evolve(event, pid=link.process.pid)
        self._mirror.take(event, actor_class)
        observers = self._device.system.observers
        if isinstance(event, MessageEvent):
            observers.emit(event)
        else:
            observers.emit_life(event)

    def _on_log(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        name, level, text = message
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            logger.handle(record_of(name, level, text, link.process.pid))
