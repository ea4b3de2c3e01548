"""The communicators of a worker: bounded waits, and giving up from another thread."""

from __future__ import annotations

import threading

import attrs
import pytest

from trio_accel.backends.base import LibraryError
from trio_accel.backends.base.contract.ops import Waiting
from trio_accel.backends.base.kit.communicators import (
    ABORTED,
    MISSING,
    NOT_IN_TIME,
    Communicators,
    RankCommunicator,
)


@attrs.define(eq=False)
class Handle:
    """Arrives after this many looks."""

    looks: float = float("inf")
    aborted: int = 0

    def poll(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def abort(self) -> None:
        self.aborted += 1


def code_of(call: object) -> str:
    with pytest.raises(LibraryError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.library == "test"
    return str(caught.value.code)


def test_it_waits_until_all_begun_calls_have_arrived() -> None:
    made, handle = RankCommunicator("test"), Handle(300)
    made.begin(lambda: handle)
    made.settle()
    assert handle.looks == -1
    assert not handle.aborted


def test_a_wait_in_an_event_loop_has_an_end() -> None:
    made = RankCommunicator("test")
    made.begin(Handle)
    assert code_of(lambda: made.settle(is_short=True)) == NOT_IN_TIME


def test_a_wait_ends_when_it_is_given_up_in_another_thread() -> None:
    made, handle, waiting = RankCommunicator("test"), Handle(), Waiting()
    made.begin(lambda: handle)
    thread = threading.Timer(0.05, made.abort)
    thread.start()
    with made.calling(waiting):
        assert waiting.is_on
        assert code_of(made.settle) == ABORTED
        thread.join()
        # A call without an end now is stuck.
        assert not waiting.is_on
    made.abort()
    assert handle.aborted == 1
    assert code_of(lambda: made.call(lambda _: None)) == ABORTED


def test_a_communicator_stuck_in_a_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.backends.base.kit.communicators._LEAVING", 0.01)
    made, handle, goes_on, is_in = RankCommunicator("test"), Handle(), threading.Event(), threading.Event()
    made.begin(lambda: handle)

    def hang(_: Handle) -> None:
        is_in.set()
        goes_on.wait(10)

    thread = threading.Thread(target=made.call, args=(hang,))
    thread.start()
    assert is_in.wait(10)
    made.abort()
    assert handle.aborted == 1
    goes_on.set()
    thread.join()


def test_they_are_found_by_number_and_given_up_before_they_are_open() -> None:
    table = Communicators("test")
    assert code_of(lambda: table.find(1)) == MISSING
    made = table.new(1)
    assert table.find(1) is made
    table.close(1).join()
    assert code_of(lambda: table.find(1)) == ABORTED
    table.close(2).join()
    assert code_of(lambda: table.new(2)) == ABORTED
    for number in range(3, 4 + table.max_closed):
        table.close(number).join()
    # Communicators given up long ago are forgotten.
    assert code_of(lambda: table.find(1)) == MISSING


def test_a_kernel_waits_for_others_between_its_begin_and_its_end() -> None:
    @attrs.define(eq=False)
    class Point:
        is_done: bool

    waiting = Waiting()
    assert not waiting.is_on
    waiting.came = Point(is_done=False)
    assert not waiting.is_on
    waiting.came.is_done = True
    assert waiting.is_on
    waiting.ran = Point(is_done=False)
    assert waiting.is_on
    waiting.ran.is_done = True
    assert not waiting.is_on
