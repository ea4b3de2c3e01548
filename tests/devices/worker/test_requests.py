"""The table of requests, against what it promises, over random histories."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trio_accel.devices.dispatch._request import RemoteRequest
from trio_accel.devices.dispatch._requests import RequestTable

pytestmark = pytest.mark.any_backend

LIBRARIES = ("a", "b", "c", "")
LIMIT = 2

blocks = st.frozensets(st.integers(0, 3), max_size=2)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(LIBRARIES), blocks, blocks),
        st.tuples(st.just("done"), st.integers(0, 9)),
        st.tuples(st.just("withdraw"), st.integers(0, 9)),
        st.tuples(st.just("lose"), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))),
        st.tuples(st.just("open")),
    ),
    max_size=40,
)


@attrs.define
class World:
    """The table, and a worker's view of it."""

    table: RequestTable = attrs.field(init=False)
    made: list[RemoteRequest] = attrs.field(factory=list)
    waiting: list[RemoteRequest] = attrs.field(factory=list)
    had: list[RemoteRequest] = attrs.field(factory=list)
    is_open: bool = True
    last: int = 0

    def __attrs_post_init__(self) -> None:
        self.table = RequestTable(LIMIT, self.sent)
        self.table.open()

    def sent(self, request: RemoteRequest) -> None:
        assert self.is_open
        assert request in self.waiting
        # Nothing runs concurrently with a suspect.
        assert not any(other.is_suspect for other in self.had)
        assert not (request.is_suspect and any(other.library for other in self.had))
        if any(other.is_suspect for other in self.waiting) and not request.is_suspect:
            assert request.number <= self.last
        for other in self.waiting:
            if other.number < request.number:
                # No earlier waiting request uses its library, or touches the same memory.
                assert other.library != request.library or other.is_suspect != request.is_suspect
                assert not (other.writes & (request.reads | request.writes))
                assert not (other.reads & request.writes)
        self.waiting.remove(request)
        self.had.append(request)
        if request.library:
            assert sum(one.library == request.library for one in self.had) <= LIMIT

    def add(self, library: str, reads: frozenset[int], writes: frozenset[int]) -> None:
        request = RemoteRequest(self.table.next_number(), library, reads, writes)
        self.made.append(request)
        self.waiting.append(request)
        self.table.add(request)

    def done(self, which: int) -> None:
        if self.had:
            request = self.had.pop(which % len(self.had))
            assert self.table.done(request.number) is request
            assert self.table.done(request.number) is None
            self.table.pump()

    def withdraw(self, which: int) -> None:
        if self.made:
            request = self.made[which % len(self.made)]
            is_waiting = request in self.waiting
            if is_waiting:
                self.waiting.remove(request)
            assert self.table.withdraw(request) is is_waiting

    def lose(self, ended: set[int], suspects: set[int]) -> None:
        self.is_open = False
        had = self.table.close()
        assert had == sorted(self.had, key=lambda request: request.number)
        again = [request for number, request in enumerate(had) if number not in ended]
        for number, request in enumerate(again):
            # A lease launches nothing.
            request.is_suspect = request.is_suspect or (number in suspects and bool(request.library))
            request.rank = -number % 3
        self.had.clear()
        self.waiting = sorted([*self.waiting, *again], key=lambda request: request.number)
        self.last = max((request.number for request in self.waiting), default=0)
        self.table.put_back(again)

    def open(self) -> None:
        self.is_open = True
        self.table.open()

    def check(self) -> None:
        assert (self.table.waiting, self.table.sent) == (len(self.waiting), len(self.had))
        assert len(self.table) == len(self.waiting) + len(self.had)
        if self.is_open and self.waiting:
            # Nothing waits for nothing.
            assert self.had
            first = min(self.waiting, key=lambda request: request.number)
            if any(request.is_suspect for request in (*self.waiting, *self.had)):
                return
            assert first.library
            assert sum(one.library == first.library for one in self.had) == LIMIT


NONE, ONE = frozenset[int](), frozenset([0])
CLOSED = [("add", "", NONE, NONE), ("lose", set(), set())]


