"""The plain Trio programs that actors are compared with."""

from __future__ import annotations

import math
import time

import trio

__all__ = ["Channel", "Question", "hog_loop"]


class Question:
    """A request as a plain Trio program would send it: an event tells of the answer."""

    __slots__ = ("answer", "answered", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer = 0
        self.answered = trio.Event()


class Channel:
    """A task that answers what comes through a memory channel of the mailbox's default size.

    No types, no supervision, no cancellation of what runs, no end that is anybody's concern:
    what a round trip between two tasks costs at least.
    """

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Question](64)

    async def serve(self) -> None:
        """Answer with a running sum; runs until cancelled."""
        value = 0
        async for question in self._receive:
            value += question.number
            question.answer = value
            question.answered.set()

    async def ask(self, number: int) -> int:
        """Send a number and wait for the sum."""
        question = Question(number)
        await self._send.send(question)
        await question.answered.wait()
        return question.answer


async def hog_loop(step: float = 0.001) -> None:
    """Compute for `step` seconds whenever the loop comes round: a neighbour with bad manners."""
    while True:
        end = time.perf_counter() + step
        while time.perf_counter() < end:
            math.sqrt(2.0)
        await trio.lowlevel.checkpoint()
