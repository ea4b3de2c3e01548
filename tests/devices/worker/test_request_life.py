"""The life of a request against a model: each event has an edge or is refused; one outcome comes."""

from __future__ import annotations

from typing import NoReturn

import outcome
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    """What a device does with a request, in any order, and what the asker must see of it."""

    @initialize()
    def begin(self) -> None:
        self.request = Observed()
        self.request.task = object()  # type: ignore[assignment]  # any: nothing is scheduled here
        # The model: where it waits, whether its end was told and its asker cancelled, and what was told.
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
        """The asker is cancelled: taken back where it waits, left to its grace where a worker has it."""
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


def test_every_edge_leads_on_and_every_stage_ends() -> None:
    edges = RemoteRequest.edges
    stages = {stage for stage, _ in edges} | {*edges.values()}
    assert not any(stage == "over" for stage, _ in edges)
    ending = {"over"}
    while more := {stage for (stage, _), following in edges.items() if following in ending} - ending:
        ending |= more
    assert ending == stages == {"queued", "sent", "copying", "unwinding", "left", "over"}


def test_one_that_waits_is_withdrawn_at_once() -> None:
    request = Observed()
    request.take_back_at_once()
    assert request.abort(raise_cancel) is trio.lowlevel.Abort.SUCCEEDED
    assert (request.stage, request.let_go, request.given) == ("over", 1, [])
    with pytest.raises(RuntimeError, match="request 1 is over: 'withdraw'"):
        request.abort(raise_cancel)
