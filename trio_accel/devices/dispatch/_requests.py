"""The requests of a device that are not done; those whose turn it is go to the worker."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import DeviceLostError, OutOfMemoryError
from ..base._statistics import QueueStatistics
from ..base._waits import SubmissionOrder, TaskNotifier
from ..engine._device_state import DeviceState
from ..wire import _orders
from ._chunks import ChunkTable
from ._link import WorkerLink
from ._outcomes import CopyService, OutcomePolicy
from ._request import BorrowRequest, HostCopy, LeaseRequest, OperationRequest, RemoteRequest

# Released blocks travel with the next operation, unless they are so many bytes or blocks.
_MAX_RELEASED_BYTES = 64 << 20
_MAX_RELEASED_BLOCKS = 64
# Seconds between two looks for what was dropped, while there are requests.
_DRAINED = 0.1
# Suspects wait under this name, in place of the queue of their library; no library has it.
_SUSPECTS = "?"
_NUMBER, _RANK = attrgetter("number"), attrgetter("rank")


class RequestTable:
    """The requests of a device in order, of which the worker has so many of each library at a time.

    A request waits while its window is full, while one before it in the same library waits, and while
    one that it must follow (because of the memory they touch) waits. So the worker gets those that
    depend on each other in the order in which they were made, and puts them in order from there.

    Suspects of a fault run behind all that was put back with them, one at a time, with nothing beside them
    (D136). Later requests wait until they are done.

    Args:
        limit: The most of a library that the worker has at a time.
        send: Hands a request over to the worker.
    """

    def __init__(self, limit: int, send: Callable[[RemoteRequest], None]) -> None:
        self._limit = limit
        self._send = send
        self._numbers = itertools.count(1)
        self._sent: dict[int, RemoteRequest] = {}
        self._counts: dict[str, int] = {}
        self._queues: dict[str, deque[RemoteRequest]] = {}
        # D19: requests of one library wait in their order anyway, and all of them in that of memory.
        self._order = SubmissionOrder()
        self._is_open = False
        self._is_careful = False
        # The suspect that runs alone, and the last number that still goes before the waiting suspects.
        self._alone: RemoteRequest | None = None
        self._last_innocent = 0
        self.waiting: int = 0

    def __len__(self) -> int:
        return self.waiting + len(self._sent)

    @property
    def sent(self) -> int:
        """The number that the worker has."""
        return len(self._sent)

    def next_number(self) -> int:
        """Return the place of the next request."""
        return next(self._numbers)

    def get(self, number: int) -> RemoteRequest | None:
        """Return a request that the worker has."""
        return self._sent.get(number)

    def add(self, request: RemoteRequest) -> None:
        """Hand a request over, now or in its turn."""
        if request.stage != "queued":
            request.move("return")
        if self._is_open and not self.waiting and self._may_go(request):
            self._hand_over(request)
            return
        queue = self._queue(request)
        # Others that wait could not go before this one came, and still cannot: only its own queue is looked
        # at.
        if self._is_open and queue[0] is request and self._may_go(request):
            self.pump()

    def open(self, *, carefully: bool = False) -> None:
        """Begin with a worker: hand over the requests that wait.

        Args:
            carefully: One request at a time, until `send_ready` (D75). A waiting request may be the one that
                loses the context, and the context should complete another one before it gets there.
        """
        self._is_open = True
        self._is_careful = carefully
        self.pump()

    def send_ready(self) -> None:
        """Hand over as many as the window takes."""
        if self._is_careful:
            self._is_careful = False
            self.pump()

    def pump(self) -> None:
        """Hand over what may be handed over now."""
        self._pump_innocent()
        while (suspect := self._next_suspect()) is not None:
            self._queues[_SUSPECTS].remove(suspect)
            self._alone = suspect
            self._unqueue(suspect)
            # The suspect may have been refused at once, and then others may go.
            self._pump_innocent()

    def _next_suspect(self) -> RemoteRequest | None:
        """Choose the suspect that may begin now, the likeliest last; a library's are in their order."""
        queue = self._queues.get(_SUSPECTS)
        # Leases do not count: a lease launches nothing, and the program may hold it until later requests are
        # served.
        if not queue or not self._is_open or any(request.library for request in self._sent.values()):
            return None
        firsts = {request.library: request for request in reversed(queue)}
        may_go = (
            request for request in queue if firsts[request.library] is request and self._may_go(request)
        )
        return min(may_go, key=_RANK, default=None)

    def _pump_innocent(self) -> None:
        is_moving = self._is_open and self.waiting > 0
        while is_moving:
            is_moving = False
            queues = [queue for library, queue in self._queues.items() if queue and library != _SUSPECTS]
            for queue in queues:
                while queue and self._is_open and self._may_go(queue[0]):
                    self._unqueue(queue.popleft())
                    # A request of another library may have waited for the memory of this one.
                    is_moving = len(queues) > 1

    def done(self, number: int) -> RemoteRequest | None:
        """Take a request out that the worker is done with; returns it, if it was known."""
        request = self._sent.pop(number, None)
        if request is not None:
            self._counts[request.library] -= 1
            if request is self._alone:
                self._alone = None
        return request

    def withdraw(self, request: RemoteRequest) -> bool:
        """Take a request back that the worker does not have; returns whether it was waiting."""
        queue = self._queues.get(_queue_name(request), ())
        if request not in queue:
            return False
        assert isinstance(queue, deque)
        queue.remove(request)
        # A request of another library may have waited for its turn.
        self._leave(request)
        self.pump()
        return True

    def close(self) -> list[RemoteRequest]:
        """End with a worker that is gone; returns its requests, in order."""
        self._is_open = self._is_careful = False
        self._alone = None
        had = sorted(self._sent.values(), key=_NUMBER)
        self._sent.clear()
        self._counts.clear()
        return had

    def put_back(self, requests: Iterable[RemoteRequest]) -> None:
        """Put requests of a lost worker back, each in its old place."""
        waiting = sorted([*requests, *self.take_waiting()], key=_NUMBER)
        # Requests up to this number go before the suspects, and later ones behind them (D136).
        self._last_innocent = waiting[-1].number if waiting else 0
        for request in waiting:
            self._queue(request)

    def take_waiting(self) -> list[RemoteRequest]:
        """Take all waiting requests back, in order."""
        waiting = self._in_order()
        self._queues.clear()
        self._order = SubmissionOrder()
        self.waiting = 0
        return waiting

    def forget_library(self, library: str) -> bool:
        """Keep nothing of a library that has no requests; returns whether it has none."""
        suspects = self._queues.get(_SUSPECTS, ())
        if (
            self._counts.get(library)
            or self._queues.get(library)
            or any(s.library == library for s in suspects)
        ):
            return False
        self._counts.pop(library, None)
        self._queues.pop(library, None)
        return True

    def queues(self, in_flight: Mapping[str, int]) -> dict[str, QueueStatistics]:
        """Count requests by library.

        Args:
            in_flight: How many the worker has launched; the others that it has wait there.
        """
        counts: dict[str, QueueStatistics] = {}
        waits = Counter(request.library for queue in self._queues.values() for request in queue)
        for library in {*waits, *self._counts} - {""}:
            launched = in_flight.get(library, 0)
            waiting = self._counts.get(library, 0) + waits[library] - launched
            if launched or waiting:
                counts[library] = QueueStatistics(waiting=waiting, in_flight=launched)
        return counts

    def queues_by(self, started: Callable[[str], int]) -> dict[str, QueueStatistics]:
        """Count requests by library.

        Args:
            started: Number of the last that a library has begun to launch.
        """
        in_flight = Counter(
            request.library for request in self._sent.values() if request.number <= started(request.library)
        )
        return self.queues(in_flight)

    def _may_go(self, request: RemoteRequest) -> bool:
        # D75: the first request after a loss is alone, until one has completed.
        if self._is_careful and any(sent.library for sent in self._sent.values()):
            return False
        # D136: a suspect runs with nothing beside it, and later requests wait for all suspects.
        if self._alone is not None:
            return False
        if not request.is_suspect and request.number > self._last_innocent and self._queues.get(_SUSPECTS):
            return False
        # A lease launches nothing.
        if request.library and self._counts.get(request.library, 0) >= self._limit:
            return False
        turn = request.turn
        if turn is not None and turn.waits_for and not turn.is_ready:
            return False
        # A request that is alone may go, however large: no other would ever make room for it.
        return request.has_room or not self._sent

    def _queue(self, request: RemoteRequest) -> deque[RemoteRequest]:
        if request.stage != "queued":
            request.move("return")
        name = _queue_name(request)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
        queue.append(request)
        self.waiting += 1
        request.turn = self._order.enter(request.reads, request.writes)
        return queue

    def _in_order(self) -> list[RemoteRequest]:
        """Return all that wait, by their numbers."""
        return sorted(itertools.chain.from_iterable(self._queues.values()), key=_NUMBER)

    def _unqueue(self, request: RemoteRequest) -> None:
        self._leave(request)
        self._hand_over(request)

    def _leave(self, request: RemoteRequest) -> None:
        self.waiting -= 1
        if request.turn is not None:
            self._order.leave(request.turn)
            request.turn = None

    def _hand_over(self, request: RemoteRequest) -> None:
        # The request is in the table before it is sent: a refusal there takes it out again.
        self._sent[request.number] = request
        self._counts[request.library] = self._counts.get(request.library, 0) + 1
        request.move("send")
        self._send(request)