@settings(max_examples=400, deadline=None)
@given(actions)
# A request withdrawn from between others that touch the same memory.
@example([*CLOSED, ("add", "a", ONE, NONE), ("add", "a", NONE, ONE), ("withdraw", 2), ("add", "", NONE, ONE)])
@example([*CLOSED, ("add", "a", NONE, ONE), ("add", "a", NONE, ONE), ("withdraw", 2), ("add", "", NONE, ONE)])
def test_requests_go_in_order_so_many_at_a_time_and_none_is_forgotten(history: list[tuple]) -> None:
    world = World()
    for action, *arguments in history:
        getattr(world, action)(*arguments)
        world.check()
    world.open()
    while world.had:
        world.done(0)
        world.check()
    assert not world.waiting
    assert not world.table._order._readers
    assert not world.table._order._writers


def test_waiting_requests_are_taken_in_their_order() -> None:
    world = World()
    for library in "abaabbab":
        world.add(library, frozenset(), frozenset([1]))
    waiting = list(world.waiting)
    assert world.table.take_waiting() == waiting
    assert world.table.waiting == 0


class Large(RemoteRequest):
    """A request that never fits next to others."""

    @property
    def has_room(self) -> bool:
        return False


def test_a_request_too_large_next_to_others_runs_on_its_own() -> None:
    sent: list[RemoteRequest] = []
    table = RequestTable(LIMIT, sent.append)
    table.open()
    first, second = (Large(table.next_number(), "a", frozenset(), frozenset()) for _ in range(2))
    table.add(first)
    table.add(second)
    assert sent == [first]
    # It comes again, after the other, and holds its old memory.
    table.done(first.number)
    first.number = table.next_number()
    table.add(first)
    table.pump()
    assert sent == [first, second]
    table.done(second.number)
    table.pump()
    assert sent == [first, second, first]


def test_a_careful_device_hands_over_one_at_a_time_until_it_should_hurry() -> None:
    sent: list[int] = []
    table = RequestTable(LIMIT, lambda request: sent.append(request.number))
    requests = [RemoteRequest(table.next_number(), library, frozenset(), frozenset()) for library in "aabb"]
    for request in requests:
        table.add(request)
    assert sent == []
    table.open(carefully=True)
    assert sent == [1]
    # Requests arriving meanwhile wait as well.
    table.add(RemoteRequest(table.next_number(), "c", frozenset(), frozenset()))
    assert sent == [1]
    # A request that ended without showing anything makes room for the next.
    table.done(1)
    table.pump()
    assert sent == [1, 2]
    table.send_ready()
    assert sorted(sent) == [1, 2, 3, 4, 5]
    # After a loss everything waits again; a normally opened device continues normally.
    table.put_back(table.close())
    table.open()
    assert sorted(sent[5:]) == [2, 3, 4, 5]


def test_the_likeliest_suspect_is_the_last_except_its_own_readers() -> None:
    sent: list[int] = []
    table = RequestTable(LIMIT, lambda request: sent.append(request.number))
    table.open()
    requests = [
        RemoteRequest(table.next_number(), library, reads, writes)
        for library, reads, writes in [("a", NONE, ONE), ("b", NONE, NONE), ("c", ONE, NONE)]
    ]
    for request, rank in zip(requests, (2, 1, 0), strict=True):
        table.add(request)
        request.is_suspect, request.rank = True, rank
    table.put_back(table.close())
    sent.clear()
    table.open()
    for number in (2, 1, 3):
        assert sent[-1] == number
        table.done(number)
        table.pump()
    assert sent == [2, 1, 3]


def test_a_suspect_refused_at_once_keeps_nobody_waiting() -> None:
    sent: list[int] = []

    def send(request: RemoteRequest) -> None:
        sent.append(request.number)
        if request.is_suspect:
            # Its array was damaged by the one before.
            table.done(request.number)

    table = RequestTable(LIMIT, send)
    requests = [RemoteRequest(table.next_number(), library, NONE, NONE) for library in "abc"]
    table.open()
    for request in requests:
        table.add(request)
    had = table.close()
    for request in had[:2]:
        request.is_suspect = True
    table.put_back(had)
    later = RemoteRequest(table.next_number(), "d", NONE, NONE)
    table.add(later)
    sent.clear()
    table.open()
    assert sent == [3]
    table.done(3)
    table.pump()
    assert sent == [3, 1, 2, 4]
    assert table.waiting == 0


def test_a_held_lease_keeps_no_suspect_waiting() -> None:
    sent: list[int] = []
    table = RequestTable(LIMIT, lambda request: sent.append(request.number))
    lease, request = (RemoteRequest(table.next_number(), library, NONE, NONE) for library in ("", "a"))
    table.open()
    table.add(lease)
    table.add(request)
    request.is_suspect = True
    table.put_back(table.close())
    sent.clear()
    table.open()
    assert sent == [1, 2]
