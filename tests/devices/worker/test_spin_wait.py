"""Staying awake while a message is due."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from chosen import BACKEND
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.devices.base import _options
from trio_accel.devices.base._options import window_of
from trio_accel.devices.wire import _channel
from trio_accel.devices.wire._channel import Channel, EndOfChannel, SpinWait

PERIOD, WINDOW = 0.05, 0.2
# Seconds that pass at each look at the clock, because a loop that stays awake never lets Trio's clock jump.
TICK = 1e-4


class Turns(trio.abc.Instrument):
    """Counts the turns of the loop in which it does not sleep."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += not timeout


@contextmanager
def counted() -> Generator[Turns, None, None]:
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    try:
        yield turns
    finally:
        trio.lowlevel.remove_instrument(turns)


class Peers:
    """Two ends, of which one stays awake for the answers of the other."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.ours, self.theirs = (Channel(sock) for sock in socket.socketpair())
        self.spin_wait = SpinWait(WINDOW, frozenset({"ask"}), frozenset({"answer"}))
        self.ours.spin_with(self.spin_wait)
        for channel in (self.ours, self.theirs):
            nursery.start_soon(channel.run)
        nursery.start_soon(self.ours.listen)

    async def exchange(self, seconds: float) -> int:
        """Ask, and be answered after a while; returns the number of loop turns without sleep."""
        with counted() as turns:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.answer, seconds)
                # The receiver waits before it is asked.
                nursery.start_soon(self.ours.receive)
                await trio.testing.wait_all_tasks_blocked()
                self.ours.send(("ask",), now=True)
        return turns.count

    async def answer(self, seconds: float) -> None:
        await self.theirs.receive()
        await trio.sleep(seconds)
        self.theirs.send(("answer",), now=True)

    async def get_steady(self) -> None:
        for _ in range(3):
            await self.exchange(PERIOD)
        assert self.spin_wait.is_steady


class Clock:
    """The clock of channels, which shows the time of Trio's mock clock."""

    def __init__(self, trios: MockClock) -> None:
        self._trios = trios

    def perf_counter(self) -> float:
        self._trios.jump(TICK)
        return self._trios.current_time()


@pytest.fixture
async def peers(
    nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Peers, None]:
    monkeypatch.setattr(_channel, "time", Clock(autojump_clock))
    # A loop that sleeps waits for events before the clock jumps, and so its turns are not counted.
    autojump_clock.autojump_threshold = 1e-3
    made = Peers(nursery)
    yield made
    made.ours.close()
    made.theirs.close()
    nursery.cancel_scope.cancel()


async def test_due_work_finds_the_loop_awake(peers: Peers, autojump_clock: MockClock) -> None:
    await peers.get_steady()
    # Between two exchanges it sleeps.
    with counted() as turns:
        await trio.sleep(PERIOD)
    assert turns.count < 20
    assert await peers.exchange(PERIOD) > 50


async def test_unsteady_work_is_not_waited_for(peers: Peers, autojump_clock: MockClock) -> None:
    for round_ in range(4):
        assert await peers.exchange(0.02 * 2**round_) < 20


async def test_overdue_work_is_no_longer_waited_for(
    peers: Peers, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    await peers.get_steady()
    peers.ours.send(("ask",), now=True)
    nursery.start_soon(peers.ours.receive)
    await trio.sleep(PERIOD + WINDOW)
    with counted() as turns:
        await trio.sleep(PERIOD)
    assert turns.count < 20
    assert not peers.spin_wait.is_steady
    peers.theirs.send(("answer",), now=True)


async def test_work_due_later_is_slept_for(peers: Peers, autojump_clock: MockClock) -> None:
    peers.spin_wait._half = PERIOD / 10
    await peers.get_steady()
    with counted() as turns:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peers.ours.receive)
            nursery.start_soon(peers.answer, PERIOD)
            await trio.testing.wait_all_tasks_blocked()
            peers.ours.send(("ask",), now=True)
            await trio.sleep(PERIOD / 2)
            asleep = turns.count
    assert asleep < 20
    # It stays awake from a moment before the answer is due.
    assert turns.count > asleep + 20


async def test_only_answers_count(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, spin_wait = peers.ours, peers.theirs, peers.spin_wait
    clock = SimpleNamespace(now=time.perf_counter())
    monkeypatch.setattr(_channel, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    for round_ in range(3):
        ours.send(("ask",), now=True)
        await theirs.receive()
        # Messages in between begin nothing and end nothing.
        ours.send(("by the way",), now=True)
        theirs.send(("by the way",), now=True)
        await ours.receive()
        clock.now += PERIOD
        theirs.send(("answer",), now=True)
        await ours.receive()
        before = spin_wait._forecast.seconds
        ours.send(("by the way",), now=True)
        clock.now += 2 * PERIOD
        assert await theirs.receive()
        assert spin_wait._forecast.seconds == before == pytest.approx(PERIOD)
        # Two are alike, and so is each of the next.
        assert spin_wait.is_steady == (round_ > 0)


async def test_who_stays_awake_hears_of_the_end(peers: Peers, autojump_clock: MockClock) -> None:
    await peers.get_steady()
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(EndOfChannel):
                await peers.ours.receive()

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        peers.ours.send(("ask",), now=True)
        await trio.sleep(PERIOD)
        peers.theirs.close()


async def test_a_small_machine_sleeps(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options.os, "sched_getaffinity", lambda _: set(range(4)))
    assert window_of(ta.AdaptiveCompletion(window=0.002), device.info) == 0.002
    assert window_of(ta.PolledCompletion(), device.info) == 0
    assert bool(window_of(None, device.info)) is (BACKEND == "cuda")
    monkeypatch.setattr(_options.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert window_of(ta.AdaptiveCompletion(window=0.002), device.info) == 0
