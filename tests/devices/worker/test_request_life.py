"""The life of a request against a model: each event has an edge or is refused; there is one outcome."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import attrs
import outcome
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import trio_accel as ta
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec
from trio_accel.devices.dispatch import _outcomes, _requests
from trio_accel.devices.dispatch._calls import WorkerLeases
from trio_accel.devices.dispatch._request import RemoteRequest


class CancelledError(Exception):
    """Stands for the cancellation of a task."""


def raise_cancel() -> NoReturn:
    raise CancelledError


class Observed(RemoteRequest):
    """One that notes what it gives and gives back."""

    __slots__ = ("forgotten", "given", "let_go")

    def __init__(self) -> None:
        super().__init__(1, "a", frozenset(), frozenset())
        self.given: list[object] = []
        self.let_go = self.forgotten = 0

    def take_back_at_once(self) -> None:
        self._on_cancel = lambda _: True

    def settle(self, result: outcome.Outcome[None]) -> None:
        self.given.append(result.error if isinstance(result, outcome.Error) else None)
        self.task = None

    def _let_go(self) -> None:
        self.let_go += 1

    def _forget(self) -> None:
        self.forgotten += 1


class Life(RuleBasedStateMachine):
    """The device's actions on a request, in any order, and the caller's required view of them."""

    @initialize()
    def begin(self) -> None:
        self.request = Observed()
        self.request.task = object()  # type: ignore[assignment]  # any: nothing is scheduled here
        # The model: the request's queue, whether its end was reported and its caller cancelled, and the
        # reports.
        self.place = "here"
        self.is_cancelled = self.is_ended = self.has_left = False
        self.expected: object = None
        self.failure: Exception | None = None
        self.copies = 0

    def refused(self, step: str) -> None:
        """Expect that this cannot happen now, and that it changes nothing."""
        before = self.request.stage
        with pytest.raises(RuntimeError, match=f"request 1 is {before}: '{step}'") as caught:
            self.request.move(step)  # type: ignore[arg-type]
        assert caught.typename == "NoEdgeError"
        assert self.request.stage == before

    @rule()
    def send(self) -> None:
        if self.place == "here" and not self.is_ended:
            self.request.move("send")
            self.place = "worker"
        else:
            self.refused("send")

    @rule()
    def lose(self) -> None:
        if self.place == "worker" and not (self.is_ended or self.has_left):
            self.request.move("return")
            self.place = "here"
        else:
            self.refused("return")

    @rule()
    def copy(self) -> None:
        if not self.is_ended:
            self.copies += 1
            self.request.copies += 1

    @precondition(lambda self: self.copies)
    @rule(fails=st.booleans())
    def copied(self, fails: bool) -> None:
        if fails:
            self.request.failure = self.failure = OSError("copy")
        self.copies -= 1
        self.request.copy_over()

    @rule()
    def cancel(self) -> None:
        """The caller is cancelled: a waiting request is withdrawn, a request in a worker has its grace."""
        if self.is_cancelled or self.request.stage == "over":
            return
        self.is_cancelled = True
        self.request.raise_cancel = raise_cancel
        if self.place == "here" and not self.is_ended:
            self.is_ended, self.expected = True, CancelledError
            self.request.unwind()

    @precondition(lambda self: self.is_cancelled)
    @rule()
    def leave(self) -> None:
        """The grace is over."""
        if self.place == "worker" and not (self.is_ended or self.has_left):
            self.has_left, self.expected = True, CancelledError
            self.request.leave()
        elif self.request.stage == "copying":
            self.expected = CancelledError
            self.request.unwind()
        else:
            self.refused("leave")

    @rule(error=st.none() | st.builds(ValueError))
    def end(self, error: Exception | None) -> None:
        """The worker is done with it, or it is refused."""
        if self.is_ended:
            with pytest.raises(RuntimeError):
                self.request.finish(error)
            return
        self.is_ended = True
        if not self.has_left:
            self.expected = error
        self.request.finish(error)

    @rule(step=st.sampled_from(["send", "return", "withdraw", "end", "unwind", "leave", "complete"]))
    def nothing_follows_the_end(self, step: str) -> None:
        if self.request.stage == "over":
            self.refused(step)

    @invariant()
    def the_outcome_comes_once_and_behind_the_copies(self) -> None:
        request = self.request
        is_over = self.is_ended and not self.copies
        assert (request.stage == "over") is is_over
        assert request.let_go == is_over
        # Its launch is forgotten here only if nobody waits who would do it.
        assert request.forgotten == (is_over and self.expected is CancelledError)
        told = is_over or (self.has_left and bool(request.given))
        assert len(request.given) == told
        if self.has_left and not self.copies:
            assert request.given
        for given in request.given:
            if self.expected is CancelledError:
                assert isinstance(given, CancelledError)
            else:
                assert given in (self.expected, self.failure)
                assert (given is None) is (self.expected is None and self.failure is None)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


LOST = ta.ContextLostError("the worker was killed")


@attrs.define(eq=False)
class Held:
    """A lease, or an array borrowed from a lease, and its model.

    Attributes:
        request: The real one.
        loan: Of a lease: ends it when its last user has ended.
        lender: The lease that lends the array.
        ends: The number of ends reported to the lender.
        users: The model's count of a lease's users: the caller, and the loans.
        is_dropped: Whether who asked has given it back.
        place: "here", "worker" or "over".
        is_leaving: Whether the worker was asked to end it.
        is_told: Whether who asked knows that it is held, or why not.
    """

    request: Any = None
    loan: Any = None
    lender: Held | None = None
    ends: int = 0
    users: int = 1
    is_dropped: bool = False
    place: str = "here"
    is_leaving: bool = False
    is_told: bool = False

    def ended(self) -> None:
        assert self.lender is not None
        self.ends += 1
        self.lender.loan.end()


class Worker:
    """The application's view of a worker that serves leases."""

    has_faulted = is_stuck = False
    used = ()

    def __init__(self) -> None:
        self.unleased: list[int] = []

    def send(self, order: Any, *, now: bool) -> None:
        name, number = order
        assert (name, now, number in self.unleased) == ("unlease", True, False)
        self.unleased.append(number)


