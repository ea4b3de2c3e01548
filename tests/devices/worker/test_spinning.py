"""A lone waiting task polls for its answer on its own, if the answer is due."""

from __future__ import annotations

import contextvars
import gc
import itertools
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from math import inf
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND
from garbage import without_collection
from isolated import BLAS, options
from processes import until

import trio_accel as ta
from trio_accel.devices.wire import _channel
from trio_accel.devices.wire._channel import Channel, EndOfChannel, SpinWait
from trio_accel.devices.wire._frames import Received
from trio_accel.devices.wire._protocol import SharedPage


class Peers:
    """Two ends, of which one is sure that an answer is due, and has a receiver."""

    def __init__(self, nursery: trio.Nursery, page: SharedPage | None) -> None:
        self.ours, self.theirs = (Channel(sock) for sock in socket.socketpair())
        if page is not None:
            self.ours.share(*page.frames)
            self.theirs.share(*reversed(page.frames))
        self.spin_wait = SpinWait(20.0, frozenset({"ask"}), frozenset({"answer"}))
        self.ours.spin_with(self.spin_wait)
        for task in (self.ours.run, self.theirs.run, self.ours.listen, self.receive):
            nursery.start_soon(task)
        self.received: list[Any] = []
        self.polled: list[Any] = []
        self.takes: bool = True
        self.end: BaseException | None = None

    async def receive(self) -> None:
        try:
            while True:
                self.received += [message for message, _ in await self.ours.receive()]
        except Exception as error:  # noqa: BLE001  # a test looks at it
            self.end = error

    def take(self, received: list[Received]) -> bool:
        if self.takes:
            self.polled += [message for message, _ in received]
        return self.takes

    def ask(self) -> None:
        # Two that took as long as one another.
        for _ in range(3):
            self.spin_wait.sent()
            self.spin_wait.received([(("answer",), ())])
        self.ours.send(("ask",), now=True)
        assert self.ours.may_spin

    async def spin(self, until: Callable[[], bool]) -> None:
        with trio.move_on_after(60) as scope:
            before = len(self.polled)
            await self.ours.spin(self.take, lambda: not until() and len(self.polled) == before)
        # It is not to be cancelled: it returns.
        assert not scope.cancel_called


@pytest.fixture(params=["socket", "memory"])
async def peers(request: pytest.FixtureRequest, nursery: trio.Nursery) -> AsyncGenerator[Peers, None]:
    page = SharedPage.create() if request.param == "memory" else None
    made = Peers(nursery, page)
    await trio.testing.wait_all_tasks_blocked()
    yield made
    made.ours.close()
    made.theirs.close()
    if page is not None:
        page.close()
    nursery.cancel_scope.cancel()


async def test_the_answer_reaches_its_waiting_caller(peers: Peers) -> None:
    for count in range(1, 4):
        peers.ask()
        peers.theirs.send(("answer", count), now=True)
        await peers.spin(lambda: False)
        assert peers.polled[-1] == ("answer", count)
        assert len(peers.polled) == count
    assert not peers.received
    assert not peers.ours.may_spin


async def test_the_receiver_is_woken_after_the_answer(peers: Peers) -> None:
    peers.ask()
    turns = iter(range(9))

    def answer() -> bool:
        if next(turns, None) == 4:
            # To a task that looks for it.
            peers.theirs.send(("answer",), now=True)
        return False

    await peers.spin(answer)
    assert peers.polled == [("answer",)]
    await trio.testing.wait_all_tasks_blocked(0.01)
    peers.theirs.send(("by the way",), now=True)
    await until(lambda: peers.received)
    assert peers.received == [("by the way",)]


async def test_unclaimed_messages_belong_to_the_receiver(peers: Peers) -> None:
    peers.takes = False
    peers.ask()
    turns = iter(range(20))

    def is_over() -> bool:
        turn = next(turns, None)
        if turn == 10:
            # The receiver, and the task that listens for it, have settled by now.
            peers.theirs.send(("answer",), now=True)
        return turn is None

    await peers.spin(is_over)
    assert next(turns, None) is not None
    # Later messages are received after it, and so is the end.
    peers.theirs.send(("later",), now=True)
    peers.theirs.close()
    await until(lambda: peers.end is not None)
    assert peers.received == [("answer",), ("later",)]
    assert isinstance(peers.end, EndOfChannel)


