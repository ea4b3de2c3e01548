"""Staying awake while a message is due."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager

import pytest
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.devices import _completion
from trio_accel.devices._completion import window_of
from trio_accel.devices.worker._channel import Channel
from trio_accel.devices.worker._vigil import Vigil

PERIOD, WINDOW = 0.05, 0.2


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


@pytest.fixture
async def vigil(nursery: trio.Nursery) -> AsyncGenerator[Vigil, None]:
    made = Vigil(WINDOW, frozenset(), frozenset())
    nursery.start_soon(made.run)
    yield made
    nursery.cancel_scope.cancel()


async def exchange(vigil: Vigil, seconds: float) -> int:
    """Send, and receive after a while; returns how often the loop went round without sleep."""
    with counted() as turns:
        vigil.sent()
        vigil.sent()
        await trio.sleep(seconds)
        vigil.received()
    return turns.count


async def test_what_is_due_finds_the_loop_awake(vigil: Vigil) -> None:
    for _ in range(20):
        await exchange(vigil, PERIOD)
        if vigil._forecast.is_steady:
            break
    # Between two exchanges it sleeps.
    with counted() as turns:
        await trio.sleep(PERIOD)
    assert turns.count < 20
    assert await exchange(vigil, PERIOD) > 50


async def test_what_never_takes_as_long_is_not_waited_for(vigil: Vigil) -> None:
    for round_ in range(4):
        assert await exchange(vigil, 0.02 * 2**round_) < 20


async def test_what_does_not_come_is_waited_for_no_longer(vigil: Vigil) -> None:
    for _ in range(20):
        await exchange(vigil, PERIOD)
        if vigil._forecast.is_steady:
            break
    vigil.sent()
    await trio.sleep(PERIOD + WINDOW)
    with counted() as turns:
        await trio.sleep(PERIOD)
    assert turns.count < 20
    assert not vigil._forecast.is_steady


async def test_a_small_machine_sleeps(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_completion.os, "sched_getaffinity", lambda _: set(range(4)))
    assert window_of(ta.AdaptiveCompletion(window=0.002), device.info) == 0.002
    assert window_of(ta.PolledCompletion(), device.info) == 0
    assert bool(window_of(None, device.info)) is (BACKEND == "cuda")
    monkeypatch.setattr(_completion.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert window_of(ta.AdaptiveCompletion(window=0.002), device.info) == 0


async def test_only_answers_count(nursery: trio.Nursery) -> None:
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    ours.vigil = vigil = Vigil(WINDOW, frozenset({"ask"}), frozenset({"answer"}))
    try:
        for channel in (ours, theirs):
            nursery.start_soon(channel.run)
        for _ in range(3):
            ours.post(("ask",), now=True)
            await theirs.receive()
            # What is said in between begins nothing and ends nothing.
            ours.send(("by the way",), now=True)
            theirs.send(("by the way",), now=True)
            await ours.receive()
            await trio.sleep(PERIOD)
            theirs.post(("answer",), now=True)
            await ours.receive()
            before = vigil._forecast.seconds
            ours.send(("by the way",), now=True)
            await trio.sleep(2 * PERIOD)
            assert vigil._forecast.seconds == before >= PERIOD
            assert await theirs.receive()
        assert vigil._forecast.is_steady
    finally:
        ours.close()
        theirs.close()
        nursery.cancel_scope.cancel()
