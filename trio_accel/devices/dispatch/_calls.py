"""The side tasks of a worker dispatch: questions, leases, the actor tree and measurements.

Operations take the main path of `RequestSender` and `AnswerHandler`. Four classes here do the rest:

* `Questions` asks a worker to count, synchronize or close a library. A question is not a request: it has its
  own number and no turn. If the worker is lost meanwhile (`lose`), `ask` repeats the question to the next.
* `WorkerLeases` gives arrays to the program or to other devices. A lease is a `LeaseRequest` among the
  requests. So it takes its turn between operations on the same memory, and survives the worker, because the
  next one holds the same.
* `WorkerActors` rebuilds the tree of library actors from the worker's events. Its own counters, `handled` and
  `failed`, come from answers.
* `Measures` and `MeasuredRequest` time operations for a `Meter`. A request is measured from its creation, and
  again from the last time a worker received it.

Some orders matter:

* `Questions.ask` sends released blocks first, so that an answer counts them as released. `answer` adds the
  application's own counts when the answer arrives, and not when the caller runs, because more may have
  happened by then.
* A lease is checked again once it is granted (`granted`), because its array may have been released or damaged
  in the meantime.
* The program may keep a leased array. So `hold` clears its write flag before the memory returns to the
  device; a read-only lease gets a view without write access from the beginning.
* Operations that read a borrowed array follow its `BorrowRequest` in the order of requests. So they need not
  wait for the answer if the worker has the memory mapped (`Borrowed._is_sure`).

`give_back` must be called for every lease, even if it was never granted: otherwise all later operations on
the block would wait for ever. A lease of a lost worker ends at once, and does not go to the next worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import attrs
import outcome
import trio
from numpy.lib.stride_tricks import as_strided

from ...actors import (
    ActorRestarted,
    ActorSnapshot,
    ActorStarted,
    ActorTerminated,
    Event,
    Measured,
    Meter,
    TaskEvent,
    leavable_context,
    note_end,
)
from ...backends.base import (
    AccelDevice,
    CacheCounts,
    Ints,
    KeptCounts,
    MemoryStatistics,
    NotSupportedError,
    PlacedBlock,
)
from ..base._library_paths import by_title, is_actor_of
from ..base._statistics import (
    CacheStatistics,
    DeviceStatistics,
    KeptStatistics,
    LibraryStatistics,
    ProcessStatistics,
    QueueStatistics,
)
from ..engine._device_state import DeviceState
from ..operations._blocks import Block, BorrowedBlock
from ..operations._operation import Launch
from ..operations._ref import AccelRef
from ..wire import _orders
from ..wire._answers import KEPT_COUNTS, MEMORY
from ..wire._protocol import Address, Message, NonsenseError
from ._chunks import Chunk, ChunkTable, Stay
from ._launch_encoding import TemplateTable
from ._loans import Loan, next_abroad
from ._request import BorrowRequest, HostArrays, LeaseRequest, OperationRequest, Place
from ._requests import RequestSender


@attrs.define(eq=False)
class _Question:
    kind: str
    done: TaskEvent = attrs.field(factory=TaskEvent)
    value: Any = None
    is_lost: bool = False


class Questions:
    """Unanswered questions to workers.

    Args:
        device: The device.
        sender: Knows the active worker.
    """

    def __init__(self, device: DeviceState, sender: RequestSender) -> None:
        self._device = device
        self._sender = sender
        self._last = 0
        self._calls: dict[int, _Question] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def ask(self, kind: str, path: str = "") -> Any:
        """Ask the active worker, and the next one if it is lost before it answers.

        Args:
            kind: ``"count"``, ``"synchronize"``, or ``"close"`` with the import path of a library.
            path: The import path of the library to close.

        Raises:
            DeviceLostError: The device's worker has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        availability, sender = self._device.availability, self._sender
        while True:
            while sender.link is None:
                if availability.is_shut:
                    raise await self._device.lost()
                await availability.wait_changed()
            # Arrays that the program has dropped by now count as released.
            sender.send_released()
            self._last += 1
            number = self._last
            call = self._calls[number] = _Question(kind)
            sender.link.send(_orders.call(number, kind, path), now=True)
            try:
                await call.done.wait()
            finally:
                del self._calls[number]
            if not call.is_lost:
                return call.value

    def answer(self, pid: int, number: int, value: Any) -> None:
        """Take a worker's answer; its caller may have left.

        Args:
            pid: The pid of the worker.
            number: The number of the question.
            value: The answer.

        Raises:
            NonsenseError: The question is unknown, or the answer does not fit it.
        """
        call = self._calls.get(number)
        if number > self._last or (call is not None and (value is None) is (call.kind == "count")):
            raise NonsenseError(f"result: it answers no call that was made, {number}")
        # Count now, and not when the caller runs, because more may have happened by then.
        counted = None if value is None else self._count(pid, value)
        if call is not None:
            call.value = counted
            call.done.set()

    def _count(self, pid: int, value: Any) -> DeviceStatistics:
        """Combine the current counts of the worker and this process."""
        launched, completed, in_flight, memory, usage, kept_counts = value
        link = self._sender.link
        templates = KeptCounts() if link is None else link.templates.kept.counts
        return DeviceStatistics(
            generation=self._device.generation,
            pid=pid,
            launched=launched,
            completed=completed,
            in_flight=sum(in_flight.values()),
            queues=by_title(self._sender.requests.queues(in_flight)),
            memory=MemoryStatistics(**dict(zip(MEMORY, memory, strict=True))),
            losses=self._device.losses.count,
            libraries=by_title(_libraries(usage)),
            plan_caches={
                "link": KeptStatistics.of(templates),
                "executor": KeptStatistics(**dict(zip(KEPT_COUNTS, kept_counts, strict=True))),
            },
            actors=self._device.blocks.bytes_by_actor(),
            process=ProcessStatistics.of(pid),
        )

    def lose(self) -> None:
        """Fail all questions, because the worker is lost."""
        for call in self._calls.values():
            call.is_lost = True
            call.done.set()