async def test_messages_left_when_the_channel_is_closed_leave_no_descriptor(peers: Peers) -> None:
    peers.takes = False
    peers.ask()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    peers.theirs.send(("answer",), (descriptor,), now=True)
    os.close(descriptor)
    await peers.spin(lambda: False)
    [(_, (left,))] = peers.ours._left
    os.fstat(left)
    # Another spinning task would get its successors first.
    peers.spin_wait.sent()
    assert not peers.spin_wait.pause()
    assert not peers.ours.may_spin
    peers.ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(left)
    await until(lambda: peers.end is not None)
    assert not peers.received


async def test_nobody_spins_for_long(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_channel, "LONGEST_LOOK", 0.05)
    peers.ask()
    await peers.spin(lambda: False)
    peers.theirs.send(("answer",), now=True)
    await until(lambda: peers.received)


async def test_later_messages_are_received_as_usual(peers: Peers) -> None:
    peers.ask()
    turns = iter(range(5))
    await peers.spin(lambda: next(turns, None) is None)
    peers.theirs.send(("answer",), now=True)
    await until(lambda: peers.received)
    # Also after a while, when nothing is due.
    await trio.testing.wait_all_tasks_blocked(0.01)
    peers.theirs.send(("by the way",), now=True)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert peers.received == [("answer",), ("by the way",)]
    assert not peers.polled


async def test_a_notification_during_a_spin_is_repeated(peers: Peers) -> None:
    """The task that listens has notified nobody by then."""
    peers.ask()
    take, turns = peers.ours._take, iter(range(20))

    def late(seconds: float) -> list[Received]:
        turn = next(turns)
        if turn == 10:
            peers.theirs.send(("answer",), now=True)
        # The loop has turned since then.
        return take(seconds) if turn > 13 else []

    peers.ours._take = late  # type: ignore[method-assign]
    await peers.spin(lambda: False)
    peers.ours._take = take  # type: ignore[method-assign]
    await trio.testing.wait_all_tasks_blocked(0.01)
    peers.theirs.send(("last",), now=True)
    await until(lambda: peers.received)
    assert peers.polled == [("answer",)]
    assert peers.received == [("last",)]


async def test_who_is_cancelled_leaves_it_to_the_receiver(peers: Peers) -> None:
    peers.ask()
    with trio.move_on_after(0.01) as scope:
        # No answer arrives, so it returns only because of the cancellation.
        await peers.spin(lambda: False)
        assert trio.current_effective_deadline() == -float("inf")
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    peers.theirs.send(("answer",), now=True)
    await until(lambda: peers.received)


@pytest.mark.parametrize("whose", ["ours", "theirs"])
async def test_the_end_is_the_receivers(peers: Peers, whose: str) -> None:
    peers.ask()
    turns = iter(range(10))

    def is_over() -> bool:
        if next(turns, None) == 5:
            getattr(peers, whose).close()
        return False

    await peers.spin(is_over)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert isinstance(peers.end, EndOfChannel)


async def test_one_task_waits_for_several_peers(nursery: trio.Nursery) -> None:
    """Each receiver gets its peer back after the answer, and the others are still looked for."""
    several = [Peers(nursery, None) for _ in range(3)]
    await trio.testing.wait_all_tasks_blocked()
    for one in several:
        one.ask()
    turns = itertools.count()
    heard: list[Any] = []

    def goes_on() -> bool:
        turn = next(turns)
        if turn in (3, 12):
            several[turn // 6].theirs.send(("answer", turn), now=True)
        if turn == 8:
            several[0].theirs.send(("later",), now=True)
        heard[:] = several[0].received
        return turn < 30

    await _channel.spin_together([(one.ours, one.take) for one in several], goes_on)
    assert [one.polled for one in several] == [[("answer", 3)], [], [("answer", 12)]]
    assert heard == [("later",)]
    for one in several:
        one.ours.close()
        one.theirs.close()
    nursery.cancel_scope.cancel()


@attrs.define
class Spinning:
    """Counts the callers that poll for themselves."""

    now: int = 0
    begun: int = 0
    taken: int = 0


@pytest.fixture
def spinning(monkeypatch: pytest.MonkeyPatch) -> Spinning:
    # However small or busy this machine is.
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(SpinWait, "pause", lambda spin_wait: 0.0 if spin_wait._is_expected else inf)
    monkeypatch.setattr(_channel, "LONGEST_LOOK", 10.0)
    counts, spin = Spinning(), Channel.spin

    async def counted(channel: Channel, take: Any, goes_on: Any) -> None:
        counts.begun += 1
        counts.now += 1
        try:
            await spin(channel, take, goes_on)
        finally:
            counts.now -= 1
        (request,) = goes_on.args
        counts.taken += request.stage == "over"

    monkeypatch.setattr(Channel, "spin", counted)
    return counts


@pytest.fixture
async def device(system: ta.System, spinning: Spinning) -> AsyncGenerator[ta.Device, None]:
    wakeful = options(completion=ta.AdaptiveCompletion(), cancel_grace=0.2, close_grace=0.2)
    async with system.open_device(BACKEND, options=wakeful) as device:
        yield device


async def steady(device: ta.Device, spinning: Spinning) -> ta.AccelRef:
    """An array used by a spinning request."""
    x = await device.put(np.ones(8))
    before = spinning.taken
    # The first is of a template that the worker does not have, and its library is opened.
    for _ in range(3):
        await ta.linalg.scal(1.0, x)
    assert spinning.taken > before
    return x


async def test_a_lone_asker_spins(device: ta.Device, spinning: Spinning) -> None:
    x = await steady(device, spinning)
    before = spinning.taken
    for _ in range(50):
        await ta.linalg.scal(-1.0, x)
    assert spinning.taken == before + 50
    with pytest.raises(ta.OutOfMemoryError):
        await device.zeros((1 << 50,))
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=ZeroDivisionError())
    with pytest.raises(ta.ActorFailedError) as failed:
        await ta.linalg.scal(1.0, x)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert (await x.to_host()).tolist() == [1.0] * 8


