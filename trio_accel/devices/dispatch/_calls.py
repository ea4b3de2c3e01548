"""A worker's own counts and actors, its operations as they are measured, and leases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
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
    what: str
    done: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    is_lost: bool = False


class Questions:
    """The questions to workers that are not answered.

    Args:
        device: The device.
        sender: Has the worker that serves.
    """

    def __init__(self, device: DeviceState, sender: RequestSender) -> None:
        self._device = device
        self._sender = sender
        self._last = 0
        self._calls: dict[int, _Question] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def ask(self, what: str, path: str = "") -> Any:
        """Call the worker that serves, and the next one if it is lost meanwhile.

        Args:
            what: ``"count"``, ``"synchronize"``, or ``"close"`` with the import path of a library.
            path: Import path of the library to close.

        Raises:
            DeviceLostError: There is no worker any more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        availability, sender = self._device.availability, self._sender
        while True:
            while sender.link is None:
                if availability.is_shut:
                    raise await self._device.lost()
                await availability.wait_changed()
            # Arrays that the program has let go by now are counted as released.
            sender.send_released()
            self._last += 1
            number = self._last
            call = self._calls[number] = _Question(what)
            sender.link.send(_orders.call(number, what, path), now=True)
            try:
                await call.done.wait()
            finally:
                del self._calls[number]
            if not call.is_lost:
                return call.value

    def answer(self, pid: int, number: int, value: Any) -> None:
        """Take an answer of a worker; its asker may have gone.

        Args:
            pid: Number of its process.
            number: Number of the call.
            value: The answer.

        Raises:
            NonsenseError: There was no such call, or it asks for something else.
        """
        call = self._calls.get(number)
        if number > self._last or (call is not None and (value is None) is (call.what == "count")):
            raise NonsenseError(f"result: it answers no call that was made, {number}")
        # Counted now, and not when its asker runs: more may have happened by then.
        counted = None if value is None else self._count(pid, value)
        if call is not None:
            call.value = counted
            call.done.set()

    def _count(self, pid: int, value: Any) -> DeviceStatistics:
        """Add what the worker counts to what waits here: whatever it had done by then is known here."""
        launched, completed, in_flight, memory, usage, kept = value
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
            kept={
                "link": KeptStatistics.of(templates),
                "executor": KeptStatistics(**dict(zip(KEPT_COUNTS, kept, strict=True))),
            },
            actors=self._device.blocks.bytes_by_actor(),
            process=ProcessStatistics.of(pid),
        )

    def lose(self) -> None:
        """Fail all calls: the worker is gone."""
        for call in self._calls.values():
            call.is_lost = True
            call.done.set()


def _libraries(usage: dict[str, Ints]) -> dict[str, LibraryStatistics]:
    return {
        path: LibraryStatistics(plans=CacheStatistics.of(CacheCounts(*plans)), workspace=workspace)
        for path, (*plans, workspace) in usage.items()
    }