def _libraries(usage: dict[str, Ints]) -> dict[str, LibraryStatistics]:
    return {
        path: LibraryStatistics(plans=CacheStatistics.of(CacheCounts(*plans)), workspace=workspace)
        for path, (*plans, workspace) in usage.items()
    }


class WorkerLeases:
    """Leases of arrays, in memory that this process has mapped.

    Args:
        device: The device.
        sender: Knows the requests, and the active worker.
        chunks: The memory.
    """

    def __init__(self, device: DeviceState, sender: RequestSender, chunks: ChunkTable) -> None:
        self._device = device
        self._sender = sender
        self._requests = sender.requests
        self._chunks = chunks

    @leavable_context
    async def hold(self, ref: AccelRef, *, write: bool, stream: object) -> AsyncGenerator[Any]:
        """See `AccelRef.lease`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._device.availability.is_shut:
            raise await self._device.lost()
        self._check(ref, stream)
        request = LeaseRequest(self._requests.next_number(), ref.spec, write=write)
        try:
            self._ask(request)
            _, _, chunk, offset = await self.granted(request, ref.block, "lease")
            array = self._chunks.view(chunk, offset, ref.spec)
            if not write:
                # Clearing the array's own flag is not enough, because the program could set it again.
                array = as_strided(array, writeable=False)
            self._device.leases += 1
            try:
                yield array
            finally:
                self._device.leases -= 1
                # The program may keep the array, but must not write to memory of the device.
                array.flags.writeable = False
        finally:
            self.give_back(request)

    def lend(self, ref: AccelRef) -> WorkerLoan:
        """Request a lease for devices that read the array; `Loan.wait` waits until it is granted."""
        request = LeaseRequest(self._requests.next_number(), ref.spec, write=False)
        self._ask(request)
        return WorkerLoan(ref, request, self)

    def borrow(self, loan: Loan, stay: Stay | None) -> Borrowed:
        """Make a leased array, of another device or this one, known to the worker."""
        assert isinstance(loan, WorkerLoan)  # a worker cannot reach other memory
        assert loan.location is not None
        block = BorrowedBlock(self._device.blocks, loan.ref.block)
        is_own = loan.ref.block.table is self._device.blocks
        array = attrs.evolve(loan.ref.spec, block=block.id)
        number = self._requests.next_number()
        chunk = loan.location.chunk
        chunk_number = chunk.number if is_own else chunk.abroad
        request = BorrowRequest(number, array, loan.location, chunk_number, loan.end, stay=stay)
        loan.users += 1
        # If the worker has the chunk mapped, later operations can be sent without waiting for its answer.
        link = self._sender.link
        is_sure = is_own or (link is not None and chunk.borrowers.get(link, False))
        self._ask(request)
        return Borrowed(AccelRef(block, array), request, self, is_sure)

    def _ask(self, request: LeaseRequest) -> None:
        if self._device.availability.is_shut:
            request.failure = self._device.outage()
            request.granted.set()
        else:
            self._requests.add(request)

    async def granted(self, request: LeaseRequest, block: Block, verb: str) -> Address:
        """Wait until a worker grants the lease of a block; return the block's address.

        Raises:
            AccelError: The lease was refused.
        """
        await request.granted.wait()
        if request.failure is not None:
            raise request.failure
        # The block may have been damaged or released during the wait.
        block.check(verb, request.array)
        assert request.address is not None
        return request.address

    def chunk(self, number: int, nbytes: int) -> Chunk:
        """Return the memory of a block; see `ChunkTable.chunk`."""
        return self._chunks.chunk(number, nbytes)

    def give_back(self, request: LeaseRequest) -> None:
        """End a lease that a worker holds, or will hold."""
        if request.stage == "sent" and self._sender.link is not None:
            request.move("leave")
            self._sender.link.send(_orders.unlease(request.number), now=True)
        elif request.stage in ("queued", "sent"):
            # A lost worker's lease ends at once, perhaps while other requests are sorted; it is not put back.
            self._requests.withdraw(request)
            request.end()

    def _check(self, ref: AccelRef, stream: object) -> None:
        ref.block.check("lease", ref.spec)
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


@attrs.define(eq=False)
class WorkerLoan(Loan):
    """An array that a worker holds for other devices.

    Attributes:
        location: The place of its block, once the lease is granted.
    """

    _request: LeaseRequest
    _leases: WorkerLeases
    location: Place | None = attrs.field(default=None, init=False)

    async def wait(self, verb: str) -> None:
        """See `Loan.wait`."""
        _, nbytes, number, offset = await self._leases.granted(self._request, self.ref.block, verb)
        self.location = Place(self._leases.chunk(number, nbytes), offset, nbytes)
        # Readers may need the chunk's descriptor again.
        self.location.chunk.loans += 1

    def map_to(self, device: AccelDevice, block: int) -> int:
        """See `Loan.map_to`."""
        assert self.location is not None
        chunk, number = self.location.chunk, next_abroad()
        device.map_chunk(number, chunk.nbytes, chunk.open_to_read(), write=False)
        device.expect((PlacedBlock(block, self.location.nbytes, number, self.location.offset),))
        return number

    def give_back(self) -> None:
        """See `Loan.give_back`."""
        self._leases.give_back(self._request)
        if self.location is not None:
            self.location.chunk.end_loan()


@attrs.frozen(eq=False)
class Borrowed:
    """A leased array of another device, as an array of the device that reads it.

    Attributes:
        array: The array.
    """

    array: AccelRef
    _request: BorrowRequest
    _leases: WorkerLeases
    _is_sure: bool

    async def wait(self, verb: str) -> None:
        """Wait until operations may read it. Returns at once if the worker has its memory mapped.

        Raises:
            NotSupportedError: The worker cannot map the memory.
            DeviceLostError: The device is closed, or has failed for good.
        """
        if not self._is_sure:
            await self._leases.granted(self._request, self.array.block, verb)

    def end(self) -> None:
        """Stop reading it. Operations that already read it are awaited in the background."""
        self.array.block.is_released = True
        self._leases.give_back(self._request)


_IDLE = QueueStatistics(waiting=0, in_flight=0)


@attrs.define
class _Node:
    """One actor, and the counts of each library when the actor started."""

    actor_class: str
    handled_before: Mapping[str, int]
    failed_before: Mapping[str, int]
    state: str = "starting"
    incarnation: int = 0
    last_error: str | None = None


class WorkerActors:
    """Rebuilds the tree of a worker's library actors from its events and answers.

    Attributes:
        handled: The number of requests served, by the import path of the library.
        failed: The number of requests that crashed the library's actor.
    """

    def __init__(self) -> None:
        self.handled: defaultdict[str, int] = defaultdict(int)
        self.failed: defaultdict[str, int] = defaultdict(int)
        self._nodes: dict[str, _Node] = {}

    def clear(self) -> None:
        """Forget the actors, because the worker has ended."""
        self._nodes.clear()
        self.handled.clear()
        self.failed.clear()

    def take(self, event: Event, actor_class: str) -> None:
        """Update an actor from an event of its life."""
        if not isinstance(event, (ActorStarted, ActorRestarted, ActorTerminated)):
            return
        if isinstance(event, ActorTerminated):
            self._nodes.pop(event.path, None)
            return
        node = self._nodes.get(event.path)
        if node is None:
            node = self._nodes[event.path] = _Node(actor_class, dict(self.handled), dict(self.failed))
        node.incarnation = event.incarnation
        node.state = "running"
        if isinstance(event, ActorRestarted):
            node.state = "restarting"
            if event.error is not None:
                node.last_error = f"{type(event.error).__name__}: {event.error}"

    def path_of(self, library: str) -> str | None:
        """Return the path of the actor that serves a library, by import path; None if there is none."""
        return next(
            (path for path, node in self._nodes.items() if is_actor_of(path, node.actor_class, library)), None
        )

    def snapshots(self, queues: dict[str, QueueStatistics]) -> tuple[ActorSnapshot, ...]:
        """Describe the actors in their present state.

        Args:
            queues: The requests, by the import path of the library.
        """
        below: dict[str, list[ActorSnapshot]] = {}
        # Children before their parents.
        for path in sorted(self._nodes, key=lambda path: -path.count("/")):
            snapshot = self._snapshot(path, queues, tuple(below.pop(path, ())))
            parent = path.rpartition("/")[0]
            below.setdefault(parent if parent in self._nodes else "", []).append(snapshot)
        return tuple(below.get("", ()))

    def _snapshot(
        self, path: str, queues: dict[str, QueueStatistics], children: tuple[ActorSnapshot, ...]
    ) -> ActorSnapshot:
        node = self._nodes[path]

        def counted(now: Mapping[str, int], previous: Mapping[str, int]) -> int:
            return sum(
                count - previous.get(library, 0)
                for library, count in now.items()
                if is_actor_of(path, node.actor_class, library)
            )

        matching = (
            queue for library, queue in queues.items() if is_actor_of(path, node.actor_class, library)
        )
        queue = next(matching, _IDLE)
        return ActorSnapshot(
            path=path,
            actor_class=node.actor_class,
            state=node.state,
            incarnation=node.incarnation,
            mailbox_depth=queue.waiting,
            deferred=queue.in_flight,
            handled=counted(self.handled, node.handled_before),
            failed=counted(self.failed, node.failed_before),
            last_error=node.last_error,
            children=children,
        )


class Measures:
    """Receivers of the times and outcomes of operations, by library and name.

    Args:
        device: The device.
        actors: The actors of its worker.
    """

    def __init__(self, device: DeviceState, actors: WorkerActors) -> None:
        self._observers = device.system.observers
        self._path = f"{device.path}/context"
        self._actors = actors
        self._meter: Meter | None = None
        self._measured: dict[tuple[str, str], Measured] = {}

    def now(self) -> float:
        """Return the current time."""
        return self._observers.now()

    def of(self, launch: Launch) -> Measured | None:
        """Return the receiver for such operations; None if they are not measured."""
        meter = self._observers.meter
        if meter is not self._meter:
            self._meter = meter
            self._measured = {}
        if meter is None:
            return None
        key = launch.library, launch.name
        measured = self._measured.get(key)
        if measured is None:
            # An unopened library does not have an actor.
            path = self._actors.path_of(launch.library)
            measured = meter.measured(path or self._path, launch.name)
            if path is not None:
                self._measured[key] = measured
        return measured


class MeasuredRequest(OperationRequest):
    """A measured launch in a worker."""

    __slots__ = ("_began", "_measures", "_sent")

    def __init__(self, number: int, launch: Launch, hosts: HostArrays, measures: Measures) -> None:
        super().__init__(number, launch, hosts)
        self._measures = measures
        self._began = measures.now()
        # The time when a worker last received it.
        self._sent: float | None = None

    def message(self, word: int, released: Ints, templates: TemplateTable) -> Message:
        """Encode the request for the worker with these templates."""
        self._sent = self._measures.now()
        return super().message(word, released, templates)

    def settle(self, result: outcome.Outcome[None]) -> None:
        """Count the launch, and deliver its outcome."""
        measured = self._measures.of(self.launch)
        if measured is not None:
            now = self._measures.now()
            sent = now if self._sent is None else self._sent
            error = result.error if isinstance(result, outcome.Error) else None
            # A cancellation and Ctrl-C are not errors of the launch.
            is_cancelled = error is not None and not isinstance(error, Exception)
            failure = None if is_cancelled else error
            note_end(measured, sent - self._began, now - sent, failure, cancelled=is_cancelled)
        super().settle(result)
