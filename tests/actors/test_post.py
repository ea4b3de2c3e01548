"""Posting: a request whose outcome comes to a callback."""

from __future__ import annotations

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


async def test_a_crash_an_end_and_a_deferred_reply_come_to_the_callback() -> None:
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
