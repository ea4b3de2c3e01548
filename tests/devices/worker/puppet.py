"""A worker in the process of the test, which sends the messages that the test chooses."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from chunk_files import sealed

from trio_accel.devices.launcher._launcher import Launcher
from trio_accel.devices.wire._answers import ANSWERS, KEPT_COUNTS, MEMORY
from trio_accel.devices.wire._channel import Channel, EndOfChannel
from trio_accel.devices.wire._protocol import ALLOCATIONS, FIRST_WORD, SharedPage

__all__ = ["Puppet", "Puppets", "in_json"]

_MEMORY = 1 << 20


def in_json(*message: object) -> bytes:
    """A message as a worker writes it when it does not answer an operation."""
    return b"\0" + json.dumps(message).encode()


class Puppet:
    """One worker, in the place of a `WorkerProcess` as well. It makes one chunk for all its blocks.

    Attributes:
        asked: Numbers of its unanswered requests, with the blocks to be made.
        answers: Whether it answers requests on its own.
        said: The payloads of its messages.
    """

    def __init__(self, descriptors: Sequence[int], pid: int, *, answers: bool) -> None:
        self.pid = pid
        self.answers = answers
        self.asked: dict[int, tuple[tuple[int, int], ...]] = {}
        self.said: list[bytes] = []
        self._page = SharedPage(os.dup(descriptors[1]))
        self.channel = Channel(socket.socket(fileno=os.dup(descriptors[0])), sends=ANSWERS)
        self._templates: dict[int, Any] = {}
        self._chunk = 1000 * pid
        self._has_chunk = False
        self._offset = 0
        self._dead = trio.Event()

    # As a process.

    def kill(self) -> None:
        if not self._dead.is_set():
            self.channel.close()
            self._page.close()
            self._dead.set()

    close = kill

    def ending(self) -> str | None:
        return None

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def wait(self) -> str:
        await self._dead.wait()
        return "was killed by SIGKILL"

    # As a worker.

    def say(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send this, whatever it is."""
        self.said.append(payload)
        self.channel._outbox._put(payload, tuple(map(os.dup, descriptors)))
        self.channel._outbox._work.notify()

    def tell(self, *message: object) -> None:
        self.say(ANSWERS.encode(message))

    def began(self, number: int) -> None:
        """Show that a request was begun, with that word which the first library has."""
        self._page.words[FIRST_WORD] = number

    def done(self, number: int) -> None:
        """Answer a request with success."""
        addresses = []
        for block, nbytes in self.asked.pop(number):
            addresses.append((block, nbytes, self._chunk, self._offset))
            self._offset += max(-(-nbytes // 512), 1) * 512
        self.tell("done", number, tuple(addresses), (), None)

    async def run(self) -> None:
        """Serve until it is killed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.channel.run)
            try:
                while True:
                    for message, descriptors in await self.channel.receive():
                        for descriptor in descriptors:
                            os.close(descriptor)
                        self._take(*message)
            except EndOfChannel:
                pass
            self.kill()

    def _take(self, kind: object, *rest: Any) -> None:
        if kind == "config":
            self.tell("ready", ("memory", "blas"))
        elif kind == "start":
            self.tell("started")
        elif kind == "template":
            self._templates[rest[0]] = rest[1]
        elif kind == "request":
            self._ask(rest[0], rest[3][ALLOCATIONS])
        elif kind == "replay":
            number, _, _, template, blocks, _, _ = rest
            self._ask(
                number, [(blocks[position], nbytes) for position, nbytes in self._templates[template][3]]
            )
        elif kind == "call":
            value = (
                None
                if rest[1] == "synchronize"
                else (0, 0, {}, (0,) * len(MEMORY), {}, (0,) * len(KEPT_COUNTS))
            )
            self.tell("result", rest[0], value)
        elif kind == "close":
            self.tell("closed")

    def _ask(self, number: int, allocations: Sequence[tuple[int, int]]) -> None:
        if not self._has_chunk:
            self._make_chunk()
        self.asked[number] = tuple(allocations)
        if self.answers:
            self.done(number)

    def _make_chunk(self) -> None:
        self._has_chunk = True
        descriptor = sealed(_MEMORY)
        try:
            self.say(in_json("chunk", self._chunk, _MEMORY), (descriptor,))
        finally:
            os.close(descriptor)


class Puppets:
    """The workers of one test: all that its devices order.

    Attributes:
        answers: Whether new puppets answer requests on their own.
        last: The last started puppet.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._count = 0
        self.answers = True
        self.last: Puppet

    async def start(
        self, launcher: object, arguments: object, descriptors: Sequence[int], *_: object
    ) -> Puppet:
        await trio.lowlevel.checkpoint()
        self._count += 1
        self.last = Puppet(descriptors, self._count, answers=self.answers)
        self._nursery.start_soon(self.last.run)
        return self.last

    async def wait(self, condition: Callable[[Puppet], object]) -> Puppet:
        """Wait for something that the last of them brings about."""
        with trio.fail_after(60):
            while not condition(self.last):  # noqa: ASYNC110  # nobody tells
                await trio.lowlevel.checkpoint()
        return self.last

    @classmethod
    @asynccontextmanager
    async def open(cls, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Puppets, None]:
        async with trio.open_nursery() as nursery:
            puppets = cls(nursery)

            async def start(*arguments: Any) -> Puppet:
                return await puppets.start(*arguments)

            monkeypatch.setattr(Launcher, "start_worker", start)
            yield puppets
            nursery.cancel_scope.cancel()
