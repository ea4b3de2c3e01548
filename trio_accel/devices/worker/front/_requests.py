"""The requests of a device that are not done: those that wait here, and those that the worker has."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from ...base._order import SubmissionOrder
from ...base._statistics import QueueStatistics
from ._request import RemoteRequest

__all__ = ["RequestTable"]


class RequestTable:
    """Hands requests over in order, so many of each library at a time.

    A request waits while its window is full, while one before it in the same library waits, and while
    one that it must follow (because of the memory they touch) waits. So the worker gets those that
    depend on each other in the order in which they were made, and puts them in order from there.

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
        # Those of one library that wait have their order anyway: it is kept once others wait beside them.
        self._order = SubmissionOrder()
        self._is_mixed = False
        self._is_open = False
        self._is_careful = False
        self.waiting: int = 0

    def __len__(self) -> int:
        return self.waiting + len(self._sent)

    @property
    def sent(self) -> int:
        """How many the worker has."""
        return len(self._sent)

    def next_number(self) -> int:
        """The place of the next request."""
        return next(self._numbers)

    def get(self, number: int) -> RemoteRequest | None:
        """A request that the worker has."""
        return self._sent.get(number)

    def add(self, request: RemoteRequest) -> None:
        """Hand a request over, now or in its turn."""
        if self._is_open and not self.waiting and self._may_go(request):
            self._hand_over(request)
            return
        queue = self._queue(request)
        # Those that wait already could not go before, and still cannot.
        if self._is_open and queue[0] is request and self._may_go(request):
            self.pump()

    def open(self, *, carefully: bool = False) -> None:
        """There is a worker: hand over what waits.

        Args:
            carefully: One request at a time, until `hurry`. What waits may hold the request that loses the
                context, which is to be seen to work before that is reached.
        """
        self._is_open = True
        self._is_careful = carefully
        self.pump()

    def hurry(self) -> None:
        """Hand over as many as the window takes."""
        if self._is_careful:
            self._is_careful = False
            self.pump()

    def pump(self) -> None:
        """Hand over what may be handed over now."""
        is_moving = self._is_open and self.waiting > 0
        while is_moving:
            is_moving = False
            queues = [queue for queue in self._queues.values() if queue]
            for queue in queues:
                while queue and self._is_open and self._may_go(queue[0]):
                    self._unqueue(queue.popleft())
                    # One of another library may have waited for it.
                    is_moving = len(queues) > 1

    def done(self, number: int) -> RemoteRequest | None:
        """The worker is done with a request; returns it, if it was known."""
        request = self._sent.pop(number, None)
        if request is not None:
            self._counts[request.library] -= 1
        return request

    def withdraw(self, request: RemoteRequest) -> bool:
        """Take a request back that the worker does not have; returns whether it was waiting."""
        queue = self._queues.get(request.library, ())
        if request not in queue:
            return False
        assert isinstance(queue, deque)
        queue.remove(request)
        self._leave(request)
        self.pump()
        return True

    def close(self) -> list[RemoteRequest]:
        """The worker is gone; returns what it had, in order."""
        self._is_open = self._is_careful = False
        had = list(self._sent.values())
        self._sent.clear()
        self._counts.clear()
        return sorted(had, key=lambda request: request.number)

    def put_back(self, requests: Iterable[RemoteRequest]) -> None:
        """Let requests wait that a worker had, each in its old place."""
        again = {request.number: request for request in requests}
        for queue in self._queues.values():
            again.update((request.number, request) for request in queue)
        self._forget_waiting()
        for number in sorted(again):
            self._queue(again[number])

    def take_waiting(self) -> list[RemoteRequest]:
        """Take everything back that waits, in order."""
        waiting = self._in_order()
        self._forget_waiting()
        return waiting

    def queues(self, in_flight: Mapping[str, int]) -> dict[str, QueueStatistics]:
        """Count requests by library.

        Args:
            in_flight: How many the worker has launched; the others that it has wait there.
        """
        counts: dict[str, QueueStatistics] = {}
        for library in {*self._queues, *self._counts} - {""}:
            launched = in_flight.get(library, 0)
            waiting = self._counts.get(library, 0) + len(self._queues.get(library, ())) - launched
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
        if self._is_careful and self._sent:
            return False
        # A lease launches nothing.
        if request.library and self._counts.get(request.library, 0) >= self._limit:
            return False
        turn = request.turn
        if turn is not None and turn.waits_for and not turn.is_ready:
            return False
        # A request that is alone may go: no other would ever make room for it.
        return request.has_room or not self._sent

    def _queue(self, request: RemoteRequest) -> deque[RemoteRequest]:
        queue = self._queues.get(request.library)
        if queue is None:
            queue = self._queues[request.library] = deque()
        queue.append(request)
        self.waiting += 1
        request.turn = None
        if self._is_mixed:
            request.turn = self._order.enter(request.reads, request.writes)
        elif self.waiting > len(queue):
            self._is_mixed = True
            for other in self._in_order():
                other.turn = self._order.enter(other.reads, other.writes)
        return queue

    def _in_order(self) -> list[RemoteRequest]:
        """All that wait, by their numbers."""
        waiting = [request for queue in self._queues.values() for request in queue]
        return sorted(waiting, key=lambda request: request.number)

    def _forget_waiting(self) -> None:
        self._queues.clear()
        self._order = SubmissionOrder()
        self._is_mixed = False
        self.waiting = 0

    def _unqueue(self, request: RemoteRequest) -> None:
        self._leave(request)
        self._hand_over(request)

    def _leave(self, request: RemoteRequest) -> None:
        self.waiting -= 1
        if request.turn is not None:
            self._order.leave(request.turn)
            request.turn = None
            self._is_mixed = self.waiting > 0

    def _hand_over(self, request: RemoteRequest) -> None:
        self._sent[request.number] = request
        self._counts[request.library] = self._counts.get(request.library, 0) + 1
        self._send(request)
