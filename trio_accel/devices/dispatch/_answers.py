"""The messages of a device's workers, and their effects."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorEvent, ActorFailedError, Event, MessageEvent
from ...backends.base import ArraySpec, ContextPoisonedError, Strs
from ..base._errors import lost_descriptors, out_of_descriptors
from ..base._statistics import LaunchTimes
from ..base._waits import Alarms
from ..engine._device_state import DeviceState
from ..wire import _answers, _orders
from ..wire._frames import LOST, Received, close_all
from ..wire._messages import expect, handlers
from ..wire._protocol import Address, NonsenseError
from ._calls import Questions, WorkerActors
from ._chunks import ChunkTable
from ._link import WorkerLink
from ._outcomes import CopyService, OutcomePolicy
from ._pool import WorkerPool
from ._request import BorrowRequest, LeaseRequest, OperationRequest, RemoteRequest
from ._requests import RequestTable

# Seconds between two attempts to get a descriptor, when this process had too many.
_ASKED_AGAIN = 0.1


@attrs.define(eq=False, repr=False)
class AnswerHandler:
    """Handles the messages of workers, which are not trusted.

    Args:
        device: The device.
        requests: Its requests.
        chunks: Its memory.
        copies: Copies host arrays of requests.
        outcomes: Delivers the outcomes of requests.
        pool: The workers.
        alarms: The times at which cancelled callers leave their requests.
        calls: The questions to workers.
        lose: Called when a worker has lost its context.

    Attributes:
        actors: The actors of the active worker.
        on_first_success: Called once, when the context completes its first request without an error.
        on_prepared: Called when the active worker has opened again all libraries that were in use.
    """

    _device: DeviceState
    _requests: RequestTable
    _chunks: ChunkTable
    _copies: CopyService
    _outcomes: OutcomePolicy
    _pool: WorkerPool
    _alarms: Alarms
    _calls: Questions
    _lose: Callable[[WorkerLink, Exception], None]
    actors: WorkerActors = attrs.field(factory=WorkerActors)
    on_first_success: Callable[[], None] | None = None
    on_prepared: Callable[[], None] = lambda: None
    _nursery: trio.Nursery = attrs.field(init=False)
    _handlers: dict[Any, Callable[..., None]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._handlers = _HANDLERS(self)

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; a task of the nursery requests chunks with lost descriptors."""
        self._nursery = nursery

    def handle(self, link: WorkerLink, received: list[Received]) -> None:
        """Handle the messages of a worker."""
        handlers = self._handlers
        taken = 0
        # D80: its messages are no longer read, but this process has to close their descriptors.
        if link.is_distrusted:
            _close_descriptors(received)
            return
        try:
            for message, descriptors in received:
                if descriptors:
                    kind = _answers.KINDS.kinds[message[0]]
                    expect(kind.carries, f"{kind}: it came with descriptors")
                handlers[message[0]](link, *message[1:], *descriptors)
                taken += 1
        except NonsenseError as error:
            # D80: only here does nonsense cause the loss of its worker.
            _close_descriptors(received[taken:])
            link.kill_for_nonsense(error)
        # One pump serves all completed requests.
        if self._requests.waiting:
            self._requests.pump()

    def take_plain(self, link: WorkerLink, received: list[Received]) -> bool:
        """Handle received messages in a caller's task, if all of them report plain success.

        Other messages are handled in the worker's task. In this task they would run in the caller's context,
        and their errors would get the exception that the caller is handling as their context.
        """
        message: Any
        for message, _ in received:
            if not (message[0] == "times" or (message[0] == "done" and self._is_plain(message))):
                return False
        self.handle(link, received)
        return True

    def _is_plain(self, message: Any) -> bool:
        """Return whether an answer reports plain success, so that the request's end needs no further work."""
        _, number, _, results, trouble = message
        request = self._requests.get(number)
        if trouble is not None or self._requests.waiting or not isinstance(request, OperationRequest):
            return False
        # Unrequested host arrays are nonsense: the receiver loses the worker for them.
        return len(results) == len(request.hosts.filled) and not (request.hosts.is_used or self._device.hooks)

    def is_waited_for(self, request: OperationRequest) -> bool:
        """Return whether its caller should poll for its end."""
        # D38: the answers of other requests would have to wait for this caller's polls.
        return request.stage != "over" and self._requests.sent == 1

    def _on_times(self, link: WorkerLink, number: int, begun: int, completed: int) -> None:
        request = self._request(link, number)
        if request is not None:
            if not isinstance(request, OperationRequest):
                raise NonsenseError(f"times: request {number} is a lease")
            # All processes of the machine share the clock, so a future end is nonsense.
            expect(begun <= completed <= time.monotonic_ns(), f"times: {begun} to {completed}")
            request.launch.times = LaunchTimes(link.process.pid, begun, completed)

    def _on_progress(self, link: WorkerLink, number: int, text: str) -> None:
        request = self._request(link, number)
        if request is not None:
            asker = request.launch.spec.asker if isinstance(request, OperationRequest) else None
            if asker is None:
                raise NonsenseError(f"progress: request {number} is not a call of a program")
            # If nobody listens, the worker sends no further progress.
            if asker.notify is not None:
                asker.report(text)
                link.send(_orders.heard(number), now=True)

    def _on_ready(self, link: WorkerLink, libraries: Strs) -> None:
        expect(not link.is_ready, "ready: it was before")
        link.libraries = libraries
        link.is_ready = True
        link.notify()

    def _on_started(self, link: WorkerLink) -> None:
        expect(link.is_ready and not link.is_started, "started: it was not told to")
        link.is_started = True
        link.notify()

    def _on_prepared(self, link: WorkerLink) -> None:
        expect(link.is_started, "prepared: it was not told to start")
        link.is_prepared = True
        if link.is_serving:
            self.on_prepared()

    def _on_program_opened(self, link: WorkerLink, library: str, taken: int, imports: int) -> None:
        self._device.recoveries.record_program(library, taken * 1e-9, imports * 1e-9)

    def _on_closed(self, link: WorkerLink) -> None:
        expect(self._outcomes.is_closing, "closed: it was not told to")
        link.is_started = False
        link.notify()

    def _on_lost(self, link: WorkerLink, error: Exception, is_silent: bool) -> None:
        link.is_silent = is_silent
        link.has_faulted = isinstance(error, ContextPoisonedError) and not error.is_memory_damaged
        self._lose(link, error)
        link.kill_worker(f"lost its context: {error}", error)

    def _on_done(  # noqa: C901  # calls that would make it shorter take as long as what they do
        self,
        link: WorkerLink,
        number: int,
        addresses: tuple[Address, ...],
        results: tuple[bytes, ...],
        trouble: Any,
    ) -> None:
        request = self._request(link, number)
        if request is None:
            return
        if (
            isinstance(request, OperationRequest)
            and trouble is None
            and not addresses
            and self._ends_plainly(link, request, results)
        ):
            self._requests.done(number)
            self._outcomes.end_plainly(request, results)
            self.actors.handled[request.library] += 1
            return
        # The check comes first, because nonsense loses the worker, and then the sorting of its requests must
        # include this one.
        _check_done(request, addresses, results, trouble, self._chunks)
        self._requests.done(number)
        # D75: once per context. From here on its loss is not part of a crash loop, and the window is open.
        if trouble is None and self.on_first_success is not None:
            first, self.on_first_success = self.on_first_success, None
            first()
        if request.is_cancelled:
            # Only cancelled requests have an alarm.
            self._alarms.drop(request)
        if isinstance(request, OperationRequest):
            if trouble is not None:
                self._chunks.forget_addresses(request.launch.allocations)
            if self._chunks.missing:
                addresses = self._mapped(request, addresses)
            done = self._outcomes.done(request, addresses, results, trouble)
            if done is None:
                self._collect(request)
            else:
                placed, error = done
                if placed:
                    self._chunks.record(placed)
                self._count(link, request, error)
        elif isinstance(request, LeaseRequest):
            self._end_lease(link, request, trouble)

    def _ends_plainly(self, link: WorkerLink, request: OperationRequest, results: Sequence[bytes]) -> bool:
        """Return whether success affects only the outcome and filled host arrays."""
        is_special = (
            type(request) is not OperationRequest
            or request.stage != "sent"
            or request.hosts.is_used
            or request.copies
            or request.raise_cancel is not None
            or request.failure is not None
            or request.suspicion is not None
            or request.library not in link.used
            or self.on_first_success is not None
            or self._device.hooks
        )
        if is_special or len(request.hosts.filled) != len(results):
            return False
        for host, data in zip(request.hosts.filled, results, strict=True):  # noqa: SIM110  # a call less
            if host.nbytes != len(data):
                return False
        return True

    def _end_lease(self, link: WorkerLink, request: LeaseRequest, trouble: Any) -> None:
        """End a lease that the worker has ended."""
        if trouble is not None and isinstance(request, BorrowRequest):
            request.chunk.unmap(link)
            self._outcomes.refuse(request, trouble[3])
        elif not request.granted.is_set():
            self._outcomes.end_lease(request)
        else:
            request.end()

    def _count(self, link: WorkerLink, request: OperationRequest, error: BaseException | None) -> None:
        """Count an operation for the tree. The next workers open a library in advance after its success."""
        library = request.library
        if error is None and request.suspicion is not None:
            request.suspicion.remaining.discard(request.number)
        if isinstance(error, ActorFailedError):
            self.actors.failed[library] += 1
        else:
            self.actors.handled[library] += 1
        if error is None and library not in link.used:
            link.used.add(library)
            self._pool.use(library)

    def _request(self, link: WorkerLink, number: int) -> RemoteRequest | None:
        """Return the request of a worker's message; None if the worker is no longer active.

        Raises:
            NonsenseError: The worker was not sent this request, or has already answered it.
        """
        if not link.is_serving:
            return None
        request = self._requests.get(number)
        if request is None:
            raise NonsenseError(f"request {number} is unknown")
        return request

    def _mapped(self, request: OperationRequest, addresses: Iterable[Address]) -> tuple[Address, ...]:
        """Return the new blocks in memory that this process has; a request with other blocks fails."""
        missing = self._chunks.missing
        for _, nbytes, chunk, _ in addresses:
            if chunk in missing and request.failure is None:
                request.failure = error = out_of_descriptors(nbytes, missing[chunk])
                self._device.locate(error, request.launch.name)
        return tuple([address for address in addresses if address[2] not in missing])

    def _collect(self, request: OperationRequest) -> None:
        """Collect garbage for a request without enough memory, because reference cycles may hold arrays."""
        if request.is_cancelled:
            self._copies.unwind(request)
            return
        request.shortages += 1
        self._device.blocks.make_room()
        # The request gets a new last number, so that its number still shows whether it had begun.
        request.number = self._requests.next_number()
        self._requests.add(request)

    def _on_granted(self, link: WorkerLink, number: int, address: Address) -> None:
        request = self._request(link, number)
        if request is not None:
            if not isinstance(request, LeaseRequest):
                raise NonsenseError(f"granted: request {number} is not a lease")
            expect(address[0] == request.array.block, f"granted: another block than that of request {number}")
            if isinstance(request, BorrowRequest):
                request.record_mapped(link)
            else:
                self._chunks.check_address(address)
            request.address = address
            request.granted.set()

    def _on_copy(
        self,
        link: WorkerLink,
        transfer: int,
        number: int,
        index: int,
        chunk: int,
        offset: int,
        array: ArraySpec,
    ) -> None:
        def copied() -> None:
            link.send(_orders.copied(transfer), now=True)

        if not link.is_serving:
            return
        request = self._requests.get(number)
        if isinstance(request, OperationRequest):
            _check_copy(request, index, array)
            self._chunks.check_array(chunk, offset, array)
            if request.stage == "sent":
                copy, view = request.hosts.copies[index], partial(self._chunks.view, chunk, offset, array)
                self._copies.copy_on_device(request, copy, view, copied)
                return
        # The request was refused while its operands were being copied, or its caller has left. The stream
        # must continue nevertheless.
        copied()

    def _on_chunk(self, link: WorkerLink, number: int, nbytes: int, *descriptors: int) -> None:
        expect(len(descriptors) == 1, f"chunk {number}: it came with {len(descriptors)} descriptors")
        if link.is_serving:
            try:
                if descriptors[0] == LOST:
                    raise lost_descriptors()
                self._chunks.check_new(number, nbytes, descriptors[0])
                chunk = self._chunks.keep(number, nbytes, descriptors[0])
            except OSError as error:
                self._chunks.missing[number] = error
                self._nursery.start_soon(self._ask_for_chunk, link, number)
            else:
                link.send(_orders.chunk_received(number))
                self._pool.share(chunk, link)
                return
        # The worker has failed for good, and the application knows of no block in this chunk.
        close_all(descriptors)

    @enable_ki_protection
    async def _ask_for_chunk(self, link: WorkerLink, number: int) -> None:
        """Request the descriptor of a chunk again after a moment, because there may be room for it then."""
        await trio.sleep(_ASKED_AGAIN)
        if number in self._chunks.missing and link.is_serving:
            link.send(_orders.tell_chunk(number))

    def _on_unchunk(self, link: WorkerLink, number: int) -> None:
        if link.is_serving and self._chunks.missing.pop(number, None) is None:
            self._chunks.check_gone(number)
            self._chunks.drop(number)

    def _on_result(self, link: WorkerLink, number: int, value: Any) -> None:
        self._calls.answer(link.process.pid, number, value)

    def _on_event(self, link: WorkerLink, event: Event, actor_class: str) -> None:
        if link.how is not None:
            return
        expect(event.path.startswith(f"{self._device.path}/context/"), "event: of another's actor")
        if isinstance(event, ActorEvent):
            event = attrs.evolve(event, pid=link.process.pid)
        self.actors.take(event, actor_class)
        observers = self._device.system.observers
        if isinstance(event, MessageEvent):
            observers.emit(event)
        else:
            observers.emit_life(event)

    def _on_log(self, link: WorkerLink, name: str, level: int, text: str) -> None:
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            logger.handle(record_of(name, level, text, link.process.pid, self._device.path))