def _queue_name(request: RemoteRequest) -> str:
    return _SUSPECTS if request.is_suspect else request.library


@attrs.define(eq=False, repr=False)
class RequestSender:
    """Sends requests to the worker that serves, and with them the blocks that the program has let go.

    Args:
        device: The device.
        chunks: Its memory.
        copies: Copies host arrays of requests.
        outcomes: Ends a request that cannot be sent.

    Attributes:
        link: The worker that serves, if one does now.
        requests: The requests that are not done.
    """

    _device: DeviceState
    _chunks: ChunkTable
    _copies: CopyService
    _outcomes: OutcomePolicy
    link: WorkerLink | None = None
    requests: RequestTable = attrs.field(init=False)
    # Ids of released blocks that the worker is not told of yet, and those among them of unknown size.
    _released: list[int] = attrs.field(factory=list[int])
    _released_bytes: float = 0.0
    _some_released: TaskNotifier = attrs.field(factory=TaskNotifier)
    # The task that gives back what is dropped while the worker has requests; it waits while it has none.
    _first_sent: TaskNotifier = attrs.field(factory=TaskNotifier)

    def __attrs_post_init__(self) -> None:
        self.requests = RequestTable(self._device.options.in_flight, self._send)

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; blocks are given back by tasks of the nursery."""
        nursery.start_soon(self._send_released_soon)
        nursery.start_soon(self._drain_meanwhile)

    def begin(self, link: WorkerLink, told: Iterable[int]) -> None:
        """Begin with a worker, which was told of these blocks."""
        self.link = link
        link.is_serving = True
        # The program may have let blocks go since the list for this worker was made.
        self._released, self._released_bytes = [], 0.0
        self._release([block for block in told if block not in self._chunks.blocks])
        self._device.blocks.release = self._release

    def end(self) -> None:
        """End with the worker that served."""
        if self.link is not None:
            self.link.is_serving = False
            self.link = None

    def serving(self) -> WorkerLink:
        """Return the worker that serves.

        Raises:
            DeviceLostError: None does now.
        """
        if self.link is None:
            raise DeviceLostError("the context of the device is being replaced", device=self._device.name)
        return self.link

    def _send(self, request: RemoteRequest) -> None:
        """Hand a request over; the table has seen to it that it may go."""
        if request.is_suspect and self._outcomes.fail_if_guilty(request):
            self.requests.done(request.number)
            return
        link, library = self.link or self.serving(), request.library
        blocks = self._device.blocks
        if blocks.dropped:
            # Dropped blocks go along with the request.
            self._note_released(blocks.take_some())
        if self._first_sent.task is not None:
            self._first_sent.notify()
        if isinstance(request, LeaseRequest):
            self._send_lease(request, link)
            return
        assert isinstance(request, OperationRequest)
        word = link.words.get(library)
        try:
            if word is None:
                word = link.word(library)
            message = request.message(word, tuple(self._released), link.templates)
        except Exception as error:  # noqa: BLE001  # it is the asker's
            self.requests.done(request.number)
            self._device.locate(error, request.launch.name)
            self._outcomes.refuse(request, error)
            return
        # The list is emptied only now: a message that could not be made has told the worker nothing.
        if self._released:
            self._released, self._released_bytes = [], 0.0
        link.send(message, now=self.requests.sent == 1)
        if request.hosts.is_used:
            self._copies.stage(request, self._filled)

    def _send_lease(self, request: LeaseRequest, link: WorkerLink) -> None:
        released = tuple(self._released)
        try:
            if isinstance(request, BorrowRequest):
                request.send(link, released)
            else:
                message = _orders.lease(request.number, request.array.block, bool(request.writes), released)
                link.send(message, now=self.requests.sent == 1)
        except OutOfMemoryError as error:
            self.requests.done(request.number)
            self._outcomes.refuse(request, error)
        else:
            self._released, self._released_bytes = [], 0.0

    def _filled(self, copy: HostCopy) -> None:
        """Tell the worker that a host array is in shared memory: operations may wait for it."""
        if self.link is not None:
            self.link.send(_orders.filled(copy.transfer), now=True)

    def _note_released(self, blocks: list[int]) -> None:
        self._released_bytes += self._chunks.forget(blocks)
        if self.link is not None:
            self._released.extend(blocks)

    def _release(self, blocks: Iterable[int]) -> None:
        self._note_released(list(blocks))
        if self.link is None:
            return
        if self._released_bytes >= _MAX_RELEASED_BYTES or len(self._released) >= _MAX_RELEASED_BLOCKS:
            # Small ones, and few, can wait for a request to go with.
            self._some_released.notify()

    def forget_library(self, library: str) -> None:
        """Forget a library that was closed, unless it was asked for again."""
        if self.requests.forget_library(library) and self.link is not None:
            self.link.forget_library(library)

    def send_released(self) -> None:
        """Tell the worker now what the program has let go."""
        if self._released and self.link is not None:
            self.link.send(_orders.release(tuple(self._released)))
            self._released, self._released_bytes = [], 0.0

    @enable_ki_protection
    async def _send_released_soon(self) -> None:
        while True:
            await self._some_released.wait()
            self.send_released()

    @enable_ki_protection
    async def _drain_meanwhile(self) -> None:
        """Give back what is dropped while requests come and go, without being notified of each."""
        blocks = self._device.blocks
        try:
            while True:
                if not self.requests.sent:
                    # The flag falls before the drain: blocks that are dropped after it wake the loop, and
                    # those before it are drained here.
                    blocks.is_watched = False
                    blocks.drain()
                    await self._first_sent.wait()
                blocks.is_watched = True
                await trio.sleep(_DRAINED)
                blocks.drain()
        finally:
            blocks.is_watched = False
