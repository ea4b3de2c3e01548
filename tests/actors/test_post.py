"""Posting: a request with a callback for its outcome."""

from __future__ import annotations

import itertools
from contextvars import ContextVar, copy_context

import attrs
import outcome
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta


@attrs.frozen
class Double(ta.Request["Doubler", int]):
    number: int


@attrs.frozen
class Later(ta.Request["Doubler", int]):
    pass


class Doubler(ta.Actor):
    def __init__(self) -> None:
        self.gate = trio.Event()
        REPLIES.clear()

    @ta.handles(Double)
    async def double(self, message: Double) -> int:
        if message.number < 0:
            raise ValueError("negative")
        return 2 * message.number

    @ta.handles(Later)
    async def later(self, message: Later) -> ta.DeferredReply[int]:
        reply: ta.DeferredReply[int] = self.context.defer()
        REPLIES.append(reply)
        return reply


@attrs.frozen
class Read(ta.Request["Reader", int]):  # type: ignore[name-defined]  # each test has its own
    number: int


VARIABLE: ContextVar[str] = ContextVar("VARIABLE")
REPLIES: list[ta.DeferredReply[int]] = []


async def test_the_outcomes_come_in_order_without_anyone_waiting() -> None:
    got: list[int] = []
    async with ta.open_system("s") as system:
        doubler = await system.spawn(Doubler, mailbox=ta.MailboxOptions(capacity=2))
        for number in range(10):
            doubler.post(Double(number), lambda result: got.append(result.unwrap()))
        assert got == []
        await wait_all_tasks_blocked()
        assert got == [2 * number for number in range(10)]


async def test_the_callback_gets_a_crash_an_end_and_a_deferred_reply() -> None:
    got: list[outcome.Outcome[int]] = []
    async with ta.open_system("s") as system:
        doubler = await system.spawn(Doubler)
        doubler.post(Double(-1), got.append)
        doubler.post(Later(), got.append)
        await wait_all_tasks_blocked()
        [crash] = got
        assert isinstance(crash, outcome.Error)
        assert isinstance(crash.error, ta.ActorFailedError)
        REPLIES[0].set(7)
        assert got[1].unwrap() == 7
        doubler.post(Later(), got.append)
        doubler.cancel("enough")
        await doubler.wait_terminated()
        assert isinstance(got[2], outcome.Error)
        assert len(got) == 3
        with pytest.raises(ta.ActorStoppedError):
            doubler.post(Double(1), got.append)
    assert len(got) == 3


async def test_a_queued_request_can_be_withdrawn_and_a_running_one_cannot() -> None:
    got: list[int] = []
    async with ta.open_system("s") as system:
        doubler = await system.spawn(Doubler)
        posted = [
            doubler.post(Double(number), lambda result: got.append(result.unwrap())) for number in range(3)
        ]
        # The first was handed to the actor, which waited for it.
        assert [one.withdraw() for one in posted] == [False, True, True]
        await wait_all_tasks_blocked()
        assert got == [0]
        assert [one.withdraw() for one in posted] == [False, False, False]
        assert system.tree().find(doubler.path).handled == 1


async def test_a_deferred_request_cannot_be_withdrawn() -> None:
    got: list[outcome.Outcome[int]] = []
    async with ta.open_system("s") as system:
        doubler = await system.spawn(Doubler)
        posted = doubler.post(Later(), got.append)
        await wait_all_tasks_blocked()
        assert not posted.withdraw()
        REPLIES.pop().set(7)
        assert got == [outcome.Value(7)]


async def test_requests_that_share_a_context_are_served_in_it_and_let_others_run() -> None:
    """The others get their turn after a few at most."""
    shared = copy_context()
    shared.run(VARIABLE.set, "shared")
    seen: list[str] = []
    turns: list[int] = []

    class Reader(ta.Actor):
        @ta.handles(Read)
        async def read(self, message: Read) -> int:
            seen.append(VARIABLE.get())
            return message.number

    async def others() -> None:
        while len(seen) < 100:
            turns.append(len(seen))
            await trio.lowlevel.checkpoint()

    async with ta.open_system("s") as system, trio.open_nursery() as nursery:
        reader = await system.spawn(Reader)
        for number in range(100):
            reader.post(Read(number), lambda result: result.unwrap(), context=shared)
        nursery.start_soon(others)
    assert seen == ["shared"] * 100
    # Nine in a row at most, and the order of tasks is random within a round.
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 18
    assert VARIABLE.get("none") == "none"


async def test_each_request_has_the_context_of_whoever_posts() -> None:
    got: list[str] = []

    class Reader(ta.Actor):
        @ta.handles(Read)
        async def read(self, message: Read) -> int:
            got.append(VARIABLE.get())
            return message.number

    async with ta.open_system("s") as system:
        reader = await system.spawn(Reader)
        for name in ("a", "b", "b"):
            context = copy_context()
            context.run(VARIABLE.set, name)
            context.run(reader.post, Read(0), lambda result: result.unwrap())
        await wait_all_tasks_blocked()
        assert got == ["a", "b", "b"]