class LifeOfLeases(RuleBasedStateMachine):
    """Leases and their loans, while workers come and go, and until the device is closed."""

    @initialize()
    def begin(self) -> None:
        device: Any = SimpleNamespace(
            options=ta.DeviceOptions(), name="d", generation=1, availability=SimpleNamespace(is_shut=False)
        )
        nothing: Any = None
        self.all: list[Held] = []
        self.table = _requests.RequestTable(4, self.sent)
        self.sender: Any = SimpleNamespace(link=None, requests=self.table)
        self.outcomes = _outcomes.OutcomePolicy(device, nothing)
        self.leases = WorkerLeases(device, self.sender, nothing)
        self.is_closed = False
        self.open()

    def sent(self, request: RemoteRequest) -> None:
        # A request just lent is not known yet.
        (held,) = [one for one in self.all if one.request in (request, None)]
        assert held.place == "here"
        held.place = "worker"

    def where(self, place: str) -> list[Held]:
        return [one for one in self.all if one.place == place]

    def drop(self, held: Held) -> None:
        """Have the model give one back."""
        if held.place == "worker" and self.sender.link is not None:
            held.is_leaving = True
        elif held.place != "over":
            self.end(held)

    def end(self, held: Held) -> None:
        """Have the model end one, and with it perhaps the lease that lent it."""
        held.place, held.is_leaving = "over", False
        if held.lender is not None:
            held.lender.users -= 1
            if not held.lender.users:
                self.drop(held.lender)

    @precondition(lambda self: not self.is_closed)
    @rule(block=st.integers(1, 2), at_once=st.booleans())
    def lend(self, block: int, at_once: bool) -> None:
        ref: Any = SimpleNamespace(spec=ArraySpec(block, 0, DType.float64, (4,), (8,)))
        held = Held()
        self.all.append(held)
        held.loan = self.leases.lend(ref)
        held.request = held.loan._request
        if at_once and held.place == "worker":
            self.granted(held)

    @precondition(lambda self: not self.is_closed)
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        """Operations of the same device are to read what it has lent."""
        lent = [one for one in self.all if one.is_told and one.users and one.loan and one.place != "over"]
        if not lent:
            return
        lender = data.draw(st.sampled_from(lent))
        array = attrs.evolve(lender.request.array, block=100 + len(self.all))
        held, number = Held(lender=lender), self.table.next_number()
        place: Any = SimpleNamespace(chunk=None)
        held.request = _requests.BorrowRequest(number, array, place, 1, held.ended, stay=None)
        lender.loan.users += 1
        lender.users += 1
        self.all.append(held)
        self.table.add(held.request)

    def give_back(self, held: Held) -> None:
        held.is_dropped = True
        held.users -= 1
        if held.loan is None or not held.users:
            self.drop(held)
        if held.loan is None:
            self.leases.give_back(held.request)
        else:
            held.loan.end()

    @rule(data=st.data())
    def need_no_longer(self, data: st.DataObject) -> None:
        """Who has asked gives it back, whether it was held or not."""
        if mine := [one for one in self.all if not one.is_dropped]:
            self.give_back(data.draw(st.sampled_from(mine)))

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        """The worker holds it; the next worker reports it again."""
        if had := self.where("worker"):
            self.granted(data.draw(st.sampled_from(had)))

    def granted(self, held: Held) -> None:
        held.is_told = True
        held.request.granted.set()

    def finish(self, held: Held) -> None:
        is_told, held.is_told = held.is_told, True
        self.end(held)
        assert self.table.done(held.request.number) is held.request
        if is_told:
            held.request.end()
        elif held.loan is None:
            self.outcomes.refuse(held.request, LOST)
        else:
            self.outcomes.end_lease(held.request)
        self.table.pump()

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """The worker has ended it on request, or has refused it."""
        if had := [one for one in self.where("worker") if one.is_leaving or not one.is_told]:
            self.finish(data.draw(st.sampled_from(had)))

    @precondition(lambda self: not self.is_closed and self.sender.link is None)
    @rule()
    def open(self) -> None:
        self.sender.link = Worker()
        self.table.open()

    @precondition(lambda self: self.sender.link is not None)
    @rule()
    def lose(self) -> None:
        """Held requests pass to the next worker, except leases that were to end."""
        link, self.sender.link = self.sender.link, None
        for held in self.where("worker"):
            if held.is_leaving:
                self.end(held)
        for held in self.where("worker"):
            held.place = "here"
        self.table.put_back(self.outcomes.sort(self.table.close(), link, LOST, {}))

    @precondition(lambda self: self.sender.link is None)
    @rule()
    def rest(self) -> None:
        """The device is given up for a while: requests never held are refused."""
        for held in self.where("here"):
            if not held.is_told:
                held.is_told = True
                self.end(held)
        waiting: list[Any] = self.table.take_waiting()
        kept = [one for one in waiting if one.granted.is_set()]
        for request in waiting:
            if request not in kept:
                self.outcomes.refuse(request, LOST)
        self.table.put_back([one for one in kept if one.stage == "queued"])

    @precondition(lambda self: not self.is_closed and len(self.all) > 5)
    @rule()
    def close(self) -> None:
        self.is_closed = self.outcomes.is_closing = True
        self.sender.link = None
        for held in [one for one in self.all if one.place != "over"]:
            held.is_told = True
            if held.place != "over":
                self.end(held)
        for request in (*self.table.close(), *self.table.take_waiting()):
            self.outcomes.refuse(request, self.outcomes.closed())

    @invariant()
    def states_match_the_model(self) -> None:
        link = self.sender.link
        for held in self.all:
            at_worker = "left" if held.is_leaving else "sent"
            stages = {"here": "queued", "worker": at_worker, "over": "over"}
            assert held.request.stage == stages[held.place]
            assert held.request.granted.is_set() is held.is_told
            assert held.ends == (held.lender is not None and held.place == "over")
        leaving = [one.request.number for one in self.all if one.is_leaving]
        assert {*leaving} <= {*(link.unleased if link else [])}
        assert len(self.table) == len(self.where("here")) + len(self.where("worker"))

    def teardown(self) -> None:
        """After everything is given back and a worker has answered, nothing is left."""
        for held in self.all:
            if not held.is_dropped:
                self.give_back(held)
        if not self.is_closed and self.sender.link is None:
            self.open()
        while had := self.where("worker"):
            self.finish(had[-1])
        self.states_match_the_model()
        assert {one.place for one in self.all} <= {"over"}


TestLeases = LifeOfLeases.TestCase
TestLeases.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_every_edge_leads_on_and_every_stage_ends() -> None:
    edges = RemoteRequest.edges
    stages = {stage for stage, _ in edges} | {*edges.values()}
    assert not any(stage == "over" for stage, _ in edges)
    ending = {"over"}
    while more := {stage for (stage, _), following in edges.items() if following in ending} - ending:
        ending |= more
    assert ending == stages == {"queued", "sent", "copying", "unwinding", "left", "over"}


def test_a_waiting_request_is_withdrawn_at_once() -> None:
    request = Observed()
    request.take_back_at_once()
    assert request.abort(raise_cancel) is trio.lowlevel.Abort.SUCCEEDED
    assert (request.stage, request.let_go, request.given) == ("over", 1, [])
    with pytest.raises(RuntimeError, match="request 1 is over: 'withdraw'"):
        request.abort(raise_cancel)
