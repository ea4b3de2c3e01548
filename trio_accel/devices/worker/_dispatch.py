"""Contexts in worker processes: operations go to the worker that serves, and survive its death."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorContext, Event, MessageEvent
from ...backends.base import ContextPoisonedError, DeviceLostError, MemoryStatistics
from ...backends.base.ops import CopyToHostSpec
from .._alarms import Alarms
from .._blocks import Block
from .._context import context_policy
from .._engine import Phase
from .._operation import Launch, Operation, Planner
from .._pending import Pending
from .._ref import AccelRef
from .._statistics import DeviceStatistics
from ._channel import Message
from ._chunks import ChunkTable
from ._context import WorkerContextActor
from ._copies import Copying
from ._frames import died, place_of, plain_place, read_array
from ._launcher import Launcher, open_launcher
from ._link import WorkerLink
from ._mirror import Mirror, decode_event
from ._pool import WorkerPool, check_options
from ._request import LeaseRequest, OperationRequest, RemoteRequest
from ._requests import RequestTable
from ._wire_errors import decode_error

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["WorkerDispatch"]

LibraryT = TypeVar("LibraryT")
ReplyT = TypeVar("ReplyT")

# Besides those of the program: copies are bound by memory, two at a time saturate it.
_COPIES = 2
_CLOSING = 1.0
_WORKER_CONTEXT = "worker/context"
_logger = logging.getLogger("trio_accel.devices")


@attrs.define(eq=False)
class _Call:
    """Something that the worker is asked beside requests."""

    done: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    is_lost: bool = False


class WorkerDispatch:
    """Serves a device from worker processes, one at a time; memory and requests outlive them."""

    def __init__(self, device: Device) -> None:
        check_options(device.options)
        self._device = device
        self._options = device.options
        self._chunks = ChunkTable(device.backend, self._unshare)
        self._requests = RequestTable(device.options.in_flight, self._send)
        self._pool = WorkerPool(device.name, device.options, self._chunks, self._handle, self._ended)
        self._alarms = Alarms()
        self._mirror = Mirror()
        self._link: WorkerLink | None = None
        self._context: ActorContext | None = None
        self._released: list[int] = []
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._copyings: set[Copying] = set()
        self._copied = trio.Event()
        self._limiter = trio.CapacityLimiter(_COPIES)
        self._launcher: Launcher
        self._nursery: trio.Nursery
        self._last_error: BaseException | None = None
        self._is_closing = False
        self._launched = 0
        self._completed = 0
        self._handlers: dict[str, Callable[[WorkerLink, Any, tuple[int, ...]], None]] = {
            "ready": self._on_ready,
            "started": self._on_started,
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

    # What a device asks of it.

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries of the current context."""
        if self._link is None:
            raise DeviceLostError("the device has no context now", device=self._device.name)
        return self._link.libraries

    async def prepare(self) -> None:
        """Have the launcher of the system started: it must outlive the device's actor."""
        self._launcher = await open_launcher(self._device.system)
        self._chunks.open(self._launcher)

    @asynccontextmanager
    async def open(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the memory and the workers."""
        observers = self._device.system.observers
        given_up: BaseException | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._alarms.run)
                self._pool.open(self._launcher, self._nursery)
                observers.on_change(self, self._observe)
                try:
                    yield
                except BaseException as error:
                    given_up = self._last_error or error
                    raise
                finally:
                    observers.off_change(self)
                    self._end(given_up)
                    with trio.CancelScope(shield=True):
                        # They are killed: this takes as long as the kernel needs for that.
                        await self._pool.close()
                        await self._wait_copies()
                self._nursery.cancel_scope.cancel(reason="the device ends")
        finally:
            self._chunks.close()

    async def start_context(self, context: ActorContext) -> None:
        """Start the context's actor."""
        await context.spawn(WorkerContextActor, self, name="context", policy=context_policy(self._options))

    @enable_ki_protection
    async def ask(self, operation: Operation[LibraryT, ReplyT]) -> ReplyT:
        """See `Device.ask`."""
        if self._device.availability.is_ended:
            raise await self._device.lost()
        request, reply = self._plan(operation, spoils=False)
        try:
            self._requests.add(request)
            await request.wait(self._cancel)
        finally:
            request.launch.forget()
        return reply

    @enable_ki_protection
    def submit(self, operation: Operation[LibraryT, ReplyT]) -> Pending[ReplyT]:
        """See `Device.submit`."""
        if self._device.availability.is_ended:
            raise DeviceLostError("the device is closed, or was given up", device=self._device.name)
        window = self._device.window
        window.check_room(operation.library)
        request, reply = self._plan(operation, spoils=True)
        pending = Pending(request.launch.name, reply)
        settle = window.enter(operation.library, pending)

        def done(error: BaseException | None) -> None:
            request.launch.forget()
            settle(error)

        request.call_back(done)
        self._requests.add(request)
        return pending

    @asynccontextmanager
    async def lease(self, ref: AccelRef, *, write: bool) -> AsyncGenerator[npt.NDArray[Any], None]:
        """See `AccelRef.lease`."""
        if self._device.availability.is_ended:
            raise await self._device.lost()
        ref.block.check("lease")
        request = LeaseRequest(self._requests.next_number(), ref.spec, write=write)
        try:
            self._requests.add(request)
            await request.granted.wait()
            if request.failure is not None:
                raise request.failure
            # While its turn was waited for, it may have been spoiled or released.
            ref.block.check("lease")
            place = self._chunks.blocks[ref.block.id]
            array = self._chunks.view(place.chunk, place.offset, ref.spec)
            array.flags.writeable = write
            yield array
            array.flags.writeable = False
        finally:
            request.is_given_back = True
            if not self._requests.withdraw(request) and self._link is not None:
                self._link.send(("unlease", request.number), now=True)

    async def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self._device.blocks.drain()
        await self._call("synchronize")
        self._device.blocks.drain()
        await self._call("synchronize")

    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        self._device.blocks.drain()
        used, reserved, peak, blocks, limit = await self._call("memory")
        link = self._link
        queues = self._requests.queues((lambda _: 0) if link is None else link.started)
        return DeviceStatistics(
            generation=self._device.generation,
            launched=self._launched + sum(queue.in_flight for queue in queues.values()),
            completed=self._completed,
            in_flight=sum(queue.in_flight for queue in queues.values()),
            pending=0 if link is not None else self._requests.waiting,
            queues=queues,
            memory=MemoryStatistics(used=used, reserved=reserved, peak=peak, blocks=blocks, limit=limit),
        )

    def poison(self, reason: str) -> None:
        """See `trio_accel.testing.poison`."""
        if self._link is None:
            raise DeviceLostError("the device has no context now", device=self._device.name)
        self._link.send(("poison", reason), now=True)

    # Generations.

    @asynccontextmanager
    async def generation(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Serve with one worker, until it is lost or the context's actor ends."""
        link = await self._pool.take()
        try:
            # Nothing runs on the memory while a copy of before may still write.
            await self._wait_copies()
            self._chunks.drop_empty()
            number = self._device.generation + 1
            places = tuple(plain_place(block) for block in self._chunks.blocks.values())
            link.send(("start", number, places), now=True)
            await link.wait(lambda: link.is_started)
            self._begin(link, context, number)
            yield
            await self._close(link)
        finally:
            self._lose(link, died("was ended with its context", self._device.name))
            link.condemn("was ended with its context")

    def _begin(self, link: WorkerLink, context: ActorContext, number: int) -> None:
        self._link, self._context = link, context
        self._launched = self._completed = 0
        self._released.clear()
        self._mirror.clear()
        context.show(self._snapshots)
        self._device.blocks.release = self._release
        self._device.availability.begin(number)
        self._requests.open()
        self._pool.refill()

    async def _close(self, link: WorkerLink) -> None:
        """End a worker in order: what waits is refused, what it has is finished within the grace."""
        self._is_closing = True
        for request in self._requests.take_waiting():
            self._refuse(request, self._closed_error())
        link.send(("close",), now=True)
        with trio.move_on_after(self._options.cancel_grace + _CLOSING, shield=True):
            await link.wait(lambda: not link.is_started)

    def _end(self, given_up: BaseException | None) -> None:
        """The device ends: no worker follows."""
        error = self._closed_error()
        if given_up is not None:
            error = DeviceLostError(
                f"the device was given up: {given_up}",
                device=self._device.name,
                generation=self._device.generation,
            )
            error.__cause__ = given_up
        for request in (*self._requests.close(), *self._requests.take_waiting()):
            self._refuse(request, attrs.evolve(error))
        for call in self._calls.values():
            call.is_lost = True
            call.done.set()

    def _closed_error(self) -> DeviceLostError:
        return DeviceLostError("the device is closed", device=self._device.name)

    def _refuse(self, request: RemoteRequest, error: Exception) -> None:
        """A request ends that no worker has begun with."""
        if isinstance(request, LeaseRequest):
            request.failure = error
            request.granted.set()
            return
        assert isinstance(request, OperationRequest)
        if request.spoils:
            for output in request.launch.outputs:
                output.spoil(request.launch.name, error)
        if request.is_cancelled:
            request.unwind()
        else:
            request.finish(error)

    def _ended(self, link: WorkerLink) -> None:
        """A worker has ended by itself, or was killed."""
        self._lose(link, died(link.how or "ended", self._device.name))

    def _lose(self, link: WorkerLink, error: Exception) -> None:
        """The context is lost: sort what it had by whether it was begun, and have it replaced."""
        if link is not self._link:
            return
        self._link = None
        self._last_error = error
        self._device.blocks.drain()
        self._device.availability.interrupt()
        for copying in self._copyings:
            copying.cancel()
        for call in self._calls.values():
            call.is_lost = True
            call.done.set()
        self._calls.clear()
        again: list[RemoteRequest] = []
        for request in self._requests.close():
            if self._runs_again(request, link, error):
                again.append(request)
        self._requests.put_back(again)
        if self._context is not None and not self._is_closing:
            self._context.crash(error)

    def _runs_again(self, request: RemoteRequest, link: WorkerLink, error: Exception) -> bool:
        """Decide what becomes of a request that a lost worker had."""
        self._alarms.drop(request)
        if isinstance(request, LeaseRequest):
            return not request.is_given_back
        assert isinstance(request, OperationRequest)
        if request.number <= link.started(request.library):
            request.losses += 1
            self._count_hit(request.launch)
            if request.losses > self._options.retry or not request.makes_all_it_writes:
                self._fail_in_flight(request, link, error)
                return False
        if request.is_over:
            return False
        if request.is_cancelled:
            self._not_launched(request)
            request.unwind()
            return False
        return True

    def _fail_in_flight(self, request: OperationRequest, link: WorkerLink, cause: Exception) -> None:
        launch = request.launch
        where = {
            "device": self._device.name,
            "operation": launch.name,
            "generation": self._device.generation,
        }
        error: DeviceLostError | ContextPoisonedError
        if self._is_closing:
            error = DeviceLostError("the device was closed while this operation was in flight", **where)
        else:
            error = ContextPoisonedError(
                "the device's context was lost while this operation was in flight; make its outputs again",
                **where,
            )
            error.__cause__ = cause
        for output in launch.outputs:
            output.spoil(launch.name, error)
        self._completed += 1
        self._notify(launch, is_launched=True)
        self._finish(request, error)

    # Requests.

    def _plan(
        self, operation: Operation[LibraryT, ReplyT], *, spoils: bool
    ) -> tuple[OperationRequest, ReplyT]:
        device = self._device
        if not device.availability.is_ready:
            device.check_pending(self._requests.waiting)
        planner = Planner(device, operation)
        planned = operation.plan(planner)
        launch = planner.launch(planned.spec)
        device.validated(launch)
        reads, writes = launch.blocks()
        number = self._requests.next_number()
        return OperationRequest(number, launch, reads, writes, spoils=spoils), planned.reply

    def _send(self, request: RemoteRequest) -> None:
        link = self._link
        assert link is not None  # it hands nothing over without
        self._device.blocks.drain()
        released = tuple(self._released)
        try:
            if isinstance(request, OperationRequest):
                request.launch.check_inputs()
            message = request.message(link.word(request.library) if request.library else 0, released)
        except Exception as error:  # noqa: BLE001  # it is the asker's
            self._requests.done(request.number)
            self._refuse(request, error)
            return
        self._released.clear()
        link.send(message, now=self._requests.sent == 1)

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._chunks.forget(block)
        if self._link is None:
            return
        if not self._released:
            # They go with the next request, or with the writer, whichever is first.
            trio.lowlevel.current_trio_token().run_sync_soon(self._send_released, idempotent=True)
        self._released.extend(blocks)

    def _send_released(self) -> None:
        if self._released and self._link is not None:
            self._link.send(("release", tuple(self._released)))
            self._released.clear()

    def _cancel(self, request: RemoteRequest) -> bool:
        """An asker is cancelled: take its request back, or give it the grace to end."""
        if self._requests.withdraw(request):
            self._not_launched(request)
            return True
        if self._link is not None:
            self._link.send(("cancel", request.number), now=True)
        deadline = trio.current_time() + self._options.cancel_grace
        self._alarms.set(request, deadline, lambda: self._grace_over(request))
        return False

    def _grace_over(self, request: RemoteRequest) -> None:
        request.unwind()
        if self._link is not None:
            self._link.condemn(
                f"was killed: a cancelled operation did not end within cancel_grace = "
                f"{self._options.cancel_grace:g} s"
            )

    def _not_launched(self, request: RemoteRequest) -> None:
        if isinstance(request, OperationRequest) and request.launch.fault is not None:
            self._device.faults.give_back(request.launch.fault)

    def _count_hit(self, launch: Launch) -> None:
        if launch.fault is not None:
            launch.fault.hit += 1

    def _finish(self, request: RemoteRequest, error: BaseException | None) -> None:
        """Give the outcome, when no copy uses the program's arrays any more."""
        if request.copies:
            request.outcome_of_copies = (error,)
        else:
            request.finish(error)

    def _notify(self, launch: Launch, *, is_launched: bool) -> None:
        hooks = self._device.hooks
        if not (hooks and is_launched):
            return
        for phase in (Phase.ENQUEUE, Phase.COMPLETE, Phase.REPLY, Phase.RELEASE):
            for hook in tuple(hooks):
                try:
                    hook(phase, launch)
                except Exception:
                    _logger.exception("a hook failed in phase %s of %s", phase.value, launch.name)

    # Messages of workers.

    def _handle(self, link: WorkerLink, message: Message, descriptors: tuple[int, ...]) -> None:
        self._handlers[str(message[0])](link, message[1:], descriptors)

    def _on_ready(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        (link.libraries,) = message
        link.is_ready = True
        link.notify()

    def _on_started(self, link: WorkerLink, _: Any, __: tuple[int, ...]) -> None:
        link.is_started = True
        link.notify()

    def _on_closed(self, link: WorkerLink, _: Any, __: tuple[int, ...]) -> None:
        link.is_started = False
        link.notify()

    def _on_lost(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        error = decode_error(message[0])
        self._lose(link, error)
        link.condemn(f"lost its context: {error}")

    def _on_done(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        number, fate, is_launched, plain, damaged, places, results = message
        request = self._requests.done(number)
        if request is not None:
            self._alarms.drop(request)
            if isinstance(request, OperationRequest):
                self._operation_done(request, fate, is_launched, plain, damaged, places, results)
        self._requests.pump()

    def _operation_done(
        self,
        request: OperationRequest,
        fate: str,
        is_launched: bool,
        plain: Any,
        damaged: tuple[int, ...],
        places: tuple[Any, ...],
        results: tuple[Any, ...],
    ) -> None:
        launch = request.launch
        if fate == "withdrawn":
            self._not_launched(request)
            request.unwind()
            return
        error: BaseException | None = request.failure
        if plain is not None:
            error = decode_error(plain)
        if is_launched:
            self._launched += 1
            self._completed += 1
            self._count_hit(launch)
        elif plain is not None and self._is_closing:
            error = self._closed_error()
        if error is None:
            request.fill(results)
        alive = {block.id for block in launch.keep if isinstance(block, Block) and not block.is_released}
        self._chunks.place(place for place in map(place_of, places) if place.block in alive)
        for output in launch.outputs:
            if output.id in damaged or request.failure is not None:
                output.spoil(launch.name, error)
        self._mirror.done(request.library.rpartition(":")[2], is_failed=error is not None)
        self._notify(launch, is_launched=is_launched)
        request.finish(error)

    def _on_granted(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        request = self._requests.get(message[0])
        if isinstance(request, LeaseRequest):
            request.granted.set()

    def _on_copy(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        transfer, number, index, chunk, offset, plain = message
        request = self._requests.get(number)
        if not isinstance(request, OperationRequest) or link is not self._link:
            return
        try:
            view = self._chunks.view(chunk, offset, read_array(plain))
            host = request.hosts[index]
            is_read = isinstance(request.launch.spec, CopyToHostSpec)
            copying = Copying(host, view) if is_read else Copying(view, host)
        except Exception as error:  # noqa: BLE001  # no address space, or no descriptor for the mapping
            request.failure = error
            link.send(("copied", transfer), now=True)
            return
        request.copies += 1
        self._copyings.add(copying)
        self._nursery.start_soon(self._copy, link, request, transfer, copying)

    async def _copy(self, link: WorkerLink, request: RemoteRequest, transfer: int, copying: Copying) -> None:
        try:
            await trio.to_thread.run_sync(copying.run, limiter=self._limiter)
        except Exception as error:  # noqa: BLE001  # the system has no thread
            request.failure = error
        finally:
            request.copies -= 1
            self._copyings.discard(copying)
            copied, self._copied = self._copied, trio.Event()
            copied.set()
            link.send(("copied", transfer), now=True)
            if not request.copies and request.outcome_of_copies is not None:
                request.finish(*request.outcome_of_copies)

    async def _wait_copies(self) -> None:
        while self._copyings:
            await self._copied.wait()

    def _on_chunk(self, link: WorkerLink, message: Any, descriptors: tuple[int, ...]) -> None:
        number, nbytes = message
        if link is not self._link and link.is_started:
            # Of a worker that was given up: nothing lies in it that anybody knows of.
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._pool.share(self._chunks.keep(number, nbytes, descriptors[0]), link)

    def _on_unchunk(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        if link is self._link or not link.is_started:
            self._chunks.drop(message[0])

    def _unshare(self, number: int) -> None:
        self._pool.unshare(number, but=self._link)

    def _on_result(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        number, value = message
        call = self._calls.pop(number, None)
        if call is not None:
            call.value = value
            call.done.set()

    async def _call(self, what: str) -> Any:
        """Ask the worker that serves for something, and the next one if it is lost meanwhile."""
        while True:
            while self._link is None:
                if self._device.availability.is_ended:
                    raise await self._device.lost()
                await self._device.availability.wait_changed()
            number, call = next(self._numbers), _Call()
            self._calls[number] = call
            self._link.send(("call", number, what), now=True)
            try:
                await call.done.wait()
            finally:
                self._calls.pop(number, None)
            if not call.is_lost:
                return call.value

    def _snapshots(self) -> Any:
        link = self._link
        return self._mirror.snapshots({} if link is None else self._requests.queues(link.started))

    def _on_event(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        if link is not self._link or self._context is None:
            return
        data, actor_class = message
        base = self._context.path
        event: Event = decode_event(data, lambda path: base + path.removeprefix(_WORKER_CONTEXT))
        self._mirror.take(event, actor_class)
        observers = self._device.system.observers
        if isinstance(event, MessageEvent):
            observers.emit(event)
        else:
            observers.emit_life(event)

    def _observe(self) -> None:
        self._pool.is_observed = bool(self._device.system.observers)
        for link in self._pool.links:
            link.send(("observe", self._pool.is_observed))

    def _on_log(self, link: WorkerLink, message: Any, _: tuple[int, ...]) -> None:
        name, level, text = message
        logging.getLogger(name).log(level, "%s", text)