@pytest.mark.parametrize("is_spun", [True, False])
async def test_a_failure_keeps_no_array(device: ta.Device, spinning: Spinning, is_spun: bool) -> None:
    x = await steady(device, spinning)
    y, before = await device.put(np.ones(8)), spinning.begun
    gc.collect()
    with without_collection():
        ta.testing.inject_fault(device, ta.linalg.Scal, fail=ta.NotSupportedError("not today"))
        async with trio.open_nursery() as nursery:
            if not is_spun:
                # Then there are two, and the receiver wakes both.
                nursery.start_soon(ta.linalg.nrm2, x)
            with pytest.raises(ta.NotSupportedError, match="today"):
                await ta.linalg.scal(1.0, y)
        assert spinning.begun > before
        del y
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 1


async def test_many_askers_and_one_in_turns(device: ta.Device, spinning: Spinning) -> None:
    x = await steady(device, spinning)
    for count in (1, 5, 1, 1, 64, 1, 2):
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(ta.linalg.scal, -1.0, x)
    assert (await x.to_host()).tolist() == [-1.0] * 8
    assert not spinning.now
    statistics = await device.statistics()
    assert (statistics.in_flight, device.pending) == (0, 0)


async def test_one_who_is_cancelled(device: ta.Device, spinning: Spinning) -> None:
    x = await steady(device, spinning)
    with trio.CancelScope() as scope:
        async with one_that_spins(x, spinning, trio.Cancelled):
            scope.cancel()
    assert not spinning.now
    # Its abandoned work continues, and the worker serves others.
    y = await device.put(np.ones(8))
    assert (await y.to_host()).tolist() == [1.0] * 8
    assert device.generation == 1
    ta.testing.poison(device)
    await until(lambda: device.generation == 2)
    await ta.linalg.scal(2.0, y)
    assert (await y.to_host()).tolist() == [2.0] * 8


@asynccontextmanager
async def one_that_spins(
    x: ta.AccelRef, spinning: Spinning, error: type[BaseException]
) -> AsyncGenerator[None, None]:
    """Begins when a task spins for an endless operation, which this error is to end."""
    before, link = spinning.begun, x.device.dispatch._sender.link  # type: ignore[union-attr]
    assert link is not None
    launched = link.started(BLAS)
    ta.testing.inject_fault(x.device, ta.linalg.Scal, hang=True)

    async def ask() -> None:
        with pytest.raises(error), trio.fail_after(60):
            await ta.linalg.scal(1.0, x)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        # A request not begun at the end of its worker is the next one's, and does not end there either.
        await until(lambda: spinning.now == 1 and link.started(BLAS) > launched)
        assert spinning.begun == before + 1
        yield