class WorkerLeases:
    """Holds arrays of a device whose memory this process has mapped.

    Args:
        device: The device.
        sender: Has the requests, and the worker that serves.
        chunks: The memory.
    """

    def __init__(self, device: DeviceState, sender: RequestSender, chunks: ChunkTable) -> None:
        self._device = device
        self._sender = sender
        self._requests = sender.requests
        self._chunks = chunks

    @asynccontextmanager
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
                # A flag could be set back, over memory of which other arrays are made.
                array = as_strided(array, writeable=False)
            self._device.leases += 1
            try:
                yield array
            finally:
                self._device.leases -= 1
                # The program may keep the array, and must not write to memory that is the device's again.
                array.flags.writeable = False
        finally:
            self.give_back(request)

    def lend(self, ref: AccelRef) -> WorkerLoan:
        """Ask to hold an array for devices that read it; `Loan.wait` waits until it is held."""
        request = LeaseRequest(self._requests.next_number(), ref.spec, write=False)
        self._ask(request)
        return WorkerLoan(ref, request, self)

    def borrow(self, loan: Loan, stay: Stay | None) -> Borrowed:
        """Have the worker know an array that was lent, by another device or this one, and is held."""
        assert isinstance(loan, WorkerLoan)  # a worker reaches no other memory
        assert loan.place is not None
        block = BorrowedBlock(self._device.blocks, loan.ref.block)
        is_own = loan.ref.block.table is self._device.blocks
        array = attrs.evolve(loan.ref.spec, block=block.id)
        number = self._requests.next_number()
        chunk = loan.place.chunk
        told = chunk.number if is_own else chunk.abroad
        request = BorrowRequest(number, array, loan.place, told, loan.end, stay=stay)
        loan.users += 1
        # Operations come behind it, and nothing keeps it from being known.
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
        """Wait until a worker holds a block; returns its place.

        Raises:
            AccelError: It cannot.
        """
        await request.granted.wait()
        if request.failure is not None:
            raise request.failure
        # While its turn was waited for, it may have become invalid, or was released.
        block.check(verb, request.array)
        assert request.address is not None
        return request.address

    def chunk(self, number: int, nbytes: int) -> Chunk:
        """Return the memory of a block; see `ChunkTable.chunk`."""
        return self._chunks.chunk(number, nbytes)

    def give_back(self, request: LeaseRequest) -> None:
        """End what a worker holds, or is to hold."""
        if request.stage == "sent" and self._sender.link is not None:
            request.move("leave")
            self._sender.link.send(_orders.unlease(request.number), now=True)
        elif request.stage in ("queued", "sent"):
            # One that a lost worker had is not put back: it may end while the others are sorted.
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
        place: Where it is, once it is held.
    """

    _request: LeaseRequest
    _leases: WorkerLeases
    place: Place | None = attrs.field(default=None, init=False)

    async def wait(self, verb: str) -> None:
        """See `Loan.wait`."""
        _, nbytes, number, offset = await self._leases.granted(self._request, self.ref.block, verb)
        self.place = Place(self._leases.chunk(number, nbytes), offset, nbytes)
        # Readers may need its descriptor again.
        self.place.chunk.loans += 1

    def map_to(self, device: AccelDevice, block: int) -> int:
        """See `Loan.map_to`."""
        assert self.place is not None
        chunk, number = self.place.chunk, next_abroad()
        device.map_chunk(number, chunk.nbytes, chunk.open_to_read(), write=False)
        device.expect((PlacedBlock(block, self.place.nbytes, number, self.place.offset),))
        return number

    def give_back(self) -> None:
        """See `Loan.give_back`."""
        self._leases.give_back(self._request)
        if self.place is not None:
            self.place.chunk.end_loan()


@attrs.frozen(eq=False)
class Borrowed:
    """An array that was lent, as one of a device that reads it.

    Attributes:
        array: The array.
    """

    array: AccelRef
    _request: BorrowRequest
    _leases: WorkerLeases
    _is_sure: bool

    async def wait(self, verb: str) -> None:
        """Wait until operations may read it: at once where the worker has its memory mapped.

        Raises:
            NotSupportedError: The worker cannot map the memory.
            DeviceLostError: The device is closed, or was given up.
        """
        if not self._is_sure:
            await self._leases.granted(self._request, self.array.block, verb)

    def end(self) -> None:
        """End to read it: operations that do by now are awaited, and not by the caller."""
        self.array.block.is_released = True
        self._leases.give_back(self._request)


_IDLE = QueueStatistics(waiting=0, in_flight=0)


@attrs.define
class _Node:
    """One actor, and what its libraries had handled and failed before it was there."""

    actor_class: str
    handled_before: Mapping[str, int]
    failed_before: Mapping[str, int]
    state: str = "starting"
    incarnation: int = 0
    last_error: str | None = None


class WorkerActors:
    """Puts the library actors of a worker together from its events and the requests that it serves.

    Attributes:
        handled: Requests that the worker has served, by the import path of the library.
        failed: Requests that have crashed the library's actor.
    """

    def __init__(self) -> None:
        self.handled: defaultdict[str, int] = defaultdict(int)
        self.failed: defaultdict[str, int] = defaultdict(int)
        self._nodes: dict[str, _Node] = {}

    def clear(self) -> None:
        """Forget the actors: the worker is gone."""
        self._nodes.clear()
        self.handled.clear()
        self.failed.clear()

    def take(self, event: Event, actor_class: str) -> None:
        """Follow the life of an actor."""
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
        """Return the path of the actor that serves the library at an import path; None if there is none."""
        return next(
            (path for path, node in self._nodes.items() if is_actor_of(path, node.actor_class, library)), None
        )

    def snapshots(self, queues: dict[str, QueueStatistics]) -> tuple[ActorSnapshot, ...]:
        """Describe the actors as they are now.

        Args:
            queues: Requests by the import path of the library.
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

        def counted(now: Mapping[str, int], before: Mapping[str, int]) -> int:
            return sum(
                count - before.get(library, 0)
                for library, count in now.items()
                if is_actor_of(path, node.actor_class, library)
            )

        own = (queue for library, queue in queues.items() if is_actor_of(path, node.actor_class, library))
        queue = next(own, _IDLE)
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
    """Takers of operations' times and outcomes, by library and name.

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
        """Return the time."""
        return self._observers.now()

    def of(self, launch: Launch) -> Measured | None:
        """Return the taker of such operations; None if they are not measured any more."""
        meter = self._observers.meter
        if meter is not self._meter:
            self._meter = meter
            self._measured = {}
        if meter is None:
            return None
        key = launch.library, launch.name
        measured = self._measured.get(key)
        if measured is None:
            # A library that was never opened has no actor.
            path = self._actors.path_of(launch.library)
            measured = meter.measured(path or self._path, launch.name)
            if path is not None:
                self._measured[key] = measured
        return measured


class MeasuredRequest(OperationRequest):
    """A launch in a worker, which is measured."""

    __slots__ = ("_began", "_measures", "_sent")

    def __init__(self, number: int, launch: Launch, hosts: HostArrays, measures: Measures) -> None:
        super().__init__(number, launch, hosts)
        self._measures = measures
        self._began = measures.now()
        # The time when it was handed over to a worker last.
        self._sent: float | None = None

    def message(self, word: int, released: Ints, templates: TemplateTable) -> Message:
        """Encode it for the worker that has these templates."""
        self._sent = self._measures.now()
        return super().message(word, released, templates)

    def settle(self, result: outcome.Outcome[None]) -> None:
        """Count the launch, and give its outcome."""
        measured = self._measures.of(self.launch)
        if measured is not None:
            now = self._measures.now()
            sent = now if self._sent is None else self._sent
            error = result.error if isinstance(result, outcome.Error) else None
            # A cancellation and Ctrl-C are no errors of a launch.
            is_cancelled = error is not None and not isinstance(error, Exception)
            failure = None if is_cancelled else error
            note_end(measured, sent - self._began, now - sent, failure, cancelled=is_cancelled)
        super().settle(result)
