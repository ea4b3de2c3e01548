"""The unfinished requests of a device, and the rules by which they are sent to the worker."""

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

# Released blocks travel with the next operation, unless there are this many bytes or blocks.
_MAX_RELEASED_BYTES = 64 << 20
_MAX_RELEASED_BLOCKS = 64
# Seconds between checks for dropped blocks, while there are requests.
_DRAINED = 0.1
# The queue name of suspects, in place of their library's. No library has this name.
_SUSPECTS = "?"
_NUMBER, _RANK = attrgetter("number"), attrgetter("rank")


class RequestTable:
    """The requests of a device in order. The worker has a limited number of each library at a time.

    A request waits while its library's window is full, while an earlier request of its library waits, and
    while a request waits that it must follow, because they touch the same memory. So the worker gets
    dependent requests in the order in which they were made, and orders them from there.

    Suspects of a fault run after all requeued requests, one at a time and alone (D136). Later requests wait
    until the suspects have ended.

    Args:
        limit: The maximum number of a library's requests at the worker.
        send: Hands a request over to the worker.
    """

    def __init__(self, limit: int, send: Callable[[RemoteRequest], None]) -> None:
        self._limit = limit
        self._send = send
        self._numbers = itertools.count(1)
        self._sent: dict[int, RemoteRequest] = {}
        self._counts: dict[str, int] = {}
        self._queues: dict[str, deque[RemoteRequest]] = {}
        # D19: the requests of one library wait in their order; all requests wait in the order of memory.
        self._order = SubmissionOrder()
        self._is_open = False
        self._is_careful = False
        # The only running suspect, and the last request number that may precede the waiting suspects.
        self._alone: RemoteRequest | None = None
        self._last_innocent = 0
        self.waiting: int = 0

    def __len__(self) -> int:
        return self.waiting + len(self._sent)

    @property
    def sent(self) -> int:
        """The number of requests that the worker has."""
        return len(self._sent)

    def next_number(self) -> int:
        """Return the number of the next request."""
        return next(self._numbers)

    def get(self, number: int) -> RemoteRequest | None:
        """Return a request that the worker has."""
        return self._sent.get(number)

    def add(self, request: RemoteRequest) -> None:
        """Send a request, now or in its turn."""
        if request.stage != "queued":
            request.move("return")
        if self._is_open and not self.waiting and self._may_go(request):
            self._hand_over(request)
            return
        queue = self._queue(request)
        # The other waiting requests could not be sent before, and still cannot. So only this queue is
        # checked.
        if self._is_open and queue[0] is request and self._may_go(request):
            self.pump()

    def open(self, *, carefully: bool = False) -> None:
        """Begin with a worker: send the requests that wait.

        Args:
            carefully: Send one request at a time, until `send_ready` (D75). A waiting request may lose the
                context, and the context should complete another one before that.
        """
        self._is_open = True
        self._is_careful = carefully
        self.pump()

    def send_ready(self) -> None:
        """Send as many requests as the window takes."""
        if self._is_careful:
            self._is_careful = False
            self.pump()

    def pump(self) -> None:
        """Send all requests that may be sent now."""
        self._pump_innocent()
        while (suspect := self._next_suspect()) is not None:
            self._queues[_SUSPECTS].remove(suspect)
            self._alone = suspect
            self._unqueue(suspect)
            # The suspect may have been refused immediately, so that others may be sent.
            self._pump_innocent()

    def _next_suspect(self) -> RemoteRequest | None:
        """Return the suspect that may begin now, the likeliest last; a library's run in their order."""
        queue = self._queues.get(_SUSPECTS)
        # Leases do not count, because they launch nothing, and the program may hold one until later requests
        # are served.
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
                    # A request of another library may have waited for the memory of this request.
                    is_moving = len(queues) > 1

    def done(self, number: int) -> RemoteRequest | None:
        """Remove a request that the worker has ended; return it, if it was known."""
        request = self._sent.pop(number, None)
        if request is not None:
            self._counts[request.library] -= 1
            if request is self._alone:
                self._alone = None
        return request

    def withdraw(self, request: RemoteRequest) -> bool:
        """Take back a request that the worker does not have; return whether it was waiting."""
        queue = self._queues.get(_queue_name(request), ())
        if request not in queue:
            return False
        assert isinstance(queue, deque)
        queue.remove(request)
        # A request of another library may have waited for this turn.
        self._leave(request)
        self.pump()
        return True

    def close(self) -> list[RemoteRequest]:
        """End with a lost worker; return its requests, in order."""
        self._is_open = self._is_careful = False
        self._alone = None
        had = sorted(self._sent.values(), key=_NUMBER)
        self._sent.clear()
        self._counts.clear()
        return had

    def put_back(self, requests: Iterable[RemoteRequest]) -> None:
        """Return requests of a lost worker to their old positions."""
        waiting = sorted([*requests, *self.take_waiting()], key=_NUMBER)
        # Requests up to this number precede the suspects, and later ones follow them (D136).
        self._last_innocent = waiting[-1].number if waiting else 0
        for request in waiting:
            self._queue(request)

    def take_waiting(self) -> list[RemoteRequest]:
        """Take back all waiting requests, in order."""
        waiting = self._in_order()
        self._queues.clear()
        self._order = SubmissionOrder()
        self.waiting = 0
        return waiting

    def forget_library(self, library: str) -> bool:
        """Forget a library without requests; return whether it was forgotten."""
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
            in_flight: The numbers of launched requests in the worker; the rest of its requests wait there.
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
            started: Returns the number of the last request that a library has begun to launch.
        """
        in_flight = Counter(
            request.library for request in self._sent.values() if request.number <= started(request.library)
        )
        return self.queues(in_flight)

    def _may_go(self, request: RemoteRequest) -> bool:
        # D75: after a loss only one request runs at a time, until one has completed.
        if self._is_careful and any(sent.library for sent in self._sent.values()):
            return False
        # D136: a suspect runs without other requests, and later requests wait for all suspects.
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
        # The only request may be sent however large it is, because no other would ever free memory for it.
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
        """Return all waiting requests, by number."""
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
        # The request is in the table before it is sent, because a refusal in `send` removes it.
        self._sent[request.number] = request
        self._counts[request.library] = self._counts.get(request.library, 0) + 1
        request.move("send")
        self._send(request)


def _queue_name(request: RemoteRequest) -> str:
    return _SUSPECTS if request.is_suspect else request.library


@attrs.define(eq=False, repr=False)
class RequestSender:
    """Sends requests to the active worker, and the blocks that the program has released with them.

    Args:
        device: The device.
        chunks: Its memory.
        copies: Copies host arrays of requests.
        outcomes: Ends a request that cannot be sent.

    Attributes:
        link: The active worker, if any.
        requests: The unfinished requests.
    """

    _device: DeviceState
    _chunks: ChunkTable
    _copies: CopyService
    _outcomes: OutcomePolicy
    link: WorkerLink | None = None
    requests: RequestTable = attrs.field(init=False)
    # Released blocks that the worker does not know of yet, and their bytes, infinity if a size is unknown.
    _released: list[int] = attrs.field(factory=list[int])
    _released_bytes: float = 0.0
    _some_released: TaskNotifier = attrs.field(factory=TaskNotifier)
    # The task that frees dropped blocks while the worker has requests waits here while there are none.
    _first_sent: TaskNotifier = attrs.field(factory=TaskNotifier)

    def __attrs_post_init__(self) -> None:
        self.requests = RequestTable(self._device.options.in_flight, self._send)

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; tasks of the nursery return blocks."""
        nursery.start_soon(self._send_released_soon)
        nursery.start_soon(self._drain_meanwhile)

    def begin(self, link: WorkerLink, known_blocks: Iterable[int]) -> None:
        """Begin with a worker that knows these blocks."""
        self.link = link
        link.is_serving = True
        # The program may have released blocks since the list for this worker was made.
        self._released, self._released_bytes = [], 0.0
        self._release([block for block in known_blocks if block not in self._chunks.blocks])
        self._device.blocks.release = self._release

    def end(self) -> None:
        """End with the active worker."""
        if self.link is not None:
            self.link.is_serving = False
            self.link = None

    def serving(self) -> WorkerLink:
        """Return the active worker.

        Raises:
            DeviceLostError: There is none at present.
        """
        if self.link is None:
            raise DeviceLostError("the context of the device is being replaced", device=self._device.name)
        return self.link

    def _send(self, request: RemoteRequest) -> None:
        """Send a request that may be sent according to the table."""
        if request.is_suspect and self._outcomes.fail_if_guilty(request):
            self.requests.done(request.number)
            return
        link, library = self.link or self.serving(), request.library
        blocks = self._device.blocks
        if blocks.dropped:
            # Dropped blocks travel with the request.
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
        except Exception as error:  # noqa: BLE001  # it is passed to the caller
            self.requests.done(request.number)
            self._device.locate(error, request.launch.name)
            self._outcomes.refuse(request, error)
            return
        # The list is emptied only now, because a failed encoding has sent nothing to the worker.
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
        """Report to the worker that a host array is in shared memory, so that operations may use it."""
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
            # Few small blocks can wait for the next request.
            self._some_released.notify()

    def forget_library(self, library: str) -> None:
        """Forget a closed library, unless new requests use it."""
        if self.requests.forget_library(library) and self.link is not None:
            self.link.forget_library(library)

    def send_released(self) -> None:
        """Report all released blocks to the worker now."""
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
        """Free dropped blocks while there are requests, without a notification for each."""
        blocks = self._device.blocks
        try:
            while True:
                if not self.requests.sent:
                    # Clear the flag before draining: blocks dropped after that wake the loop, and blocks
                    # dropped before are drained here.
                    blocks.is_watched = False
                    blocks.drain_some()
                    await self._first_sent.wait()
                blocks.is_watched = True
                await trio.sleep(_DRAINED)
                blocks.drain_some()
        finally:
            blocks.is_watched = False