@pytest.mark.parametrize("how", ["kill", "poison"])
async def test_a_request_of_a_lost_worker(device: ta.Device, spinning: Spinning, how: str) -> None:
    x, other = await steady(device, spinning), await device.put(np.arange(8.0))
    async with one_that_spins(x, spinning, ta.ContextLostError):
        if how == "poison":
            ta.testing.poison(device)
        else:
            process = device.dispatch.process  # type: ignore[union-attr]
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert not spinning.now
    await ta.linalg.scal(2.0, other)
    assert (await other.to_host()).tolist() == list(range(0, 16, 2))
    assert device.generation == 2


async def test_a_request_of_a_closed_device(device: ta.Device, spinning: Spinning) -> None:
    x = await steady(device, spinning)
    async with one_that_spins(x, spinning, ta.DeviceLostError):
        await device.close()
    assert not spinning.now


async def test_messages_for_others_are_delivered_in_nobodys_context(
    device: ta.Device, spinning: Spinning
) -> None:
    """Observers, and handlers of the log, and not in the context of a caller that happens to wait alone."""
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    x = await steady(device, spinning)
    seen: list[tuple[str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(("log", who.get()))

    handler, logger = Handler(), logging.getLogger("trio_accel")
    logger.addHandler(handler)
    who.set("an asker")
    try:
        with device.system.subscribe(lambda event: seen.append((type(event).__name__, who.get()))):
            ta.testing.inject_fault(device, ta.linalg.Scal, fail=ZeroDivisionError())
            with pytest.raises(ta.ActorFailedError):
                await ta.linalg.scal(1.0, x)
            await ta.linalg.scal(1.0, x)
            await until(lambda: ("MessageCompleted", "nobody") in seen)
    finally:
        logger.removeHandler(handler)
    assert {name for name, _ in seen} >= {"log", "MessageFailed", "ActorRestarted"}
    assert {whose for _, whose in seen} == {"nobody"}


async def test_the_error_of_another_request_does_not_affect_a_spinning_request(
    system: ta.System, spinning: Spinning
) -> None:
    """The waiting one is handed over when the one before it is done, and refused then."""
    one = options(completion=ta.AdaptiveCompletion(), in_flight=1)
    async with system.open_device(BACKEND, options=one) as device:
        x, y = await steady(device, spinning), await device.put(np.ones(8))
        failed: list[BaseException] = []

        async def first() -> None:
            try:
                int("its own trouble")
            except ValueError:
                await ta.linalg.scal(2.0, x)

        async def second() -> None:
            with pytest.raises(ta.StaleRefError) as refused:
                await ta.linalg.nrm2(y)
            failed.append(refused.value)

        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await until(lambda: spinning.now == 1)
            nursery.start_soon(second)
            await until(lambda: len(device.dispatch._requests) == 2)  # type: ignore[attr-defined]
            y.release()
        assert failed[0].__context__ is None


ANSWER = "done", 7, (), (), None
LINK: Any = SimpleNamespace()


def sent(device: ta.Device, monkeypatch: pytest.MonkeyPatch, *, is_copied: bool) -> Any:
    """Have the worker serve a request 7; returns the dispatch."""
    dispatch: Any = device.dispatch  # type: ignore[attr-defined]
    request, _ = dispatch._plan(ta.devices.Empty((1,), ta.DType.float32))
    request.hosts = SimpleNamespace(is_used=is_copied, filled=())
    monkeypatch.setattr(dispatch._requests, "get", {7: request}.get)
    return dispatch


@pytest.mark.parametrize(
    "received",
    [
        [ANSWER, ("event", None, "")],
        [("event", None, ""), ANSWER],
        [("done", 8, (), (), None)],
        [("done", 7, (), (b"12345678",), None)],
        [("done", 7, (), (), ("done", True, False, None, ()))],
        [("result", 7, None)],
    ],
    ids=["with another", "behind another", "of none", "with an array", "with trouble", "no answer"],
)
async def test_other_messages_belong_to_the_receiver(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, received: Any
) -> None:
    dispatch = sent(device, monkeypatch, is_copied=False)
    assert not dispatch._answers.take_plain(LINK, [(message, ()) for message in received])


@pytest.mark.parametrize("what", ["a copy", "a request that waits", "a hook"])
async def test_an_answer_that_something_follows_from_is_the_receivers(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    dispatch = sent(device, monkeypatch, is_copied=what == "a copy")
    if what == "a request that waits":
        monkeypatch.setattr(dispatch._requests, "waiting", 1)
    if what == "a hook":
        monkeypatch.setattr(device.state, "hooks", [print])
    assert not dispatch._answers.take_plain(LINK, [(ANSWER, ())])