def _check_done(
    request: RemoteRequest,
    addresses: tuple[Address, ...],
    results: tuple[bytes, ...],
    trouble: Any,
    chunks: ChunkTable,
) -> None:
    """Check that an answer contains only blocks that its request makes, and the requested host arrays.

    Raises:
        NonsenseError: It contains others, or an address is impossible.
    """
    allocations = request.launch.allocations if isinstance(request, OperationRequest) else ()
    for address in addresses:
        if address[:2] not in allocations:
            block, nbytes, *_ = address
            raise NonsenseError(f"request {request.number} makes no block {block} of {nbytes} bytes")
        chunks.check_address(address)
    if not isinstance(request, OperationRequest):
        is_refused = isinstance(request, BorrowRequest) and trouble is not None and trouble[3] is not None
        expect(not results and (trouble is None or is_refused), f"request {request.number} is a lease")
        return
    if trouble is not None:
        how, _, _, error, _ = trouble
        expect(how == "done" or request.is_cancelled, f"request {request.number} was not cancelled")
        if how != "done" or error is not None:
            return
    if (results or request.hosts.filled or request.hosts.is_used) and not request.hosts.fits(results):
        raise NonsenseError(f"request {request.number} has other host arrays")


def _check_copy(request: OperationRequest, index: int, array: ArraySpec) -> None:
    """Check that a copy for a worker concerns a host array of the request.

    Raises:
        NonsenseError: It does not.
    """
    copies = request.hosts.copies
    expect(index < len(copies), f"host array {index} of request {request.number} is unknown")
    host = copies[index].host
    is_like = host.shape == array.shape and host.dtype == array.dtype.dtype
    expect(is_like, f"host array {index} of request {request.number} is another")


def _close_descriptors(received: Iterable[Received]) -> None:
    """Close the descriptors of unhandled messages."""
    for _, descriptors in received:
        close_all(descriptors)


def record_of(name: str, level: int, text: str, pid: int, device: str) -> logging.LogRecord:
    """Make the application's log record of a worker's record.

    Args:
        name: The name of the logger.
        level: Its level.
        text: Its formatted message.
        pid: The pid of the worker.
        device: The path of the device.
    """
    record = logging.LogRecord(name, level, __file__, 0, "%s", (text,), None)
    record.process = pid
    record.processName = "trio_accel worker"
    # These are attributes as `extra` would set them.
    vars(record).update(pid=pid, device=device)
    return record


_HANDLERS = handlers(_answers.KINDS, AnswerHandler, leading=("link",))
