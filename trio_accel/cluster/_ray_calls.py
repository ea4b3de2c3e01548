"""Agents as actors of Ray's, and asks by Ray's calls: the way to an agent that no stream reaches."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio

from ..actors._errors import single
from ._agent import LOG_FORMAT, Agent, AgentConfig, Started
from ._frames import Parts
from ._link import VERSION, Address, Allocate, Link, LinkLostError, RefusedError, Stream

__all__ = ["RayAddress", "RayAgent"]

_logger = logging.getLogger("trio_accel.cluster")

# Seconds in which an agent must say by a call that it is there.
_PROOF = 2.0
_Frame: TypeAlias = "tuple[int, int, list[Any]]"


class RayAgent:
    """An agent in an actor of Ray's: Trio in a thread, beside the event loop in which Ray calls this.

    Args:
        config: What the agent is told.
    """

    def __init__(self, config: AgentConfig) -> None:
        logging.basicConfig(format=LOG_FORMAT)
        self._agent = Agent(config)
        self._started: Future[Started] = Future()
        self._nursery: trio.Nursery
        self._token: trio.lowlevel.TrioToken
        self._links: dict[bytes, tuple[asyncio.Queue[_Frame], trio.MemorySendChannel[_Frame]]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    async def start(self) -> Started:
        """Return when the agent listens."""
        return await asyncio.wrap_future(self._started)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as error:
            if self._started.done():
                _logger.exception("this agent has failed")
                os._exit(1)
            self._started.set_exception(single(error))

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            await self._agent.run(self._tell)

    def _tell(self, address: Address, devices: tuple[str, ...]) -> None:
        self._started.set_result(Started(address, devices, os.getpid()))

    async def open(self, link: bytes) -> str:
        """Have an end of a link here, and return the version of the package and of Python."""
        replies, loop = asyncio.Queue[_Frame](), asyncio.get_running_loop()
        send, receive = trio.open_memory_channel[_Frame](math.inf)
        self._links[link] = replies, send

        def put(frame: _Frame) -> None:
            loop.call_soon_threadsafe(replies.put_nowait, frame)

        stream = _CallStream(put, partial(_only, receive))
        served = Link([stream], "the program", self._agent.serve)
        self._token.run_sync_soon(self._nursery.start_soon, served.run)
        return VERSION

    async def put(self, link: bytes, frame: _Frame) -> None:
        """Take a frame."""
        self._token.run_sync_soon(self._links[link][1].send_nowait, frame)

    async def get(self, link: bytes) -> list[_Frame]:
        """Return frames as soon as there is one."""
        replies = self._links[link][0]
        frames = [await replies.get()]
        while not replies.empty():
            frames.append(replies.get_nowait())
        return frames


async def _only(frames: trio.MemoryReceiveChannel[_Frame]) -> list[_Frame]:
    return [await frames.receive()]


class _CallStream(Stream):
    """Frames by calls.

    Args:
        put: Sends a frame.
        get: Waits for frames.
    """

    def __init__(self, put: Callable[[_Frame], object], get: Callable[[], Awaitable[list[_Frame]]]) -> None:
        super().__init__()
        self._put, self._get = put, get
        self._got = deque[_Frame]()

    async def send(self, number: int, kind: int, parts: Parts) -> None:
        # Ray has arrays beside its pickles, without a copy.
        self._put((number, kind, [np.asarray(memoryview(one)) for one in parts]))

    async def receive(self) -> tuple[int, int, list[memoryview]]:
        if not self._got:
            self._got.extend(await self._get())
        number, kind, parts = self._got.popleft()
        # What is in Ray's store is read-only, and would stay there.
        return number, kind, [memoryview(one.copy()) for one in parts]

    def close(self) -> None:
        pass  # a link ends with the agent at its other end


@attrs.define(unsafe_hash=True)
class RayAddress:
    """Where an agent of Ray's is reached: by streams, or by calls of its actor where none gets through.

    Attributes:
        stream: Where it listens.
        actor: Ray's actor.
        is_called: Whether this process has found no stream to it.
    """

    stream: Address
    actor: Any = attrs.field(eq=False, repr=False)
    is_called: bool = attrs.field(default=False, eq=False)

    async def connect(self, name: str, window: float, nursery: trio.Nursery, allocate: Allocate) -> Link:
        """Connect to the agent, as `Address.connect`."""
        self.is_called = False
        try:
            return await self.stream.connect(name, window, nursery, allocate)
        except LinkLostError as error:
            if isinstance(error.__cause__, RefusedError):
                raise
            link = await self._connect_by_calls(name, window, error)
            _logger.warning("%s; asks go by Ray's calls, which take five times as long", error)
            self.is_called = True
            nursery.start_soon(link.run)
            return link

    async def _connect_by_calls(self, name: str, window: float, error: LinkLostError) -> Link:
        token, theirs, actor = os.urandom(16), None, self.actor
        with trio.move_on_after(_PROOF), suppress(trio.EndOfChannel):
            theirs = await _result(actor.open.remote(token))
        if theirs is None:
            raise error
        if theirs != VERSION:
            text = f"node {name} cannot be reached: it has {theirs}, and this is {VERSION}"
            raise LinkLostError(text, is_begun=False)
        stream = _CallStream(partial(actor.put.remote, token), lambda: _result(actor.get.remote(token)))
        return Link([stream], name, window=window)


async def _result(ref: Any) -> Any:
    """Wait for what a call of Ray's replies.

    Raises:
        EndOfChannel: The actor is gone.
    """
    done, soon = trio.Event(), trio.lowlevel.current_trio_token().run_sync_soon

    def tell(_: object) -> None:
        with suppress(trio.RunFinishedError):
            soon(done.set)

    future: Future[Any] = ref.future()
    future.add_done_callback(tell)
    await done.wait()
    try:
        return future.result(timeout=0)
    except Exception as error:
        raise trio.EndOfChannel(str(error)) from error
